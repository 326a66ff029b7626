"""Packed layers compute what plain ones do, and a packed target is the same target."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from tests.tiny_drafters import make_drafter, random_prompts
from treedraft.config import DecodeConfig
from treedraft.ops import packed
from treedraft.ops.packed import DRAFTER, TARGET, PackedLinear, pack, pack_linears
from treedraft.speculate import generate, generate_plain
from treedraft.targets import tiny as tiny_module
from treedraft.targets.hf import Target


@pytest.mark.parametrize("rows", [(), (1,), (2,), (7,), (64,), (300,), (2, 3), (0,)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_layer_is_the_plain_one(monkeypatch: pytest.MonkeyPatch, rows: tuple[int, ...], bias: bool) -> None:
    monkeypatch.setattr(packed, "PACK_FROM", 1)
    torch.manual_seed(0)
    plain = nn.Linear(48, 80, bias=bias)
    (layer,) = pack([plain])
    assert isinstance(layer, PackedLinear)
    x = torch.randn((*rows, 48))
    for each in (x, torch.randn((*rows, 96))[..., ::2]):
        with torch.no_grad():
            torch.testing.assert_close(layer(each), plain(each), rtol=1e-5, atol=1e-5)
    x.requires_grad_(True)
    gradients = [torch.autograd.grad(module(x).square().sum(), [x, plain.weight]) for module in (plain, layer)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)
    assert copy.deepcopy(layer)._product is None and pickle.loads(pickle.dumps(layer))._product is None
    other = nn.Linear(48, 80, bias=bias)
    layer.load_state_dict(other.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(layer(x), other(x), rtol=1e-5, atol=1e-5)
    (layer,) = pack([other])
    with torch.no_grad():
        assert layer.double()(x.double()).dtype == torch.float64  # another type goes the plain way
        assert layer._product is None
    assert list(layer.state_dict()) == list(plain.state_dict())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("pack_from", [1, 2**30])
def test_siblings_are_one_product_whatever_the_order_of_calls(
    monkeypatch: pytest.MonkeyPatch, bias: bool, pack_from: int
) -> None:
    monkeypatch.setattr(packed, "PACK_FROM", pack_from)
    torch.manual_seed(0)
    module, plain = nn.Module(), nn.Module()
    for name, rows in (("q_proj", 24), ("k_proj", 8), ("v_proj", 8), ("o_proj", 16), ("gate_proj", 40), ("up_proj", 40)):
        layer = nn.Linear(16, rows, bias=bias)
        setattr(module, name, layer)
        setattr(plain, name, copy.deepcopy(layer))
    pack_linears(module, TARGET)
    products = {name: layer._product for name, layer in module.named_children() if isinstance(layer, PackedLinear)}
    assert len(products) == 5 + (pack_from == 1) and len(set(products.values())) == len(products) - 3
    one, other = torch.randn(5, 16), torch.randn(2, 3, 16)
    calls = [("q_proj", one), ("q_proj", one), ("v_proj", one), ("k_proj", other), ("v_proj", one), ("v_proj", other),
             ("k_proj", one), ("up_proj", one), ("q_proj", other), ("q_proj", one), ("gate_proj", one), ("o_proj", other)]  # fmt: skip
    calls += [(name, other) for name in ("q_proj", "k_proj", "v_proj")]
    with torch.no_grad():
        for name, x in calls:
            torch.testing.assert_close(getattr(module, name)(x), getattr(plain, name)(x), rtol=1e-5, atol=1e-5)
    assert products["q_proj"].input is None  # nothing is held once all have theirs


def test_an_input_that_was_changed_in_between_is_multiplied_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "PACK_FROM", 1)
    module = nn.Module()
    module.k_proj, module.v_proj = nn.Linear(16, 8), nn.Linear(16, 8)
    plain = copy.deepcopy(module)
    pack_linears(module, DRAFTER)
    x = torch.randn(3, 16)
    with torch.no_grad():
        module.k_proj(x)
        x.mul_(2)
        torch.testing.assert_close(module.v_proj(x), plain.v_proj(x), rtol=1e-5, atol=1e-5)
        with torch.inference_mode():
            module.k_proj(x)
        assert not module.v_proj(x).is_inference()


def test_siblings_that_read_different_inputs_are_packed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "PACK_FROM", 1)
    module = nn.Module()
    module.gate_proj, module.up_proj = nn.Linear(8, 8), nn.Linear(16, 8)
    pack_linears(module, TARGET)
    assert all(isinstance(layer, PackedLinear) for layer in module.children())
    assert module.gate_proj._product is not module.up_proj._product  # pyright: ignore


def test_only_large_products_in_float32_on_a_cpu_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    def packed_layers(target: Target) -> int:
        return sum(isinstance(layer, PackedLinear) for layer in target.model.modules())

    alone = packed_layers(tiny_module.load())  # siblings are joined, small as they are
    monkeypatch.setattr(packed, "PACK_FROM", 1)
    assert packed_layers(tiny_module.load()) > alone > 0
    assert not any(packed_layers(tiny_module.load(dtype=dtype)) for dtype in (torch.float64, torch.bfloat16))


@pytest.mark.parametrize("tied", [False, True])
def test_a_packed_target_is_the_same_target(monkeypatch: pytest.MonkeyPatch, tied: bool) -> None:
    """Weights, fingerprint and, to rounding, logits; and speculative decoding on it is plain decoding on it."""
    plain = tiny_module.load(tied=tied, padded_vocab_size=80)
    monkeypatch.setattr(packed, "PACK_FROM", 1)
    target = tiny_module.load(tied=tied, padded_vocab_size=80)
    assert target.fingerprint() == plain.fingerprint() and target.model.state_dict().keys() == plain.model.state_dict().keys()
    drafter = make_drafter(target, correction="attention")
    pack_linears(drafter, DRAFTER)
    for seed, prompt in enumerate(random_prompts(target, 8, seed=1)):
        torch.testing.assert_close(target.prefill(prompt).logits, plain.prefill(prompt).logits, rtol=1e-4, atol=1e-4)
        config = DecodeConfig(depth=5, width=3, budget=20, temperature=float(seed % 2))
        found = generate(target, drafter, prompt, config=config, max_new_tokens=16, seed=seed)
        assert found.ids == generate_plain(target, prompt, temperature=float(seed % 2), max_new_tokens=16, seed=seed).ids
