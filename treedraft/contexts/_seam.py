"""The seam every context implements, twice: over whole sequences (training, replay) and request by request (decoding).

The law: appending a prefix in any chunks gives what remembering it at once gives, and what was never appended leaves no
trace. A context says which of the target's states it reads (`Config.taps`); a row of them is a vector [C]: the tapped
hidden states, then keys and values of every cached layer, as the target stores them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from treedraft.ops.layers import Shape
from treedraft.ops.memory import Memory, Rotary, Rows, Seen, Whole


class Layers(Protocol):
    """The draft layers as a context sees them."""

    shape: Shape

    def remember(self, features: Tensor, positions: Tensor, rotary: Rotary) -> Rows: ...


# The target's own cache, read: of every cached layer, keys and values [S, n, k, d] of the n <= size rows before
# ends [S], right aligned.
ReadCache = Callable[[Sequence[int], int], list[tuple[Tensor, Tensor]]]


class State(ABC):
    """The committed prefixes of several requests; grows by the taps of accepted rows and nothing else.

    `lengths` are the requests' committed tokens; `stores` holds every tensor whose size is the request's to pay.
    """

    lengths: list[int]

    @abstractmethod
    def append(self, taps: Tensor, counts: Sequence[int], requests: Sequence[int]) -> None:
        """Add the first counts[b] rows of taps [B, n, C] to request requests[b]; later rows are padding, never seen."""

    @property
    @abstractmethod
    def memory(self) -> Memory:
        """What drafting at the ends of the prefixes reads; views, good until the next `append`."""

    @property
    @abstractmethod
    def stores(self) -> list[Tensor]: ...

    @abstractmethod
    def keep(self, requests: Tensor) -> None:
        """Go on with these requests alone, in this order."""

    def load(self, stores: Sequence[Tensor], lengths: Sequence[int]) -> None:
        """Become what another state of this kind and size is, made elsewhere."""
        for own, new in zip(self.stores, stores, strict=True):
            own.copy_(new)
        self.lengths = list(lengths)

    @property
    def num_bytes(self) -> int:
        return sum(store.nbytes for store in self.stores)


def without_padding(taps: Tensor, counts: Sequence[int]) -> Tensor:
    """taps [B, n, C] with zeros behind the first counts[b] rows: what is masked still goes through products, and must be finite."""
    if min(counts) == taps.shape[1]:
        return taps
    rows = torch.arange(taps.shape[1], device=taps.device)
    return taps.masked_fill((rows >= torch.tensor(counts, device=taps.device)[:, None])[..., None], 0.0)


class Context(nn.Module, ABC):
    """What a block sees of its prefix. `reads_cache`: it attends to the target's own keys, so their heads must agree."""

    reads_cache = False

    @abstractmethod
    def remember(self, taps: Tensor, positions: Tensor, layers: Layers, rotary: Rotary) -> Whole:
        """Whole sequences: taps [S, T, C] at absolute positions [S, T] or [T]; blocks may then start anywhere."""

    @abstractmethod
    def open(
        self, num_requests: int, layers: Layers, rotary: Rotary, *, capacity: int, cache: ReadCache | None
    ) -> State:
        """Requests without a prefix, kept in the type of the weights; `capacity` is how many rows to make room for first.

        With `cache` rows of the target's cache are read there, without it a state keeps its own copy.
        """

    @property
    def columns(self) -> tuple[slice, slice]:
        """Which columns of taps [..., C] a state reads: those of the last row it is given alone, and those of every row."""
        return slice(0), slice(None)

    def folder(self, device: torch.device) -> Callable[[int], State] | None:
        """Opens states of so many requests on the target's device, to take in prompts there and be sent whole.

        None where a state grows with its prefix: then there is nothing to gain from it.
        """
        return None

    def inputs(self, embedded: Tensor, seen: Seen) -> Tensor:
        """What the first draft layer reads, [S, A, B, H], from the slots' embedded tokens."""
        return embedded
