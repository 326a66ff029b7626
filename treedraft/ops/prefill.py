"""Causal attention of a prompt's chunk over all that is cached, without a mask as long as the prompt.

The rows of a chunk are the last n columns: each sees every earlier column and itself. Under one mask that takes n x S
values, more than the cache of a small model holds. On a CPU the columns before the chunk are served without a mask, the
chunk's own by a kernel that is causal by itself, and the two are merged by log-sum-exp, as a draft tree is. Elsewhere a few
rows at a time go under a mask of at most `MASKED` values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from treedraft.ops.tree_attention.hybrid import merge, on_cpu_kernel, plain, triangle

NAME = "treedraft_prefill"
MASKED = 2**24  # values of a mask


def causal(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    """q [B, H, n, D], k and v [B, HK, S, D] -> [B, H, n, D]; row i sees the columns up to S - n + i. For CPUs."""
    before = k.shape[2] - q.shape[2]
    chunk = triangle(q, k[:, :, before:], v[:, :, before:], scale)
    if before == 0:
        return chunk[0]
    return merge(plain(q, k[:, :, :before], v[:, :, :before], scale), chunk)[0]


def naive(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    """The same by one softmax under one mask."""
    mask = torch.ones((q.shape[2], k.shape[2]), dtype=torch.bool, device=q.device).tril(k.shape[2] - q.shape[2])
    k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], 1) for part in (k, v))
    return (q @ k.transpose(-1, -2) * scale).masked_fill(~mask, -torch.inf).softmax(-1) @ v


@contextlib.contextmanager
def installed(config: Any) -> Iterator[None]:
    """A transformers model with this config attends so; give it a mask with four axes, which is passed on and not read."""
    _register()
    saved, config._attn_implementation = config._attn_implementation, NAME
    try:
        yield
    finally:
        config._attn_implementation = saved


@cache
def _register() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention)


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _mask: Tensor | None, scaling: float | None = None, **options: Any
) -> tuple[Tensor, None]:
    """query [B, H, n, D] of the last n columns -> [B, n, H, D], as transformers calls it."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if on_cpu_kernel(query):
        return causal(query, key, value, scale=scale).transpose(1, 2), None
    return _few_rows_at_a_time(module, query, key, value, scale), None


def _few_rows_at_a_time(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """By transformers' own attention, whose masks end with the last column that one of their rows sees."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    columns, parts = key.shape[2], []
    first = columns - query.shape[2]
    for start, rows in _dealt(first, columns):
        end = start + rows
        mask = torch.ones((rows, end), dtype=torch.bool, device=query.device).tril(start)[None, None]
        own = query[:, :, start - first : end - first]
        parts.append(sdpa_attention_forward(module, own, key[:, :, :end], value[:, :, :end], mask, scaling=scale)[0])
    return torch.cat(parts, 1)


def _dealt(first: int, end: int) -> Iterator[tuple[int, int]]:
    """Rows first .. end - 1 in blocks (start, number), a mask of each having at most MASKED values."""
    rows = max(1, MASKED // end)
    for start in range(first, end, rows):
        yield start, min(rows, end - start)
