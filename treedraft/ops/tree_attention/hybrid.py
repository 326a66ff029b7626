"""Tree attention in two parts: the prefix without a mask, the tree with one of N x N, merged by log-sum-exp.

The prefix part is plain attention, so any flash kernel can do it, and the queries of the heads that share a key head are
stacked as rows: a key is read once for all of them and never repeated. With lse the log-sum-exp of a part's scores, the
output is the average of the two parts weighed by exp(lse), which is sigmoid(lse_tree - lse_prefix) for the tree (the merge
of cascade attention and of LongSpec).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from treedraft.ops.tree_attention.mask import TreeRows

_STACK_FROM = 2**16  # values of a key head; fewer stay in a core's cache: reading them once a head beats stacking rows
Part = tuple[Tensor, Tensor]  # outputs [..., rows, D] and log-sum-exp [..., rows]


def hybrid(q: Tensor, k: Tensor, v: Tensor, rows: TreeRows, *, scale: float, need_lse: bool = True) -> tuple[Tensor, Tensor | None]:
    """q [B, H, N, D], k and v [B, HK, S, D] -> outputs [B, H, N, D], stored as [B, N, H, D], and lse [B, H, N] if needed.

    Reads the columns below prefix + N of each request alone.
    """
    if rows.size == 1 and rows.common is not None and rows.num_nodes is None and rows.blind is None:
        # A single node sees all there is: no mask, no parts.
        out, lse = _prefix(q, k, v, (rows.common + 1,) * len(q), rows.common + 1, scale)
    else:
        out, lse = _tree(q, k, v, rows, scale)
        if any(rows.lengths):
            before, before_lse = _prefix(q, k, v, rows.lengths, rows.common, scale)
            if need_lse:
                out, lse = merge((before, before_lse), (out, lse))
            else:
                out = _mix(before, out, (lse - before_lse).sigmoid_())
    return out.transpose(1, 2).contiguous().transpose(1, 2), lse if need_lse else None


def merge(one: Part, other: Part) -> Part:
    """The attention over two disjoint sets of keys, from that over each; a part that saw nothing has lse -inf."""
    share = torch.sigmoid(other[1] - one[1])
    # Two empty parts: -inf - -inf. Nothing was seen, so both outputs are 0 and any share will do.
    share = torch.where(torch.isneginf(other[1]), 0.0, share)
    return _mix(one[0], other[0], share), torch.logaddexp(one[1], other[1])


def _mix(one: Tensor, other: Tensor, share: Tensor) -> Tensor:
    """one + share (other - one), in float32 at least: a share of three digits would cost what half precision has left."""
    wide = share.dtype
    if one.dtype == wide:
        return torch.lerp(one, other, share[..., None])
    return torch.lerp(one.to(wide), other.to(wide), share[..., None]).to(one.dtype)


def _prefix(q: Tensor, k: Tensor, v: Tensor, prefixes: tuple[int, ...], common: int | None, scale: float) -> Part:
    """Every row over all of its request's prefix; [B, H, N, D], [B, H, N]."""
    if common is not None:
        return plain(q, k.narrow(2, 0, common), v.narrow(2, 0, common), scale)
    # Prefixes of different lengths: one call each reads what is there and nothing else, stale rows least of all.
    out = q.new_zeros(q.shape)
    lse = torch.full(q.shape[:3], -torch.inf, dtype=_accurate(q), device=q.device)
    for request, length in enumerate(prefixes):
        if length:
            one = slice(request, request + 1)
            out[one], lse[one] = plain(q[one], k[one, :, :length], v[one, :, :length], scale)
    return out, lse


def _tree(q: Tensor, k: Tensor, v: Tensor, rows: TreeRows, scale: float) -> Part:
    """Every row over the nodes it sees; [B, H, N, D], [B, H, N]."""
    out, lse = masked(q, _nodes(k, rows), _nodes(v, rows), rows.bias(q.dtype), scale)
    if rows.blind is not None:
        out, lse = out.masked_fill(rows.blind[:, None, :, None], 0), lse.masked_fill(rows.blind[:, None], -torch.inf)
    return out, lse


def _nodes(x: Tensor, rows: TreeRows) -> Tensor:
    """The rows of the tree, [B, HK, N, D]: a view where all prefixes are of one length."""
    if rows.common is not None:
        nodes = x.narrow(2, rows.common, rows.size)
    else:
        columns = rows.prefix_lens[:, None] + torch.arange(rows.size, device=x.device)
        nodes = x.gather(2, columns[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))
    if rows.num_nodes is None:
        return nodes
    # Zero times what lies in a row of padding may be NaN.
    return nodes.masked_fill((torch.arange(rows.size, device=x.device) >= rows.num_nodes[:, None])[:, None, :, None], 0)


# -- the two parts, by whatever this torch and device have ---------------------------------------------------------------


def plain(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Part:
    """Attention of q [B, H, N, D] over all of k and v [B, HK, S, D]; lse is the natural logarithm."""
    flash, (kv_heads, columns), (num_heads, num_rows) = _flash(q.device.type), k.shape[1:3], q.shape[1:3]
    if flash is None or (q.device.type == "cuda" and q.dtype.itemsize > 2):
        return masked(q, k, v, None, scale)
    if q.device.type == "cpu" and (columns * k.shape[3] < _STACK_FROM or num_heads == kv_heads) and _groups_heads():
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
    if q.device.type == "cpu" and _flash("cpu") is not None:
        if group > 1 and not _groups_heads():
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=bias, scale=scale)
    accurate, packed = _accurate(q), q.unflatten(1, (k.shape[1], group))  # [B, HK, G, rows, D]
    scores = (packed @ k.transpose(-1, -2)[:, :, None]).to(accurate) * scale
    scores = scores if bias is None else scores + bias[:, :, None].to(accurate)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(torch.isneginf(lse), 0.0)[..., None]).exp()
    return (weights.to(v.dtype) @ v[:, :, None]).flatten(1, 2), lse.flatten(1, 2)


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
