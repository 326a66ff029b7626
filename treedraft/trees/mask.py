"""Who sees whom in a tree that is flattened parents first: depths and the ancestor mask, from parents alone."""

from __future__ import annotations

import torch
from torch import Tensor


def ancestor_mask(parents: Tensor) -> Tensor:
    """[N] parents (-1 for the root, parent before child) -> bool [N, N]; row i is true at i and at i's ancestors.

    The closure grows by doubling: after k steps a row knows its nearest 2^k ancestors.
    """
    num_nodes = len(parents)
    device = parents.device
    assert bool((parents < torch.arange(num_nodes, device=device)).all()), "a parent comes before its children"
    closure = torch.zeros((num_nodes + 1, num_nodes + 1), dtype=torch.bool, device=device)
    closure.fill_diagonal_(True)
    # Row N stands above every root, so that -1 indexes a row which adds nothing but itself.
    jump = torch.cat([parents, parents.new_tensor([-1])]) % (num_nodes + 1)
    while bool((jump[:-1] != num_nodes).any()):
        closure |= closure[jump]
        jump = jump[jump]
    return closure[:num_nodes, :num_nodes]


def depths_of(parents: Tensor) -> Tensor:
    """[N] parents -> [N] depths, root 0; the number of ancestors."""
    return ancestor_mask(parents).sum(1) - 1
