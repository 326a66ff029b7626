"""The parts of a Qwen3 decoder layer that drafters are built from, with the parameter names of published drafters.

Sizes: S sequences, A blocks a sequence, B slots a block, T context rows, H hidden, h query heads, k key-value heads,
g = h / k, d head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from treedraft.ops.memory import Summary


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a drafter inherits from its target: widths, heads, layers, vocabulary."""

    hidden_size: int
    num_heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    vocab_size: int
    draft_vocab_size: int
    num_taps: int

    def __post_init__(self) -> None:
        if self.num_heads % self.kv_heads:
            raise ValueError(f"{self.num_heads} query heads do not divide into {self.kv_heads} key-value heads")


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary position embedding, halves convention (Llama, Qwen3): x [..., heads, d], cosine and sine [..., d].

    Computed in the wider type of both, returned in that of x: angles are float32 where x is half precision.
    """
    first, second = x.chunk(2, dim=-1)
    rotated = torch.cat((-second, first), dim=-1)
    return (x * cosine.unsqueeze(-2) + rotated * sine.unsqueeze(-2)).to(x.dtype)


class RMSNorm(nn.RMSNorm):
    """torch's, in the type of its input: under autocast a weight of another type would cost the fused kernel."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


def rms_norm(x: Tensor, eps: float) -> Tensor:
    """Root-mean-square normalisation over the last axis, without parameters."""
    return torch.rms_norm(x, (x.shape[-1],), eps=eps)


class Attention(nn.Module):
    """Projections of grouped-query attention with normalised queries and keys; who attends to what is the caller's."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.num_heads, self.kv_heads, self.head_dim = shape.num_heads, shape.kv_heads, shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, shape.num_heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * shape.head_dim, shape.hidden_size, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, eps=shape.rms_norm_eps)
        self.k_norm = RMSNorm(shape.head_dim, eps=shape.rms_norm_eps)

    def project(self, x: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[..., H] -> queries [..., h, d], normalised, rotated and scaled by 1 / sqrt(d), and keys and values."""
        heads = self.num_heads, self.kv_heads
        both = torch.cat((self._normed_queries(x), self._normed_keys(x)), dim=-2)
        queries, keys = rotate(both, cosine, sine).split(heads, dim=-2)
        return queries * self.head_dim**-0.5, keys, self.values(x)

    def keys(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """[..., H] -> [..., k, d], normalised and rotated."""
        return rotate(self._normed_keys(x), cosine, sine)

    def values(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., k, d]."""
        return self.v_proj(x).unflatten(-1, (self.kv_heads, self.head_dim))

    def _normed_queries(self, x: Tensor) -> Tensor:
        return self.q_norm(self.q_proj(x).unflatten(-1, (self.num_heads, self.head_dim)))

    def _normed_keys(self, x: Tensor) -> Tensor:
        return self.k_norm(self.k_proj(x).unflatten(-1, (self.kv_heads, self.head_dim)))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)), no biases."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


_FEW = 2**19  # numbers in the keys of a context; so many are copied in less time than a second softmax's parts take


def block_attention(
    queries: Tensor,
    context_keys: Tensor,
    context_values: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor | None,
    block_mask: Tensor,
    summary: Summary | None = None,
) -> Tensor:
    """One softmax over the context rows a block may see, the slots of the block itself and a summary's entries.

    queries [S, A, B, h, d] (scaled), context_* [S, T, k, d], keys and values [S, A, B, k, d]; visible [S, A, T] says
    which context rows block (s, a) sees (None: all), block_mask [B, B] which slots each slot sees. Returns [S, A, B, h * d].
    Context keys are shared by all blocks of a sequence, so nothing of size A x T x d is ever built.
    """
    num_seqs, num_blocks, num_slots, num_heads, head_dim = queries.shape
    if num_blocks == 1 and visible is None and summary is None and context_keys.numel() <= _FEW:
        return _one_block(queries, context_keys, context_values, keys, values, block_mask)
    kv_heads, length = keys.shape[3], context_keys.shape[1]
    groups = num_heads // kv_heads
    # [S, A, B, k, g, d] -> [S, k, A, g, B, d]
    q = queries.unflatten(3, (kv_heads, groups)).permute(0, 3, 1, 4, 2, 5)
    far = q.reshape(num_seqs, kv_heads, -1, head_dim) @ context_keys.permute(0, 2, 3, 1)
    far = far.view(num_seqs, kv_heads, num_blocks, groups * num_slots, length)
    if visible is not None:
        far = far.masked_fill(~visible[:, None, :, None, :], float("-inf"))
    entries = _summary_scores(q, summary) if summary is not None else []
    q = q.reshape(num_seqs, kv_heads, num_blocks, groups * num_slots, head_dim)
    near = q @ keys.permute(0, 3, 1, 4, 2)
    near = near.masked_fill(~block_mask.repeat(groups, 1), float("-inf"))
    weights = torch.cat([far, near, *entries], dim=-1).softmax(-1)
    far, near, entry = weights.split([length, num_slots, weights.shape[-1] - length - num_slots], dim=-1)
    mixed = far.flatten(2, 3) @ context_values.transpose(1, 2)
    mixed = mixed.view_as(q) + near @ values.permute(0, 3, 1, 2, 4)
    mixed = mixed.view(num_seqs, kv_heads, num_blocks, groups, num_slots, head_dim)
    if summary is not None:
        # [S, A, h, R, d] -> [S, k, A, g, R, d]
        own = summary.values.unflatten(2, (kv_heads, groups)).permute(0, 2, 1, 3, 4, 5).to(mixed.dtype)
        mixed = mixed + entry.unflatten(3, (groups, num_slots)) @ own
    return mixed.permute(0, 2, 4, 1, 3, 5).flatten(3)


def _one_block(queries: Tensor, context_keys: Tensor, context_values: Tensor, keys: Tensor, values: Tensor, block_mask: Tensor) -> Tensor:
    """The same for a block a sequence that sees a whole context of few rows: they are put beside the block's own."""
    k, v = (torch.cat((far, near[:, 0]), dim=1).transpose(1, 2) for far, near in ((context_keys, keys), (context_values, values)))
    mask = nn.functional.pad(block_mask, (context_keys.shape[1], 0), value=True)
    mixed = nn.functional.scaled_dot_product_attention(
        queries[:, 0].transpose(1, 2), k, v, attn_mask=mask, scale=1.0, enable_gqa=True
    )
    return mixed.transpose(1, 2).flatten(2)[:, None]


def _summary_scores(q: Tensor, summary: Summary) -> list[Tensor]:
    """[S, k, A, g * B, R] of queries [S, k, A, g, B, d]; a list, to be put beside the other scores."""
    keys = summary.keys.to(q.dtype).unflatten(0, (q.shape[1], 1, q.shape[3]))  # [k, 1, g, R, d]
    scores = (q @ keys.transpose(-1, -2)).flatten(3, 4)
    return [scores.masked_fill(~summary.known[:, None, :, None, None], float("-inf"))]
