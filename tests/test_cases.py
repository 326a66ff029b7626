"""What users of such software met, each kept from happening here; what other files cover is not repeated.

The letters group them: A greedy output, B sampling, C trees and masks, D caches, E stops; the numbers tell them apart.
"""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kit import Stub, TableTarget, adversary, oracle, script, writing
from tests.tiny_drafters import make_drafter, random_prompts
from treedraft.config import DecodeConfig, Sampling
from treedraft.decode import _difference, _Streamer
from treedraft.speculate import Generation, Stopper, audit, generate, generate_plain, report
from treedraft.speculate_many import generate_many
from treedraft.targets import tiny as tiny_module
from treedraft.targets.generate import generate as generate_batch
from treedraft.targets.hf import Target, Verified
from treedraft.trees import best_first, rules
from treedraft.trees.accept import accept
from treedraft.trees.best_first import BestFirst
from treedraft.trees.chain import Chain
from treedraft.trees.drawn import DrawnTree
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


@pytest.mark.parametrize("mode", ["chain", "tree"])
def test_a1_float32_has_no_difference_on_100_prompts(mode: Any) -> None:
    """Of 1 to 64 tokens; 48 new ones, in rounds of 25 requests. A difference would be shown with the gap of its logits."""
    target, differences = tiny_module.load(dtype=torch.float32), []
    prompts = random_prompts(target, 100, longest=64, seed=23 + len(mode))
    plain = generate_batch(target, prompts, max_new_tokens=48, temperature=0.0, seeds=[0] * 100, batch_size=50)
    for first in range(0, 100, 25):
        drafter = make_drafter(target, correction="attention", seed=first)
        config = DecodeConfig(mode=mode, depth=5, width=3, budget=16)
        found = generate_many(target, drafter, prompts[first : first + 25], config=config, batch_size=25, max_new_tokens=48)
        for prompt, one, ids in zip(prompts[first:], found, plain[first:], strict=False):
            if one.ids != ids:
                differences.append(audit(target, prompt, one, Generation(ids=ids)))
    assert not differences


def padded_to(target: Target, num_nodes: int) -> None:
    """From now on every tree is verified with as many rows: leaves below the root fill it up."""
    verify = target.verify

    def fixed(tokens: torch.Tensor, parents: torch.Tensor) -> Verified:
        more, size = torch.zeros(num_nodes - len(tokens), dtype=torch.int64), len(tokens)
        found = verify(torch.cat([tokens, more]), torch.cat([parents, more]))
        return Verified(logits=found.logits[:size], taps=found.taps[:size])

    target.verify = fixed  # pyright: ignore[reportAttributeAccessIssue]


def test_a3_differences_vanish_where_both_decoders_verify_as_many_rows() -> None:
    """It is the number of rows of a product that rounds differently: many ids and layers, so that ties are near."""
    differing = []
    for fixed in (False, True):
        target = tiny_module.load(dtype=torch.bfloat16, vocab_size=2000, num_layers=6)
        drafter, config = make_drafter(target), DecodeConfig(depth=3, width=3, budget=8)
        if fixed:
            padded_to(target, 8)
        pairs = [
            (generate(target, drafter, prompt, config=config, max_new_tokens=24).ids, generate_plain(target, prompt, max_new_tokens=24).ids)
            for prompt in random_prompts(target, 8, longest=12, seed=2)
        ]
        differing.append(sum(one != other for one, other in pairs))
    assert differing[0] >= 3 and differing[1] <= differing[0] // 3


def test_a7_a_batch_in_half_precision_is_finite_and_parts_only_at_ties() -> None:
    """Rows of 1, 7 and 30 tokens: of the first all but one is padding beside the last. float64 is in test_many.py."""
    target = tiny_module.load(dtype=torch.float16)
    target.eos_token_ids = ()
    drafter, prompts = make_drafter(target, correction="attention"), [[5], list(range(7)), list(range(30))]
    config = DecodeConfig(depth=3, width=2, budget=8)
    many = generate_many(target, drafter, prompts, config=config, batch_size=3, max_new_tokens=10)  # logits that are not finite stop it
    for prompt, found in zip(prompts, many, strict=True):
        alone = generate(target, drafter, prompt, config=config, max_new_tokens=10)
        assert len(found.ids) == 10 and found.text
        assert found.ids == alone.ids or audit(target, prompt, found, alone)["near_tie"]


