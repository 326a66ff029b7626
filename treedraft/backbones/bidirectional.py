"""DFlash's mask: every slot sees the context and the whole block, later mask slots included."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from treedraft.backbones._block import BlockBackbone, Config

__all__ = ["Component", "Config"]


@final
class Component(BlockBackbone):
    def block_mask(self, num_slots: int, device: torch.device) -> Tensor:
        return torch.ones((num_slots, num_slots), dtype=torch.bool, device=device)
