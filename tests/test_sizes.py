"""Parameter counts of published drafters, closed exactly, without allocating them."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from treedraft.config import DrafterConfig
from treedraft.corrections import markov
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
    "14B": (5120, 40, 8, 17408),
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


@pytest.mark.parametrize(("size", "rank"), [("0.6B", 28), ("1.7B", 69), ("4B", 129), ("8B", 248)])
def test_a_markov_head_of_matched_size(size: str, rank: int) -> None:
    """Ranks of the published Markov heads that have as many parameters as the attention layer, its four norms apart."""
    assert counts(size, {"name": "markov", "size": 1})["correction"] == 2 * 151_936 * rank


@pytest.mark.parametrize("size", [*QWEN3])
@pytest.mark.parametrize("times", [1, 3])
def test_a_size_is_met_to_half_a_rank(size: str, times: int) -> None:
    layer = counts(size, {"name": "attention"})["correction"]
    assert abs(counts(size, {"name": "markov", "size": times})["correction"] - times * layer) <= 151_936


def test_a_size_counts_the_draft_vocabulary() -> None:
    """W2 has a row a draft token alone; what is counted is what is built."""
    small = dataclasses.replace(shape(*QWEN3["0.6B"]), draft_vocab_size=8192)
    sizes = []
    for correction in ({"name": "attention"}, {"name": "markov", "size": 1}, {"name": "markov", "size": 1, "variant": "rnn"}):
        with torch.device("meta"):
            sizes.append(Drafter(DrafterConfig(correction=correction), small))
    layer, head, recurrent = (drafter.correction for drafter in sizes)
    assert abs(sizes[1].parameter_counts()["correction"] - sizes[0].parameter_counts()["correction"]) <= (151_936 + 8192) / 2
    assert head.rank == recurrent.rank and layer.attn.q_proj.weight.shape == (2048, 1024)


def test_a_size_draws_no_random_numbers() -> None:
    """The layer is counted without being made: the weights of a head of this size are those of its rank."""
    tiny = Shape(
        hidden_size=32, num_heads=4, kv_heads=2, head_dim=8, intermediate_size=64, rms_norm_eps=1e-6, vocab_size=64, draft_vocab_size=64,
        num_taps=2,
    )  # fmt: skip
    rank = markov.rank_for(markov.Config(size=1), tiny)
    tables = []
    for options in ({"size": 1}, {"rank": rank}):
        torch.manual_seed(0)
        tables.append(markov.Component(markov.Config(**options), tiny).markov_w1.weight)
    assert rank > 1 and torch.equal(*tables)
