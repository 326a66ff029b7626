"""Options of trees and of their scorers: as flags and in grids, and what is measured to choose them: ranks and recall."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contracts.tree_tables import random_scorer
from tests.tiny_drafters import make_drafter
from treedraft import drafter as drafter_module
from treedraft import metrics
from treedraft.apart import DeviceLink, serve
from treedraft.config import DecodeConfig
from treedraft.decode import Arguments, _decode_config, main
from treedraft.drafter import Drafter
from treedraft.evaluate import Replay, Trajectory, builder_for
from treedraft.grid import load_grid
from treedraft.metrics import Rounds, histogram_caps, measured_caps, rank_counts
from treedraft.speculate import generate, generate_plain
from treedraft.speculate_many import generate_many
from treedraft.targets.generate import generate as generate_batch
from treedraft.targets.hf import Target
from treedraft.trees.accept import accept_batch, ranks_of
from treedraft.trees.best_first import BestFirst
from treedraft.trees.limits import DepthCaps, GapCap

GRID = """
question = "?"
target = "tiny"
[[arms]]
correction = ["markov", "attention"]
[decode]
depth = 7
"""


PROMPTS = [[5], list(range(20)), [7, 30, 2, 41]]


@pytest.fixture(scope="module")
def knowing(tiny64: Target) -> Drafter:
    """A drafter whose correction has the bigrams of some answers: rounds of all lengths."""
    drafter = make_drafter(tiny64, correction={"name": "markov", "rank": 64})
    correction: Any = drafter.correction
    correction.markov_w1.weight.data = torch.eye(64, dtype=tiny64.dtype)
    for prompt in PROMPTS:
        ids = [prompt[-1], *generate_plain(tiny64, prompt, max_new_tokens=24).ids]
        correction.markov_w2.weight.data[ids[1:], ids[:-1]] += 30.0
    return drafter


# -- flags and grids -----------------------------------------------------------------------------------------------------


def grid_of(tmp_path: Path, decode: str, arms: str = 'correction = ["markov", "attention"]') -> list[DecodeConfig]:
    path = tmp_path / "grid.toml"
    path.write_text(GRID.replace('correction = ["markov", "attention"]', arms) + decode)
    return [cell.decode for cell in load_grid(path).cells[: len(load_grid(path).cells) // 2]]


@pytest.mark.parametrize(
    ("lines", "caps", "gaps"),
    [
        ("caps = [3, 2, 1]", [(3, 2, 1)], [None]),
        ("caps = [[3, 2, 1]]", [(3, 2, 1)], [None]),
        ('caps = [[3, 2, 1], [2], "none"]', [(3, 2, 1), (2,), None], [None] * 3),
        ("gap_cap = [1, 1.5]", [None], [(1.0, 1.5)]),
        ("gap_cap = [[1, 1.5], [2, 1]]", [None] * 2, [(1.0, 1.5), (2.0, 1.0)]),
    ],
)
def test_a_list_of_numbers_is_one_value_of_what_is_a_vector(tmp_path: Path, lines: str, caps: list, gaps: list) -> None:
    found = grid_of(tmp_path, lines)
    assert [config.caps for config in found] == caps and [config.gap_cap for config in found] == gaps
    assert len(grid_of(tmp_path, "width = [2, 3]\n" + lines)) == 2 * len(found)  # other lists multiply


def test_tapped_layers_of_an_arm_are_one_value(tmp_path: Path) -> None:
    path = tmp_path / "grid.toml"
    path.write_text(GRID.replace("[[arms]]", "[[arms]]\ntap_layers = [0, 1]"))
    assert [arm.drafter.tap_layers for arm in load_grid(path).arms] == [(0, 1)] * 2


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("caps = [3, 0]", r"grid.toml \[decode\]: caps are \(3, 0\)"),
        ("caps = []", r"caps are \(\)"),
        ("gap_cap = [1]", "gap_cap"),
        ("caps = [2]\ngap_cap = [1, 1]", "exclude"),
        ('scorer = ["marginal", "conditional"]\ncandidates = 9', r"grid.toml \[decode\]: candidates is 9.*'marginal'"),
        ('caps = "none.json"', "none.json"),
    ],
)
def test_wrong_options_of_a_grid_are_named(tmp_path: Path, lines: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        grid_of(tmp_path, lines)


def test_a_grid_of_candidates_needs_corrections(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"candidates is 9.*correction 'none'"):
        grid_of(tmp_path, "candidates = 9", 'correction = ["none", "markov"]')
    assert [config.candidates for config in grid_of(tmp_path, 'candidates = [9, "none"]')] == [9, None]


def test_flags_are_the_fields_of_a_config() -> None:
    flags: dict[str, Any] = {"scorer": "per_depth", "admit": "pop", "frontier": 4, "count_root": False, "candidates": 9}
    config = _decode_config(Arguments(**flags))
    assert {name: getattr(config, name) for name in flags} == flags
    assert _decode_config(Arguments(caps="3,2,1")).caps == (3, 2, 1) and _decode_config(Arguments(gap_cap="1,2.5")).gap_cap == (1, 2.5)
    assert _decode_config(Arguments()) == DecodeConfig() and _decode_config(Arguments(budget="auto")).admit == "pop"


def test_builders_have_the_options_of_a_config() -> None:
    shaped = DecodeConfig(admit="pop", count_root=False, caps=(3, 2), frontier=4, width=5, budget=9)
    assert builder_for(shaped) == BestFirst(
        budget=9, width=5, depth=15, admit="pop", count_root=False, caps=DepthCaps(caps=(3, 2)), frontier=4
    )
    assert builder_for(DecodeConfig(gap_cap=(2.0, 1.0))) == BestFirst(budget=255, width=7, depth=15, caps=GapCap(beta=2.0, g0=1.0))


@pytest.mark.parametrize(
    "options",
    [{"caps": (3, 2, 1)}, {"gap_cap": (1.0, 1.0)}, {"frontier": 2, "admit": "pop"}, {"count_root": False}, {"scorer": "per_depth"},
     {"scorer": "per_depth", "candidates": 9}, {"scorer": "marginal"}],
    ids=str,
)  # fmt: skip
def test_every_option_is_lossless_alone_and_side_by_side(tiny64: Target, knowing: Drafter, options: dict[str, Any]) -> None:
    config = DecodeConfig(mode="tree", depth=5, width=3, budget=12, **options)
    plain = [generate_plain(tiny64, prompt, max_new_tokens=14).ids for prompt in PROMPTS]
    assert [generate(tiny64, knowing, prompt, config=config, max_new_tokens=14).ids for prompt in PROMPTS] == plain
    many = generate_many(tiny64, knowing, PROMPTS, config=config, batch_size=3, max_new_tokens=14)
    assert [answer.ids for answer in many] == plain
    sizes = [len(item.tree) for answer in many for item in answer.rounds]
    assert max(sizes) == 12 + ("count_root" in options) and (min(sizes) < 12 or "gap_cap" not in options)


# -- ranks ---------------------------------------------------------------------------------------------------------------

def replay_of(target: Target, prompts: list[list[int]], length: int) -> Replay:
    answers = generate_batch(target, prompts, max_new_tokens=length, temperature=0.0, seeds=[0] * len(prompts), batch_size=4)
    return Replay(target, [
        Trajectory(prompt=str(i), domain="", seed=i, ids=np.array([*prompt, *answer]), prompt_length=len(prompt))
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ], at_once=2)  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), budget=st.integers(1, 30), admit=st.sampled_from(["fanout", "pop"]))
def test_ranks_are_places_among_siblings(seed: int, budget: int, admit: Any) -> None:
    scorer = random_scorer("smooth", conditional=True, num_requests=5, depth=4, vocab=4, seed=seed)
    trees = BestFirst(budget=budget, width=3, admit=admit).build(torch.full((5,), 9), scorer)
    continuation = 100 + torch.randint(0, 4, (5, 4), generator=torch.Generator().manual_seed(seed))
    paths, accepted = accept_batch(trees, continuation)
    ranks = ranks_of(trees, paths)
    for request in range(5):
        tree = trees.tree(request)
        path = paths[request, : int(accepted[request]) + 1].tolist()
        expected = [tree.children()[above].index(node) for above, node in zip(path, path[1:], strict=False)]
        assert ranks[request].tolist() == expected + [-1] * (ranks.shape[1] - len(expected))


@pytest.mark.parametrize("config", [DecodeConfig(mode="chain", depth=5), DecodeConfig(mode="tree", depth=5, width=6, budget=40, scorer="marginal")])
def test_ranks_of_replay_are_those_of_live_rounds(tiny64: Target, knowing: Drafter, config: DecodeConfig) -> None:
    replayed = {item.seed: item for item in replay_of(tiny64, PROMPTS, 24).run(knowing, config)}
    for seed, prompt in enumerate(PROMPTS):
        live = generate(tiny64, knowing, prompt, config=config, max_new_tokens=24).counts()
        whole = live.emitted > live.accepted
        found = replayed[seed].ranks
        assert live.ranks is not None and found is not None and found.shape == (live.num_rounds, 5)
        assert (found[whole, : live.ranks.shape[1]] == live.ranks[whole]).all() and (found[:, live.ranks.shape[1] :] == -1).all()
    counts = rank_counts(list(replayed.values()))
    assert counts and sum(counts[0]) == sum(int((item.accepted > 0).sum()) for item in replayed.values())
    assert len(counts[0]) == 1 if config.mode == "chain" else len(counts[0]) > 1


def test_ranks_are_counted_by_depth() -> None:
    def rounds(ranks: list[list[int]] | None) -> Rounds:
        some = np.zeros(0, dtype=np.int64)
        return Rounds(prompt="", domain="", seed=0, accepted=some, emitted=some, nodes=some, ranks=None if ranks is None else np.array(ranks))

    parts = [rounds([[0, 2, -1], [0, 0, -1]]), rounds([[1, -1], [-1, -1]])]
    assert rank_counts(parts) == [[2, 1, 0], [1, 0, 1]]
    assert rank_counts([*parts, rounds(None)]) is None and rank_counts([]) is None and rank_counts([rounds([[-1]])]) == []


def test_histogram_caps_by_hand() -> None:
    assert histogram_caps([[8, 1, 1, 0], [99, 1, 0, 0], [0, 0, 0, 0]]) == (3, 1)
    assert histogram_caps([[90, 1, 5, 4]]) == (4,)  # the second rank is rare, the fourth is not
    assert histogram_caps([[90, 1, 5, 4]], least=0.05) == (3,) and histogram_caps([[1] * 99]) == (1,) and histogram_caps([]) == ()


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), least=st.sampled_from([0.02, 0.1, 0.3]))
def test_capped_trees_keep_the_share_that_was_promised(seed: int, least: float) -> None:
    """In the rounds that were counted no rank is lost that `least` of the accepted drafts of its depth had: the trees under
    the caps accept the counted paths up to their first rarer rank, and what the root loses is less than that times ranks."""
    scorer = random_scorer("smooth", conditional=True, num_requests=300, depth=3, vocab=4, seed=seed)
    anchor = torch.full((300,), 9)
    continuation = 100 + torch.randint(0, 4, (300, 3), generator=torch.Generator().manual_seed(seed))
    free = BestFirst(budget=85, width=4, depth=3).replay(anchor, scorer, continuation)  # the whole tree
    some = free.accepted.numpy()
    counts = rank_counts([Rounds(prompt="", domain="", seed=0, accepted=some, emitted=some, nodes=some, ranks=free.ranks.numpy())])
    assert counts is not None
    caps = histogram_caps(counts, least=least)
    capped = BestFirst(budget=85, width=4, depth=3, caps=DepthCaps(caps=caps)).replay(anchor, scorer, continuation)
    limits = torch.tensor([*caps, *[4] * 3])[: free.ranks.shape[1]]
    kept = ((free.ranks >= 0) & (free.ranks < limits)).cumprod(1)
    assert capped.accepted.tolist() == kept.sum(1).tolist()
    for row, cap in zip(counts, caps, strict=True):
        assert all(count < least * sum(row) for count in row[cap:])
    lost = 1 - int((capped.accepted > 0).sum()) / int((free.accepted > 0).sum())
    assert lost <= least * (4 - caps[0]) + 1e-9


def test_caps_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "ranks.json"
    path.write_text(json.dumps({"ranks": [[90, 6, 4], [50, 50, 0]], "least": 0.05}))
    assert measured_caps(path) == (2, 2) and _decode_config(Arguments(caps=str(path))).caps == (2, 2)
    assert [config.caps for config in grid_of(tmp_path, 'caps = ["ranks.json", [3]]')] == [(2, 2), (3,)]
    path.write_text(json.dumps({"ranks": [[97, 2, 1]]}))
    assert measured_caps(path) == (2,)
    for text, words in (('{"ranks": []}', "has no ranks"), ("[1]", "has no ranks"), ("{", "not valid JSON")):
        path.write_text(text)
        with pytest.raises(ValueError, match=words):
            measured_caps(path)


def test_bench_ranks_writes_what_decode_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from treedraft import bench

    out = tmp_path / "ranks.json"
    shared = ["--target", "pocket", "--width", "4", "--budget", "24", "--depth", "4"]
    monkeypatch.setattr(sys, "argv", ["bench", "ranks", *shared, "--count", "3", "--max-new-tokens", "16", "--output", str(out)])
    assert bench.main() == 0
    caps = json.loads(out.read_text())["caps"]
    assert f"--caps {','.join(map(str, caps))}" in capsys.readouterr().out and 1 <= max(caps) <= 4
    monkeypatch.setattr(sys, "argv", ["decode", *shared, "--caps", str(out), "--compare", "--json", "--max-new-tokens", "8", "What is 3 plus 4?"])
    assert main() == 0
    record = json.loads(capsys.readouterr().out)
    assert record["caps"] == caps and record["identical"] is True


# -- recall of candidates ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["chain", "tree"])
@pytest.mark.parametrize("scorer", ["conditional", "per_depth"])
def test_recall_is_counted_live_in_batches_behind_a_link_and_by_replay(tiny64: Target, knowing: Drafter, scorer: Any, mode: Any) -> None:
    config = DecodeConfig(mode=mode, depth=5, width=4, budget=24, scorer=scorer, candidates=12)
    live = [generate(tiny64, knowing, prompt, config=config, max_new_tokens=16) for prompt in PROMPTS]
    apart = [generate(tiny64, DeviceLink(tiny64, knowing), prompt, config=config, max_new_tokens=16) for prompt in PROMPTS]
    many = generate_many(tiny64, knowing, PROMPTS, config=config, batch_size=2, max_new_tokens=16)
    linked = generate_many(tiny64, DeviceLink(tiny64, knowing), PROMPTS, config=config, batch_size=3, max_new_tokens=16)
    expected = [[item.among_candidates for item in answer.rounds] for answer in live]
    assert all(None not in rounds for rounds in expected)
    for others in (apart, many, linked):
        assert [[item.among_candidates for item in answer.rounds] for answer in others] == expected
    replayed = sorted(replay_of(tiny64, PROMPTS, 16).run(knowing, config), key=lambda item: item.seed)
    for found, rounds, answer in zip(replayed, expected, live, strict=True):
        assert found.among is not None and len(found.among) == len(rounds)
        for got, asked, item in zip(found.among.tolist(), rounds, answer.rounds, strict=True):
            assert got[: item.emitted] == [int(one) for one in (asked or [])][: item.emitted]  # the record ends with the answer
            assert set(got[item.emitted :]) <= {-1}
    share = metrics.candidate_recall(replayed)
    assert share is not None and 0 < share < 1
    assert metrics.summary(replayed, 5)["candidate_recall"] == share
    assert metrics.candidate_recall([answer.counts() for answer in live]) is not None


def test_recall_is_not_counted_where_all_tokens_are_scored(tiny64: Target) -> None:
    drafter = make_drafter(tiny64, correction="attention")
    config = DecodeConfig(depth=5, budget=9)
    assert metrics.summary(replay_of(tiny64, PROMPTS, 8).run(drafter, config), 5)["candidate_recall"] is None
    assert generate(tiny64, drafter, [5], config=config, max_new_tokens=6).rounds[0].among_candidates is None


@pytest.mark.parametrize(
    ("correction", "options", "words"),
    [
        ("none", {"candidates": 9}, "correction 'none'"),
        ("attention", {"candidates": 9, "scorer": "marginal"}, "scorer 'marginal'"),
        ("attention", {"candidates": 64}, "has to be fewer than the 64 tokens"),
    ],
)
def test_candidates_that_restrict_nothing_are_refused_or_warned_of(
    tiny64: Target, correction: str, options: dict, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Commands and grids refuse them; who calls the library is told once, and all tokens are scored."""
    drafter, config = make_drafter(tiny64, correction=correction), DecodeConfig(depth=5, budget=9, **options)
    with pytest.raises(ValueError, match=words):
        drafter.check_candidates(config.candidates, config.scorer)
    drafter_module._warn.cache_clear()
    found = generate(tiny64, drafter, [5], config=config, max_new_tokens=6)
    replay_of(tiny64, [[5, 9]], 6).run(drafter, config)
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 1 and words in said[0] and all(item.among_candidates is None for item in found.rounds)
    with pytest.raises(ValueError, match="another process scores all tokens"):
        serve(tiny64, drafter, 0, config=config)


def test_a_cell_with_candidates_says_their_recall() -> None:
    from treedraft.cells import _result_columns

    result: dict[str, Any] = {name: 0 for name in ("tau", "tau_macro", "prompts", "decodings", "rounds", "rounds_cut", "emitted", "mean_nodes", "hardware", "commit")}
    result |= {"tau_by_domain": {}, "survival": []}
    trained = {"parameters": {}, "steps": 0, "blocks": 0, "seconds": 0}
    assert _result_columns({**result, "candidate_recall": 0.5}, trained)["candidate_recall"] == 0.5
    assert "candidate_recall" not in _result_columns({**result, "candidate_recall": None}, trained)
