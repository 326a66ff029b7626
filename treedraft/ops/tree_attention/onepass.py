"""A kernel to be compared with: one pass over all columns under a bool mask of N x (P + N), one query head a program."""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportMissingImports=false

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def attend(
    q, k, v, mask, out, scale, num_rows, num_columns,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, mask_batch, mask_row,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    dims = tl.arange(0, D)
    alive = rows < num_rows
    q_tile = tl.load(q + batch * q_batch + head * q_head + rows[:, None] * q_row + dims[None, :], mask=alive[:, None], other=0.0)
    if UPCAST:
        q_tile = q_tile.to(tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, D], tl.float32)
    k_base = k + batch * k_batch + (head // GROUP) * k_head
    v_base = v + batch * v_batch + (head // GROUP) * v_head
    for start in range(0, num_columns, 64):
        place = tl.cast(start, tl.int64) + tl.arange(0, 64)
        here = place < num_columns
        k_tile = tl.load(k_base + place[:, None] * k_row + dims[None, :], mask=here[:, None], other=0.0)
        v_tile = tl.load(v_base + place[:, None] * v_row + dims[None, :], mask=here[:, None], other=0.0)
        seen = tl.load(mask + batch * mask_batch + rows[:, None] * mask_row + place[None, :], mask=alive[:, None] & here[None, :], other=0)
        if UPCAST:
            k_tile = k_tile.to(tl.float32)
            v_tile = v_tile.to(tl.float32)
        scores = tl.where(seen != 0, tl.dot(q_tile, k_tile.T) * scale, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        level = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp2(top - level)
        weights = tl.exp2(scores - level[:, None])
        total = total * shrink + tl.sum(weights, 1)
        mixed = tl.dot(weights.to(v_tile.dtype), v_tile, mixed * shrink[:, None])
        top = higher
    mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    targets = out + ((batch * num_rows + rows) * H + head)[:, None] * D + dims[None, :]
    tl.store(targets, mixed.to(targets.dtype.element_ty), mask=alive[:, None])


def onepass(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *, upcast: bool = False) -> Tensor:
    """q [B, H, N, D], k and v [B, HK, S, D], mask bool [B, 1, N, S] -> [B, H, N, D]; D a power of two."""
    (batch, heads, rows, dim), kernel = q.shape, attend
    out = q.new_empty((batch, rows, heads, dim))
    grid: Any = (triton.cdiv(rows, 64), heads, batch)
    launched: Any = kernel[grid]
    bytes_ = mask[:, 0].view(dtype=_uint8())
    launched(
        q, k, v, bytes_, out, dim**-0.5 * 1.4426950408889634, rows, k.shape[2], *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        *bytes_.stride()[:2], H=heads, GROUP=heads // k.shape[1], D=dim, BLOCK_M=64, UPCAST=upcast, num_warps=4,
    )  # fmt: skip
    return out.transpose(1, 2)


def _uint8() -> Any:
    import torch

    return torch.uint8
