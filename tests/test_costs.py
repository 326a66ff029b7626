"""What a round costs: fitted curves rise and bend upwards, profiles are stored, and a tree sized by them changes no output."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.tiny_drafters import make_drafter, random_prompts
from treedraft import costs
from treedraft.config import MOST_NODES, DecodeConfig
from treedraft.costs import NODES, Profile, fit, profile_of
from treedraft.speculate import generate, generate_plain
from treedraft.targets.hf import Target


@settings(max_examples=60, deadline=None)
@given(seconds=st.lists(st.lists(st.floats(1e-4, 10), min_size=len(NODES), max_size=len(NODES)), min_size=1, max_size=4))
@example(seconds=[[3.0, 3.0, 4.0, 3.0, 0.03125, 1.0, 1.0, 1.0, 1.0], [1.0, 2.0, 0.25, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]])
def test_fitted_curves_rise_with_nodes_and_context_and_are_convex(seconds: list[list[float]]) -> None:
    curves = fit(NODES, seconds, MOST_NODES)
    slack = -1e-9 * curves.max()
    assert curves.shape == (len(seconds), MOST_NODES) and (curves > 0).all()
    steps = np.diff(curves, axis=1)
    assert (steps >= slack).all() and (np.diff(steps, axis=1) >= slack).all() and (np.diff(curves, axis=0) >= slack).all()


@settings(max_examples=30, deadline=None)
@given(
    seconds=st.lists(st.lists(st.floats(1e-3, 1), min_size=len(NODES), max_size=len(NODES)), min_size=2, max_size=4),
    lengths=st.lists(st.integers(0, 20_000), min_size=2, max_size=2), requests=st.integers(1, 3),
)  # fmt: skip
def test_no_round_is_cheaper_behind_more_tokens_or_with_more_nodes(seconds: list[list[float]], lengths: list[int], requests: int) -> None:
    profile = Profile(
        contexts=(64, 512, 2048, 8192)[: len(seconds)], verify=tuple(map(tuple, seconds)), draft=0.01, level=0.0, correction=0.0, hardware=""
    )
    short, long = (np.array(profile.at(length, requests).verify) for length in sorted(lengths))
    assert (long >= short - 1e-9 * long.max()).all() and (np.diff(short) >= -1e-9 * short.max()).all()


def test_curves_that_rise_and_are_convex_are_fitted_as_they_are() -> None:
    seconds = [[0.05 + 0.001 * n + 0.002 * max(0, n - 32) + more * (1 + n) for n in NODES] for more in (0, 0.001, 0.004)]
    curves = fit(NODES, seconds, MOST_NODES)
    for curve, measured in zip(curves, seconds, strict=True):
        assert [curve[n - 1] for n in NODES] == pytest.approx(measured, rel=1e-6)
    assert curves[0, 99] == pytest.approx(0.05 + 0.1 + 0.002 * 68, rel=1e-6)


def test_contexts_go_as_far_as_the_window(tiny64: Target) -> None:
    def contexts(window: int) -> list[int]:
        return costs.contexts_of(SimpleNamespace(max_length=window))  # pyright: ignore[reportArgumentType]

    assert contexts(32_768) == [64, 512, 2048, 8192] and contexts(8192) == [64, 512, 2048, 8192 - MOST_NODES - 1]
    assert contexts(1000) == [64, 512, 743] and contexts(300) == [43] and contexts(200) == [100]


def test_a_profile_belongs_to_all_that_changes_its_times(tiny64: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = make_drafter(tiny64, correction="attention")
    paths = [costs._path(tiny64, drafter, 5, *more) for more in (("conditional", None), ("per_depth", None), ("conditional", 8))]
    paths.append(costs._path(tiny64, drafter, 6, "conditional", None))
    monkeypatch.setattr(tiny64, "attention", replace(tiny64.attention, name="sdpa"))
    paths.append(costs._path(tiny64, drafter, 5, "conditional", None))
    monkeypatch.setattr(tiny64, "packed", not tiny64.packed)
    paths.append(costs._path(tiny64, drafter, 5, "conditional", None))
    assert len(set(paths)) == len(paths)


def test_trees_of_several_requests_are_timed(tiny64: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    verified: list[tuple[int, ...]] = []
    verify = costs.Requests.verify
    monkeypatch.setattr(costs.Requests, "verify", lambda self, trees: verified.append(tuple(trees.tokens.shape)) or verify(self, trees))
    seconds = costs.verify_several(tiny64, 3, 20, (1, 4, 9), repeats=1)
    assert len(seconds) == 3 and min(seconds) > 0 and set(verified) == {(3, 1), (3, 4), (3, 9)}


def test_contexts_are_interpolated() -> None:
    slow = tuple(0.2 + 0.002 * n for n in NODES)
    profile = Profile(contexts=(64, 192), verify=(tuple(value / 2 for value in slow), slow), draft=0.01, level=0.002, correction=0.001, hardware="")
    assert profile.at(0).verify[0] == pytest.approx(slow[0] / 2) and profile.at(9999).verify[0] == pytest.approx(slow[0])
    assert profile.at(128).verify[7] == pytest.approx(0.75 * slow[3], rel=1e-6)
    assert profile.at(0).level == 0.002 and profile.at(0, 3).level == 0.002  # a call is shared, its nodes are not
    assert profile.at(0).correction == 0.001 and profile.at(0, 3).correction == pytest.approx(0.003)
    assert profile.at(130) is profile.at(150)  # computed once for neighbouring lengths


def test_a_profile_is_measured_once(tiny64: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREEDRAFT_CACHE", str(tmp_path))
    drafter = make_drafter(tiny64, correction="attention")
    first = profile_of(tiny64, drafter, 5)
    assert first.draft > 0 and first.level + first.correction > 0 and all(value > 0 for row in first.verify for value in row)
    monkeypatch.setattr(costs, "measure", lambda *_, **__: pytest.fail("measured again"))
    assert profile_of(tiny64, drafter, 5) == first
    assert len(list((tmp_path / "profiles").iterdir())) == 1


def test_output_is_plain_decoding_and_trees_follow_the_cost(tiny64: Target) -> None:
    drafter = make_drafter(tiny64, correction="attention")
    config = DecodeConfig(mode="tree", depth=5, width=4, budget=MOST_NODES, admit="pop")
    sizes = []
    for node in (0.0, 0.02, 1.0):
        profile = Profile(contexts=(64,), verify=(tuple(1 + node * n for n in NODES),), draft=0.1, level=0.0, correction=0.0, hardware="")
        for seed, prompt in enumerate(random_prompts(tiny64, 4, longest=9, seed=1)):
            options: dict[str, Any] = {"max_new_tokens": 16, "seed": seed}
            found = generate(tiny64, drafter, prompt, config=config, profile=profile, **options)
            assert found.ids == generate_plain(tiny64, prompt, **options).ids
        sizes.append(np.mean([len(item.tree) for item in found.rounds]))
    assert sizes[0] > sizes[1] > sizes[2] >= 1
