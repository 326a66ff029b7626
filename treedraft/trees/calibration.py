"""How often drafts come true, by the probability that they were given."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

# Most nodes of a tree are unlikely: below a tenth bins are decades, above it tenths.
EDGES = (1e-4, 1e-3, 1e-2, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
NUM_BINS = len(EDGES) + 1


@torch.no_grad()
def tally(log_q: Tensor, came_true: Tensor, owner: Tensor, num_owners: int) -> Tensor:
    """Of M events with log-probabilities [M], by owner and bin: how many, the sum of their probabilities, and how many
    came true: float64 [num_owners, NUM_BINS, 3]. A reliability diagram is made of the sums over owners."""
    log_q = log_q.double()
    place = owner * NUM_BINS + torch.bucketize(log_q, _log_edges(log_q.device), right=True)
    size = num_owners * NUM_BINS
    counts = (
        torch.bincount(place, minlength=size).double(),
        torch.bincount(place, log_q.exp(), minlength=size),
        torch.bincount(place[came_true], minlength=size).double(),
    )
    return torch.stack(counts, 1).view(num_owners, NUM_BINS, 3)


@cache
def _log_edges(device: torch.device) -> Tensor:
    return torch.tensor(EDGES, dtype=torch.float64, device=device).log()
