"""Several requests of one target side by side: what `Target` offers for one, with a length and a tree of its own a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from treedraft.ops.tree_attention.mask import tree_rows
from treedraft.targets.hf import PREFILL_ROWS, Target, Verified
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
        prompt = self.prompts[row]
        self.target.check_prompt(prompt)
        ids = torch.tensor(list(prompt), device=self.device)
        view = self.cache.rows(slice(row, row + 1))
        parts: list[Tensor] = []
        last, start = ids, 0
        for chunk in ids.split(PREFILL_ROWS):
            end = start + len(chunk)
            view.write_next(slice(start, end), end)
            positions = torch.arange(start, end, device=self.device)
            mask = torch.arange(end, device=self.device) <= positions[:, None]
            last, taps = self.target.forward(chunk[None], positions=positions[None], mask=mask[None, None], cache=view)
            if take is not None:
                take(taps[0])
                parts.clear()
            parts.append(taps[0])
            start = end
        self.lengths[row] = len(ids)
        return Verified(logits=self.target.head(last[0, -1:]), taps=torch.cat(parts))

    @torch.no_grad()
    def verify(self, trees: TreeBatch) -> Verified:
        """Score the tree of every row in one forward: logits [R, N, V], taps [R, N, C]; padded nodes say nothing."""
        num_nodes = trees.tokens.shape[1]
        rows = tree_rows(trees.parents.to(self.device), tuple(self.lengths.tolist()))
        columns = self.lengths[:, None] + torch.arange(num_nodes, device=self.device)
        self.cache.write_next(columns, rows.max_prefix + num_nodes)
        last, taps = self.target.forward_tree(trees.tokens.clamp(min=0), rows, self.cache)
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
