"""Several requests of one target side by side: what `Target` offers for one, with a length and a tree of its own a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from treedraft.ops.tree_attention.mask import tree_rows
from treedraft.targets.hf import Target, Verified
from treedraft.trees.tree import TreeBatch


class Requests:
    """Rows of one cache; row r holds lengths[r] committed tokens. Rows never see each other."""

    def __init__(self, target: Target, prompts: Sequence[Sequence[int]], *, capacity: int) -> None:
        self.target, self.device = target, target.device
        self.cache = target.new_cache(batch=len(prompts), capacity=capacity)
        self.lengths = torch.zeros(len(prompts), dtype=torch.int64, device=target.device)
        self.prompts = prompts

    @torch.no_grad()
    def prefill(self, row: int, *, take: Callable[[Tensor], None] | None = None) -> Verified:
        """Start row `row`: as `Target.prefill`, in the same chunks."""
        verified = self.target.prefill_cache(self.cache.rows(slice(row, row + 1)), self.prompts[row], take=take)
        self.lengths[row] = len(self.prompts[row])
        return verified

    @torch.no_grad()
    def verify(self, trees: TreeBatch) -> Verified:
        """Score the tree of every row in one forward: logits [R, N, V], taps [R, N, C]; padded nodes say nothing."""
        num_nodes = trees.tokens.shape[1]
        rows = tree_rows(trees.parents.to(self.device), tuple(self.lengths.tolist()))
        columns = self.lengths[:, None] + torch.arange(num_nodes, device=self.device)
        self.cache.write_next(columns, rows.max_prefix + num_nodes)
        last, taps = self.target.forward_tree(trees.tokens.clamp(min=0).to(self.device), rows, self.cache)
        return Verified(logits=self.target.head(last), taps=taps)

    def commit(self, paths: Tensor, counts: Tensor) -> None:
        """Keep of row r the nodes paths[r, : counts[r]] (root first) as its next tokens; drop the others."""
        steps = torch.arange(paths.shape[1], device=self.device)
        target = self.lengths[:, None] + steps
        source = torch.where(steps < counts[:, None], self.lengths[:, None] + paths, target)
        self.cache.move_rows(source, target)
        self.lengths += counts

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows alone, in this order."""
        self.lengths = self.lengths[rows]
        self.cache.keep(rows)
