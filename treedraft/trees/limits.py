"""What a best-first tree may be limited by besides its budget: the fan-out of a node, and the time a node costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Caps(Protocol):
    """How many children a node may have, of the `width` that it would have without a cap; at least one."""

    def __call__(self, slot: Tensor, log_q: Tensor) -> Tensor:
        """Depths [L] of the nodes and log q [L, W] of their best children, best first -> caps [L]."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthCaps:
    """A cap a depth, that of the root first; deeper nodes have no cap."""

    caps: tuple[int, ...]

    def __post_init__(self) -> None:
        if any(cap < 1 for cap in self.caps):
            raise ValueError(f"fan-out caps {self.caps} of a draft tree must be at least 1")

    def __call__(self, slot: Tensor, log_q: Tensor) -> Tensor:
        table = torch.tensor([*self.caps, log_q.shape[1]], device=slot.device)
        return table[slot.clamp(max=len(self.caps))]


def histogram_caps(counts: Sequence[Sequence[float]], *, least: float = 0.02) -> DepthCaps:
    """Caps from how often the accepted child of a node at depth d had rank r, `counts[d][r]` (JetSpec).

    A depth keeps as many children as there are ranks with at least the share `least`, one at least; a depth that was
    never seen keeps as many as there are ranks.
    """
    widest = max((len(row) for row in counts), default=1)
    caps = []
    for row in counts:
        total = sum(row)
        caps.append(max(1, sum(count / total >= least for count in row)) if total else widest)
    return DepthCaps(caps=tuple(caps))


@dataclass(frozen=True, slots=True, kw_only=True)
class GapCap:
    """Fewer children where the drafter is sure: round(W * sigmoid(-beta * (g - g0))), g the gap of the best two log q.

    JetSpec's top-2-gap rule; there g is a depth's, here it is the node's own, which is the same for marginal scores.
    """

    beta: float = 1.0
    g0: float = 1.0

    def __call__(self, slot: Tensor, log_q: Tensor) -> Tensor:
        width = log_q.shape[1]
        if width < 2:
            return torch.ones_like(slot)
        gap = torch.nan_to_num(log_q[:, 0] - log_q[:, 1], nan=0.0).double()
        share = torch.sigmoid(-self.beta * (gap - self.g0))
        return (width * share).round().long().clamp(min=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Seconds of a round, for stopping where more nodes lower the expected throughput (CaDDTree).

    draft       what a round costs however large its tree is
    correction  a node that is expanded
    verify      verify[n - 1]: one target forward over n nodes; the last entry's slope goes on beyond
    """

    draft: float
    correction: float
    verify: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.verify or min(self.draft, self.correction, *self.verify) < 0 or self.draft + self.verify[0] <= 0:
            given = f"draft {self.draft}, correction {self.correction}, verify {self.verify[:3]}"
            raise ValueError(f"a cost model needs times of at least 0, and more for a round of one node, not {given}")

    def rate(self, gain: Tensor, num_expanded: Tensor) -> Tensor:
        """Expected tokens a second after every admission: gain and num_expanded [..., N] of the first 1 .. N nodes."""
        num_nodes = gain.shape[-1]
        curve = torch.tensor(self.verify[:num_nodes], dtype=torch.float64, device=gain.device)
        if num_nodes > len(curve):
            slope = curve[-1] - curve[-2] if len(curve) > 1 else curve[-1]
            beyond = torch.arange(1, num_nodes - len(curve) + 1, device=gain.device)
            curve = torch.cat([curve, curve[-1] + slope * beyond])
        return gain / (self.draft + self.correction * num_expanded + curve)
