"""What a round costs: fitted curves rise and bend upwards, profiles are stored, and a tree sized by them changes no output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiny_drafters import make_drafter, random_prompts
from treedraft import costs
from treedraft.config import MOST_NODES, DecodeConfig
from treedraft.costs import NODES, Profile, fit, profile_of
from treedraft.speculate import generate, generate_plain
from treedraft.targets.hf import Target


@settings(max_examples=60, deadline=None)
@given(seconds=st.lists(st.floats(1e-4, 10), min_size=len(NODES), max_size=len(NODES)))
def test_fitted_curves_rise_and_are_convex(seconds: list[float]) -> None:
    curve = np.array(fit(NODES, seconds, MOST_NODES))
    assert len(curve) == MOST_NODES and (curve > 0).all()
    steps = np.diff(curve)
    assert (steps >= -1e-9 * curve.max()).all() and (np.diff(steps) >= -1e-9 * curve.max()).all()


def test_a_convex_curve_is_fitted_as_it_is() -> None:
    seconds = [0.05 + 0.001 * n + 0.002 * max(0, n - 32) for n in NODES]
    curve = fit(NODES, seconds, MOST_NODES)
    assert [curve[n - 1] for n in NODES] == pytest.approx(seconds, rel=1e-6)
    assert curve[99] == pytest.approx(0.05 + 0.1 + 0.002 * 68, rel=1e-6)


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
