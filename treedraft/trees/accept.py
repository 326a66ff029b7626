"""How the target's own choices walk a draft tree. Lossless for any tree that was built without looking at the noise."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from treedraft import noise
from treedraft.trees.tree import DraftTree, TreeBatch


def choose(target_logits: Tensor, depths: Tensor, *, temperature: float, seed: int, length: int) -> Tensor:
    """The target's choice after every node, logits [N, V] and depths [N] -> [N] ids: what plain decoding emits there.

    `length` counts the committed tokens before the anchor, so a node at depth d sits at position length + d and its
    successor is drawn with the noise of position length + d + 1, the same for all nodes of a depth (sampler match).
    """
    if temperature == 0:
        return noise.draw(target_logits, 0, None)
    chosen = torch.empty_like(depths, device=target_logits.device)
    for depth in depths.unique().tolist():
        nodes = (depths == depth).nonzero().squeeze(1)
        shared = noise.gumbel(seed, length + depth + 1, target_logits.shape[-1])
        chosen[nodes] = noise.draw(target_logits[nodes], temperature, shared)
    return chosen


def accept(tree: DraftTree, target_tokens: Tensor) -> tuple[Tensor, int]:
    """Node indices [A] of the accepted path, root first, and the target's token after it.

    `target_tokens` [N] is the target's choice after every node (`choose`): a child is followed if it is that choice.
    """
    agrees = tree.tokens == target_tokens[tree.parents.clamp(min=0)]
    # Siblings differ, so the accepted nodes are one path, and parents come before children.
    path = _reached(agrees[None], tree.parents[None])[0].nonzero().squeeze(1)
    return path, int(target_tokens[path[-1]])


def accept_batch(trees: TreeBatch, continuation: Tensor) -> tuple[Tensor, Tensor]:
    """The longest path of every tree that a recorded continuation follows, for replay without the target.

    `continuation` [R, T] holds the tokens after the anchor; -1 pads and never matches. Returns node indices of the
    accepted paths [R, max accepted + 1], root first, -1 beyond, and the number of accepted drafts [R] without the root.
    """
    num_requests, num_nodes = trees.tokens.shape
    recorded = pad(continuation, (0, max(0, num_nodes - continuation.shape[1])), value=-1)
    due = recorded.gather(1, (trees.depths - 1).clamp(min=0))
    agrees = (trees.tokens == due) & (due >= 0) & trees.real
    reached = _reached(agrees, trees.parents)
    num_accepted = reached.sum(1) - 1
    paths = continuation.new_full((num_requests, num_nodes + 1), -1)
    nodes = torch.arange(num_nodes, device=continuation.device).expand_as(reached)
    paths.scatter_(1, torch.where(reached, trees.depths, num_nodes), nodes)
    return paths[:, : int(num_accepted.max()) + 1], num_accepted


def _reached(agrees: Tensor, parents: Tensor) -> Tensor:
    """bool [R, N]: the root, and every node that agrees and whose ancestors all do; log2(N) pointer jumps."""
    reached = agrees.clone()
    reached[:, 0] = True
    jump = parents.clamp(min=0)
    for _ in range(agrees.shape[1].bit_length()):
        reached &= reached.gather(1, jump)
        jump = jump.gather(1, jump)
    return reached
