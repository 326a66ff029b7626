"""What tests decode with besides the tiny target: drafters that know everything or nothing, and trees written by hand.

The other pieces are elsewhere: table models in tests/contracts/test_accept.py and test_rules.py, scorers from random
tables in tests/contracts/tree_tables.py, plain decoding in treedraft.speculate.generate_plain.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from treedraft.targets.hf import Target
from treedraft.trees.mask import depths_of
from treedraft.trees.scorers import MarginalScorer
from treedraft.trees.tree import DraftTree


class Stub:
    """A drafter whose block is its own positions, and which proposes `ids[position] + shift`: 0 is the oracle, 1 the adversary."""

    def __init__(self, target: Target, ids: list[int], shift: int) -> None:
        self.target, self.ids, self.shift = target, torch.tensor(ids), shift
        self.config = SimpleNamespace(first_slot=1)

    def open(self, num_requests: int, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(append=lambda *_: None, memory=None)

    def hidden(self, memory: None, anchor_tokens: Tensor, anchors: Tensor, depth: int) -> Tensor:
        return (anchors[..., None] + 1 + torch.arange(depth))[..., None]

    def scorer(
        self, hidden: Tensor, anchor: Tensor, rung: str = "conditional", *, candidates: int | None = None
    ) -> MarginalScorer:
        tokens = (self.ids[hidden[..., 0].clamp(max=len(self.ids) - 1)] + self.shift) % self.target.vocab_size
        log_q = torch.full((*tokens.shape, self.target.vocab_size), -torch.inf, dtype=torch.float64)
        return MarginalScorer(log_q.scatter_(-1, tokens[..., None], 0.0))


def script(tokens: list[int], parents: list[int]) -> DraftTree:
    depths = depths_of(torch.tensor(parents))
    return DraftTree(tokens=torch.tensor(tokens), parents=torch.tensor(parents), depths=depths, scores=-depths.double())
