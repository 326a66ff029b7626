"""The one table of tolerances: absolute and relative bounds by dtype, for whatever is not equal bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
GRADIENT = 1e-6  # relative to the largest entry: sums of a batch taken in another order, losses in float32


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Equal up to the rounding of their dtype."""
    bound = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=bound, atol=bound)


def assert_close_sums(actual: Tensor, expected: Tensor) -> None:
    """Equal up to GRADIENT of the largest entry."""
    scale = float(expected.abs().max().clamp_min(1.0))
    torch.testing.assert_close(actual, expected, rtol=0, atol=GRADIENT * scale)
