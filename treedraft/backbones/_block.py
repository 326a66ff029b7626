"""The block-parallel transformer of DFlash and JetSpec; its subclasses differ in who sees whom inside the block alone.

Section numbers in this file are those of the DFlash network: context features enter every layer as keys and values
through that layer's own projections, are never updated and never query; positions are absolute.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from treedraft.ops.layers import MLP, Attention, RMSNorm, Shape, block_attention
from treedraft.ops.memory import Rotary, Rows, Seen


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Sizes left None are the target's. `norm` before the head: trained with the backbone, or the target's own."""

    num_layers: int = 5
    num_heads: int | None = None
    kv_heads: int | None = None
    intermediate_size: int | None = None
    norm: Literal["own", "target"] = "own"

    def __post_init__(self) -> None:
        if self.num_layers < 1:
            raise ValueError(f"backbone.num_layers is {self.num_layers}; at least 1")

    def apply(self, shape: Shape) -> Shape:
        return replace(
            shape,
            num_heads=self.num_heads or shape.num_heads,
            kv_heads=self.kv_heads or shape.kv_heads,
            intermediate_size=self.intermediate_size or shape.intermediate_size,
        )


class DraftLayer(nn.Module):
    """A pre-norm Qwen3 decoder layer whose attention also reads the context."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape.hidden_size, shape.intermediate_size)
        self.input_layernorm = RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        seen: Seen,
        layer: int,
        block_mask: Tensor,
    ) -> Tensor:
        attention, normed = self.self_attn, self.input_layernorm(x)
        queries, keys, values = attention.project(normed, *rotary)
        summary = seen.summaries[layer] if seen.summaries is not None else None
        x = x + attention.o_proj(
            block_attention(
                queries, seen.keys[layer], seen.values[layer], keys, values, seen.visible, block_mask, summary
            )
        )
        return x + self.mlp(self.post_attention_layernorm(x))


class BlockBackbone(nn.Module, ABC):
    """[anchor, MASK, ...] blocks of any number of slots -> hidden states, one per slot, after the final norm.

    Where that norm is the target's (`norm` is None) the caller applies it.
    """

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__()
        self.config = config
        self.shape = config.apply(shape)
        self.layers = nn.ModuleList(DraftLayer(self.shape) for _ in range(config.num_layers))
        self.norm = RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps) if config.norm == "own" else None

    @abstractmethod
    def block_mask(self, num_slots: int, device: torch.device) -> Tensor:
        """bool [B, B]: row i is true where slot i sees slot j."""

    def remember(self, features: Tensor, positions: Tensor, rotary: Rotary) -> Rows:
        """Keys and values of context features [S, T, H] at absolute positions [S, T] or [T], for every layer."""
        cosine, sine = rotary(positions)
        attentions: list[Attention] = [layer.self_attn for layer in self.layers]  # pyright: ignore
        return Rows(
            keys=[attention.keys(features, cosine, sine) for attention in attentions],
            values=[attention.values(features) for attention in attentions],
        )

    def forward(self, inputs: Tensor, anchors: Tensor, seen: Seen, rotary: Rotary) -> Tensor:
        """Blocks [S, A, B, H] whose slot 0 sits at absolute position anchors [S, A] -> hidden [S, A, B, H]."""
        num_slots = inputs.shape[2]
        positions = anchors.unsqueeze(-1) + torch.arange(num_slots, device=anchors.device)
        cosine_sine = rotary(positions)
        mask = self.block_mask(num_slots, inputs.device)
        assert len(seen.keys) == len(self.layers), "a context remembers something for every layer"
        for number, layer in enumerate(self.layers):
            inputs = layer(inputs, cosine_sine, seen, number, mask)
        return self.norm(inputs) if self.norm is not None else inputs
