"""Tree attention in two parts: the prefix without a mask, the tree under its own, merged by log-sum-exp.

The prefix part is plain attention, so any flash kernel can do it, and the queries of the heads that share a key head are
stacked as rows: a key is read once for all of them and never repeated. With lse the log-sum-exp of a part's scores, the
output is the average of the two parts weighed by exp(lse), which is sigmoid(lse_tree - lse_prefix) for the tree (the merge
of cascade attention and of LongSpec).

On a CPU a large tree goes in blocks of rows: a row sees its path, so a few neighbours see a small part of the tree, and
only those columns are multiplied. No mask spans the prefix, but for the few columns up to one that products like.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, reduce
from typing import Any

import torch
from torch import Tensor

from treedraft.ops.tree_attention.mask import ALIGNED, Block, TreeRows

# What is fastest on two cores of an AMD EPYC, in float32: 4/2 heads of 48, 9/3 of 64 and 32/8 of 128, 64 to 4096 columns, 1 to 512 nodes.
_ONE_READ = 2**19  # numbers in the keys of all heads; fewer stay in the cache, and stacking rows costs more than reading them again
_DIVIDE_FROM = 2**24  # products of queries with the keys of the tree, times D; fewer are done before blocks of them are set up
_BLOCK = 32  # nodes; with 16 or 64 the whole takes up to a tenth longer
_CHUNK = 1024  # columns at a time where no kernel keeps the scores to itself
Part = tuple[Tensor, Tensor]  # outputs [..., rows, D] and log-sum-exp [..., rows]


def hybrid(q: Tensor, k: Tensor, v: Tensor, rows: TreeRows, *, scale: float, need_lse: bool = True) -> tuple[Tensor, Tensor | None]:
    """q [B, H, N, D], k and v [B, HK, S, D] -> outputs [B, H, N, D], stored as [B, N, H, D], and lse [B, H, N] if needed.

    Reads the columns below prefix + N of each request alone.
    """
    if rows.common is None:
        # Prefixes of different lengths: each request reads what is there and nothing else, stale rows least of all.
        parts = [_attend(q[b : b + 1], k[b : b + 1], v[b : b + 1], one, scale, need_lse) for b, one in enumerate(rows.requests)]
        out, lse = torch.cat([out.transpose(1, 2) for out, _ in parts]), torch.cat([lse for _, lse in parts])
    else:
        out, lse = _attend(q, k, v, rows, scale, need_lse)
        out = out.transpose(1, 2).contiguous()
    return out.transpose(1, 2), lse if need_lse else None


def _attend(q: Tensor, k: Tensor, v: Tensor, rows: TreeRows, scale: float, need_lse: bool) -> Part:
    """The same behind prefixes of one length."""
    assert rows.common is not None
    if rows.size == 1 and rows.num_nodes is None and rows.blind is None:
        # A single node sees all there is: no mask, no parts.
        return plain(q, _columns(k, 0, rows.common + 1), _columns(v, 0, rows.common + 1), scale)
    first, size = deal(q, rows)
    blocks = rows.blocks(rows.common - first, size, q.dtype)
    if first == 0 and len(blocks) == 1:
        return _block(q, k, v, rows, blocks[0], first, scale)
    if first:
        out, lse = plain(q, k[:, :, :first], v[:, :, :first], scale)
    else:
        out, lse = q.new_empty(q.transpose(1, 2).shape).transpose(1, 2), q.new_empty(q.shape[:3], dtype=_accurate(q))
    for block in blocks:
        own_q, own, own_lse = (q, out, lse) if len(blocks) == 1 else (x[:, :, block.rows] for x in (q, out, lse))
        tree, tree_lse = part = _block(own_q, k, v, rows, block, first, scale)
        if first == 0 or need_lse:
            tree, tree_lse = merge((own, own_lse), part) if first else part
            own.copy_(tree)
            own_lse.copy_(tree_lse)
        else:
            _mix_(own, tree, tree_lse.sub_(own_lse).sigmoid_())
    return out, lse


def deal(q: Tensor, rows: TreeRows) -> tuple[int, int]:
    """How many columns of the prefix are served without a mask, and how many rows at a time look at the others.

    A large tree on a CPU goes in blocks of rows, behind a prefix cut at a column that matrix products like.
    """
    assert rows.common is not None
    if q.device.type != "cpu" or rows.num_nodes is not None or q.shape[1] * q.shape[3] * rows.size**2 <= _DIVIDE_FROM:
        return rows.common, rows.size
    return rows.common - rows.common % ALIGNED, _BLOCK


def merge(one: Part, other: Part) -> Part:
    """The attention over two disjoint sets of keys, from that over each; a part that saw nothing has lse -inf."""
    share = torch.sigmoid(other[1] - one[1])
    # Two empty parts: -inf - -inf. Nothing was seen, so both outputs are 0 and any share will do.
    share = torch.where(torch.isneginf(other[1]), 0.0, share)
    return _mix_(one[0].clone(), other[0], share), torch.logaddexp(one[1], other[1])


def _mix_(one: Tensor, other: Tensor, share: Tensor) -> Tensor:
    """one += share (other - one), in float32 at least: a share of three digits would cost what half precision has left."""
    wide = share.dtype
    if one.dtype == wide:
        return one.lerp_(other, share[..., None])
    return one.copy_(torch.lerp(one.to(wide), other.to(wide), share[..., None]))


def _block(q: Tensor, k: Tensor, v: Tensor, rows: TreeRows, block: Block, first: int, scale: float) -> Part:
    """The rows of a block, q [B, H, rows, D], over the columns it needs, which count from `first` on."""
    k, v = (_needed(x, rows, block, first) for x in (k, v))
    out, lse = masked(q, k, v, block.bias, scale)
    if block.blind is not None:
        out, lse = out.masked_fill(block.blind[:, None, :, None], 0), lse.masked_fill(block.blind[:, None], -torch.inf)
    return out, lse


def _needed(x: Tensor, rows: TreeRows, block: Block, first: int) -> Tensor:
    """[B, HK, C, D]: a view where a block needs all columns."""
    x, columns = _columns(x, first, rows.lengths[0] + rows.size), block.columns
    if columns is not None:
        if len(columns) == 1:
            return x.index_select(2, columns[0])
        return x.gather(2, columns[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))
    if rows.num_nodes is None:
        return x
    # Zero times what lies in a row of padding may be NaN.
    nodes = torch.arange(first - rows.lengths[0], rows.size, device=x.device)
    return x.masked_fill((nodes >= rows.num_nodes[:, None])[:, None, :, None], 0)


def _columns(x: Tensor, start: int, end: int) -> Tensor:
    """x[:, :, start:end], without the time that a view takes where it is all of x."""
    return x if end - start == x.shape[2] else x[:, :, start:end]


# -- a part, by whatever this torch and device have -----------------------------------------------------------------------


def plain(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Part:
    """Attention of q [B, H, N, D] over all of k and v [B, HK, S, D]; lse is the natural logarithm."""
    flash, (kv_heads, columns), (num_heads, num_rows) = _flash(q.device.type), k.shape[1:3], q.shape[1:3]
    if flash is None or (q.device.type == "cuda" and q.dtype.itemsize > 2):
        chunks = zip(k.split(_CHUNK, 2), v.split(_CHUNK, 2), strict=True)
        return reduce(merge, (masked(q, keys, values, None, scale) for keys, values in chunks))
    cached = kv_heads * columns * k.shape[3] < _ONE_READ
    if q.device.type == "cpu" and (cached or num_heads == kv_heads) and _groups_heads():
        return flash(q, k, v, scale=scale)  # pyright: ignore[reportReturnType]
    out, lse = flash(q.reshape(len(q), kv_heads, -1, q.shape[3]), k, v, scale=scale)[:2]  # rows [G N]
    group = num_heads // kv_heads
    lse = lse[..., : group * num_rows].unflatten(2, (group, num_rows)).flatten(1, 2)
    return out.unflatten(2, (group, num_rows)).flatten(1, 2), lse


def masked(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Part:
    """Attention of q [B, H, rows, D] over k and v [B, HK, S, D], `bias` [B or 1, 1, rows, S] added to the scores.

    Of a row that sees nothing only the operator's own value is returned: the caller knows which these are.
    """
    group = q.shape[1] // k.shape[1]
    if on_cpu_kernel(q):
        return _on_cpu(q, k, v, scale, attn_mask=bias)
    accurate, packed = _accurate(q), q.unflatten(1, (k.shape[1], group))  # [B, HK, G, rows, D]
    scores = (packed @ k.transpose(-1, -2)[:, :, None]).to(accurate) * scale
    scores = scores if bias is None else scores + bias[:, :, None].to(accurate)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(torch.isneginf(lse), 0.0)[..., None]).exp()
    return (weights.to(v.dtype) @ v[:, :, None]).flatten(1, 2), lse.flatten(1, 2)


def triangle(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Part:
    """Attention of q [B, H, N, D] over k and v [B, HK, N, D], row i up to column i, where `on_cpu_kernel(q)`."""
    return _on_cpu(q, k, v, scale, is_causal=True)


def on_cpu_kernel(q: Tensor) -> bool:
    """Whether torch's CPU kernel serves these queries."""
    return q.device.type == "cpu" and _flash("cpu") is not None


def _on_cpu(q: Tensor, k: Tensor, v: Tensor, scale: float, **options: Any) -> Part:
    group = q.shape[1] // k.shape[1]
    if group > 1 and not _groups_heads():
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, scale=scale, **options)


@cache
def _groups_heads() -> bool:
    """Whether torch's CPU kernel takes fewer key heads than query heads (newer ones do)."""
    q, k = torch.zeros((1, 2, 1, 8)), torch.zeros((1, 1, 1, 8))
    try:
        out, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, k)
    except RuntimeError:
        return False
    return out.shape == q.shape


def _flash(device: str) -> Callable[..., tuple[Tensor, ...]] | None:
    """torch's own kernel that also returns the log-sum-exp; these operators are private, so they may be missing."""
    name = {"cpu": "_scaled_dot_product_flash_attention_for_cpu", "cuda": "_scaled_dot_product_flash_attention"}.get(device)
    return getattr(torch.ops.aten, name, None) if name is not None else None


def _accurate(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)
