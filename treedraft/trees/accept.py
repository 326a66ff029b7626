"""How the target's own choices walk a draft tree. Lossless for any tree that was built without looking at the noise."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from treedraft.trees.tree import DraftTree, TreeBatch


def accept(tree: DraftTree, choose: Callable[[list[int]], int]) -> tuple[list[int], int]:
    """Node indices of the accepted path, root first, and the target's token after it (sampler match).

    `choose(path)` is what plain decoding emits after the last node of a path: one draw a node, shared by its children,
    of which the one that carries it is followed. It is asked of the nodes on the path alone, and nothing is done for any
    other node but to look for a token. Twins, nodes with one parent and one token, share their children as well.
    """
    parents, tokens = tree.parents.tolist(), tree.tokens.tolist()

    def twins(one: int, other: int) -> bool:
        """Whether two nodes are one, or end the same tokens."""
        while one != other:
            if tokens[one] != tokens[other] or 0 in (one, other):
                return False
            one, other = parents[one], parents[other]
        return True

    path = [0]
    while True:
        token, child = choose(path), path[-1]
        try:
            while not twins(parents[child := tokens.index(token, child + 1)], path[-1]):
                pass
        except ValueError:
            return path, token
        path = [*path, child] if parents[child] == path[-1] else tree.path_to(child)


class Followed(NamedTuple):
    """R trees along recorded continuations."""

    paths: Tensor  # int64 [R, max accepted + 1]: nodes of the accepted paths, root first, -1 beyond
    accepted: Tensor  # int64 [R]: accepted drafts, without the root
    reached: Tensor  # bool [R, N_max]: the nodes of the paths
    judged: Tensor  # bool [R, N_max]: drafted nodes at depths that the record reaches, so that it says yes or no to them


def accept_batch(trees: TreeBatch, continuation: Tensor) -> tuple[Tensor, Tensor]:
    """The longest path of every tree that a recorded continuation follows, for replay without the target.

    `continuation` [R, T] holds the tokens after the anchor; -1 pads and never matches. Returns node indices of the
    accepted paths [R, max accepted + 1], root first, -1 beyond, and the number of accepted drafts [R] without the root.
    """
    return follow(trees, continuation)[:2]


def follow(trees: TreeBatch, continuation: Tensor) -> Followed:
    """The same with what calibration needs. Siblings have to differ, as builders make them: twins would both be counted."""
    num_requests, num_nodes = trees.tokens.shape
    recorded = pad(continuation, (0, max(0, num_nodes - continuation.shape[1])), value=-1)
    due = recorded.gather(1, (trees.depths - 1).clamp(min=0))
    judged = (due >= 0) & trees.real
    reached = _reached((trees.tokens == due) & judged, trees.parents)
    judged[:, 0] = False
    num_accepted = reached.sum(1) - 1
    paths = continuation.new_full((num_requests, num_nodes + 1), -1)
    nodes = torch.arange(num_nodes, device=continuation.device).expand_as(reached)
    paths.scatter_(1, torch.where(reached, trees.depths, num_nodes), nodes)
    paths = paths[:, : int(num_accepted.max()) + 1]
    return Followed(paths=paths, accepted=num_accepted, reached=reached, judged=judged)


def ranks_of(trees: TreeBatch, paths: Tensor) -> Tensor:
    """Of every draft of paths [R, A + 1], root first and -1 beyond, how many siblings are better: [R, A], -1 beyond.

    Siblings stand in the tree best first. The greedy spine is the path of ranks 0: what a chain drafts.
    """
    node, parent = paths[:, 1:, None], paths[:, :-1, None]
    before = torch.arange(trees.parents.shape[1], device=paths.device) < node
    return ((trees.parents[:, None] == parent) & before).sum(2).masked_fill(paths[:, 1:] < 0, -1)


def spine_length(ranks: Tensor) -> Tensor:
    """Drafts that precede a path's first step off the greedy spine, [R, A] -> [R]."""
    return (ranks == 0).cumprod(1).sum(1)


def _reached(agrees: Tensor, parents: Tensor) -> Tensor:
    """bool [R, N]: the root, and every node that agrees and whose ancestors all do; log2(N) pointer jumps."""
    reached = agrees.clone()
    reached[:, 0] = True
    jump = parents.clamp(min=0)
    for _ in range(agrees.shape[1].bit_length()):
        reached &= reached.gather(1, jump)
        jump = jump.gather(1, jump)
    return reached
