"""The noise behind every draw: its bits, its law, and what a rounding error in the logits does to a draw."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from treedraft import noise
from treedraft.trees.drawn import DRAFTING
from treedraft.trees.rules import VERIFYING

WORD = st.integers(-(2**63), 2**63 - 1)
LAW = torch.tensor([0.45, 0.30, 0.20, 0.05], dtype=torch.float64)
ALPHA = 1e-4


def mix(value: int) -> int:
    """SplitMix64 on Python's integers."""
    value = (value + 0x9E3779B97F4A7C15) % 2**64
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
    return value ^ (value >> 31)


@given(seed=WORD, position=st.integers(0, 2**40), token=st.integers(0, 2**20))
def test_bits(seed: int, position: int, token: int) -> None:
    expected = mix((mix((mix(seed % 2**64) + position) % 2**64) + token) % 2**64) >> 11
    assert float(noise.uniform(seed, position, token)) == (expected + 0.5) * 2.0**-53


def test_a_row_does_not_depend_on_the_others() -> None:
    seeds, positions = torch.tensor([3, 3, 9]), torch.tensor([0, 7, 7])
    together = noise.gumbel(seeds, positions, 50)
    for row, seed, position in zip(together, seeds.tolist(), positions.tolist(), strict=True):
        assert torch.equal(row, noise.gumbel(seed, position, 50))
        assert torch.equal(row[:20], noise.gumbel(seed, position, 20))


def test_gumbel_law() -> None:
    values = noise.gumbel(torch.arange(40)[:, None], torch.arange(50), 60)
    assert stats.kstest(values.flatten().numpy(), "gumbel_r").pvalue > ALPHA
    for axis in range(3):  # neighbours along seeds, positions and ids have nothing to do with each other
        size = values.shape[axis] - 1
        left, right = (values.narrow(axis, start, size).flatten().numpy() for start in (0, 1))
        assert stats.spearmanr(left, right).pvalue > ALPHA


def counts_of_draws(logits: torch.Tensor, temperature: float, first_seed: int, num_draws: int = 120_000) -> np.ndarray:
    """How often each of the 16 pairs of ids is drawn at two positions in a row."""
    seeds = torch.arange(first_seed, first_seed + num_draws)
    first, second = (noise.draw(logits, temperature, noise.gumbel(seeds, place, len(logits))) for place in (5, 6))
    return torch.bincount(first * len(logits) + second, minlength=len(logits) ** 2).numpy()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_have_the_law_of_the_softmax(temperature: float) -> None:
    """Chi-square on pairs beside a null (two samples of one law) and a law that is 1 % away, which has to be seen."""
    law = torch.softmax(LAW.log() / temperature, 0)
    pairs = torch.outer(law, law).flatten().numpy()
    drawn, again = (counts_of_draws(LAW.log(), temperature, seed) for seed in (0, 10**6))
    assert stats.chisquare(drawn, drawn.sum() * pairs).pvalue > ALPHA
    assert stats.chi2_contingency(np.stack([drawn, again])).pvalue > ALPHA
    biased = law + torch.tensor([0.01, -0.01, 0, 0])
    assert stats.chisquare(drawn, drawn.sum() * torch.outer(biased, biased).flatten().numpy()).pvalue < ALPHA


def test_what_cannot_be_is_never_drawn() -> None:
    logits = torch.tensor([-torch.inf, 0.0, -torch.inf])
    assert (noise.draw(logits, 1.0, noise.gumbel(torch.arange(1000), 0, 3)) == 1).all()


def test_a_rounding_error_does_not_move_a_draw() -> None:
    """At a vocabulary of 49,152 and float32 errors; by inverse CDF one draw in about a hundred moves."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(200, 49152, generator=generator)
    disturbed = logits + 1e-5 * torch.randn(logits.shape, generator=generator)
    gumbel = noise.gumbel(0, torch.arange(200), 49152)
    assert torch.equal(noise.draw(logits, 1.0, gumbel), noise.draw(disturbed, 1.0, gumbel))
    uniforms = noise.uniform(0, torch.arange(200))[:, None]
    inverted = [torch.searchsorted(row.double().softmax(-1).cumsum(-1), uniforms) for row in (logits, disturbed)]
    assert (inverted[0] != inverted[1]).any()


def test_streams_of_a_position_have_nothing_to_do_with_each_other() -> None:
    """What a target draws, what a drafter draws and what an acceptance rule decides at one position (see trees/)."""
    seeds = torch.arange(20_000)
    streams = [noise.uniform(seeds, 5, 0), noise.uniform(seeds, 5, DRAFTING, 0, 0, 0), noise.uniform(seeds, 5, VERIFYING, 1)]
    assert DRAFTING != VERIFYING
    for one, other in itertools.combinations(streams, 2):
        assert stats.spearmanr(one.numpy(), other.numpy()).pvalue > ALPHA
