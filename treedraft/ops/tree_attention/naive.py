"""Tree attention as it is defined, in float64, one row at a time: walk up from the node, attend to prefix and path."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def from_parents(
    q: Tensor, k: Tensor, v: Tensor, parents: Sequence[Sequence[int]], prefixes: Sequence[int], *, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """q [B, H, N, D], k and v [B, HK, S, D] -> outputs [B, H, N, D] and log-sum-exp of the scores [B, H, N], float64.

    Row i of request b sees the columns below prefixes[b], and prefixes[b] + j for itself and every ancestor j.
    """
    seen = []
    for tree in parents:
        rows = []
        for node in range(len(tree)):
            path = [node]
            while tree[path[-1]] >= 0:
                path.append(tree[path[-1]])
            rows.append(path)
        seen.append(rows)
    return _attend(q, k, v, seen, prefixes, scale)


def from_visible(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, prefixes: Sequence[int], *, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """The same for any bool mask [B or 1, N, N]; a row that sees nothing gets 0, and -inf."""
    listed = [[row.nonzero().flatten().tolist() for row in tree] for tree in visible.expand(len(q), -1, -1)]
    return _attend(q, k, v, listed, prefixes, scale)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, seen: list[list[list[int]]], prefixes: Sequence[int], scale: float | None
) -> tuple[Tensor, Tensor]:
    group = q.shape[1] // k.shape[1]
    scale = float(q.shape[-1] ** -0.5) if scale is None else scale
    outputs = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    lse = torch.full(q.shape[:3], -torch.inf, dtype=torch.float64, device=q.device)
    for request, (tree, prefix) in enumerate(zip(seen, prefixes, strict=True)):
        for node, path in enumerate(tree):
            columns = torch.tensor([*range(prefix), *(prefix + j for j in path)], dtype=torch.int64, device=q.device)
            if len(columns) == 0:
                continue
            keys = k[request][:, columns].double().repeat_interleave(group, 0)  # [H, columns, D]
            values = v[request][:, columns].double().repeat_interleave(group, 0)
            scores = (keys @ q[request, :, node].double()[:, :, None])[..., 0] * scale
            outputs[request, :, node] = (scores.softmax(-1)[:, None] @ values)[:, 0]
            lse[request, :, node] = scores.logsumexp(-1)
    return outputs, lse
