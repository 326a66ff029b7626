"""Draft trees whose nodes are drawn from the drafter's law, for the acceptance rules that weigh p against q.

Best-first trees are a function of the drafter's scores: q is a point mass there, and sampler match is the rule for them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from treedraft import noise
from treedraft.trees.chain import usable_depth
from treedraft.trees.scorers import Lanes, Scorer
from treedraft.trees.tree import DraftTree

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
    tokens, parents, depths, scores = [anchor], [-1], [0], [0.0]
    attempts: list[list[int]] = [[]]
    rows: list[Tensor] = []
    law_of = [-1]
    # Nodes above the last level, if no token comes twice.
    scorer.start(max(1, sum(math.prod(widths[:level]) for level in range(depth))))
    level = [0]
    for slot, width in zip(range(depth), widths, strict=True):
        nodes = torch.tensor(level, device=device)
        expansion_of = {node: len(rows) + place for place, node in enumerate(level)}
        lanes = Lanes(
            request=torch.zeros_like(nodes),
            slot=torch.full_like(nodes, slot),
            token=torch.tensor([tokens[node] for node in level], device=device),
            expansion=torch.tensor([expansion_of[node] for node in level], device=device),
            parent=torch.tensor([law_of[parents[node]] if node else -1 for node in level], device=device),
        )
        log_q = torch.log_softmax(scorer.expand(lanes).double() / temperature, -1)
        drawn = _draw(log_q, width, replacement, seed, position + slot + 1, nodes)
        ids = scorer.token_ids(torch.arange(log_q.shape[1], device=log_q.device))
        rows += list(log_q.new_zeros((len(level), vocab_size)).index_add_(1, ids, log_q.exp()))
        following = []
        for place, node in enumerate(level):
            law_of[node] = expansion_of[node]
            child_of: dict[int, int] = {}
            for column in drawn[place].tolist():
                token = int(ids[column])
                if token not in child_of:
                    child_of[token] = len(tokens)
                    following.append(len(tokens))
                    tokens.append(token)
                    parents.append(node)
                    depths.append(slot + 1)
                    scores.append(scores[node] + float(log_q[place, column]))
                    attempts.append([])
                    law_of.append(-1)
                attempts[node].append(child_of[token])
        level = following
    tree = DraftTree(
        tokens=torch.tensor(tokens),
        parents=torch.tensor(parents),
        depths=torch.tensor(depths),
        scores=torch.tensor(scores, dtype=torch.float64),
    )
    laws = torch.stack(rows) if rows else torch.zeros((0, vocab_size), dtype=torch.float64)
    return DrawnTree(tree=tree, attempts=attempts, laws=laws, law_of=torch.tensor(law_of))


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
