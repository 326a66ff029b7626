"""Packed layers compute what plain ones do, and a packed target is the same target."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.tiny_drafters import make_drafter, random_prompts
from treedraft.config import DecodeConfig
from treedraft.ops import packed
from treedraft.ops.packed import PackedLinear, pack_linears
from treedraft.speculate import generate, generate_plain
from treedraft.targets import tiny as tiny_module


@pytest.mark.parametrize("rows", [(), (1,), (2,), (7,), (64,), (300,), (2, 3), (0,)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_layer_is_the_plain_one(rows: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(48, 80, bias=bias)
    layer = PackedLinear(plain.weight, plain.bias)
    x = torch.randn((*rows, 48))
    for each in (x, torch.randn((*rows, 96))[..., ::2]):
        with torch.no_grad():
            torch.testing.assert_close(layer(each), plain(each), rtol=1e-5, atol=1e-5)
    x.requires_grad_(True)
    gradients = [torch.autograd.grad(module(x).square().sum(), [x, plain.weight]) for module in (plain, layer)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)
    with torch.no_grad():
        assert layer.double()(x.double()).dtype == torch.float64  # another type goes the plain way
    assert list(layer.state_dict()) == list(plain.state_dict())


def test_only_large_float32_models_on_a_cpu_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not tiny_module.load().packed  # it is small
    monkeypatch.setattr(packed, "PACK_FROM", 1)
    assert tiny_module.load().packed
    assert not tiny_module.load(dtype=torch.float64).packed and not tiny_module.load(dtype=torch.bfloat16).packed


@pytest.mark.parametrize("tied", [False, True])
def test_a_packed_target_is_the_same_target(monkeypatch: pytest.MonkeyPatch, tied: bool) -> None:
    """Weights, fingerprint and, to rounding, logits; and speculative decoding on it is plain decoding on it."""
    plain = tiny_module.load(tied=tied, padded_vocab_size=80)
    monkeypatch.setattr(packed, "PACK_FROM", 1)
    target = tiny_module.load(tied=tied, padded_vocab_size=80)
    assert target.fingerprint() == plain.fingerprint() and target.model.state_dict().keys() == plain.model.state_dict().keys()
    drafter = make_drafter(target, correction="attention")
    pack_linears(drafter)
    for seed, prompt in enumerate(random_prompts(target, 8, seed=1)):
        torch.testing.assert_close(target.prefill(prompt).logits, plain.prefill(prompt).logits, rtol=1e-4, atol=1e-4)
        config = DecodeConfig(depth=5, width=3, budget=20, temperature=float(seed % 2))
        found = generate(target, drafter, prompt, config=config, max_new_tokens=16, seed=seed)
        assert found.ids == generate_plain(target, prompt, temperature=float(seed % 2), max_new_tokens=16, seed=seed).ids
