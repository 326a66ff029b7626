"""The prefix as draft layers see it: what a context hands to a backbone.

Sizes: S sequences, A blocks a sequence, T rows, k key-value heads, h query heads, d head_dim, R summary entries.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Rotary = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Taps:
    """Which states of a target are read at every position: outputs of `layers`, keys and values of `cached` ones.

    0-based; the output of the last layer counts after the final norm, as transformers returns it.
    """

    layers: tuple[int, ...]
    cached: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Entries of one layer that stand for a whole prefix, a set for every query head.

    keys [h, R, d] are shared by all blocks, values [S, A, h, R, d] are a block's own; known [S, A] is false where the
    prefix is empty and there is nothing to see.
    """

    keys: Tensor
    values: Tensor
    known: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What blocks see of their prefix: rows [S, T, k, d] of every layer, of which block (s, a) sees visible [S, A, T]
    (None: all of them).

    A context may add a summary a layer, and the state [S, A, C] at the boundary between prefix and block.
    """

    keys: list[Tensor]
    values: list[Tensor]
    visible: Tensor | None
    summaries: list[Summary] | None = None
    boundary: Tensor | None = None


class Memory(ABC):
    """The prefixes of S sequences as a context keeps them."""

    @abstractmethod
    def at(self, anchors: Tensor) -> Seen:
        """What blocks see that start at absolute positions anchors [S, A]: rows strictly before them."""


class Whole(Memory):
    """Whole sequences: blocks may start anywhere in them."""

    @abstractmethod
    def rows(self, rows: Tensor) -> Whole:
        """Of some sequences alone, in this order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows(Whole):
    """A key and a value of every position, [S, T, k, d] a layer, ordered by position.

    `at_ends`: blocks start behind the last row of every sequence, and nowhere else.
    """

    keys: list[Tensor]
    values: list[Tensor]
    at_ends: bool = False

    def at(self, anchors: Tensor) -> Seen:
        if self.at_ends:
            return Seen(keys=self.keys, values=self.values, visible=None)
        visible = torch.arange(self.keys[0].shape[1], device=anchors.device) < anchors.unsqueeze(-1)
        return Seen(keys=self.keys, values=self.values, visible=visible)

    def rows(self, rows: Tensor) -> Rows:
        return Rows(keys=[keys[rows] for keys in self.keys], values=[values[rows] for values in self.values])
