"""What a best-first tree may be limited by besides its budget: the fan-out of a node, and the time a node costs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy import ndarray


class Caps(Protocol):
    """How many children a node may have, of the `width` that it would have without a cap; at least one."""

    def __call__(self, slot: ndarray, log_q: ndarray) -> ndarray:
        """Depths [L] of the nodes and log q [L, W] of their best children, best first -> caps [L]."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthCaps:
    """A cap a depth, that of the root first; deeper nodes have no cap. From a measurement: `metrics.histogram_caps`."""

    caps: tuple[int, ...]

    def __post_init__(self) -> None:
        if any(cap < 1 for cap in self.caps):
            raise ValueError(f"fan-out caps {self.caps} of a draft tree must be at least 1")

    def __call__(self, slot: ndarray, log_q: ndarray) -> ndarray:
        return np.array([*self.caps, log_q.shape[1]])[slot.clip(max=len(self.caps))]


@dataclass(frozen=True, slots=True, kw_only=True)
class GapCap:
    """Fewer children where the drafter is sure: round(W * sigmoid(-beta * (g - g0))), g the gap of the best two log q.

    JetSpec's top-2-gap rule; there g is a depth's, here it is the node's own, which is the same for marginal scores.
    """

    beta: float = 1.0
    g0: float = 1.0

    def __call__(self, slot: ndarray, log_q: ndarray) -> ndarray:
        width = log_q.shape[1]
        if width < 2:
            return np.ones_like(slot)
        best, second = log_q[:, :2].T
        gap = np.subtract(best, second, out=np.full(len(best), np.inf), where=second > -np.inf)
        only = np.isinf(gap)  # one child is possible
        share = np.exp(-np.logaddexp(0, self.beta * (np.where(only, 0.0, gap) - self.g0)))  # the sigmoid
        return np.where(only, 1, (width * share).round().clip(min=1)).astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Seconds of a round, for stopping where more nodes lower the expected throughput (CaDDTree).

    draft       what a round costs however large its tree is
    level       a depth at which nodes are expanded: its nodes share a call of the scorer
    correction  a node that is expanded
    verify      verify[n - 1]: one target forward over n nodes; the last entry's slope goes on beyond

    A node is admitted if the expected tokens a second rise with it. The first node of a depth has to pay for the level
    that it opens as well; where it does not, the tree ends at that depth, and nodes there are leaves.
    """

    draft: float
    level: float = 0.0
    correction: float
    verify: tuple[float, ...]

    def __post_init__(self) -> None:
        parts = (self.draft, self.level, self.correction, *self.verify)
        if not self.verify or min(parts) < 0 or self.draft + self.verify[0] <= 0:
            given = f"draft {self.draft}, level {self.level}, correction {self.correction}, verify {self.verify[:3]}"
            raise ValueError(f"a cost model needs times of at least 0, and more for a round of one node, not {given}")

    def forwards(self, most: int) -> ndarray:
        """Seconds of drafting for, and verifying, 1 .. most nodes."""
        return _forwards(self, most)

    def rate(self, gain: ndarray, num_expanded: ndarray, num_levels: ndarray, forwards: ndarray) -> ndarray:
        """Expected tokens (`gain`) a second, elementwise over trees."""
        return gain / (forwards + self.correction * num_expanded + self.level * num_levels)


@lru_cache(maxsize=64)
def _forwards(cost: Cost, most: int) -> ndarray:
    curve = np.array(cost.verify[:most])
    slope = np.diff(curve[-2:]) if len(curve) > 1 else curve
    seconds = cost.draft + np.concatenate([curve, curve[-1] + slope * np.arange(1, most - len(curve) + 1)])
    seconds.setflags(write=False)  # shared by all who ask
    return seconds
