"""Linear layers for a handful of rows on CPUs: weights laid out once for oneDNN, which then reads them at memory speed.

A plain product of 2 to 16 rows costs a CPU two to three times a single row's, although both read the weights once. With
prepacked weights 4 to 8 rows cost about what one does, and that is what verification of a small tree needs. The plain
layer is what gradients, other types and other devices go through.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

PACK_FROM = 50_000_000  # parameters; what is smaller stays in the cache, where packing gains nothing
_ROWS = 8  # the layout is chosen for about so many


class PackedLinear(nn.Linear):
    """An nn.Linear whose products without gradient run on a packed copy of its weight (as much memory again).

    The copy is made once: the weight must not change afterwards.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None = None) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self.weight, self.bias = weight, bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS)

    def forward(self, input: Tensor) -> Tensor:
        needs_gradient = torch.is_grad_enabled() and (input.requires_grad or self.weight.requires_grad)
        if needs_gradient or not (_fits(input) and _fits(self.weight)) or input.numel() == 0:
            return super().forward(input)
        return torch.ops.mkldnn._linear_pointwise(input, self._packed, self.bias, "none", [], "")


def worth_packing(module: nn.Module) -> bool:
    """True for large models in float32 on a CPU, where this torch has oneDNN."""
    weights = list(module.parameters())
    return torch.backends.mkldnn.is_available() and sum(map(Tensor.numel, weights)) >= PACK_FROM and all(map(_fits, weights))


def _fits(values: Tensor) -> bool:
    return values.device.type == "cpu" and values.dtype == torch.float32


def pack_linears(module: nn.Module) -> None:
    """Replace every nn.Linear inside `module` by a packed one with the same parameters."""
    for name, child in module.named_children():
        if type(child) is nn.Linear:
            bias: nn.Parameter | None = child.bias
            setattr(module, name, PackedLinear(cast("nn.Parameter", child.weight), bias))
        else:
            pack_linears(child)


def packed_head(weight: Tensor) -> nn.Module:
    """x -> x W^T for a frozen weight."""
    return PackedLinear(nn.Parameter(weight, requires_grad=False))
