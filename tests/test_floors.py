"""Information floors: the best proposal against a linear program, laws of a tree against plain forwards, and the bracket."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.optimize import linprog

from tests.test_cli import one_sentence, run
from tests.tiny_drafters import make_drafter, random_prompts
from treedraft.floors import (
    Anchor,
    best_proposal,
    choose_anchors,
    continuations,
    floor_of,
    laws_behind,
    proposals,
    summarise,
)
from treedraft.targets.hf import Target


def random_laws(rng: np.random.Generator, count: int, size: int) -> np.ndarray:
    return rng.dirichlet(np.full(size, rng.choice([0.1, 0.5, 3.0])), size=count)


def test_the_best_proposal_solves_the_linear_program() -> None:
    rng = np.random.default_rng(0)
    for _ in range(60):
        count, size = int(rng.integers(1, 6)), int(rng.integers(2, 7))
        laws, weights = random_laws(rng, count, size), rng.dirichlet(np.ones(count))
        # Variables: q [V], then the overlaps m [K, V] <= p and <= q.
        gain = np.concatenate([np.zeros(size), -np.repeat(weights, size)])
        below = np.concatenate([np.tile(-np.eye(size), (count, 1)), np.eye(count * size)], axis=1)
        whole = np.concatenate([np.ones(size), np.zeros(count * size)])[None]
        bounds = [(0, None)] * size + [(0, p) for p in laws.ravel()]
        solved = linprog(gain, A_ub=below, b_ub=np.zeros(count * size), A_eq=whole, b_eq=[1.0], bounds=bounds)
        q = best_proposal(laws, weights)
        assert q.sum() == pytest.approx(1.0) and (q >= 0).all()
        assert weights @ np.minimum(laws, q).sum(1) == pytest.approx(-solved.fun, abs=1e-6)  # the solver meets its constraints to 1e-7


def test_floors_by_hand() -> None:
    heads, tails = np.array([1.0, 0.0]), np.array([0.0, 1.0])
    assert floor_of(np.stack([heads, heads]), np.ones(2), heads) == pytest.approx((0.0, 0.0))
    assert floor_of(np.stack([heads, tails]), np.ones(2), heads)[0] == pytest.approx(0.5)
    assert floor_of(np.stack([heads, tails]), np.array([3.0, 1.0]), tails) == pytest.approx((0.25, 1.0))
    assert floor_of(np.stack([heads, tails]), np.array([0.0, 2.0]), tails) == pytest.approx((0.0, 0.0))
    assert np.isnan(floor_of(np.stack([heads]), np.zeros(1), heads)).all()


def test_the_floor_lies_between_its_two_estimates() -> None:
    """Of a past with five values; few samples of it, many repetitions."""
    rng = np.random.default_rng(1)
    laws, chance = random_laws(rng, 5, 8), rng.dirichlet(np.ones(5))
    floor, _ = floor_of(laws, chance, laws[0])
    found = []
    for _ in range(1500):
        pasts, own = rng.choice(5, size=4, p=chance), rng.choice(5, p=chance)
        found.append(floor_of(laws[pasts], np.ones(4), laws[own]))
    low, high = np.mean(found, axis=0)
    assert low < floor < high


@pytest.fixture(scope="module")
def anchors(tiny64: Target) -> list[Anchor]:
    rng = np.random.default_rng(3)
    return [
        Anchor(prompt=str(place), prefix=np.array(prompt), record=rng.integers(0, tiny64.vocab_size - 2, size=size))
        for place, (prompt, size) in enumerate(zip(random_prompts(tiny64, 4)[1:], (5, 5, 2), strict=True))
    ]


def test_laws_of_the_tree_are_those_of_plain_forwards(tiny64: Target, anchors: list[Anchor]) -> None:
    def law(anchor: Anchor, tokens: list[int]) -> np.ndarray:
        ids = torch.tensor([[*anchor.prefix.tolist(), *tokens]])
        return torch.softmax(tiny64.head(tiny64.trace(ids).last[0, -1]).double(), -1).numpy()

    stop = tiny64.eos_token_ids[0]
    for anchor, sampled in zip(anchors, continuations(tiny64, anchors, samples=3, depth=5), strict=True):
        sampled[2] = [*sampled[2][:1], stop]  # a sample that ends
        truth, laws, (blind, seeing) = laws_behind(tiny64, anchor, sampled)
        record = anchor.record.tolist()
        for slot in range(anchor.num_slots):
            assert truth[slot] == pytest.approx(law(anchor, record[:slot]), abs=1e-10)
            for k, path in enumerate(sampled):
                ended = stop in path[:slot]
                assert blind[slot, k] == (not ended)
                if not ended:
                    assert laws["order 0"][slot, k] == pytest.approx(law(anchor, path[:slot]), abs=1e-10)
                if slot and stop not in path[: slot - 1]:
                    likely = law(anchor, path[: slot - 1])[record[slot - 1]]
                    assert seeing[slot, k] == pytest.approx(likely, abs=1e-10)
                    expected = law(anchor, [*path[: slot - 1], record[slot - 1]])
                    assert laws["order 1"][slot, k] == pytest.approx(expected, abs=1e-10)
                elif slot:
                    assert seeing[slot, k] == 0


@pytest.mark.parametrize("correction", ["none", "markov", "attention"])
def test_proposals_are_laws_of_the_drafter(tiny64: Target, anchors: list[Anchor], correction: str) -> None:
    options = {"name": correction, **({"rank": 6} if correction == "markov" else {})}
    drafter = make_drafter(tiny64, correction=options)
    for anchor in anchors:
        found = proposals(tiny64, drafter, anchor)
        assert all(law.shape == (anchor.num_slots, tiny64.vocab_size) for law in found.values())
        assert all(law.sum(1) == pytest.approx(np.ones(anchor.num_slots)) for law in found.values())
        assert found["own path"][0] == pytest.approx(found["true path"][0], abs=1e-10)
        if correction == "none":
            assert found["own path"] == pytest.approx(found["backbone alone"], abs=1e-10)
        greedy = Anchor(prompt="", prefix=anchor.prefix, record=found["own path"].argmax(1))
        again = proposals(tiny64, drafter, greedy)  # along its own greedy path both are one
        assert again["true path"] == pytest.approx(again["own path"], abs=1e-10)


def test_summaries_resample_prompts() -> None:
    values = {"a": np.array([[0.0, np.nan], [1.0, 0.5], [0.5, np.nan]])}
    rows = {(row["slot"], row["quantity"]): row for row in summarise(values, ["x", "x", "y"], draws=400)}
    assert rows[1, "a"]["value"] == 0.5 and rows[1, "a"]["anchors"] == 3 and rows[1, "a"]["low"] == rows[1, "a"]["high"] == 0.5
    assert rows[2, "a"]["value"] == 0.5 and rows[2, "a"]["anchors"] == 1


def test_the_command_writes_what_reports_read(tmp_path: Path) -> None:
    from treedraft import report

    flags = ["--target", "tiny", "--count", "3", "--samples", "3", "--depth", "3", "--max-new-tokens", "12"]
    done = run("treedraft.floors", *flags, "--output", str(tmp_path), runs=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = pd.read_csv(tmp_path / "floors-tiny.csv")
    assert set(rows.quantity) == {f"order {order}, {name}" for order in (0, 1) for name in ("at least", "at most")}
    assert (rows[rows.slot == 1].value < 1e-6).all() and rows.value.between(-1e-9, 1).all()
    assert json.loads((tmp_path / "floors-tiny.json").read_text())["anchors"] == rows[rows.slot == 1].anchors.max() == 6
    page = tmp_path / "README.md"
    page.write_text("<!-- table: floors tiny -->\n<!-- end -->\n")
    report.fill_markers(page, tmp_path)
    assert "| slot | floor of order 0 at least |" in page.read_text() and "6 anchors" in page.read_text()
    for name in ("csv", "json"):  # of a model whose name has a dot
        (tmp_path / f"floors-Small-0.6B.{name}").write_text((tmp_path / f"floors-tiny.{name}").read_text())
    page.write_text("<!-- table: floors Small-0.6B -->\n<!-- end -->\n")
    report.fill_markers(page, tmp_path)
    assert "6 anchors" in page.read_text()
    page.write_text("<!-- table: floors pocket -->\n<!-- end -->\n")
    with pytest.raises(ValueError, match=r"README.md:1: no floors-pocket.csv"):
        report.fill_markers(page, tmp_path)
    one_sentence(run("treedraft.floors", "--samples", "0", runs=tmp_path), "--samples is 0")
    one_sentence(run("treedraft.floors", "--samples", "64", runs=tmp_path), "--samples is 64; at depth 15 at most 36")
    nothing = run("treedraft.floors", "--target", "tiny", "--count", "2", "--max-new-tokens", "1", runs=tmp_path)
    one_sentence(nothing, "no answer is longer than one token")


def test_anchors_are_places_of_the_answer() -> None:
    from treedraft.evaluate import Trajectory

    texts = [Trajectory(prompt="a", domain="", seed=0, ids=np.arange(20), prompt_length=10), Trajectory(prompt="b", domain="", seed=0, ids=np.arange(4), prompt_length=3)]
    found = choose_anchors(texts, per_answer=3, depth=4)
    assert [anchor.prompt for anchor in found] == ["a"] * 3  # one token of an answer leaves nothing behind an anchor
    for anchor in found:
        assert 10 <= anchor.prefix[-1] < 19 and anchor.record[0] == anchor.prefix[-1] + 1 and len(anchor.record) == min(4, 19 - anchor.prefix[-1])
