"""The definitions in plain Python, one node at a time: what the batched builders and walks must agree with."""

from __future__ import annotations

import heapq

import torch
from torch import Tensor

from treedraft.trees.scorers import Lanes, Scorer
from treedraft.trees.tree import DraftTree


def heap_build(anchor: int, scorer: Scorer, *, budget: int, width: int, depth: int, request: int = 0) -> DraftTree:
    """Best-first search of one request with fan-out admission (JetSpec, Algorithm 1); width 1 gives the chain.

    The best node of the heap is popped and its `width` best children enter tree and heap, until `budget` nodes, root
    included. "Best" is the highest score, then the smallest depth, then the first path of sibling ranks.
    """
    width = min(width, scorer.width_limit)
    scorer.start(budget)
    tokens, parents, depths, scores = [anchor], [-1], [0], [0.0]
    expansion_of: dict[int, int] = {}
    heap: list[tuple[float, int, tuple[int, ...], int]] = [(-0.0, 0, (), 0)]
    while heap and len(tokens) < budget:
        _, node_depth, path, node = heapq.heappop(heap)
        if node_depth == depth:
            continue
        expansion_of[node] = request * budget + len(expansion_of)
        parent_row = expansion_of[parents[node]] if node else -1
        lane = _lane(request, node_depth, tokens[node], expansion_of[node], parent_row)
        children, log_q = (best[0].tolist() for best in scorer.children(lane, width))
        for rank, (token, child_log_q) in enumerate(zip(children, log_q, strict=True)):
            if len(tokens) == budget or child_log_q == -torch.inf:
                break
            assert child_log_q <= 0, "log q is a logarithm of a probability"
            score = scores[node] + child_log_q
            heapq.heappush(heap, (-score, node_depth + 1, (*path, rank), len(tokens)))
            tokens.append(token)
            parents.append(node)
            depths.append(node_depth + 1)
            scores.append(score)
    return DraftTree(
        tokens=torch.tensor(tokens),
        parents=torch.tensor(parents),
        depths=torch.tensor(depths),
        scores=torch.tensor(scores, dtype=torch.float64),
    )


def accept_naive(tree: DraftTree, target_tokens: Tensor) -> tuple[list[int], int]:
    """Accepted path, root first, and the token after it: walk down while a child is the target's choice."""
    tokens, choices, children = tree.tokens.tolist(), target_tokens.tolist(), tree.children()
    path = [0]
    while True:
        agreeing = [child for child in children[path[-1]] if tokens[child] == choices[path[-1]]]
        if not agreeing:
            return path, choices[path[-1]]
        path.append(agreeing[0])


def _lane(request: int, slot: int, token: int, expansion: int, parent: int) -> Lanes:
    values = {"request": request, "slot": slot, "token": token, "expansion": expansion, "parent": parent}
    return Lanes(**{name: torch.tensor([value]) for name, value in values.items()})
