"""The seam every correction implements, twice: on whole blocks (training) and node by node (trees).

The law: folding `State.step` along a path gives, slot by slot, the logits that `forward` gives under teacher forcing
with that path's tokens; siblings never leak in; a freshly initialised correction returns the backbone's logits bit for
bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

Map = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Borrowed:
    """The target's frozen parts a drafter works with: `embed` ids [...] -> [..., H], `head` [..., H] -> draft logits
    [..., V], `head_rows` columns [...] -> that head's weights [..., H], `norm` [..., H] -> [..., H] what the target has
    before its head, `rotary` positions [...] -> cosine and sine [..., head_dim]."""

    embed: Map
    norm: Map
    head: Map
    head_rows: Map
    rotary: Callable[[Tensor], tuple[Tensor, Tensor]]


class Lanes(Protocol):
    """The nodes that one call corrects, L of them (see trees.scorers.Lanes)."""

    @property
    def request(self) -> Tensor: ...
    @property
    def slot(self) -> Tensor: ...
    @property
    def token(self) -> Tensor: ...
    @property
    def expansion(self) -> Tensor: ...
    @property
    def parent(self) -> Tensor: ...
    @property
    def reach(self) -> int: ...


class State(ABC):
    """One round of drafting for R requests: the block's hidden states and whatever a branch has to remember."""

    def reserve(self, capacity: int) -> None:  # noqa: B027 (a memoryless correction has nothing to reserve)
        """Make room for `capacity` expansions a request."""

    @abstractmethod
    def step(self, lanes: Lanes) -> Tensor:
        """Logits [L, V] of the children of each lane's node; a parent is always stepped in an earlier call."""

    def step_among(self, lanes: Lanes, columns: Tensor) -> Tensor:
        """The same for some draft columns [L, M] of every lane alone: logits [L, M]."""
        return self.step(lanes).gather(1, columns)

    def guess(self, anchor: Tensor, depth: int, token_ids: Map) -> Tensor | None:
        """Tokens [R, depth], most likely the anchor, its best child, that one's best child, ...; None where that would take
        a step a slot, or where a step remembers its branch, so that nodes cannot be stepped beside their ancestors."""
        return None


class Correction(nn.Module, ABC):
    """Hidden states of drafted slots and the tokens before them -> logits."""

    @abstractmethod
    def forward(self, hidden: Tensor, previous: Tensor, borrowed: Borrowed, supervised: Tensor | None = None) -> Tensor:
        """Teacher forced: hidden [N, D, H], previous [N, D] (the token before each drafted one) -> logits [N, D, V].

        With `supervised`, bool [N, D], only those slots are taken to the vocabulary: logits [M, V].
        """

    @abstractmethod
    def start(self, hidden: Tensor, borrowed: Borrowed) -> State:
        """Begin a round for hidden [R, D, H]."""


def select(values: Tensor, supervised: Tensor | None) -> Tensor:
    return values if supervised is None else values[supervised]
