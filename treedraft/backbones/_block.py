"""The block-parallel transformer of DFlash and JetSpec; its subclasses differ in who sees whom inside the block alone.

Section numbers in this file are those of the DFlash network: context features enter every layer as keys and values
through that layer's own projections, are never updated and never query; positions are absolute.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from treedraft.ops.layers import MLP, Attention, RMSNorm, Shape, block_attention

Rotary = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Sizes left None are the target's."""

    num_layers: int = 5
    num_heads: int | None = None
    kv_heads: int | None = None
    intermediate_size: int | None = None

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The prefix as the draft layers see it: keys and values [S, T, k, d] of every layer, rows ordered by position."""

    keys: list[Tensor]
    values: list[Tensor]

    def rows(self, rows: Tensor) -> Memory:
        """Of some sequences alone, in this order."""
        return Memory(keys=[keys[rows] for keys in self.keys], values=[values[rows] for values in self.values])


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
        context: tuple[Tensor, Tensor],
        visible: Tensor,
        block_mask: Tensor,
    ) -> Tensor:
        attention, normed = self.self_attn, self.input_layernorm(x)
        queries, keys, values = attention.project(normed, *rotary)
        x = x + attention.o_proj(block_attention(queries, *context, keys, values, visible, block_mask))
        return x + self.mlp(self.post_attention_layernorm(x))


class BlockBackbone(nn.Module, ABC):
    """[anchor, MASK, ...] blocks of any number of slots -> hidden states after the final norm, one per slot."""

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__()
        self.config = config
        self.shape = config.apply(shape)
        self.layers = nn.ModuleList(DraftLayer(self.shape) for _ in range(config.num_layers))
        self.norm = RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)

    @abstractmethod
    def block_mask(self, num_slots: int, device: torch.device) -> Tensor:
        """bool [B, B]: row i is true where slot i sees slot j."""

    def remember(self, features: Tensor, positions: Tensor, rotary: Rotary) -> Memory:
        """Keys and values of context features [S, T, H] at absolute positions [S, T] or [T], for every layer."""
        cosine, sine = rotary(positions)
        attentions: list[Attention] = [layer.self_attn for layer in self.layers]  # pyright: ignore
        return Memory(
            keys=[attention.keys(features, cosine, sine) for attention in attentions],
            values=[attention.values(features) for attention in attentions],
        )

    def forward(self, embedded: Tensor, anchors: Tensor, memory: Memory, visible: Tensor, rotary: Rotary) -> Tensor:
        """Blocks [S, A, B, H] whose slot 0 sits at absolute position anchors [S, A] -> hidden [S, A, B, H].

        visible [S, A, T]: the context rows that block (s, a) may see (those strictly before its anchor).
        """
        num_slots = embedded.shape[2]
        positions = anchors.unsqueeze(-1) + torch.arange(num_slots, device=anchors.device)
        cosine_sine = rotary(positions)
        mask = self.block_mask(num_slots, embedded.device)
        for layer, keys, values in zip(self.layers, memory.keys, memory.values, strict=True):
            embedded = layer(embedded, cosine_sine, (keys, values), visible, mask)
        return self.norm(embedded)
