"""The definitions in plain Python, one node at a time: what the batched builders and walks must agree with."""

from __future__ import annotations

import heapq
import math

import numpy as np
import torch
from torch import Tensor

from treedraft.trees.limits import Caps, Cost
from treedraft.trees.scorers import Lanes, Scorer
from treedraft.trees.tree import DraftTree


def heap_build(
    anchor: int,
    scorer: Scorer,
    *,
    budget: int,
    width: int,
    depth: int,
    request: int = 0,
    admit: str = "fanout",
    count_root: bool = True,
    caps: Caps | None = None,
    frontier: int | None = None,
    cost: Cost | None = None,
) -> DraftTree:
    """Best-first search of one request; width 1 gives the chain.

    The best node of the heap is popped, and its best children are pushed. With `admit` "fanout" (JetSpec, Algorithm 1)
    they enter the tree then, with "pop" (DDTree) a node enters when it is popped itself, until there are `budget` nodes,
    root included unless `count_root` is False. "Best" is the highest score, then the smallest depth, then the first path
    of sibling ranks. `caps` limits the children of a node, `frontier` the expansions of a depth, and `cost` ends the
    search at the first node that does not raise the expected throughput; one that would open a level is tried as a leaf
    first, and if that is what it becomes the tree ends at its depth.
    """
    width, budget = min(width, scorer.width_limit), budget + (not count_root)
    scorer.start(budget)
    nodes: list[tuple[int, int, int, float]] = []  # token, parent, depth, score
    expansion_of: dict[int, int] = {}
    num_expanded = [0] * (depth + 1)
    gain, rate, num_inner, num_levels = 0.0, -1.0, 0, 0
    root = (anchor, -1, 0, 0.0)
    if admit == "fanout":
        nodes.append(root)
    heap: list[tuple[float, int, tuple[int, ...], tuple[int, int, int, float], int]] = [(-0.0, 0, (), root, 0)]
    while heap and len(nodes) < budget:
        _, node_depth, path, (token, parent, _, score), node = heapq.heappop(heap)
        if admit == "pop":
            gain, inner = gain + math.exp(score), node_depth < depth and num_expanded[node_depth] != frontier
            if cost is not None:
                opens = inner and node_depth == num_levels
                new_rate = _rate(cost, gain, num_inner + inner, num_levels + opens, len(nodes) + 1)
                if opens and new_rate <= rate:  # the tree ends at this depth
                    depth, inner, opens = node_depth, False, False
                    new_rate = _rate(cost, gain, num_inner, num_levels, len(nodes) + 1)
                if new_rate <= rate:
                    break
                rate, num_inner, num_levels = new_rate, num_inner + inner, num_levels + opens
            node = len(nodes)
            nodes.append((token, parent, node_depth, score))
        if node_depth == depth or num_expanded[node_depth] == frontier or (admit == "pop" and len(nodes) == budget):
            continue
        num_expanded[node_depth] += 1
        expansion_of[node] = request * budget + len(expansion_of)
        lane = _lane(request, node_depth, token, expansion_of[node], expansion_of[parent] if node else -1)
        tokens, log_q = scorer.children(lane, width)
        cap = int(caps(lane.slot.numpy(), log_q.double().numpy())[0]) if caps is not None else width
        for rank, (child, child_log_q) in enumerate(zip(tokens[0].tolist(), log_q[0].tolist(), strict=True)):
            if rank == cap or child_log_q == -torch.inf or (admit == "fanout" and len(nodes) == budget):
                break
            assert child_log_q <= 0, "log q is a logarithm of a probability"
            entry = (child, node, node_depth + 1, score + child_log_q)
            heapq.heappush(heap, (-entry[3], node_depth + 1, (*path, rank), entry, len(nodes)))
            if admit == "fanout":
                nodes.append(entry)
    tokens, parents, depths, scores = zip(*nodes, strict=True)
    return DraftTree(
        tokens=torch.tensor(tokens),
        parents=torch.tensor(parents),
        depths=torch.tensor(depths),
        scores=torch.tensor(scores, dtype=torch.float64),
    )


def _rate(cost: Cost, gain: float, num_expanded: int, num_levels: int, num_nodes: int) -> float:
    counts = np.array([num_expanded]), np.array([num_levels])
    return float(cost.rate(np.array([gain]), *counts, cost.forwards(num_nodes)[-1:])[0])


def accept_naive(tree: DraftTree, target_tokens: Tensor) -> tuple[list[int], int]:
    """Accepted path, root first, and the token after it: walk down while a child is the choice [N] after its parent.

    Twins lead on side by side; the choice is that of the first node there is.
    """
    tokens, choices, children = tree.tokens.tolist(), target_tokens.tolist(), tree.children()
    paths = [[0]]
    while True:
        token = choices[paths[0][-1]]
        longer = [[*path, child] for path in paths for child in children[path[-1]] if tokens[child] == token]
        if not longer:
            return paths[0], token
        paths = sorted(longer, key=lambda path: path[-1])


def spine_naive(tree: DraftTree, path: list[int]) -> int:
    """Drafts of a path, root first, before it takes a child that is not its parent's best."""
    children, scores, length = tree.children(), tree.scores.tolist(), 0
    while length + 1 < len(path) and path[length + 1] == max(children[path[length]], key=scores.__getitem__):
        length += 1
    return length


def _lane(request: int, slot: int, token: int, expansion: int, parent: int) -> Lanes:
    one = [torch.tensor([value]) for value in (request, slot, token, expansion, parent)]
    return Lanes(request=one[0], slot=one[1], token=one[2], expansion=one[3], parent=one[4], deepest=slot)
