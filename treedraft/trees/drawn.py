"""Draft trees whose nodes are drawn from the drafter's law, for the acceptance rules that weigh p against q.

Best-first trees are a function of the drafter's scores: q is a point mass there, and sampler match is the rule for them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from treedraft import noise
from treedraft.trees.chain import usable_depth
from treedraft.trees.scorers import Lanes, Scorer
from treedraft.trees.tree import PADDING, DraftTree

DRAFTING = 1  # keeps drafting apart from what else is drawn at a position


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnTree:
    """A tree of one request and how it was drawn.

    tree      siblings differ: a token drawn twice under one parent is one node
    attempts  of every node, the children in the order in which they were drawn, a twin as often as it came
    laws      float64 [E, V] over target token ids: the law q that the first attempt of a node was drawn from
    law_of    int64 [N], the row of `laws` of a node, -1 where nothing was drawn
    """

    tree: DraftTree
    attempts: list[list[int]]
    laws: Tensor
    law_of: Tensor

    def law(self, node: int) -> Tensor:
        return self.laws[self.law_of[node]]


@torch.no_grad()
def draw_tree(
    anchor: int,
    scorer: Scorer,
    *,
    widths: Sequence[int],
    replacement: bool,
    temperature: float,
    vocab_size: int,
    seed: int,
    position: int,
    device: torch.device | None = None,
) -> DrawnTree:
    """A tree of len(widths) levels: every node at depth d has widths[d] attempts, drawn from q = softmax(log q / T).

    With replacement they are independent (SpecInfer), without it each is drawn from what the others left (Sequoia).
    `position` is the anchor's, `device` the scorer's; the noise is the drafter's own, keyed by seed, position and node. ValueError at
    temperature 0, where nothing is drawn.
    """
    if temperature <= 0:
        raise ValueError(f"temperature {temperature:g} draws nothing: a drawn tree needs one above 0")
    if min(widths, default=0) < 1:
        raise ValueError(f"widths {tuple(widths)} of a drawn tree: at least 1 a level")
    depth = usable_depth(len(widths), scorer)
    # Nodes above the last level, if no token comes twice.
    scorer.start(max(1, sum(math.prod(widths[:level]) for level in range(depth))))
    tokens, parents, scores = [np.array([anchor])], [np.array([-1])], [np.zeros(1)]
    attempts: list[list[int]] = []
    laws: list[Tensor] = []
    first = 0  # node of the level
    for slot, width in zip(range(depth), widths, strict=True):
        # Nodes are numbered level by level, and all above the last are expanded: an expansion has its node's number.
        nodes = np.arange(first, first + len(tokens[-1]))
        lanes = torch.from_numpy(np.stack((np.full_like(nodes, slot), tokens[-1], nodes, parents[-1]))).to(device)
        log_q = scorer.expand(
            Lanes(request=torch.zeros_like(lanes[0]), slot=lanes[0], token=lanes[1], expansion=lanes[2], parent=lanes[3], deepest=slot)
        )
        log_q = torch.log_softmax(log_q.double() / temperature, -1)
        columns = _draw(log_q, width, replacement, seed, position + slot + 1, torch.from_numpy(nodes))
        ids = scorer.token_ids(torch.arange(log_q.shape[1], device=log_q.device))
        laws.append(log_q.new_zeros((len(nodes), vocab_size)).index_add_(1, ids, log_q.exp()))
        drawn, gained = ids[columns].numpy(force=True), log_q.gather(1, columns).numpy(force=True)
        twin = (drawn[:, :, None] == drawn[:, None]).argmax(2)  # the first attempt that drew the same
        new = twin == np.arange(drawn.shape[1])
        first += len(nodes)
        children = first + new.cumsum().reshape(new.shape) - 1
        place, attempt = new.nonzero()
        attempts += children[np.arange(len(nodes))[:, None], twin].tolist()
        tokens.append(drawn[place, attempt])
        parents.append(nodes[place])
        scores.append(scores[-1][place] + gained[place, attempt])
    sizes = [len(level) for level in tokens]
    nodes = torch.arange(sum(sizes))
    fields = (tokens, parents, [np.repeat(np.arange(len(sizes)), sizes)], scores)
    tree = DraftTree(**{name: torch.from_numpy(np.concatenate(parts)) for name, parts in zip(PADDING, fields, strict=True)})
    return DrawnTree(
        tree=tree,
        attempts=[*attempts, *([] for _ in range(sizes[-1]))],
        laws=torch.cat(laws),
        law_of=torch.where(nodes < first, nodes, -1),
    )


def _draw(log_q: Tensor, width: int, replacement: bool, seed: int, position: int, nodes: Tensor) -> Tensor:
    """Columns [L, width] in the order in which they are drawn; fewer without replacement if q has no more."""
    num_columns = log_q.shape[1]
    attempts = torch.arange(width if replacement else 1)
    uniforms = noise.uniform(
        seed, position, DRAFTING, nodes[:, None, None].cpu(), attempts[:, None], torch.arange(num_columns)
    )
    keys = log_q[:, None] + noise.to_gumbel(uniforms).to(log_q.device)
    if replacement:
        return keys.argmax(-1)
    # The k largest perturbed logits are k draws without replacement, in order (Kool, van Hoof and Welling 2019).
    possible = int((log_q > -torch.inf).sum(1).min())
    return keys[:, 0].topk(min(width, possible)).indices
