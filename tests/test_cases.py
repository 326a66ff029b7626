"""What users of such software met: each test names the row of the fault list that it keeps from happening here.

Rows that other files cover are not repeated. Letters: A greedy output, B sampling, C trees and masks, D caches, E stops.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kit import Stub, script
from tests.tiny_drafters import make_drafter, random_prompts
from treedraft.config import DecodeConfig, Sampling
from treedraft.decode import _Streamer
from treedraft.speculate import Generation, Stopper, audit, generate, generate_plain, report
from treedraft.targets import tiny as tiny_module
from treedraft.targets.hf import Target
from treedraft.trees.accept import accept
from treedraft.trees.best_first import BestFirst
from treedraft.trees.chain import Chain
from treedraft.trees.scorers import MarginalScorer

TREE = DecodeConfig(mode="tree", depth=5, width=3, budget=24)


@pytest.fixture
def endless() -> Target:
    target = tiny_module.load(dtype=torch.float64)
    target.eos_token_ids = ()
    return target


# -- A: greedy output must equal plain decoding -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a3_half_precision_parts_only_at_ties(dtype: torch.dtype) -> None:
    """Every first difference of 60 prompts is a near tie; float64 has none (tests/test_lossless.py)."""
    target = tiny_module.load(dtype=dtype)
    drafter = make_drafter(target, correction="attention")
    differing = 0
    for prompt in random_prompts(target, 60, longest=12, seed=2):
        found = generate(target, drafter, prompt, config=TREE, max_new_tokens=24)
        plain = generate_plain(target, prompt, max_new_tokens=24)
        if found.ids != plain.ids:
            difference = audit(target, prompt, found, plain)
            assert difference["near_tie"], difference
            differing += 1
    assert differing < 60  # most answers have no tie that near


def test_a1_the_audit_names_place_tokens_and_gap(endless: Target) -> None:
    plain = generate_plain(endless, [5, 9], max_new_tokens=8)
    other = Generation(ids=[*plain.ids[:3], (plain.ids[3] + 1) % 60, *plain.ids[4:]])
    difference = audit(endless, [5, 9], other, plain)
    logits = endless.prefill([5, 9, *plain.ids[:3]]).logits[-1]
    assert difference["place"] == 3 and difference["tokens"] == [other.ids[3], plain.ids[3]] and not difference["near_tie"]
    assert difference["gap"] == pytest.approx(float((logits[other.ids[3]] - logits[plain.ids[3]]).abs()))
    assert audit(endless, [5, 9], Generation(ids=plain.ids[:4]), plain) == {"place": 4, "near_tie": False}


_IDENTITY = """
import hashlib, torch
from tests.tiny_drafters import make_drafter, random_prompts
from treedraft.config import DecodeConfig
from treedraft.speculate import generate, generate_plain
from treedraft.targets import tiny
torch.set_num_threads(1)
target, plain, drafted = tiny.load(dtype=torch.float64), hashlib.sha256(), hashlib.sha256()
for seed, prompt in enumerate(random_prompts(target, 200, longest=12, seed=6)):
    drafter = make_drafter(target, correction="attention", seed=seed)
    config = DecodeConfig(mode="tree", depth=5, width=3, budget=24)
    plain.update(repr(generate_plain(target, prompt, max_new_tokens=12).ids).encode())
    drafted.update(repr(generate(target, drafter, prompt, config=config, max_new_tokens=12).ids).encode())
