"""One function, four ways to compute it, and the rule that picks one."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from treedraft import registry
from treedraft.ops.tree_attention.hybrid import hybrid
from treedraft.ops.tree_attention.mask import MAX_NODES, WORD, TreeRows
from treedraft.ops.tree_attention.naive import from_visible

BACKENDS = ("auto", "triton", "hybrid", "sdpa", "reference")
KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
SMALLEST_HEAD, LARGEST_HEAD, LARGEST_EXACT_HEAD = 16, 256, 128  # the last in float32, where a larger one spills


class BackendUnavailable(ValueError):
    """A backend was asked for by name that cannot run here; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A backend and one sentence on why it was chosen."""

    name: str
    reason: str


def choose(name: str, *, device: torch.device, dtype: torch.dtype, head_dim: int) -> Choice:
    """The backend that `name` stands for; a named one is never replaced by another.

    ValueError for an unknown name, BackendUnavailable (a ValueError) for one that cannot run.
    """
    if name not in BACKENDS:
        raise ValueError(registry.unknown("attention", name, list(BACKENDS)))
    obstacle = why_not_triton(device, dtype, head_dim)
    if name == "auto" and (why := obstacle or _why_not_by_itself(dtype)) is not None:
        return Choice(name="hybrid", reason=f"hybrid (a mask-free prefix and the tree, merged): triton is out, {why}")
    if name == "auto":
        return Choice(name="triton", reason=f"triton: {device} has the tensor cores and head size {head_dim} is served")
    if name == "triton" and obstacle is not None:
        raise BackendUnavailable(f"attention 'triton' cannot run: {obstacle}; use auto or hybrid")
    return Choice(name=name, reason=f"{name}, as asked for")


def _why_not_by_itself(dtype: torch.dtype) -> str | None:
    """What keeps `auto` from a kernel that could run."""
    if interpreting():
        return "the interpreter is for tests"
    return "float32 cannot use the tensor cores and is there for comparisons" if dtype == torch.float32 else None


def why_not_triton(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """What keeps the kernel from running, in a few words, or None."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if not SMALLEST_HEAD <= head_dim <= LARGEST_HEAD:
        return f"head size {head_dim} is outside {SMALLEST_HEAD}..{LARGEST_HEAD}"
    if interpreting():
        import triton  # pyright: ignore[reportMissingImports]

        unfit = uninterpretable(triton.__version__, np.__version__)
        return unfit if device.type == "cpu" else "TRITON_INTERPRET=1 works on the CPU alone"
    if device.type != "cuda":
        return f"it needs a CUDA device, not {device.type}"
    if dtype not in KERNEL_DTYPES:
        return f"it computes in float16, bfloat16 or float32, not {str(dtype).removeprefix('torch.')}"
    if dtype == torch.float32 and head_dim > LARGEST_EXACT_HEAD:
        return f"in float32 it serves head sizes up to {LARGEST_EXACT_HEAD}, not {head_dim}"
    major, minor = torch.cuda.get_device_capability(device)
    return None if major >= 8 else f"it needs compute capability 8.0, not {major}.{minor}"


def uninterpretable(triton: str, numpy: str) -> str | None:
    """Why Triton's interpreter of that version fails whatever it is given: a bound of a loop is no scalar to a newer numpy."""
    if _release(triton) < (3, 7) and _release(numpy) >= (2, 4):
        return f"triton {triton} cannot interpret with numpy {numpy}: it needs numpy below 2.4, or triton 3.7"
    return None


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def interpreting() -> bool:
    """Whether Triton's kernels run in its interpreter, on the CPU; read when they are first imported."""
    return os.environ.get("TRITON_INTERPRET", "") not in ("", "0")


def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: TreeRows,
    *,
    scale: float | None = None,
    backend: str = "auto",
    splits: int | None = None,
    block_table: Tensor | None = None,
) -> Tensor:
    """Attention of the rows of draft trees: outputs [B, H, N, D], stored as [B, N, H, D].

    q            [B, H, N, D] float16, bfloat16, float32 (float64: not by the kernel)
    k, v         [B, HK, S, D] views of a cache; row prefix_lens[b] + j is node j, rows past the last node may hold
                 anything. With `block_table`, pools [pages, page, HK, D] instead
    splits       parts that the kernel deals the columns to (default: by the sizes and the device); another number
                 rounds differently in the last bits
    block_table  int32 [B, pages]: where page p of a request lies in the pools; a page is a multiple of 64 rows

    A NaN or infinite row of k reaches the rows that see it; rows of v that some row sees have to be finite. A row that
    sees nothing gets 0. With TREEDRAFT_CHECK=1 what can only be checked by waiting for the device is checked too.
    ValueError with the offending shape, stride, type or name; BackendUnavailable for a named backend that cannot run.
    """
    return tree_attention_lse(
        q, k, v, rows, scale=scale, backend=backend, splits=splits, block_table=block_table, need_lse=False
    )[0]


