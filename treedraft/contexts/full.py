"""DFlash's context: every committed position's tapped features, fused once, seen by all blocks that start after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from treedraft.contexts._seam import Context, Layers, ReadCache, State, without_padding
from treedraft.ops.layers import RMSNorm, Shape
from treedraft.ops.memory import Rotary, Rows, Taps


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The full context has no options."""

    def taps(self, *, chosen: tuple[int, ...] | None, default: tuple[int, ...], num_layers: int, draft_layers: int) -> Taps:
        return Taps(layers=chosen or default)


@final
class FullState(State):
    """Keys and values [S, capacity, k, d] of every draft layer; capacity doubles when it runs out."""

    def __init__(self, context: Component, num_requests: int, layers: Layers, rotary: Rotary, capacity: int) -> None:
        self.context, self.layers, self.rotary = context, layers, rotary
        self.lengths = [0] * num_requests
        shape = (num_requests, capacity, layers.shape.kv_heads, layers.shape.head_dim)
        like = context.hidden_norm.weight
        keys, values = ([like.new_zeros(shape) for _ in range(context.num_layers)] for _ in range(2))
        self.rows = Rows(keys=keys, values=values)

    @torch.no_grad()
    def append(self, taps: Tensor, counts: Sequence[int], requests: Sequence[int]) -> None:
        starts = torch.tensor([self.lengths[request] for request in requests], device=taps.device)
        columns = starts[:, None] + torch.arange(taps.shape[1], device=taps.device)
        new = self.context.remember(without_padding(taps, counts), columns, self.layers, self.rotary)
        self._reserve(max(self.lengths[request] for request in requests) + taps.shape[1])
        # Rows of padding lie behind a request's length: unseen, and written over by what comes next.
        if len(requests) == 1:
            place = (requests[0], slice(self.lengths[requests[0]], self.lengths[requests[0]] + taps.shape[1]))
        else:
            place = (torch.tensor(requests, device=taps.device)[:, None], columns)
        for store, added in zip(self.stores, (*new.keys, *new.values), strict=True):
            store[place] = added.to(store.dtype)
        for request, count in zip(requests, counts, strict=True):
            self.lengths[request] += count

    @property
    def memory(self) -> Rows:
        longest = max(self.lengths)
        return Rows(
            keys=[x[:, :longest] for x in self.rows.keys], values=[x[:, :longest] for x in self.rows.values],
            at_ends=min(self.lengths) == longest,
        )  # fmt: skip

    @property
    def stores(self) -> list[Tensor]:
        return [*self.rows.keys, *self.rows.values]

    def keep(self, requests: Tensor) -> None:
        self.rows = self.rows.rows(requests)
        self.lengths = [self.lengths[request] for request in requests.tolist()]

    def _reserve(self, rows: int) -> None:
        capacity = self.rows.keys[0].shape[1]
        if rows <= capacity:
            return
        extra = max(rows, 2 * capacity) - capacity
        self.rows = Rows(
            keys=[nn.functional.pad(x, (0, 0, 0, 0, 0, extra)) for x in self.rows.keys],
            values=[nn.functional.pad(x, (0, 0, 0, 0, 0, extra)) for x in self.rows.values],
        )


@final
class Component(Context):
    """c_t = RMSNorm(fc(taps_t)), fc: num_taps * H -> H without bias (DFlash 1.3)."""

    def __init__(self, config: Config, shape: Shape, *, num_layers: int, num_slots: int) -> None:
        super().__init__()
        self.num_layers = num_layers
        self.fc = nn.Linear(shape.num_taps * shape.hidden_size, shape.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)

    def forward(self, taps: Tensor) -> Tensor:
        """taps [..., C] -> features [..., H]."""
        return self.hidden_norm(self.fc(taps.to(self.hidden_norm.weight.dtype)))

    def remember(self, taps: Tensor, positions: Tensor, layers: Layers, rotary: Rotary) -> Rows:
        return layers.remember(self(taps), positions, rotary)

    def open(
        self, num_requests: int, layers: Layers, rotary: Rotary, *, capacity: int, cache: ReadCache | None
    ) -> FullState:
        return FullState(self, num_requests, layers, rotary, capacity)
