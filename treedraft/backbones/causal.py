"""JetSpec's mask: slot i sees the context and slots up to i, so adding slots never changes earlier ones."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from treedraft.backbones._block import BlockBackbone, Config

__all__ = ["Component", "Config"]


@final
class Component(BlockBackbone):
    def block_mask(self, num_slots: int, device: torch.device) -> Tensor:
        return torch.ones((num_slots, num_slots), dtype=torch.bool, device=device).tril()