def test_a1_the_audit_names_place_tokens_and_gap(endless: Target) -> None:
    plain = generate_plain(endless, [5, 9], max_new_tokens=8)
    other = Generation(ids=[*plain.ids[:3], (plain.ids[3] + 1) % 60, *plain.ids[4:]])
    difference = audit(endless, [5, 9], other, plain)
    logits = endless.prefill([5, 9, *plain.ids[:3]]).logits[-1]
    assert difference["place"] == 3 and difference["tokens"] == [other.ids[3], plain.ids[3]] and not difference["near_tie"]
    assert difference["logits"] == pytest.approx(logits[difference["tokens"]].tolist())
    assert difference["gap"] == pytest.approx(float((logits[other.ids[3]] - logits[plain.ids[3]]).abs()))
    said = _difference(difference)
    assert all(word in said for word in ("token 3", str(other.ids[3]), str(plain.ids[3]), *(f"{value:.4f}" for value in difference["logits"])))
    assert audit(endless, [5, 9], Generation(ids=plain.ids[:4]), plain) == {"place": 4, "near_tie": False}


_IDENTITY = """
import hashlib, torch
from tests.tiny_drafters import make_drafter, random_prompts
from treedraft.config import DecodeConfig
from treedraft.speculate import audit, generate_plain
from treedraft.speculate_many import generate_many
from treedraft.targets import tiny
torch.set_num_threads(1)
config = DecodeConfig(mode="tree", depth=5, width=3, budget=24)
for dtype in (torch.float64, torch.float32):
    target, digest, differences = tiny.load(dtype=dtype), hashlib.sha256(), []
    prompts = random_prompts(target, 200, longest=12, seed=6)
    plain = [generate_plain(target, prompt, max_new_tokens=12) for prompt in prompts]
    for first in range(0, 200, 10):
        drafter = make_drafter(target, correction="attention", seed=first)
        found = generate_many(target, drafter, prompts[first : first + 10], config=config, batch_size=10, max_new_tokens=12)
        for prompt, one, other in zip(prompts[first:], found, plain[first:]):
            if one.ids != other.ids:
                differences.append(audit(target, prompt, one, other))
    print(hashlib.sha256(repr([one.ids for one in plain]).encode()).hexdigest(), differences)
"""


def test_a6_a12_fresh_processes_agree_on_200_prompts() -> None:
    """Plain decoding with itself first, then drafting with plain decoding; 20 drafters, in float64 and in float32."""
    root = Path(__file__).parents[1]
    runs = [subprocess.run([sys.executable, "-c", _IDENTITY], cwd=root, stdout=subprocess.PIPE, text=True, check=True) for _ in range(2)]
    one, other = (run.stdout.splitlines() for run in runs)
    assert one == other and len(one) == 2
    assert all(line.endswith(" []") for line in one), one


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


def test_b15_no_rule_can_be_called_without_the_law_of_its_drafts() -> None:
    """What ignores q is a rule with a name of its own; a drawn tree comes with the laws that it was drawn from."""
    for rule in rules.RULES.values():
        assert [item.default for item in inspect.signature(rule).parameters.values()] == [inspect.Parameter.empty] * 4
    with pytest.raises(TypeError, match="laws"):
        DrawnTree(tree=script([0, 1], [-1, 0]), attempts=[[1], []])  # pyright: ignore[reportCallIssue]
    p = torch.tensor([0.5, 0.5], dtype=torch.float64)
    for name, rule in rules.RULES.items():
        if name not in ("point_mass", "typical"):
            with pytest.raises(TypeError):
                rule(p, None, [0], rules.KeyedDice(0, 0))  # pyright: ignore[reportArgumentType]


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


