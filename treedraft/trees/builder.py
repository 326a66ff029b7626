"""The seam of tree builders: scored nodes in, draft trees out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from torch import Tensor

from treedraft.trees.accept import follow, ranks_of, spine_length
from treedraft.trees.calibration import tally
from treedraft.trees.scorers import Scorer
from treedraft.trees.tree import TreeBatch


class Replayed(NamedTuple):
    """A round of R requests along their records."""

    accepted: Tensor  # int64 [R] drafts
    nodes: Tensor  # int64 [R], the root included
    ranks: Tensor  # int64 [R, A]: of every accepted draft, how many of its siblings are better; -1 beyond
    spine: Tensor  # int64 [R]: the accepted drafts before the path leaves the greedy spine
    steps: Tensor  # float64 [R, bins, 3], see `calibration.tally`: drafts below accepted nodes, by q under their parent
    paths: Tensor | None  # the same of all drafts, by q of their path; None if not all of them were drafted


class TreeBuilder(ABC):
    """Grows one tree a request; which nodes it has depends on the scorer alone, never on the target's noise."""

    __slots__ = ()

    @abstractmethod
    def build(self, anchor: Tensor, scorer: Scorer) -> TreeBatch:
        """Trees below `anchor` [R]. ValueError if the scorer has fewer slots than the builder's depth."""

    def replay(self, anchor: Tensor, scorer: Scorer, continuation: Tensor) -> Replayed:
        """One round along recorded continuations [R, T]; -1 pads them. What a record ends before is not counted."""
        trees = self.build(anchor, scorer)
        found = follow(trees, continuation)
        parents = trees.parents.clamp(min=0)
        request, node = found.judged.nonzero(as_tuple=True)
        score, came_true = trees.scores[request, node], found.reached[request, node]
        paths = tally(score, came_true, request, len(anchor))
        request, node = (found.judged & found.reached.gather(1, parents)).nonzero(as_tuple=True)
        step = trees.scores[request, node] - trees.scores[request, parents[request, node]]
        steps = tally(step, found.reached[request, node], request, len(anchor))
        ranks = ranks_of(trees, found.paths)
        return Replayed(
            accepted=found.accepted, nodes=trees.num_nodes, ranks=ranks, spine=spine_length(ranks), steps=steps, paths=paths
        )
