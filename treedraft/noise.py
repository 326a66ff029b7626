"""Noise keyed by request seed and absolute position, so that a seeded sample does not depend on how it was decoded.

Every decoder of this package draws the token at position t of request seed s from the one uniform number u(s, t). Two
decoders that compute the same logits then emit the same ids (contract L2), and since u is used once per position the
output has the target's exact law (contract L1) for any tree that was built without looking at u.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def uniform(seeds: Tensor | int, positions: Tensor | int) -> Tensor:
    """Uniform numbers in [0, 1), float64, one per (seed, position) pair; both broadcast.

    Counter-based: two rounds of the SplitMix64 finaliser (Steele, Lea and Flood 2014), first over the seed, then
    over the position added to it. Integer arithmetic wraps, so every device gives the same bits.
    """
    seed_bits = _mix(torch.as_tensor(seeds, dtype=torch.int64))
    bits = _mix(seed_bits + torch.as_tensor(positions, dtype=torch.int64).to(seed_bits.device))
    return _shift_right(bits, 11).double() * 2.0**-53


def draw(logits: Tensor, temperature: float, uniforms: Tensor | None) -> Tensor:
    """One id per row of `logits` [..., V].

    At temperature 0 argmax (lowest id on ties), else the inverse CDF at `uniforms` [...].
    Works in float64, so that a shift of one rounding error in the logits almost never moves a draw.
    """
    if temperature == 0:
        return first_argmax(logits)
    assert uniforms is not None, "sampling needs one uniform number a row"
    cumulative = torch.softmax(logits.double() / temperature, dim=-1).cumsum(-1)
    # Scaling by the last entry makes the law sum to exactly one, so no draw can fall off the end.
    threshold = (uniforms.to(logits.device) * cumulative[..., -1]).unsqueeze(-1)
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(-1).clamp_(max=logits.shape[-1] - 1)


def first_argmax(logits: Tensor) -> Tensor:
    """The lowest id among the largest logits, [..., V] -> [...]; torch.argmax does not promise which tie it returns."""
    largest = logits.amax(-1, keepdim=True)
    ids = torch.arange(logits.shape[-1], device=logits.device)
    return torch.where(logits == largest, ids, logits.shape[-1]).amin(-1).clamp_(max=logits.shape[-1] - 1)


def _mix(value: Tensor) -> Tensor:
    value = value + _GOLDEN
    value = (value ^ _shift_right(value, 30)) * _MIX_1
    value = (value ^ _shift_right(value, 27)) * _MIX_2
    return value ^ _shift_right(value, 31)


def _shift_right(value: Tensor, bits: int) -> Tensor:
    """Logical shift: torch's >> keeps the sign."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)
