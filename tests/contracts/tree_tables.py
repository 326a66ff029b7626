"""Scorers from random tables, for the tests of trees: any law, any ties, any dependence on the path."""

from __future__ import annotations

import torch
from torch import Tensor

from treedraft.trees.scorers import Lanes, MarginalScorer, Scorer
from treedraft.trees.tree import DraftTree, TreeBatch

LAWS = ("smooth", "float32", "ties", "one_hot", "flat", "holes", "dead")


def table(law: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Random log q; "ties" has few integer values, "holes" has -inf columns, "dead" whole rows."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(shape, generator=generator, dtype=torch.float64)
    match law:
        case "smooth":
            return torch.log_softmax(logits, -1)
        case "float32":
            return torch.log_softmax(logits.float(), -1)
        case "ties":
            return -torch.randint(0, 4, shape, generator=generator).double()
        case "one_hot":
            return torch.where(logits == logits.amax(-1, keepdim=True), 0.0, -torch.inf)
        case "flat":
            return torch.log_softmax(torch.zeros(shape, dtype=torch.float64), -1)
        case "holes" | "dead":
            hole = torch.rand(shape, generator=generator) < 0.6
            values = -torch.randint(0, 4, shape, generator=generator).double()
            if law == "holes":
                hole[..., 0] = False
            return values.masked_fill(hole, -torch.inf)
    raise ValueError(law)


class PathScorer(Scorer):
    """Conditional on everything: the row of a table is chosen by a hash of request, depth and all tokens of the path."""

    def __init__(self, rows: Tensor, seeds: Tensor, depth: int):
        self.rows, self.seeds, self.depth = rows, seeds, depth  # rows [M, V], seeds [R]
        self.width_limit, self.num_requests = rows.shape[1], len(seeds)
        self.num_calls = self.num_lanes = 0

    def start(self, capacity: int) -> None:
        self.capacity = capacity
        self.hashes = torch.full((self.num_requests * capacity,), -1)
        self.num_calls = self.num_lanes = 0

    def expand(self, lanes: Lanes) -> Tensor:
        assert (lanes.expansion // self.capacity == lanes.request).all()
        assert (self.hashes[lanes.expansion] == -1).all(), "a row is written once"
        assert ((lanes.parent < 0) == (lanes.slot == 0)).all()
        above = torch.where(lanes.parent < 0, self.seeds[lanes.request], self.hashes[lanes.parent])
        assert (above >= 0).all(), "a parent is expanded in an earlier call"
        hashes = (above * 1_000_003 + lanes.token * 7919 + lanes.slot * 104_729 + 12_345) % (2**31 - 1)
        self.hashes[lanes.expansion] = hashes
        self.num_calls, self.num_lanes = self.num_calls + 1, self.num_lanes + len(hashes)
        return self.rows[hashes % len(self.rows)]

    def token_ids(self, columns: Tensor) -> Tensor:
        return columns + 100


def random_scorer(law: str, *, conditional: bool, num_requests: int, depth: int, vocab: int, seed: int) -> Scorer:
    if conditional:
        return PathScorer(table(law, (64, vocab), seed), torch.arange(num_requests) + 1000 * seed, depth)
    return MarginalScorer(table(law, (num_requests, depth, vocab), seed), torch.randperm(vocab) + 100)


def same(left: DraftTree | TreeBatch, right: DraftTree | TreeBatch) -> bool:
    names = ("tokens", "parents", "depths", "scores")
    return all(torch.equal(getattr(left, name), getattr(right, name)) for name in names)
