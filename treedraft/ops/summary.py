"""Attention of fixed queries over a growing prefix, kept as (output, log-normaliser) pairs that merge exactly.

LongSpark, equations 5, 10 and 11: for one query g and rows with scores s_j = g . k_j / sqrt(d),
log_total = log sum exp(s_j) and mean = sum exp(s_j - log_total) v_j. Two disjoint sets of rows merge without looking at
them again, in any order. Everything is at least float32, under autocast too.

Sizes: L layers, h query heads, k key-value heads, g = h / k, R queries a head, d head_dim, n rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# log_total of no rows at all. Finite, so that merging nothing with nothing has a value and a gradient.
EMPTY = -1e30


@dataclass(frozen=True, slots=True, kw_only=True)
class Partial:
    """Queries attended to some set of rows: log_total [..., L, h, R] and mean [..., L, h, R, d]."""

    log_total: Tensor
    mean: Tensor

    def __getitem__(self, index) -> Partial:
        return Partial(log_total=self.log_total[index], mean=self.mean[index])


def attend(queries: Tensor, keys: Tensor, values: Tensor, inside: Tensor) -> Partial:
    """queries [L, h, R, d] over rows keys and values [..., n, L, k, d], of which inside [..., n] count."""
    wide = torch.promote_types(torch.promote_types(queries.dtype, keys.dtype), torch.float32)
    with torch.autocast(keys.device.type, enabled=False):
        grouped = queries.to(wide).unflatten(1, (keys.shape[-2], -1)) * queries.shape[-1] ** -0.5
        scores = torch.einsum("lkgrd,...nlkd->...lkgrn", grouped, keys.to(wide))
        inside = inside[..., None, None, None, None, :]
        scores = scores.masked_fill(~inside, EMPTY)
        log_total = scores.logsumexp(-1)
        weights = scores.softmax(-1) * inside  # not exp of a difference: that is slow where it underflows
        mean = torch.einsum("...lkgrn,...nlkd->...lkgrd", weights, values.to(wide))
    return Partial(log_total=log_total.flatten(-3, -2), mean=mean.flatten(-4, -3))


def merge(first: Partial, second: Partial) -> Partial:
    """The pair of both sets of rows together; they must not share one."""
    log_total = torch.logaddexp(first.log_total, second.log_total)
    parts = [(part.log_total - log_total).exp().unsqueeze(-1) * part.mean for part in (first, second)]
    return Partial(log_total=log_total, mean=parts[0] + parts[1])


def scan(parts: Partial) -> Partial:
    """Of segments [S, N, ...] in order: what the first one, the first two, ... together give. 2 N merges in all."""
    number = parts.log_total.shape[1]
    if number == 1:
        return parts
    even, odd = parts[:, 0 : number - 1 : 2], parts[:, 1::2]
    pairs = scan(merge(even, odd))
    later = merge(pairs[:, : (number - 1) // 2], parts[:, 2::2])

    def weave(first: Tensor, at_odd: Tensor, at_even: Tensor) -> Tensor:
        out = first.new_empty((first.shape[0], number, *first.shape[2:]))
        out[:, :1], out[:, 1::2], out[:, 2::2] = first, at_odd, at_even
        return out

    return Partial(
        log_total=weave(parts.log_total[:, :1], pairs.log_total, later.log_total),
        mean=weave(parts.mean[:, :1], pairs.mean, later.mean),
    )


def prefix_summaries(queries: Tensor, keys: Tensor, values: Tensor, anchors: Tensor) -> Partial:
    """What the rows before each anchor give: queries [L, h, R, d], keys and values [S, T, L, k, d], anchors [S, A].

    Prefixes are nested, so every row is attended to once: the rows are cut at the anchors and into pieces of T / A, and
    the pieces are merged along the sequence. O(R T) work, where one attention an anchor takes O(A R T). Returns
    [S, A, L, h, R(, d)].
    """
    length, num_anchors = keys.shape[1], anchors.shape[1]
    size = -(-length // num_anchors)
    regular = torch.arange(size, length, size, device=anchors.device).expand(len(anchors), -1)
    ends = torch.cat([anchors.clamp(max=length), regular], 1).sort(1).values
    starts = torch.nn.functional.pad(ends[:, :-1], (1, 0))
    places = starts.unsqueeze(-1) + torch.arange(size, device=anchors.device)
    inside = places < ends.unsqueeze(-1)
    sequence = torch.arange(len(anchors), device=anchors.device)[:, None]
    places = places.clamp(max=length - 1)
    whole = scan(attend(queries, keys[sequence[..., None], places], values[sequence[..., None], places], inside))
    return whole[sequence, torch.searchsorted(ends, anchors.clamp(max=length).contiguous())]


def naive_summaries(queries: Tensor, keys: Tensor, values: Tensor, anchors: Tensor) -> Partial:
    """The same, one softmax an anchor, head and query over that anchor's own prefix."""
    groups = queries.shape[1] // keys.shape[3]
    shape = (*anchors.shape, *queries.shape[:3])
    log_total, mean = queries.new_full(shape, EMPTY), queries.new_zeros((*shape, queries.shape[3]))
    for s, a, layer, head, query in torch.cartesian_prod(*(torch.arange(size) for size in shape)).tolist():
        seen = slice(0, int(anchors[s, a]))
        if seen.stop > 0:
            scores = keys[s, seen, layer, head // groups] @ queries[layer, head, query] * queries.shape[3] ** -0.5
            log_total[s, a, layer, head, query] = scores.logsumexp(0)
            mean[s, a, layer, head, query] = scores.softmax(0) @ values[s, seen, layer, head // groups]
    return Partial(log_total=log_total, mean=mean)
