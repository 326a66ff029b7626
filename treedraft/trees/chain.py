"""A tree without branches: the drafter's greedy path."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from treedraft.trees.builder import Replayed, TreeBuilder
from treedraft.trees.calibration import tally
from treedraft.trees.scorers import Scorer, chain_lanes
from treedraft.trees.tree import PADDING, TreeBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain(TreeBuilder):
    """The best child of the best child ..., `depth` tokens below the anchor (None: as many as the scorer has slots).

    Equals best-first search of width 1 and budget depth + 1.
    """

    depth: int | None = None

    def __post_init__(self) -> None:
        if self.depth is not None and self.depth < 0:
            raise ValueError(f"depth {self.depth} of a chain is negative")

    @torch.no_grad()
    def build(self, anchor: Tensor, scorer: Scorer) -> TreeBatch:
        """Chains below `anchor` [R], a call of the scorer a depth. ValueError if it has fewer slots than `depth`."""
        depth = usable_depth(self.depth, scorer)
        capacity = max(depth, 1)
        scorer.start(capacity)
        request = torch.arange(len(anchor), device=anchor.device)
        token, score = anchor, torch.zeros(len(anchor), dtype=torch.float64, device=anchor.device)
        tokens, scores = [token], [score]
        for slot in range(depth):
            best, log_q = scorer.children(chain_lanes(request, slot, token, capacity), 1)
            token, score = best[:, 0], score + log_q[:, 0]
            tokens.append(token)
            scores.append(score)
        return _batch(torch.stack(tokens, 1), torch.stack(scores, 1))

    @torch.no_grad()
    def replay(self, anchor: Tensor, scorer: Scorer, continuation: Tensor) -> Replayed:
        """The same as of any builder, without drafting past the first token that the record rejects: no `paths`.

        The scorer's laws have to be normalised, so that a chain has depth + 1 nodes.
        """
        depth = usable_depth(self.depth, scorer)
        capacity = max(depth, 1)
        scorer.start(capacity)
        accepted = torch.zeros_like(anchor)
        request, token = torch.arange(len(anchor), device=anchor.device), anchor
        judged: list[tuple[Tensor, Tensor, Tensor]] = []
        for slot in range(depth):
            tokens, log_q = scorer.children(chain_lanes(request, slot, token, capacity), 1)
            token = tokens[:, 0]
            if slot == continuation.shape[1]:
                break
            due = continuation[request, slot]
            agrees = token == due
            judged.append((log_q[due >= 0, 0], agrees[due >= 0], request[due >= 0]))
            request, token = request[agrees], token[agrees]
            if len(request) == 0:
                break
            accepted[request] += 1
        log_q, came_true, owner = map(torch.cat, zip(*judged, strict=True)) if judged else _nothing(anchor)
        steps = tally(log_q, came_true, owner, len(anchor))
        nodes = torch.full_like(accepted, depth + 1)
        ranks = torch.where(torch.arange(depth, device=anchor.device) < accepted[:, None], 0, -1)
        return Replayed(accepted=accepted, nodes=nodes, ranks=ranks, spine=accepted, steps=steps, paths=None)


def _nothing(anchor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return anchor.new_zeros(0, dtype=torch.float64), anchor.new_zeros(0, dtype=torch.bool), anchor[:0]


def usable_depth(depth: int | None, scorer: Scorer) -> int:
    """The depth asked for, by default the scorer's. ValueError if the scorer has fewer slots."""
    if depth is None:
        return scorer.depth
    if depth > scorer.depth:
        raise ValueError(f"depth {depth} exceeds the {scorer.depth} slots that the drafter fills")
    return depth


def _batch(tokens: Tensor, scores: Tensor) -> TreeBatch:
    """Chains [R, D + 1], cut before the first token of probability zero (which no normalised law has as its best)."""
    real = scores > -torch.inf
    depths = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    fields = {"tokens": tokens, "parents": depths - 1, "depths": depths, "scores": scores}
    fields = {name: field.masked_fill(~real, PADDING[name]) for name, field in fields.items()}
    return TreeBatch(**fields, num_nodes=real.sum(1))


Builder = Chain
