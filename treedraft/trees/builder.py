"""The seam of tree builders: scored nodes in, draft trees out."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from treedraft.trees.accept import accept_batch
from treedraft.trees.scorers import Scorer
from treedraft.trees.tree import TreeBatch


class TreeBuilder(ABC):
    """Grows one tree a request; which nodes it has depends on the scorer alone, never on the target's noise."""

    __slots__ = ()

    @abstractmethod
    def build(self, anchor: Tensor, scorer: Scorer) -> TreeBatch:
        """Trees below `anchor` [R]. ValueError if the scorer has fewer slots than the builder's depth."""

    def replay(self, anchor: Tensor, scorer: Scorer, continuation: Tensor) -> tuple[Tensor, Tensor]:
        """How many drafts a recorded continuation [R, T] accepts, and the nodes of the tree, both [R]."""
        trees = self.build(anchor, scorer)
        return accept_batch(trees, continuation)[1], trees.num_nodes
