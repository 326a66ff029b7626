"""The attention-only correction of JetSpec++: one causal attention over a branch's slots revises each hidden state.

x_i is the layer's input at slot i: the backbone's hidden state, the embedding of the token before it, their sum, or a
learned fusion of both. h'_i = h_i + Wo Attn(x_i; x_1..x_i of this branch), then optionally h'_i += MLP(norm(h'_i)), and
the head gives fresh logits. Wo (and the MLP's down projection) start at zero, so a new layer changes nothing. There is
no context inside the layer, so positions count from the block's first draft.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor, nn

from treedraft.corrections._seam import Borrowed, Correction, Lanes, State, select
from treedraft.ops.layers import MLP, Attention, Shape, rms_norm


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    inputs: Literal["hidden", "parent", "sum", "fused"] = "fused"
    mlp: bool = False


@final
class AttentionState(State):
    """Key and value of every expansion, [R * capacity, 2, k, d], and of its branch the rows [R * capacity, D]."""

    def __init__(self, layer: Component, hidden: Tensor, borrowed: Borrowed) -> None:
        self.layer, self.hidden, self.borrowed = layer, hidden, borrowed
        self.normed = rms_norm(hidden, layer.eps)
        self.slots = torch.arange(hidden.shape[1], device=hidden.device)
        self.cosine, self.sine = borrowed.rotary(self.slots)

    def reserve(self, capacity: int) -> None:
        rows, attention = len(self.hidden) * capacity, self.layer.attn
        self.rows = self.hidden.new_zeros((rows, 2, attention.kv_heads, attention.head_dim))
        # Slots a branch has not reached point at row 0 and are masked. The extra last row is what the root's parent
        # reads.
        self.branch = torch.zeros((rows + 1, self.hidden.shape[1]), dtype=torch.int64, device=self.hidden.device)

    def step(self, lanes: Lanes) -> Tensor:
        return self.borrowed.head(self._revise(lanes))

    def step_among(self, lanes: Lanes, columns: Tensor) -> Tensor:
        return torch.einsum("lh,lmh->lm", self._revise(lanes), self.borrowed.head_rows(columns))

    def _revise(self, lanes: Lanes) -> Tensor:
        """Hidden states [L, H] of the lanes' slots, revised under their branches."""
        layer, attention = self.layer, self.layer.attn
        place = lanes.request, lanes.slot
        rotary = self.cosine[lanes.slot], self.sine[lanes.slot]
        x = layer.inputs(self.normed[place], lanes.token, self.borrowed)
        queries, keys, values = attention.project(x, *rotary)
        queries = queries.unflatten(1, (attention.kv_heads, -1))  # [L, k, g, d]
        self.rows[lanes.expansion] = torch.stack((keys, values), dim=1)
        own, slot = lanes.expansion.unsqueeze(1), lanes.slot.unsqueeze(1)
        branch = torch.where(self.slots == slot, own, self.branch[lanes.parent])
        self.branch[lanes.expansion] = branch
        seen = slice(lanes.reach)
        keys, values = self.rows[branch[:, seen]].permute(2, 0, 3, 1, 4)  # each [L, k, reach, d]
        scores = (queries @ keys.mT).masked_fill((self.slots[seen] > slot)[:, None, None], float("-inf"))
        mixed = scores.softmax(-1) @ values
        return layer.revise(self.hidden[place], attention.o_proj(mixed.flatten(1)))


@final
class Component(Correction):
    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__()
        self.config, self.eps = config, shape.rms_norm_eps
        self.attn = Attention(shape)
        nn.init.zeros_(self.attn.o_proj.weight)
        if config.inputs == "fused":
            self.fusion = nn.Linear(2 * shape.hidden_size, shape.hidden_size, bias=False)
        if config.mlp:
            self.mlp = MLP(shape.hidden_size, shape.intermediate_size)
            nn.init.zeros_(self.mlp.down_proj.weight)

    def forward(self, hidden: Tensor, previous: Tensor, borrowed: Borrowed, supervised: Tensor | None = None) -> Tensor:
        attention, depth = self.attn, hidden.shape[-2]
        rotary = borrowed.rotary(torch.arange(depth, device=hidden.device))
        x = self.inputs(rms_norm(hidden, self.eps), previous, borrowed)
        queries, keys, values = attention.project(x, *rotary)
        queries = queries.unflatten(2, (attention.kv_heads, -1))  # [N, D, k, g, d]
        scores = torch.einsum("nikgd,njkd->nkgij", queries, keys)
        later = torch.ones((depth, depth), dtype=torch.bool, device=hidden.device).triu(1)
        weights = scores.masked_fill(later, float("-inf")).softmax(-1)
        mixed = torch.einsum("nkgij,njkd->nikgd", weights, values).flatten(2)
        return borrowed.head(self.revise(select(hidden, supervised), attention.o_proj(select(mixed, supervised))))

    def start(self, hidden: Tensor, borrowed: Borrowed) -> AttentionState:
        return AttentionState(self, hidden, borrowed)

    def inputs(self, normed: Tensor, previous: Tensor, borrowed: Borrowed) -> Tensor:
        """x [..., H] from the normalised hidden states [..., H] and the tokens before [...].

        Each part is normalised on its own, since their scales differ.
        """
        parts = []
        if self.config.inputs != "parent":
            parts.append(normed)
        if self.config.inputs != "hidden":
            parts.append(rms_norm(borrowed.embed(previous).to(normed.dtype), self.eps))
        if self.config.inputs == "fused":
            return self.fusion(torch.cat(parts, dim=-1))
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]

    def revise(self, hidden: Tensor, attended: Tensor) -> Tensor:
        hidden = hidden + attended
        return hidden + self.mlp(rms_norm(hidden, self.eps)) if self.config.mlp else hidden
