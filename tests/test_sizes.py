"""Parameter counts of published drafters, closed exactly, without allocating them."""

from __future__ import annotations

import pytest
import torch

from treedraft.config import DrafterConfig
from treedraft.drafter import Drafter
from treedraft.ops.layers import Shape


def shape(hidden: int, heads: int, kv_heads: int, intermediate: int) -> Shape:
    return Shape(
        hidden_size=hidden, num_heads=heads, kv_heads=kv_heads, head_dim=128, intermediate_size=intermediate, rms_norm_eps=1e-6,
        vocab_size=151_936, draft_vocab_size=151_936, num_taps=5,
    )  # fmt: skip


QWEN3 = {
    "0.6B": (1024, 16, 8, 3072),
    "1.7B": (2048, 16, 8, 6144),
    "4B": (2560, 32, 8, 9728),
    "8B": (4096, 32, 8, 12288),
    "30B-A3B": (2048, 32, 4, 6144),
}


def counts(size: str, correction: dict, num_layers: int = 5) -> dict[str, int]:
    config = DrafterConfig(backbone={"name": "causal", "num_layers": num_layers}, correction=correction)
    with torch.device("meta"):
        return Drafter(config, shape(*QWEN3[size])).parameter_counts()


@pytest.mark.parametrize(
    ("size", "num_layers", "expected"),
    [
        ("0.6B", 5, 83_899_648),
        ("1.7B", 5, 272_655_616),
        ("4B", 5, 537_427_200),
        ("8B", 5, 1_048_626_432),
        ("30B-A3B", 8, 473_995_264),
    ],
)
def test_backbone_and_context(size: str, num_layers: int, expected: int) -> None:
    parts = counts(size, {"name": "none"}, num_layers)
    assert parts["backbone"] + parts["context"] == expected and parts["correction"] == 0


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        ({"name": "attention", "inputs": "fused"}, 75_497_728),
        ({"name": "attention", "inputs": "fused", "mlp": True}, 226_492_672),
        ({"name": "attention", "inputs": "parent"}, 41_943_296),
        ({"name": "markov", "rank": 256}, 77_791_232),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else None,
)
def test_corrections(correction: dict, expected: int) -> None:
    assert counts("8B", correction)["correction"] == expected
