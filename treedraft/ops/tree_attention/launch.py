"""The kernel's host side: which tile, how many splits, TMA or pointers, and the launch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from treedraft.ops.tree_attention.dispatch import interpreting
from treedraft.ops.tree_attention.mask import WORD, TreeRows

MOST_SPLITS = 32
MERGE_ROWS = 16
_LOG2E = 1.4426950408889634
_MOST_STRIDE = 2**31 // WORD  # offsets inside a tile are int32


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Rows a program, its warps and how many tiles of columns are in flight."""

    rows: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What the number of splits depends on; the rates are those of a kernel, not of a data sheet."""

    multiprocessors: int
    programs_each: int = 1
    flops: float = 490e12  # a second, all multiprocessors together
    bandwidth: float = 4.3e12  # bytes a second
    launch: float = 3e-6  # seconds


H200 = Device(multiprocessors=132)


def block_dim(head_dim: int) -> int:
    """Head sizes are padded to a power of two, 16 at least."""
    return max(16, 1 << (head_dim - 1).bit_length())


def tile_for(rows: int, head_dim: int, *, capability: int = 9, paged: bool = False) -> Tile:
    """By the rows of a key head (G N) and the head size; chosen so that nothing spills (see `aot`).

    wgmma wants 64 rows, and four warps of it hold 64 x 128 of accumulators: smaller trees run on mma.sync.
    """
    if rows <= 32:
        return Tile(rows=16 if rows <= 16 else 32, warps=4, stages=3 if block_dim(head_dim) <= 128 else 2)
    if block_dim(head_dim) > 128:
        return Tile(rows=64, warps=8, stages=2 if capability >= 9 else 1)
    if rows <= 64 and capability >= 9:
        return Tile(rows=64, warps=4, stages=2)
    return Tile(rows=128, warps=8, stages=2 if paged and capability < 9 else 3)


def through_parts(splits: int, head_dim: int, *, capability: int = 9) -> bool:
    """Whether outputs are merged from partial ones; also of a single split where writing them directly would spill."""
    return splits > 1 or block_dim(head_dim) > (128 if capability >= 9 else 64)


def choose_splits(
    *, batch: int, kv_heads: int, group: int, num_nodes: int, head_dim: int, max_columns: int, tile: Tile, device: Device = H200
) -> int:
    """Splits of the columns that minimise waves x tiles a program + the merge, from sizes that the host knows.

    A wave is as many programs as run at once; the seconds of a program's tile are its share of `flops`. Partial results
    are written and read once in float32.
    """
    base = math.ceil(num_nodes * group / tile.rows) * kv_heads * batch
    tiles = math.ceil(max_columns / WORD) + 1
    slots = device.multiprocessors * device.programs_each
    a_tile = 4 * tile.rows * WORD * block_dim(head_dim) * slots / device.flops
    values = batch * kv_heads * group * num_nodes * head_dim

    def seconds(splits: int) -> float:
        work = math.ceil(base * splits / slots) * math.ceil(tiles / splits) * a_tile
        return work + (splits > 1) * (2 * splits * values * 4 / device.bandwidth + device.launch)

    choices = range(1, min(MOST_SPLITS, tiles) + 1)
    best = min(map(seconds, choices))
    # Two percent are within what this model knows, and fewer parts round less.
    return next(splits for splits in choices if seconds(splits) <= 1.02 * best)


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: TreeRows,
    *,
    scale: float,
    splits: int | None = None,
    block_table: Tensor | None = None,
    need_lse: bool = True,
    tma: bool | None = None,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor | None]:
    """As `dispatch.tree_attention_lse`, whose checks the arguments have passed; outputs are stored as [B, N, H, D].

    `tma`: copies by descriptor (default: where the device and the layout of k and v allow it).
    """
    from treedraft.ops.tree_attention import kernels

    attend: Any = kernels.attend
    merge: Any = kernels.merge
    (batch, num_heads, num_nodes, dim), paged = q.shape, block_table is not None
    if q.stride(3) != 1:
        q = q.contiguous()
    kv_heads = k.shape[2] if paged else k.shape[1]
    group, interpreted = num_heads // kv_heads, interpreting()
    capability = 9 if interpreted else torch.cuda.get_device_capability(q.device)[0]
    tile = tile or tile_for(num_nodes * group, dim, capability=capability, paged=paged)
    if splits is None:
        splits = choose_splits(
            batch=batch, kv_heads=kv_heads, group=group, num_nodes=num_nodes, head_dim=dim,
            max_columns=rows.max_prefix + num_nodes, tile=tile, device=H200 if interpreted else device_of(q.device),
        )  # fmt: skip
    if splits < 1:
        raise ValueError(f"splits is {splits}; at least 1")
    if tma is None:
        tma = capability >= 9 and not interpreted and not paged and tma_fits(k) and tma_fits(v)
    # [.., page or column, head]: pools have their heads inside.
    k_strides = (k.stride(0), k.stride(2), k.stride(1)) if paged else k.stride()[:3]
    v_strides = (v.stride(0), v.stride(2), v.stride(1)) if paged else v.stride()[:3]
    if max(k_strides[2], v_strides[2]) >= _MOST_STRIDE:
        raise ValueError(f"columns of k and v are {k_strides[2]} and {v_strides[2]} elements apart; below {_MOST_STRIDE}")
    out = q.new_empty((batch, num_nodes, num_heads, dim))
    lse = torch.empty((batch, num_heads, num_nodes), dtype=torch.float32, device=q.device)
    part, part_lse, parts = out, lse, through_parts(splits, dim, capability=capability)
    if parts:
        part = torch.empty((splits, batch, num_heads, num_nodes, dim), dtype=torch.float32, device=q.device)
        part_lse = torch.empty((splits, batch, num_heads, num_nodes), dtype=torch.float32, device=q.device)
    grid = (math.ceil(num_nodes * group / tile.rows), kv_heads, batch * splits)
    keys, values = (descriptor(k, dim), descriptor(v, dim)) if tma else (k, v)
    attend[grid](
        q, keys, values, rows.words, rows.prefix_lens, rows.num_nodes, block_table, out, lse, part, part_lse,
        scale * _LOG2E, num_nodes, splits, rows.words.shape[2], *q.stride()[:3], *k_strides, *v_strides,
        rows.words.stride(0) if len(rows.words) > 1 else 0, block_table.stride(0) if block_table is not None else 0,
        H=num_heads, GROUP=group, D=dim, BLOCK_D=block_dim(dim), BLOCK_M=tile.rows, SPLIT=parts,
        HAS_NUM_NODES=rows.num_nodes is not None, PAGE=k.shape[1] if paged else 0, TMA=tma,
        # The interpreter multiplies the bit patterns of bfloat16 as if they were numbers.
        UPCAST=interpreted and q.dtype == torch.bfloat16, EXACT=q.dtype == torch.float32,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if parts:
        items = batch * num_heads * num_nodes
        merge[(math.ceil(items / MERGE_ROWS),)](
            part, part_lse, out, lse, num_nodes, splits, items,
            H=num_heads, D=dim, BLOCK_D=block_dim(dim), BLOCK_M=MERGE_ROWS, num_warps=4,
        )  # fmt: skip
    return out.transpose(1, 2), lse if need_lse else None


def tma_fits(x: Tensor) -> bool:
    """Whether descriptors can address x [B, HK, S, D]: 16-byte aligned base and strides, and a head size of 16 bytes."""
    aligned = all(stride > 0 and stride * x.element_size() % 16 == 0 for stride in x.stride()[:3])
    return aligned and x.data_ptr() % 16 == 0 and x.shape[3] * x.element_size() % 16 == 0 and x.dtype.itemsize == 2


def descriptor(x: Tensor, dim: int) -> Any:
    """One tile of 64 columns of one head a copy; what lies outside x reads as 0."""
    from triton.tools.tensor_descriptor import TensorDescriptor  # pyright: ignore[reportMissingImports]

    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, WORD, block_dim(dim)])


@cache
def device_of(device: torch.device) -> Device:
    properties = torch.cuda.get_device_properties(device)
    return Device(multiprocessors=properties.multi_processor_count)
