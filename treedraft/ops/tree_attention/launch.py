"""The kernel's host side: which tile, how many splits, TMA or pointers, and the launch."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from treedraft.ops.tree_attention.dispatch import interpreting
from treedraft.ops.tree_attention.mask import WORD, TreeRows

MOST_SPLITS = 32
MERGE_ROWS = 32
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
    """What tiles and the number of splits depend on; the rates are those of a kernel, not of a data sheet."""

    multiprocessors: int
    capability: int = 9  # the major one
    shared: int = 232_448  # bytes of shared memory that a program may have
    programs_each: int = 1
    flops: float = 490e12  # a second, all multiprocessors together
    bandwidth: float = 4.3e12  # bytes a second
    launch: float = 3e-6  # seconds

    @property
    def generation(self) -> int:
        """The capability whose code suits it: 12.x has the matrix instructions of 8.x, not Hopper's."""
        return self.capability if self.capability < 12 else 8


H200 = Device(multiprocessors=132)
A100 = Device(multiprocessors=108, capability=8, shared=166_912)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How one call runs: its tile, the splits of its columns, whether these are merged, copies by descriptor or not."""

    tile: Tile
    splits: int
    parts: bool
    tma: bool


def block_dim(head_dim: int) -> int:
    """Head sizes are padded to a power of two, 16 at least."""
    return max(16, 1 << (head_dim - 1).bit_length())


def tile_for(
    rows: int, head_dim: int, *, capability: int = 9, group: int = 4, paged: bool = False, exact: bool = False, shared: int = H200.shared
) -> Tile:
    """By the rows of a key head (G N) and the head size; chosen so that nothing spills (see `aot`) and it fits `shared` bytes.

    wgmma wants 64 rows, and four warps of it hold 64 x 128 of accumulators: smaller trees run on mma.sync. `exact` is
    float32, which is multiplied without matrix instructions: more than 16 rows spill.
    """
    tile = _fastest(rows, head_dim, capability=capability, group=group, paged=paged, exact=exact)
    while tile.stages > 1 and shared_bytes(tile, head_dim, itemsize=4 if exact else 2) > shared:
        tile = replace(tile, stages=tile.stages - 1)
    return tile


def shared_bytes(tile: Tile, head_dim: int, *, itemsize: int = 2) -> int:
    """Shared memory that a program needs at most: keys and values of every stage, and queries (a compiler may do with less)."""
    dim = block_dim(head_dim)
    return tile.stages * (2 * WORD * dim * itemsize + 1024) + tile.rows * dim * itemsize


def _fastest(rows: int, head_dim: int, *, capability: int, group: int, paged: bool, exact: bool) -> Tile:
    if exact:
        return Tile(rows=16, warps=8, stages=2)
    if rows <= 16:
        return Tile(rows=16, warps=4, stages=3 if block_dim(head_dim) <= 128 and not (paged and capability < 9) else 2)
    if rows <= 32:
        return Tile(rows=32, warps=4, stages=3 if block_dim(head_dim) <= 128 and capability < 9 else 2)
    if block_dim(head_dim) > 128:
        return Tile(rows=64, warps=8, stages=2 if capability >= 9 else 1)
    if rows <= 64 and capability >= 9:
        return Tile(rows=64, warps=4, stages=2)
    if group in (5, 7) and block_dim(head_dim) > 64 and capability < 9:
        return Tile(rows=64, warps=8, stages=3)  # dividing by them takes registers that a larger tile has not left
    return Tile(rows=128, warps=8, stages=2 if paged and capability < 9 else 3)


def through_parts(splits: int, head_dim: int, *, capability: int = 9, rows: int = 128) -> bool:
    """Whether outputs are merged from partial ones; also of a single split where a tile of so many rows would spill otherwise."""
    return splits > 1 or block_dim(head_dim) > (128 if capability >= 9 and rows != 64 else 64)


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


def plan(
    *, batch: int, kv_heads: int, group: int, num_nodes: int, head_dim: int, max_prefix: int, dtype: torch.dtype, device: Device,
    paged: bool = False, aligned: bool = True, splits: int | None = None, tma: bool | None = None, tile: Tile | None = None,
) -> Plan:  # fmt: skip
    """What `launch` does with a call of these sizes; `aligned` says that descriptors could address keys and values.

    ValueError for less than one split.
    """
    generation = device.generation
    tile = tile or tile_for(
        num_nodes * group, head_dim, capability=generation, group=group, paged=paged, exact=dtype == torch.float32, shared=device.shared
    )
    if splits is None:
        splits = choose_splits(
            batch=batch, kv_heads=kv_heads, group=group, num_nodes=num_nodes, head_dim=head_dim,
            max_columns=max_prefix + num_nodes, tile=tile, device=device,
        )  # fmt: skip
    if splits < 1:
        raise ValueError(f"splits is {splits}; at least 1")
    if tma is None:
        tma = aligned and not paged and generation >= 9 and dtype.itemsize == 2
    return Plan(tile=tile, splits=splits, parts=through_parts(splits, head_dim, capability=generation, rows=tile.rows), tma=tma)


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
    chosen = plan(
        batch=batch, kv_heads=kv_heads, group=group, num_nodes=num_nodes, head_dim=dim, max_prefix=rows.max_prefix,
        dtype=q.dtype, device=H200 if interpreted else device_of(q.device), paged=paged,
        aligned=not interpreted and not paged and tma_fits(k) and tma_fits(v), splits=splits, tma=tma, tile=tile,
    )  # fmt: skip
    tile, splits = chosen.tile, chosen.splits
    # [.., page or column, head]: pools have their heads inside.
    k_strides = (k.stride(0), k.stride(2), k.stride(1)) if paged else k.stride()[:3]
    v_strides = (v.stride(0), v.stride(2), v.stride(1)) if paged else v.stride()[:3]
    if max(k_strides[2], v_strides[2]) >= _MOST_STRIDE:
        raise ValueError(f"columns of k and v are {k_strides[2]} and {v_strides[2]} elements apart; below {_MOST_STRIDE}")
    out = q.new_empty((batch, num_nodes, num_heads, dim))
    lse = torch.empty((batch, num_heads, num_nodes), dtype=torch.float32, device=q.device)
    part, part_lse = out, lse
    if chosen.parts:
        part = torch.empty((splits, batch, num_heads, num_nodes, dim), dtype=torch.float32, device=q.device)
        part_lse = torch.empty((splits, batch, num_heads, num_nodes), dtype=torch.float32, device=q.device)
    grid = (math.ceil(num_nodes * group / tile.rows), kv_heads, batch * splits)
    keys, values = (descriptor(k, dim), descriptor(v, dim)) if chosen.tma else (k, v)
    with on_device(q.device):
        attend[grid](
            q, keys, values, rows.words, rows.prefix_lens, rows.num_nodes, block_table, out, lse, part, part_lse,
            scale * _LOG2E, num_nodes, splits, rows.words.shape[2], *q.stride()[:3], *k_strides, *v_strides,
            rows.words.stride(0) if len(rows.words) > 1 else 0, block_table.stride(0) if block_table is not None else 0,
            H=num_heads, GROUP=group, D=dim, BLOCK_D=block_dim(dim), BLOCK_M=tile.rows, SPLIT=chosen.parts,
            HAS_NUM_NODES=rows.num_nodes is not None, PAGE=k.shape[1] if paged else 0, TMA=chosen.tma,
            # The interpreter multiplies the bit patterns of bfloat16 as if they were numbers.
            UPCAST=interpreted and q.dtype == torch.bfloat16, EXACT=q.dtype == torch.float32,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        if chosen.parts:
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
    from triton.runtime import driver  # pyright: ignore[reportMissingImports]

    properties, active = torch.cuda.get_device_properties(device), cast(Any, driver.active)
    with on_device(device):
        shared = active.utils.get_device_properties(torch.cuda.current_device())["max_shared_mem"]
    return Device(multiprocessors=properties.multi_processor_count, capability=properties.major, shared=shared)


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Kernels and streams go to the current device, which need not be the one that holds the tensors."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