@pytest.mark.parametrize("candidates", [None, 5])
def test_c43_a_width_beyond_the_draft_vocabulary_is_clipped_with_one_warning(
    tiny64: Target, candidates: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Of 8 ids, or of 5 candidates; a width that fits says nothing."""
    best_first.say_clipped.cache_clear()
    drafter = make_drafter(tiny64, correction="attention", d2t=torch.arange(8))
    for width, warned in ((5, False), (20, True)):
        config = DecodeConfig(depth=3, width=width, budget=40, candidates=candidates)
        found = generate(tiny64, drafter, [5, 9], config=config, max_new_tokens=12)
        assert found.ids == generate_plain(tiny64, [5, 9], max_new_tokens=12).ids
        assert all(len(siblings) <= min(width, candidates or 8) for item in found.rounds for siblings in item.tree.children())
        said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert len(said) == warned and (not warned or f"width 20 of a draft tree: {candidates or 8} tokens" in said[0])


# -- D: caches and states ---------------------------------------------------------------------------------------------------------


def test_d48_commit_of_nothing_or_too_much_is_a_mistake(endless: Target) -> None:
    endless.prefill([5, 9])
    for path in ([], [0, 1, 2], [-1], [1]):
        endless.verify(torch.tensor([1, 2]), torch.tensor([-1, 0]))
        with pytest.raises(ValueError, match="the 2 nodes last verified"):
            endless.commit(path)


def test_d53_acceptance_does_not_decay(endless: Target) -> None:
    """A forced mistake every third token: every round accepts the same, from the first to the last of 400 tokens.

    In every round the drafter's context has one row a committed token (the stub asserts it)."""
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


WORDS = (" ", "ten ", "eleven ", "STOP", "twenty ", "abSTOPcd", " The", " user", " is", " a", ",", "more ")


@pytest.mark.parametrize(
    ("answer", "stop", "cap", "tokens", "text", "reason"),
    [
        ([1, 2, 3, 4, 11, 11], ["STOP"], 5, 3, "ten eleven ", "stop string"),  # e62: the stop comes before the cap
        ([1, 2, 3, 4, 11, 11], ["STOP"], 3, 3, "ten eleven ", "stop string"),  # and wins where both are reached
        ([1, 2, 3, 4, 11, 11], ["STOP"], 2, 2, "ten eleven ", "length"),
        ([1, 3, *[11] * 14], ["STOP"], 40, 2, "ten ", "stop string"),  # e63: complete with the first token of a long block
        ([1, 2, 5, 4], ["STOP"], 40, 3, "ten eleven ab", "stop string"),  # e64: the token that completes it stays among the ids
        ([1, 2, 5, 4], ["bSTOPc", "STOP"], 40, 3, "ten eleven ab", "stop string"),  # e65: of two that one token completes
        ([1, 2, 4, 11], ["en tw"], 40, 3, "ten elev", "stop string"),  # and so do those that began it
        ([6, 7, 8, 9], ["a", "is", ","], 40, 3, " The user ", "stop string"),  # e65
        ([6, 7, 8, 9], [",", "is", "a"], 40, 3, " The user ", "stop string"),
        ([6, 7, 8, 9], ["is a", " is", "The"], 40, 1, " ", "stop string"),
    ],
)  # fmt: skip
def test_e62_e63_e64_e65_stops_by_hand(answer: list[int], stop: list[str], cap: int, tokens: int, text: str, reason: str) -> None:
    """All in one block of a drafter that knows the answer; with a wrong one, in batches and plainly the same."""
    target = TableTarget(writing(answer, after=1, vocab_size=len(WORDS)), len(WORDS), words=WORDS)
    known, config = [0, *answer, *[0] * 40], DecodeConfig(depth=15, width=2, budget=64)
    options: dict[str, Any] = {"max_new_tokens": cap, "stop": stop}
    found = [generate(target, drafter(target, known), [0], config=config, **options) for drafter in (oracle, adversary)]
    found += [generate_plain(target, [0], **options), *generate_many(target, oracle(target, known), [[0], [0]], config=config, batch_size=2, **options)]
    for one in found:
        assert (one.ids, one.text, one.finish_reason) == (answer[:tokens], text, reason)
    assert len(found[0].rounds) == (tokens > 1)


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


def test_e69_one_of_several_ids_that_end_the_text() -> None:
    answer = [3, 1, 2, 1]
    law = writing(answer, after=1, vocab_size=5)
    for eos, tokens in (((), 6), ((2,), 3), ((4, 1), 2), ((3, 2), 1)):
        target = TableTarget(law, 5, eos=eos)
        found = generate(target, oracle(target, [0, *answer, *[0] * 9]), [0], config=DecodeConfig(depth=4), max_new_tokens=6)
        assert found.ids == generate_plain(target, [0], max_new_tokens=6).ids == [*answer, 0, 0][:tokens]
        assert found.finish_reason == ("end of text" if eos else "length")


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