def tree_attention_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: TreeRows,
    *,
    scale: float | None = None,
    backend: str = "auto",
    splits: int | None = None,
    block_table: Tensor | None = None,
    need_lse: bool = True,
) -> tuple[Tensor, Tensor]:
    """`tree_attention` and the natural log-sum-exp of its scores [B, H, N] (-inf where nothing is seen).

    Without `need_lse` the second is empty.
    """
    scale = scale_of(q, scale)
    if torch.compiler.is_compiling():
        out, lse = torch.ops.treedraft.tree_attention(
            q, k, v, rows.seen, rows.prefix_lens, list(rows.prefixes or ()), rows.max_prefix, rows.num_nodes, scale,
            backend, splits or 0, block_table,
        )  # fmt: skip
        return out.transpose(1, 2), lse
    check(q, k, v, rows, block_table)
    name = _resolved(backend, q.device, q.dtype, q.shape[-1])
    out, lse = run(q, k, v, rows, scale=scale, backend=name, splits=splits, block_table=block_table, need_lse=need_lse)
    return out, lse if lse is not None else q.new_empty(0)


def run(
    q: Tensor, k: Tensor, v: Tensor, rows: TreeRows, *, scale: float, backend: str,
    splits: int | None = None, block_table: Tensor | None = None, need_lse: bool = True,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """By the backend of that name; arguments as `tree_attention_lse` has checked them."""
    if backend == "triton":
        from treedraft.ops.tree_attention.launch import launch

        return launch(q, k, v, rows, scale=scale, splits=splits, block_table=block_table, need_lse=need_lse)
    if block_table is not None:
        k, v = (gathered(pool, block_table, rows.max_prefix + rows.size) for pool in (k, v))
    if backend == "hybrid":
        return hybrid(q, k, v, rows, scale=scale, need_lse=need_lse)
    if backend == "sdpa":
        return _sdpa(q, k, v, rows, scale), _sdpa_lse(q, k, rows, scale) if need_lse else None
    assert backend == "reference", backend
    out, lse = from_visible(q, k, v, rows.visible, rows.lengths, scale=scale)
    return out.to(q.dtype).transpose(1, 2).contiguous().transpose(1, 2), lse.to(torch.promote_types(q.dtype, torch.float32))


def scale_of(q: Tensor, scale: float | None) -> float:
    return float(q.shape[-1] ** -0.5) if scale is None else scale


def gathered(pool: Tensor, block_table: Tensor, columns: int) -> Tensor:
    """Pages of a pool [pages, page, HK, D] in the order of `block_table` [B, n] -> [B, HK, >= columns, D]."""
    pages = -(-columns // pool.shape[1])
    return pool[block_table[:, :pages].long()].flatten(1, 2).transpose(1, 2)


def full_mask(rows: TreeRows, columns: int) -> Tensor:
    """bool [B, 1, N, columns]: prefix and tree in one mask, for attention that takes nothing else."""
    place = torch.arange(columns, device=rows.seen.device) - rows.prefix_lens[:, None]  # [B, columns]
    tree = rows.visible.expand(len(place), -1, -1)
    node = place.clamp(0, rows.size - 1)[:, None].expand(-1, rows.size, -1)
    inside = ((place >= 0) & (place < rows.size))[:, None]
    return ((place < 0)[:, None] | (tree.gather(2, node) & inside))[:, None]


def _sdpa(q: Tensor, k: Tensor, v: Tensor, rows: TreeRows, scale: float) -> Tensor:
    """torch's attention under one mask of N x (P + N), over the columns that are there."""
    mask, k, v = _held(k, v, rows)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    return out.transpose(1, 2).contiguous().transpose(1, 2)


def _sdpa_lse(q: Tensor, k: Tensor, rows: TreeRows, scale: float) -> Tensor:
    mask, k, _ = _held(k, k, rows)
    keys = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = (q @ keys.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32)) * scale
    return scores.masked_fill(~mask, -torch.inf).logsumexp(-1)


def _held(k: Tensor, v: Tensor, rows: TreeRows) -> tuple[Tensor, Tensor, Tensor]:
    """The full mask, and k and v up to the last column; stale rows are masked, but nothing times NaN is nothing."""
    end = max(rows.lengths) + rows.size
    mask = full_mask(rows, end)
    stale = ~mask.any(2)[..., None]  # [B, 1, end, 1]
    return mask, k[:, :, :end].masked_fill(stale, 0), v[:, :, :end].masked_fill(stale, 0)


@cache
def _resolved(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    return choose(name, device=device, dtype=dtype, head_dim=head_dim).name


# -- checks ---------------------------------------------------------------------------------------------------------------


def check(q: Tensor, k: Tensor, v: Tensor, rows: TreeRows, block_table: Tensor | None = None) -> None:
    """ValueError with the offending shape, stride or type; nothing here waits for the device."""
    if not (q.ndim == k.ndim == v.ndim == 4 and k.shape == v.shape):
        raise ValueError(f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}: expected [B, H, N, D] and twice [B, HK, S, D]")
    batch, num_heads, num_nodes, dim = q.shape
    kv_heads, held = (k.shape[2], None) if block_table is not None else (k.shape[1], k.shape[2])
    if k.shape[3] != dim or num_heads % kv_heads or (block_table is None and len(k) != batch):
        raise ValueError(f"k {list(k.shape)} does not go with q {list(q.shape)}: same D, same B, and HK divides H")
    if not (q.dtype == k.dtype == v.dtype and q.device == k.device == v.device):
        raise ValueError(f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype} on {q.device}, {k.device}, {v.device}; one of each")
    if 1 not in (q.stride(3), dim) or k.stride(3) != 1 or v.stride(3) != 1:
        raise ValueError(f"last strides {q.stride(3)}, {k.stride(3)}, {v.stride(3)} of q, k, v: each has to be 1")
    if not 1 <= num_nodes <= MAX_NODES or (held is not None and held < num_nodes):
        raise ValueError(f"{num_nodes} nodes in {held} columns: between 1 and {MAX_NODES}, and no more than columns")
    seen, wide = rows.seen, {torch.bool: num_nodes, torch.int64: -(-num_nodes // WORD)}
    if seen.dtype not in wide or seen.shape[1:] != (num_nodes, wide[seen.dtype]) or len(seen) not in (1, batch):
        raise ValueError(
            f"the mask is {seen.dtype} {list(seen.shape)}; expected bool [{batch} or 1, {num_nodes}, {num_nodes}] or "
            f"int64 [{batch} or 1, {num_nodes}, {wide[torch.int64]}]"
        )
    if rows.prefix_lens.dtype != torch.int32 or tuple(rows.prefix_lens.shape) != (batch,):
        raise ValueError(f"prefix_lens are {rows.prefix_lens.dtype} {list(rows.prefix_lens.shape)}; expected int32 [{batch}]")
    if not seen.device == rows.prefix_lens.device == q.device:
        raise ValueError(f"the mask on {seen.device} and prefix_lens on {rows.prefix_lens.device}; q is on {q.device}")
    if rows.prefixes is not None and held is not None and max(rows.prefixes) + num_nodes > held:
        raise ValueError(f"a prefix of {max(rows.prefixes)} and {num_nodes} nodes do not fit {held} columns")
    if block_table is not None and (block_table.dtype != torch.int32 or block_table.ndim != 2 or k.shape[1] % WORD):
        raise ValueError(
            f"block_table {block_table.dtype} {list(block_table.shape)} and pages of {k.shape[1]} rows; "
            f"expected int32 [B, pages] and a multiple of {WORD}"
        )
    read_by_place = {"words": seen[0] if seen.dtype == torch.int64 else None, "prefix_lens": rows.prefix_lens,
                     "num_nodes": rows.num_nodes, "a row of block_table": block_table[0] if block_table is not None else None}  # fmt: skip
    for name, x in read_by_place.items():
        if x is not None and not x.is_contiguous():
            raise ValueError(f"strides {list(x.stride())} of {name} {list(x.shape)}: they have to be contiguous, as they are read by place")
    if os.environ.get("TREEDRAFT_CHECK", "") not in ("", "0"):
        check_values(rows, held)


def check_values(rows: TreeRows, columns: int | None) -> None:
    """ValueError if a row does not see itself, sees padding, or lies past the last column; waits for the device."""
    seen = unpack_padded(rows.words)
    if bool(seen[..., rows.size :].any()):
        raise ValueError(f"a word has a bit at or past node {rows.size}")
    nodes = torch.arange(rows.size, device=seen.device)
    live = nodes < (rows.num_nodes[:, None] if rows.num_nodes is not None else rows.size)
    if not bool((seen[:, nodes, nodes] | ~live).all()):
        raise ValueError("a node does not see itself")
    longest = int(rows.prefix_lens.max())
    if int(rows.prefix_lens.min()) < 0 or longest > rows.max_prefix or (columns is not None and longest + rows.size > columns):
        raise ValueError(f"a prefix of {longest} is past max_prefix {rows.max_prefix} or past {columns} columns")


def unpack_padded(words: Tensor) -> Tensor:
    """All 64 bits of every word, bool [..., N, 64 W]."""
    return ((words[..., None] >> torch.arange(WORD, device=words.device)) & 1).flatten(-2).bool()


# -- as an operator, so that a compiled model passes through --------------------------------------------------------------


@torch.library.custom_op("treedraft::tree_attention", mutates_args=())
def _operator(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, prefix_lens: Tensor, prefixes: Sequence[int], max_prefix: int,
    num_nodes: Tensor | None, scale: float, backend: str, splits: int, block_table: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    rows = TreeRows(
        seen=seen, prefix_lens=prefix_lens, prefixes=tuple(prefixes) or None, max_prefix=max_prefix, num_nodes=num_nodes
    )
    out, lse = tree_attention_lse(
        q, k, v, rows, scale=scale, backend=backend, splits=splits or None, block_table=block_table
    )
    return out.transpose(1, 2).contiguous(), lse.contiguous()


@_operator.register_fake
def _shapes(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, prefix_lens: Tensor, prefixes: Sequence[int], max_prefix: int,
    num_nodes: Tensor | None, scale: float, backend: str, splits: int, block_table: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    batch, num_heads, rows, dim = q.shape
    accurate = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty((batch, rows, num_heads, dim)), q.new_empty((batch, num_heads, rows), dtype=accurate)