print(plain.hexdigest(), drafted.hexdigest())
"""


def test_a6_a12_fresh_processes_agree_on_200_drafters() -> None:
    """Plain decoding with itself first, then drafting with plain decoding."""
    root = Path(__file__).parents[1]
    runs = [subprocess.run([sys.executable, "-c", _IDENTITY], cwd=root, stdout=subprocess.PIPE, text=True, check=True) for _ in range(2)]
    (plain, drafted), again = (run.stdout.split() for run in runs)
    assert again[0] == plain
    assert drafted == again[1] == plain


def test_a9_only_the_argmax_is_followed_whatever_the_order_of_siblings() -> None:
    logits = torch.zeros(3, 8, dtype=torch.float64)
    logits[:, 4], logits[:, 6] = 1.0, 1.0 - 1e-6
    for siblings in ([4, 6], [6, 4]):
        tree = script([0, *siblings], [-1, 0, 0])
        path, after = accept(tree, lambda path: int(logits[path[-1]].argmax()))
        assert [int(tree.tokens[node]) for node in path] == [0, 4] and after == 4


def test_a10_a_tree_that_holds_the_chain_accepts_no_less(endless: Target) -> None:
    """On every prefix of an answer, not only over whole answers."""
    drafter = make_drafter(endless, correction="attention")
    for prompt in random_prompts(endless, 12, longest=9, seed=4):
        answer = generate_plain(endless, prompt, max_new_tokens=12).ids
        for place in range(1, 8):
            prefix = [*prompt, *answer[:place]]
            lengths = []
            for config in (DecodeConfig(mode="chain", depth=4), DecodeConfig(mode="tree", depth=4, width=3, budget=200)):
                found = generate(endless, drafter, prefix, config=config, max_new_tokens=6)
                lengths.append(len(found.rounds[0].path))
                tokens = set(map(tuple, ([int(t) for t in found.rounds[0].tree.tokens[found.rounds[0].tree.path_to(n)]] for n in range(len(found.rounds[0].tree)))))
                if config.mode == "chain":
                    chain = tokens
                else:
                    assert chain <= tokens and lengths[1] >= lengths[0]


def test_a11_d51_d56_after_every_round_the_cache_is_a_fresh_prefill(endless: Target) -> None:
    """All layers, keys and values; accepted paths of every shape. The drafter's rows are test_d57's."""
    drafter = make_drafter(endless, correction="attention")
    truth = generate_plain(endless, [5, 9], max_new_tokens=40).ids
    ids = [5, 9, *[token if place % 3 else (token + 1) % 60 for place, token in enumerate(truth)]]  # d53: a mistake every third token
    stub: Any = Stub(endless, ids, 0)
    for each in (drafter, stub):
        committed: list[int] = []

        def check(result: Generation, committed: list[int] = committed) -> None:
            committed[:] = [5, 9, *result.ids[:-1]]
            live = [store[:, :, : endless.length].clone() for store in (*endless.cache.keys, *endless.cache.values)]
            length = endless.length
            assert length == len(committed)
            saved = endless.cache, endless.length, endless._pending
            endless.cache = endless.new_cache(batch=1, capacity=64)
            endless.prefill(committed)
            for one, other in zip(live, (*endless.cache.keys, *endless.cache.values), strict=True):
                torch.testing.assert_close(one, other[:, :, :length], rtol=1e-10, atol=1e-10)
            endless.cache, endless.length, endless._pending = saved

        found = generate(endless, each, [5, 9], config=TREE, max_new_tokens=30, on_tokens=lambda r: None if r.finished else check(r))
        assert found.ids == truth[:30]


# -- B: sampling --------------------------------------------------------------------------------------------------------------


def test_b14_a_drafter_of_marginals_is_lossless_and_its_tree_coherent() -> None:
    """ab and cd, each half the time: slot by slot "a or c" then "b or d"; a tree holds both whole words."""
    log_q = torch.full((1, 2, 6), -torch.inf, dtype=torch.float64)
    log_q[0, 0, [1, 3]] = log_q[0, 1, [2, 4]] = -0.6931471805599453
    anchor = torch.tensor([0])
    tree = BestFirst(budget=7, width=2).build(anchor, MarginalScorer(log_q)).tree(0)
    paths = {tuple(tree.tokens[tree.path_to(node)[1:]].tolist()) for node in range(len(tree))}
    assert {(1, 2), (3, 4)} <= paths
    assert len(Chain().build(anchor, MarginalScorer(log_q)).tree(0)) == 3


def test_b33_penalties_over_a_long_answer(endless: Target) -> None:
    sampling = Sampling(repetition_penalty=1.1)
    drafter = make_drafter(endless, correction="attention")
    plain = generate_plain(endless, [5, 9], sampling=sampling, max_new_tokens=300)
    assert generate(endless, drafter, [5, 9], config=TREE, sampling=sampling, max_new_tokens=300).ids == plain.ids


@pytest.mark.parametrize("nodes", [1, 2, 3, 8, 17, 64, 255])
def test_b33_taps_are_there_at_every_verify_size(endless: Target, nodes: int) -> None:
    endless.prefill([5, 9])
    verified = endless.verify(torch.arange(nodes) % 60, torch.arange(-1, nodes - 1))
    assert verified.taps.shape == (nodes, endless.tap_size) and bool(torch.isfinite(verified.taps).all())


# -- C: trees, masks, positions -------------------------------------------------------------------------------------------------


def test_c45_draft_ids_that_map_to_one_token_are_refused(tiny64: Target) -> None:
    with pytest.raises(ValueError, match="twice"):
        make_drafter(tiny64, d2t=torch.tensor([1, 4, 4, 9]))


# -- D: caches and states ---------------------------------------------------------------------------------------------------------


def test_d48_commit_of_nothing_or_too_much_is_a_mistake(endless: Target) -> None:
    endless.prefill([5, 9])
    for path in ([], [0, 1, 2], [-1], [1]):
        endless.verify(torch.tensor([1, 2]), torch.tensor([-1, 0]))
        with pytest.raises(ValueError, match="the 2 nodes last verified"):
            endless.commit(path)


def test_d53_acceptance_does_not_decay(endless: Target) -> None:
    """A forced mistake every third token: every round accepts the same, from the first to the last of 400 tokens."""
    truth = generate_plain(endless, [5, 9], max_new_tokens=400).ids
    ids = [token if place % 3 else (token + 1) % 60 for place, token in enumerate(truth)]
    drafter: Any = Stub(endless, [5, 9, *ids], 0)
    found = generate(endless, drafter, [5, 9], config=DecodeConfig(mode="chain", depth=8), max_new_tokens=400)
    assert found.ids == truth
    assert {item.emitted for item in found.rounds[1:-1]} == {3}


def test_d57_one_context_row_a_committed_token(endless: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    from treedraft.drafting import Together

    rows: list[torch.Tensor] = []
    append = Together.append
    monkeypatch.setattr(Together, "append", lambda self, taps, *which: (rows.append(taps[0].clone()), append(self, taps, *which))[1])
    found = generate(endless, make_drafter(endless, correction="attention"), [5, 9, 3], config=TREE, max_new_tokens=32)
    committed = [5, 9, 3, *found.ids][: sum(map(len, rows))]
    trace = endless.trace(torch.tensor([committed])).taps[0]
    torch.testing.assert_close(torch.cat(rows), trace, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("candidates", [3, 20])
def test_restricted_scoring_is_lossless_and_counts_its_recall(endless: Target, candidates: int) -> None:
    drafter = make_drafter(endless, correction="attention")
    config = DecodeConfig(mode="tree", depth=5, width=7, budget=24, candidates=candidates)
    found = generate(endless, drafter, [5, 9], config=config, max_new_tokens=30)
    plain = generate_plain(endless, [5, 9], max_new_tokens=30)
    assert found.ids == plain.ids
    assert all(len(item.among_candidates or ()) == min(len(item.path), 5) for item in found.rounds)
    assert all(all((item.among_candidates or [])[: len(item.path) - 1]) for item in found.rounds)  # what is accepted was one
    assert 0 <= report(found, plain)["candidate_recall"] < 1


def test_a_cache_that_grew_while_drafting_serves_everybody_after(endless: Target) -> None:
    """300 tokens outgrow the first 256 rows inside of either decoder; what comes after writes and differentiates."""
    drafter = make_drafter(endless, correction="attention")
    for decode in (lambda: generate(endless, drafter, [5, 9], config=TREE, max_new_tokens=300),
                   lambda: generate_plain(endless, [5, 9], max_new_tokens=300)):  # fmt: skip
        endless.cache = endless.new_cache(batch=1, capacity=16)
        found = decode()
        endless.prefill([5, 9, 11])
        endless.verify(torch.tensor([3, 4]), torch.tensor([-1, 0]))
        for item in found.rounds[:1]:
            weight = torch.ones(len(item.tree), dtype=torch.float64, requires_grad=True)
            (weight * item.tree.scores).sum().backward()


def test_d55_a_request_that_shares_its_prompt_with_the_last_is_a_cold_run(endless: Target) -> None:
    drafter, prompt = make_drafter(endless, correction="attention"), list(range(3, 33))
    generate(endless, drafter, [*prompt, 40, 41], config=TREE, max_new_tokens=16)
    warm = generate(endless, drafter, [*prompt, 50, 51], config=TREE, max_new_tokens=16)
    fresh = tiny_module.load(dtype=torch.float64)
    fresh.eos_token_ids = ()
    cold = generate(fresh, make_drafter(fresh, correction="attention"), [*prompt, 50, 51], config=TREE, max_new_tokens=16)
    assert warm.ids == cold.ids and [item.path for item in warm.rounds] == [item.path for item in cold.rounds]


# -- E: stops, limits, text -----------------------------------------------------------------------------------------------------------


def decode_both(target: Target, answer: list[int], **options: Any) -> tuple[Generation, Generation]:
    """With a drafter that knows the answer, in blocks of 15, and plainly."""
    drafter: Any = Stub(target, [5, 9, *answer, *[3] * 20], 0)
    plain = generate_plain(target, [5, 9], **options)
    return generate(target, drafter, [5, 9], config=DecodeConfig(depth=15, width=2, budget=64), **options), plain


def test_e62_e63_e65_stops_and_caps_inside_one_block(endless: Target) -> None:
    answer = generate_plain(endless, [5, 9], max_new_tokens=14)
    pieces = [endless.decode([token]) for token in answer.ids]
    for place in (1, 2, 6):
        for cap in (place, place + 1, 14):
            stop = [pieces[place], "never"]
            found, plain = decode_both(endless, answer.ids, max_new_tokens=cap, stop=stop)
            assert (found.ids, found.text, found.finish_reason) == (plain.ids, plain.text, plain.finish_reason)
            first = next(i for i, piece in enumerate(pieces) if pieces[place] in piece)
            assert found.finish_reason == ("stop string" if first < cap else "length")
    for order in ((0, 1), (1, 0)):  # the stop that completes first wins, not the first of the list
        stop = [(pieces[4], pieces[2])[place] for place in order]
        found, plain = decode_both(endless, answer.ids, max_new_tokens=14, stop=stop)
        assert found.text == plain.text and found.ids == plain.ids


@pytest.mark.parametrize(
    ("text", "stop", "kept"),
    [("xabcd", ["abcd", "bc"], "xa"), ("xabc", ["bc", "abc"], "x"), ("abab", ["b"], "a"), ("none", ["q"], "none"), ("aab", ["ab", "b"], "a")],
)
def test_the_stop_string_that_is_complete_first_cuts(endless: Target, text: str, stop: list[str], kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endless, "decode", lambda ids: text[: len(ids)])
    for at_once in (1, len(text)):
        stopper = Stopper(endless, max_new_tokens=99, stop=stop)
        for _ in range(0, len(text), at_once):
            stopper.take([7] * at_once)
            if stopper.reason:
                break
        assert stopper.text == kept and (stopper.reason == "stop string") == (kept != text)


def test_e69_targets_without_end_of_text(endless: Target) -> None:
    found, plain = decode_both(endless, generate_plain(endless, [5, 9], max_new_tokens=9).ids, max_new_tokens=9)
    assert found.ids == plain.ids and len(found.ids) == 9


def test_e70_end_of_text_in_a_draft_ends_nothing(endless: Target) -> None:
    truth = generate_plain(endless, [5, 9], max_new_tokens=12).ids
    unused = next(token for token in range(60) if token not in truth)
    endless.eos_token_ids = (unused,)
    drafter: Any = Stub(endless, [5, 9, *truth[:3], unused, *truth[4:], *[3] * 9], 0)
    found = generate(endless, drafter, [5, 9], config=TREE, max_new_tokens=12)
    assert found.ids == truth and found.finish_reason == "length"


def test_e72_a_character_of_several_tokens_is_streamed_whole(capsys: pytest.CaptureFixture[str]) -> None:
    target = tiny_module.load(dtype=torch.float64, vocab_size=300)
    text = "día 🙂 日本 ok"
    ids = target.tokenizer(text, add_special_tokens=False)["input_ids"]
    for size in (1, 2, 3, 5):
        stream = _Streamer(target, ())
        for end in range(size, len(ids) + size, size):
            stream(Generation(ids=ids[:end]))
        stream(Generation(ids=ids, text=target.decode(ids), finished=True))
        assert capsys.readouterr().out == text


def test_e72_a_character_that_shows_as_a_mark_a_byte_is_streamed_whole(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_module.load(dtype=torch.float64)
    raw = "a🙂é".encode()

    def by_bytes(ids: list[int]) -> str:
        """As tokenizers with byte fallback do: every byte of what is not yet a character is a mark of its own."""
        done = bytes(ids)
        for cut in range(4):
            try:
                return done[: len(done) - cut].decode() + "\ufffd" * cut
            except UnicodeDecodeError:
                continue
        raise AssertionError(ids)

    monkeypatch.setattr(target, "decode", by_bytes)
    stream = _Streamer(target, ())
    for end in range(1, len(raw) + 1):
        stream(Generation(ids=list(raw[:end])))
    stream(Generation(ids=list(raw), text="a🙂é", finished=True))
    assert capsys.readouterr().out == "a🙂é"


@pytest.mark.parametrize("length", range(1, 13))
def test_e74_short_prompts(endless: Target, length: int) -> None:
    prompt = list(range(length))
    drafter = make_drafter(endless, correction="attention")
    assert generate(endless, drafter, prompt, config=TREE, max_new_tokens=6).ids == generate_plain(endless, prompt, max_new_tokens=6).ids


def test_identity_is_reported_as_json(endless: Target) -> None:
    """What the audit says can be written."""
    plain = generate_plain(endless, [5, 9], max_new_tokens=4)
    assert json.dumps(audit(endless, [5, 9], Generation(ids=[0, 1, 2, 3]), plain))
