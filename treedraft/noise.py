"""Noise keyed by request seed, absolute position and token id: a seeded sample does not depend on how it was decoded.

Every decoder of this package draws the token at position t of request seed s with the noise g(s, t, id). Two decoders
that compute the same logits then emit the same ids (contract L2), and since the noise of a position decides one token
the output has the target's exact law (contract L1) for any tree that was built without looking at it.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCHEME = "gumbel, splitmix64"  # part of the name of whatever was drawn and kept
_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def uniform(seeds: Tensor | int, *counters: Tensor | int) -> Tensor:
    """Uniform numbers inside (0, 1), float64, one per tuple of a seed and counters, which broadcast.

    Counter-based: a round of the SplitMix64 finaliser (Steele, Lea and Flood 2014) over the seed, then one over every
    counter added to what came before. Integer arithmetic wraps, so every device gives the same bits.
    """
    bits = _mix(torch.as_tensor(seeds, dtype=torch.int64))
    for counter in counters:
        bits = _mix(bits + torch.as_tensor(counter, dtype=torch.int64).to(bits.device))
    return _shift_right(bits, 11, out=bits).double().add_(0.5).mul_(2.0**-53)


def gumbel(seeds: Tensor | int, positions: Tensor | int, vocab_size: int) -> Tensor:
    """Gumbel(0, 1) noise of every id at a position: seeds and positions [...] -> float64 [..., V]."""
    seed, position = torch.broadcast_tensors(torch.as_tensor(seeds), torch.as_tensor(positions))
    ids = torch.arange(vocab_size, device=seed.device)
    return to_gumbel(uniform(seed[..., None], position[..., None], ids))


def to_gumbel(uniforms: Tensor) -> Tensor:
    """Gumbel(0, 1) noise from uniform numbers, in their place."""
    return uniforms.log_().neg_().log_().neg_()


def draw(logits: Tensor, temperature: float, noise: Tensor | None) -> Tensor:
    """One id per row of `logits` [..., V]: argmax at temperature 0, else argmax of logits / temperature + Gumbel noise.

    That has the law softmax(logits / temperature) (Gumbel 1954). A rounding error in the logits moves the draw only
    where two ids tie for the maximum, while an inverse CDF has a boundary at every one of V ids.
    """
    if temperature == 0:
        return first_argmax(logits)
    assert noise is not None, "sampling needs noise"
    return (logits.double() / temperature + noise.to(logits.device)).argmax(-1)


def first_argmax(logits: Tensor) -> Tensor:
    """The lowest id among the largest logits, [..., V] -> [...]; torch.argmax does not promise which tie it returns."""
    if logits.device.type == "cpu":  # numpy's does, in one pass
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return torch.as_tensor(wide.detach().numpy().argmax(-1))
    largest = logits.amax(-1, keepdim=True)
    ids = torch.arange(logits.shape[-1], device=logits.device)
    return torch.where(logits == largest, ids, logits.shape[-1]).amin(-1).clamp_(max=logits.shape[-1] - 1)


def _mix(value: Tensor) -> Tensor:
    """The finaliser, in place on one copy: at V numbers a row, fresh memory costs as much as the arithmetic."""
    value = value + _GOLDEN
    scratch = torch.empty_like(value)
    for shift, factor in ((30, _MIX_1), (27, _MIX_2)):
        value.bitwise_xor_(_shift_right(value, shift, out=scratch)).mul_(factor)
    return value.bitwise_xor_(_shift_right(value, 31, out=scratch))


def _shift_right(value: Tensor, bits: int, out: Tensor) -> Tensor:
    """Logical shift: torch's >> keeps the sign."""
    return torch.bitwise_right_shift(value, bits, out=out).bitwise_and_((1 << (64 - bits)) - 1)
