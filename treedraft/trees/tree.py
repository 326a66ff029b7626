"""Draft trees as flat tensors: the root first, parents before children, siblings with different tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from treedraft.trees.mask import ancestor_mask

# What fills the rows beyond `num_nodes`; depth 0, so that a padded row still has a legal position.
PADDING = {"tokens": -1, "parents": -1, "depths": 0, "scores": -torch.inf}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DraftTree:
    """One tree of N nodes. Node 0 is the root: the anchor, the last committed token.

    tokens   int64 [N]    target token id
    parents  int64 [N]    node index, -1 for the root, else smaller than the node's own
    depths   int64 [N]    0 for the root
    scores   float64 [N]  sum of the drafter's log q from the root (nats), 0 for the root
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    scores: Tensor

    def __len__(self) -> int:
        return len(self.tokens)

    def lasting(self) -> DraftTree:
        """A copy for those who look at it later, outside of inference mode."""
        with torch.inference_mode(False):
            return DraftTree(**{name: getattr(self, name).clone() for name in PADDING})

    def ancestors(self) -> Tensor:
        """bool [N, N]: row i is true at i and at i's ancestors."""
        return ancestor_mask(self.parents)

    def path_to(self, node: int) -> list[int]:
        """Node indices from the root to `node`, both included."""
        parents, path = self.parents.numpy(force=True), []
        while node >= 0:
            path.append(node)
            node = int(parents[node])
        return path[::-1]

    def children(self) -> list[list[int]]:
        """For every node the indices of its children, in tree order (best first for the builders of this package)."""
        children: list[list[int]] = [[] for _ in range(len(self))]
        for node, parent in enumerate(self.parents.tolist()):
            if parent >= 0:
                children[parent].append(node)
        return children

    def render(self, decode: Callable[[int], str] = str, accepted: Collection[int] = ()) -> str:
        """The tree as text, one node a line: marker of the nodes in `accepted`, token, probability under its parent."""
        tokens, scores, parents = self.tokens.tolist(), self.scores.double(), self.parents
        given_parent = (scores - scores[parents.clamp(min=0)]).exp().tolist()
        children = self.children()
        lines: list[str] = []
        stack = [(0, "", "")]  # node, what leads to it, what leads to its children
        while stack:
            node, branch, indent = stack.pop()
            mark = "● " if node in accepted else ""
            chance = f"  {given_parent[node]:.2f}" if node else ""
            lines.append(f"{branch}{mark}{decode(tokens[node])}{chance}")
            last = len(children[node]) - 1
            for rank in range(last, -1, -1):
                branch, below = ("└─ ", "   ") if rank == last else ("├─ ", "│  ")
                stack.append((children[node][rank], indent + branch, indent + below))
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TreeBatch:
    """R trees side by side, padded to N_max nodes (see PADDING); fields as in `DraftTree` with a leading axis R."""

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    scores: Tensor
    num_nodes: Tensor  # int64 [R], the root included

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def real(self) -> Tensor:
        """bool [R, N_max]: which rows are nodes."""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.num_nodes.unsqueeze(1)

    def tree(self, request: int) -> DraftTree:
        num_nodes = int(self.num_nodes[request])
        return DraftTree(**{name: getattr(self, name)[request, :num_nodes] for name in PADDING})

    @staticmethod
    def of(trees: Sequence[DraftTree]) -> TreeBatch:
        """Trees of any sizes, padded to the largest."""
        fields = {
            name: pad_sequence([getattr(tree, name) for tree in trees], batch_first=True, padding_value=fill)
            for name, fill in PADDING.items()
        }
        num_nodes = torch.tensor([len(tree) for tree in trees], device=trees[0].tokens.device)
        return TreeBatch(**fields, num_nodes=num_nodes)
