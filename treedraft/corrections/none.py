"""No correction: a slot's logits are the backbone's, whatever stands before it on the branch (DFlash, JetSpec)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from torch import Tensor

from treedraft.corrections._seam import Borrowed, Correction, Lanes, State, select
from treedraft.ops.layers import Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """No correction has no options."""


@final
class BaseState(State):
    """The head applied once to all slots [R, D, H]."""

    def __init__(self, base_logits: Tensor) -> None:
        self.base_logits = base_logits

    def step(self, lanes: Lanes) -> Tensor:
        return self.base_logits[lanes.request, lanes.slot]


@final
class Component(Correction):
    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__()

    def forward(self, hidden: Tensor, previous: Tensor, borrowed: Borrowed, supervised: Tensor | None = None) -> Tensor:
        return borrowed.head(select(hidden, supervised))

    def start(self, hidden: Tensor, borrowed: Borrowed) -> BaseState:
        return BaseState(borrowed.head(hidden))
