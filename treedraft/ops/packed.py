"""Linear layers for a handful of rows on CPUs: weights laid out once for oneDNN, which then reads them at memory speed.

A plain product of 2 to 16 rows costs a CPU two to three times a single row's, although both read the weights once. With
prepacked weights 4 to 8 rows cost about what one does, and that is what verification of a small tree needs. Layers that
read the same input, like the projections of an attention, are one product. The plain layer is what gradients, other
types and other devices go through.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

PACK_FROM = 200_000  # weights of a product; a smaller one stays in the cache, where packing gains nothing
Groups = Sequence[tuple[str, ...]]  # names of children that are called on one tensor, one after the other
TARGET: Groups = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
DRAFTER: Groups = (("k_proj", "v_proj"), ("gate_proj", "up_proj"))  # of a prefix it makes keys and values alone
_ROWS = 8  # the layout is chosen for about so many


class _Product:
    """x -> x W^T of several layers at once: the first that is called computes it, the others find their columns done.

    Each takes its columns once; another tensor, a second call on the same one or one that was changed in between compute
    anew. A copy of it, deep or pickled, is None: packed weights cannot be copied.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.sizes = [layer.out_features for layer in layers]
        self.weight = torch.cat([layer.weight.detach() for layer in layers])
        biases = [layer.bias for layer in layers]
        self.bias = None if biases[0] is None else torch.cat([bias.detach() for bias in biases])
        self.packed = self.weight.numel() >= PACK_FROM
        if self.packed:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight, _ROWS)
        self.input: Tensor | None = None
        self.state: tuple[bool, int] | None = None  # of the input and the mode, when the product was made
        self.waiting: dict[int, Tensor] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    def __call__(self, place: int, input: Tensor) -> Tensor:
        state = (torch.is_inference_mode_enabled(), 0 if input.is_inference() else input._version)
        if input is not self.input or state != self.state or place not in self.waiting:
            if self.packed:
                product = torch.ops.mkldnn._linear_pointwise(input, self.weight, self.bias, "none", [], "")
            else:
                product = nn.functional.linear(input, self.weight, self.bias)
            if len(self.sizes) == 1:
                return product
            self.input, self.state, self.waiting = input, state, dict(enumerate(product.split(self.sizes, -1)))
        own = self.waiting.pop(place)
        if not self.waiting:
            self.input = None
        return own


class PackedLinear(nn.Linear):
    """An nn.Linear whose products without gradient run on a copy of its weight laid out for that (as much memory again).

    That copy is made once: the weight must not be changed in place. What is moved, cast, copied or loaded into is plain
    again. Calls skip the hooks of modules, which cost a small product a good part of its time.
    """

    def __init__(self, layer: nn.Linear, product: _Product, place: int) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = layer.out_features, layer.in_features
        self.weight, self.bias = cast("nn.Parameter", layer.weight), cast("nn.Parameter | None", layer.bias)
        self._product: _Product | None = product
        self._place = place

    def forward(self, input: Tensor) -> Tensor:
        needs_gradient = torch.is_grad_enabled() and (input.requires_grad or self.weight.requires_grad)
        if needs_gradient or self._product is None or not _fits(input) or input.numel() == 0:
            return super().forward(input)
        return self._product(self._place, input)

    __call__ = forward

    def _apply(self, fn: Any, recurse: bool = True) -> PackedLinear:
        self._product = None
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._product = None
        super()._load_from_state_dict(*args, **kwargs)


def can_pack(module: nn.Module) -> bool:
    """True for models in float32 on a CPU, where this torch has oneDNN."""
    return torch.backends.mkldnn.is_available() and all(map(_fits, module.parameters()))


def pack(layers: Sequence[nn.Linear]) -> list[nn.Linear]:
    """Layers with the same parameters whose products are one; a single small one stays as it is."""
    if len(layers) == 1 and layers[0].weight.numel() < PACK_FROM:
        return [*layers]
    product = _Product(layers)
    return [PackedLinear(layer, product, place) for place, layer in enumerate(layers)]


def pack_linears(module: nn.Module, siblings: Groups) -> None:
    """Pack every nn.Linear inside `module` in place, siblings together."""
    children = dict(module.named_children())
    plain: dict[str, nn.Linear] = {name: child for name, child in children.items() if type(child) is nn.Linear}
    groups = [names for names in siblings if _read_alike([plain.get(name) for name in names])]
    alone = set(plain).difference(*groups)
    for names in (*groups, *((name,) for name in alone)):
        for name, layer in zip(names, pack([plain[name] for name in names]), strict=True):
            setattr(module, name, layer)
    for child in set(children.values()) - set(plain.values()):
        pack_linears(child, siblings)


def packed_head(weight: Tensor) -> nn.Linear:
    """x -> x W^T for a frozen weight."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return pack([layer])[0]


def _read_alike(layers: Sequence[nn.Linear | None]) -> bool:
    """True if all are there, read inputs of one width, and either all have a bias or none has."""
    kinds = {layer and (layer.in_features, layer.bias is None) for layer in layers}
    return None not in kinds and len(kinds) == 1


def _fits(values: Tensor) -> bool:
    return values.dtype is torch.float32 and values.is_cpu
