"""Stop strings, found in the tail of the text, cut where a search of the whole text would; the work grows with the tokens."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from treedraft.speculate import Stopper

KINDS = ("bytes", "fallback", "words")
WORDS = ["the", "a", "ab", "abc", "ing", "b", "c", ".", ",", "n't", "'s", "x" * 9, "日", "do"]
BYTES = [f"<0x{value:02X}>" for value in range(256)]


@cache
def tokenizer(kind: str) -> Any:
    """Bytes of characters (GPT-2), characters with bytes to fall back on and a space that is stripped (Llama), or words
    whose spaces are cleaned up (BERT)."""
    if kind == "bytes":
        symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
        decoder: Any = decoders.ByteLevel()
    elif kind == "fallback":
        symbols = [*BYTES, *WORDS, *("▁" + word for word in WORDS), "▁"]
        decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    else:
        symbols = [*WORDS, *("##" + word for word in WORDS)]
        decoder = decoders.WordPiece(cleanup=True)
    model = models.WordLevel({symbol: index for index, symbol in enumerate([*symbols, "<s>"])}, unk_token="<s>")
    whole = Tokenizer(model)
    whole.decoder = decoder
    whole.add_special_tokens(["<s>"])
    return PreTrainedTokenizerFast(tokenizer_object=whole)


@cache
def pieces(kind: str) -> list[list[int]]:
    """What texts are made of: words, characters of several tokens, halves of them, and what is not shown."""
    vocabulary = tokenizer(kind).get_vocab()
    if kind == "words":
        return [[index] for index in vocabulary.values()]
    # GPT-2's names of bytes: printable ones are their own, the others follow from 256 on.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    own = [value for value in range(256) if chr(value) in alphabet]
    others = [value for value in range(256) if chr(value) not in alphabet]
    symbol_of = dict(zip([*own, *others], alphabet, strict=True))
    ids = [vocabulary[symbol_of[value] if kind == "bytes" else BYTES[value]] for value in range(256)]
    texts = ["🙂", "é", "日本", "🙂" * 14, "\n", "ab", " the", "ing "]
    cut = [[ids[value] for value in text.encode()] for text in texts]
    words = [[index] for symbol, index in vocabulary.items() if symbol not in BYTES] if kind == "fallback" else []
    return [*cut, *cut[:3], cut[0][:2], cut[0][2:], [ids[0xFF]], [vocabulary["<s>"]], *words]


def target(kind: str, decoded: list[int] | None = None) -> Any:
    def decode(ids: list[int]) -> str:
        if decoded is not None:
            decoded.append(len(ids))
        return tokenizer(kind).decode(ids, skip_special_tokens=True)

    return SimpleNamespace(decode=decode, eos_token_ids=())


def first_stop(kind: str, ids: list[int], stop: list[str]) -> int | None:
    """Tokens after which the text holds a stop string: the definition."""
    decode = target(kind).decode
    return next((count for count in range(1, len(ids) + 1) if any(text in decode(ids[:count]) for text in stop)), None)


@pytest.mark.parametrize("kind", KINDS)
@settings(derandomize=True, max_examples=40, deadline=None)
@given(data=st.data())
def test_the_tail_shows_what_the_whole_text_does(kind: str, data: st.DataObject) -> None:
    ids = [token for piece in data.draw(st.lists(st.sampled_from(pieces(kind)), max_size=90)) for token in piece]
    text = target(kind).decode(ids)
    begin, size = data.draw(st.integers(0, max(0, len(text) - 1))), data.draw(st.integers(1, 6))
    stop = [text[begin : begin + size] or "q", data.draw(st.sampled_from(["never", "🙂🙂", ". a", "abab", "\ufffd日", " the a"]))]
    stopper = Stopper(target(kind), max_new_tokens=len(ids) + 1, stop=stop)
    count = stopper.take(ids)
    assert (count if stopper.reason else None) == first_stop(kind, ids, stop)
    assert stopper.ids == ids[:count]


@pytest.mark.parametrize("kind", KINDS)
@settings(derandomize=True, max_examples=12, deadline=None)
@given(texts=st.lists(st.integers(0, 999), min_size=40, max_size=80), size=st.integers(1, 9))
def test_the_tail_is_the_end_of_the_text(kind: str, texts: list[int], size: int) -> None:
    """After every token, for as long as a stop string may be and a character that is not whole yet.

    But where the whole ends in bytes that are no characters: a bad one spoils all bytes of its run, those before the tail too.
    """
    stopper = Stopper(target(kind), max_new_tokens=999, stop=["\0" * size])
    for token in (token for text in texts for token in pieces(kind)[text % len(pieces(kind))]):
        stopper.take([token])
        whole, tail = stopper.target.decode(stopper.ids), stopper._tail()
        assert tail[-size - 3 :] == whole[-size - 3 :] or "\ufffd" in whole[-size - 3 :]
    assert len(tail) <= max(len(whole) * 0.8, 300)


@pytest.mark.parametrize(("kind", "only"), [*((kind, None) for kind in KINDS), ("bytes", 3), ("fallback", 3)])
def test_a_token_costs_the_decoding_of_a_few(kind: str, only: int | None) -> None:
    """Of any text, and of one whose every character takes three tokens."""
    costs = []
    for count in (1000, 2000, 4000):
        decoded: list[int] = []
        drawn = ((place * 7919 if only is None else only) % len(pieces(kind)) for place in range(count))
        ids = [token for piece in drawn for token in pieces(kind)[piece]][:count]
        Stopper(target(kind, decoded), max_new_tokens=count + 1, stop=["never", "to be seen"]).take(ids)
        costs.append(sum(decoded) / count)
    assert max(costs) < (200 if only is None else 600) and costs[2] < 1.1 * costs[1]
