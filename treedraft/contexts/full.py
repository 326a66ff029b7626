"""DFlash's context: every committed position's tapped features, fused once, seen by all blocks that start after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from treedraft.ops.layers import RMSNorm, Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The full context has no options."""


@final
class Component(nn.Module):
    """c_t = RMSNorm(fc(taps_t)), fc: num_taps * H -> H without bias (DFlash 1.3)."""

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__()
        self.fc = nn.Linear(shape.num_taps * shape.hidden_size, shape.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)

    def forward(self, taps: Tensor) -> Tensor:
        """taps [..., C] -> features [..., H]."""
        return self.hidden_norm(self.fc(taps))

    def visible(self, anchors: Tensor, num_rows: int) -> Tensor:
        """anchors [S, A] -> bool [S, A, T]: rows strictly before the anchor, whose own state does not exist yet."""
        return torch.arange(num_rows, device=anchors.device) < anchors.unsqueeze(-1)
