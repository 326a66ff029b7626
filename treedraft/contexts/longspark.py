"""LongSpark's context: a state of fixed size instead of a growing one (arXiv 2609.37029, equations 5, 6, 10, 11).

Draft layer j reads layer l(j) of the target through three things: the last W rows of that layer's own cache, as stored;
R entries a query head that sum up the whole prefix, windowed rows included; and what is fused into every slot's input,
the boundary state: the outputs of all l(j) at the last committed row. Summary entry r has the learned vector g_r as its
key and g_r's attention over the prefix, M_r, as its value, so g is trained as a query and as a key. A round folds the
accepted rows into (M, log-normaliser) and forgets them.

An empty prefix shows nothing: no row, no summary, a boundary of zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor, nn

from treedraft.contexts._seam import Context, Layers, ReadCache, State, without_padding
from treedraft.ops.layers import RMSNorm, Shape, rotate
from treedraft.ops.memory import Memory, Rotary, Seen, Summary, Taps, Whole
from treedraft.ops.summary import EMPTY, Partial, attend, merge, prefix_summaries


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """`window` rows and `summary` entries a head (0: none), `boundary` state or none, and the target's `layers`.

    One layer a draft layer; None spreads them from the first to the last. A drafter's tap_layers, which the full context
    reads, are not asked. `slots` says how slots differ: a learned table
    of one row a slot, whose last row ("repeat": the slot's number is clamped to the table) or linear interpolation
    ("interpolate": all slots move closer together) serves a block longer than trained, or one learned vector that is turned
    slot by slot ("rotary"), for any number.
    """

    layers: tuple[int, ...] | None = None
    window: int = 256
    summary: int = 16
    boundary: bool = True
    slots: Literal["repeat", "interpolate", "rotary"] = "repeat"

    def __post_init__(self) -> None:
        for name, value in (("window", self.window), ("summary", self.summary)):
            if value < 0:
                raise ValueError(f"context.{name} is {value}; at least 0 (none)")

    def taps(self, *, chosen: tuple[int, ...] | None, default: tuple[int, ...], num_layers: int, draft_layers: int) -> Taps:
        layers = self.layers or spread_layers(num_layers, draft_layers)
        if len(layers) != draft_layers:
            raise ValueError(f"context.layers names {len(layers)} layers for {draft_layers} draft layers; one each")
        return Taps(layers=layers, cached=layers if self.window or self.summary else ())


def spread_layers(num_layers: int, draft_layers: int) -> tuple[int, ...]:
    """Evenly from the first layer to the last, both included; halves go to the even number. One alone is the last."""
    if draft_layers == 1:
        return (num_layers - 1,)
    return tuple(round(i * (num_layers - 1) / (draft_layers - 1)) for i in range(draft_layers))


class Fusion(nn.Module):
    """RMSNorm(W2 silu(W1 x)), no biases."""

    def __init__(self, size: int, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.w1 = nn.Linear(size, hidden_size, bias=False)
        self.w2 = nn.Linear(hidden_size, hidden_size, bias=False)
        self.norm = RMSNorm(hidden_size, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.w2(nn.functional.silu(self.w1(x))))


@final
class Component(Context):
    """Sizes: L draft layers, B trained slots, h query heads, R entries, d head_dim.

    A row of taps is the outputs of L layers [L * H], then [L, 2, k, d] keys and values where they are read.
    """

    def __init__(self, config: Config, shape: Shape, *, num_layers: int, num_slots: int) -> None:
        super().__init__()
        self.config, self.shape, self.num_layers = config, shape, num_layers
        self.reads_cache = bool(config.window or config.summary)
        hidden, eps = shape.hidden_size, shape.rms_norm_eps
        if config.boundary:
            self.boundary = Fusion(shape.num_taps * hidden, hidden, eps)
        self.slot_inputs = Fusion((1 + config.boundary) * hidden, hidden, eps)
        self.slot_table = nn.Embedding(1 if config.slots == "rotary" else num_slots, hidden)
        nn.init.normal_(self.slot_table.weight, std=0.02)
        self.queries: nn.Parameter | None = None
        if config.summary:
            self.queries = nn.Parameter(torch.empty(num_layers, shape.num_heads, config.summary, shape.head_dim))
            nn.init.normal_(self.queries, std=shape.head_dim**-0.5)

    @property
    def dtype(self) -> torch.dtype:
        return self.slot_table.weight.dtype

    def split(self, taps: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [..., C] -> boundary states [..., L * H], keys and values [..., L, 2, k, d] (L is 0 where unread)."""
        hidden = taps[..., : self.shape.num_taps * self.shape.hidden_size]
        rest = taps[..., hidden.shape[-1] :]
        return hidden, rest.unflatten(-1, (-1 if rest.shape[-1] else 0, 2, self.shape.kv_heads, self.shape.head_dim))

    def remember(self, taps: Tensor, positions: Tensor, layers: Layers, rotary: Rotary) -> Sequences:
        return Sequences(self, taps.to(self.dtype))

    def open(
        self, num_requests: int, layers: Layers, rotary: Rotary, *, capacity: int, cache: ReadCache | None
    ) -> FixedState:
        return FixedState(self, num_requests, self.queries, self.slot_table.weight.device, cache)

    @property
    def columns(self) -> tuple[slice, slice]:
        hidden = self.shape.num_taps * self.shape.hidden_size
        return slice(hidden if self.config.boundary else 0), slice(hidden, None)

    def folder(self, device: torch.device) -> Callable[[int], FixedState]:
        """What it takes beside the target are the queries alone, copied once."""
        queries = None if self.queries is None else self.queries.detach().to(device)
        return lambda num_requests: FixedState(self, num_requests, queries, device, None)

    def inputs(self, embedded: Tensor, seen: Seen) -> Tensor:
        """RMSNorm(U2 silu(U1 [e_s + slot_s; c])), c the boundary state, the same for all slots of a block."""
        parts = [embedded + self.signal(embedded.shape[2]).to(embedded.dtype)]
        if self.config.boundary:
            assert seen.boundary is not None
            parts.append(self.boundary(seen.boundary).unsqueeze(2).expand_as(embedded))
        return self.slot_inputs(torch.cat(parts, -1))

    def signal(self, num_slots: int) -> Tensor:
        """What tells slots apart, [num_slots, H]."""
        table = self.slot_table.weight
        slots = torch.arange(num_slots, device=table.device)
        if self.config.slots == "rotary":
            half = table.shape[1] // 2
            wide = torch.promote_types(table.dtype, torch.float32)
            angles = slots[:, None] * 10_000.0 ** (-torch.arange(half, dtype=wide, device=table.device) / half)
            angles = torch.cat([angles, angles], -1)
            return rotate(table[:, None], angles.cos(), angles.sin()).squeeze(1)
        if num_slots <= len(table):
            return table[:num_slots]
        if self.config.slots == "repeat":
            return table[slots.clamp(max=len(table) - 1)]
        stretched = nn.functional.interpolate(table.T[None], num_slots, mode="linear", align_corners=True)
        return stretched[0].T

    def summaries(self, partial: Partial, known: Tensor) -> list[Summary] | None:
        """A layer's entries each, from pairs [S, A, L, h, R(, d)]."""
        if self.queries is None:
            return None
        means = partial.mean.unbind(2)
        return [Summary(keys=keys, values=values, known=known) for keys, values in zip(self.queries, means, strict=True)]


@final
class Sequences(Whole):
    """Whole sequences of taps [S, T, C]: the state of any anchor is worked out when it is asked for."""

    def __init__(self, context: Component, taps: Tensor) -> None:
        self.context, self.taps = context, taps

    def at(self, anchors: Tensor) -> Seen:
        context, length = self.context, self.taps.shape[1]
        hidden, cached = context.split(self.taps)
        sequence = torch.arange(len(anchors), device=anchors.device)[:, None]
        ends = anchors.clamp(max=length)
        known = ends > 0
        seen = slice(0, length if context.config.window else 0)
        places = torch.arange(length, device=anchors.device)[seen]
        visible = (places < ends.unsqueeze(-1)) & (places >= ends.unsqueeze(-1) - context.config.window)
        partial = None
        if context.queries is not None:
            partial = prefix_summaries(context.queries, cached[..., 0, :, :], cached[..., 1, :, :], ends)
        boundary = hidden[sequence, (ends - 1).clamp(min=0)].masked_fill(~known.unsqueeze(-1), 0.0)
        rows = _layer_rows(context, cached[:, seen])
        return Seen(
            keys=rows[0], values=rows[1], visible=visible, boundary=boundary,
            summaries=None if partial is None else context.summaries(partial, known),
        )  # fmt: skip

    def rows(self, rows: Tensor) -> Sequences:
        return Sequences(self.context, self.taps[rows])


@final
class FixedState(State):
    """Pairs [S, L, h, R(, d)], boundary states [S, L * H] and, without the target's cache at hand, a ring [S, W, L, 2, k, d].

    Position p lies in the ring at p mod W.
    """

    def __init__(
        self, context: Component, num_requests: int, queries: Tensor | None, device: torch.device, cache: ReadCache | None
    ) -> None:
        config, shape = context.config, context.shape
        self.context, self.queries, self.cache, self.lengths = context, queries, cache, [0] * num_requests
        like = torch.empty(0, dtype=context.dtype, device=device)
        wide = torch.promote_types(like.dtype, torch.float32)
        self.boundary = like.new_zeros((num_requests, shape.num_taps * shape.hidden_size if config.boundary else 0))
        pairs = (num_requests, context.num_layers, shape.num_heads, config.summary)
        self.pairs = Partial(
            log_total=like.new_full(pairs, EMPTY, dtype=wide),
            mean=like.new_zeros((*pairs, shape.head_dim), dtype=wide),
        )
        rows = 0 if cache is not None else config.window
        self.ring = like.new_zeros((num_requests, rows, context.num_layers, 2, shape.kv_heads, shape.head_dim))

    @torch.no_grad()
    def append(self, taps: Tensor, counts: Sequence[int], requests: Sequence[int]) -> None:
        hidden, cached = self.context.split(without_padding(taps, counts))
        which, number = (torch.tensor(values, device=taps.device) for values in (requests, counts))
        starts = torch.tensor([self.lengths[request] for request in requests], device=taps.device)
        step = torch.arange(taps.shape[1], device=taps.device)
        if self.context.config.boundary:
            last = hidden[torch.arange(len(hidden), device=taps.device), (number - 1).clamp(min=0)].to(self.boundary.dtype)
            self.boundary[which] = torch.where(number[:, None] > 0, last, self.boundary[which])
        if self.queries is not None:
            inside = step < number[:, None]
            added = attend(self.queries, cached[..., 0, :, :], cached[..., 1, :, :], inside)
            merged = merge(self.pairs[which], added)
            self.pairs.log_total[which], self.pairs.mean[which] = merged.log_total, merged.mean
        if self.ring.shape[1]:
            # Of more rows than the ring holds only the last ones: no place is written twice.
            kept = (step < number[:, None]) & (step >= number[:, None] - self.ring.shape[1])
            row, place = kept.nonzero(as_tuple=True)
            self.ring[which[row], (starts[row] + place) % self.ring.shape[1]] = cached[row, place].to(self.ring.dtype)
        for request, count in zip(requests, counts, strict=True):
            self.lengths[request] += count

    @property
    def memory(self) -> Ends:
        return Ends(self)

    @property
    def stores(self) -> list[Tensor]:
        return [self.ring, self.pairs.log_total, self.pairs.mean, self.boundary]

    def keep(self, requests: Tensor) -> None:
        self.lengths = [self.lengths[request] for request in requests.tolist()]
        self.pairs, self.ring, self.boundary = self.pairs[requests], self.ring[requests], self.boundary[requests]

    def window(self, device: torch.device) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """Keys and values [S, n, k, d] of every layer and which rows are there, bool [S, 1, n]."""
        context, lengths = self.context, torch.tensor(self.lengths, device=device)[:, None, None]
        number = min(context.config.window, max(self.lengths))
        if self.cache is None or not number:
            keys, values = _layer_rows(context, self.ring[:, :number])
            return keys, values, torch.arange(number, device=device) < lengths
        pairs = self.cache(self.lengths, number)
        keys, values = ([part.to(context.dtype) for part in parts] for parts in zip(*pairs, strict=True))
        return keys, values, torch.arange(number, 0, -1, device=device) <= lengths


@final
class Ends(Memory):
    """The ends of a state's prefixes: a block starts there and nowhere else."""

    def __init__(self, state: FixedState) -> None:
        self.state = state

    def at(self, anchors: Tensor) -> Seen:
        assert anchors.shape[1] == 1, "one block a request"
        state, context = self.state, self.state.context
        keys, values, visible = state.window(anchors.device)
        known = torch.tensor([[length > 0] for length in state.lengths], device=anchors.device)
        return Seen(
            keys=keys, values=values, visible=visible, boundary=state.boundary[:, None],
            summaries=context.summaries(state.pairs[:, None], known),
        )  # fmt: skip


def _layer_rows(context: Component, cached: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Rows [S, T, L, 2, k, d] -> keys and values [S, T, k, d] of every layer, in the context's type."""
    if cached.shape[2] == 0:
        empty = cached.new_zeros((*cached.shape[:2], *cached.shape[4:]), dtype=context.dtype)
        return [empty] * context.num_layers, [empty] * context.num_layers
    layers = cached.to(context.dtype).unbind(2)
    return [layer[:, :, 0] for layer in layers], [layer[:, :, 1] for layer in layers]
