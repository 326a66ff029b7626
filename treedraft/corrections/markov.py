"""DSpark's low-rank Markov heads: a bias on the logits, b = W2 e with e = W1[parent token] of rank r.

vanilla reads the parent alone: two nodes with one parent token get one bias. gated lets the slot's hidden state weigh
e; rnn carries a state of rank r along the branch (DSpark 2.2). W2 starts at zero, so a new head changes nothing.

`size` gives the rank in parameters: W1 and W2 together have so many times those of the fused attention correction of the
same target, so that one grid file compares both at matched size on any target.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

import numpy as np
import torch
from torch import Tensor, nn

from treedraft.corrections import attention
from treedraft.corrections._seam import Borrowed, Correction, Lanes, Map, State, select
from treedraft.ops.layers import Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A rank of its own, or one that follows from `size`; DSpark's 256 where neither is set."""

    variant: Literal["vanilla", "gated", "rnn"] = "vanilla"
    rank: int | None = None
    size: float | None = None

    def __post_init__(self) -> None:
        if self.rank is not None and self.rank < 1:
            raise ValueError(f"correction.rank is {self.rank}; at least 1")
        if self.size is not None and self.size <= 0:
            raise ValueError(f"correction.size is {self.size}; a positive number of attention layers")
        if self.rank is not None and self.size is not None:
            raise ValueError(f"correction.rank is {self.rank} and correction.size {self.size}: a size has its rank; set one of them")


def rank_for(config: Config, shape: Shape) -> int:
    """r such that W1 [V, r] and W2 [V', r] have about `size` times the parameters of the fused attention correction."""
    if config.size is None:
        return 256 if config.rank is None else config.rank
    with torch.device("meta"):
        layer = attention.Component(attention.Config(), shape)
    parameters = sum(weight.numel() for weight in layer.parameters())
    return max(1, round(config.size * parameters / (shape.vocab_size + shape.draft_vocab_size)))


@final
class MarkovState(State):
    """Base logits of all slots, and for rnn one state [R * capacity, r] an expansion."""

    def __init__(self, head: Component, hidden: Tensor, borrowed: Borrowed) -> None:
        self.head, self.hidden = head, hidden
        self.base_logits = borrowed.head(hidden)
        self.memory = hidden.new_zeros((0, head.rank))

    def reserve(self, capacity: int) -> None:
        if self.head.config.variant == "rnn":
            # The extra last row is what -1 (the root's parent) reads: a state of zeros.
            self.memory = self.hidden.new_zeros((len(self.hidden) * capacity + 1, self.head.rank))

    def step(self, lanes: Lanes) -> Tensor:
        return self.base_logits[lanes.request, lanes.slot] + self.head.markov_w2(self._embed(lanes))

    def step_among(self, lanes: Lanes, columns: Tensor) -> Tensor:
        base = self.base_logits[lanes.request[:, None], lanes.slot[:, None], columns]
        return base + torch.einsum("lr,lmr->lm", self._embed(lanes), self.head.markov_w2.weight[columns])

    def guess(self, anchor: Tensor, depth: int, token_ids: Map) -> Tensor | None:
        logits = self.base_logits
        if self.head.config.variant != "vanilla" or not logits.is_cpu or logits.dtype not in (torch.float32, torch.float64):
            return None
        # A step of one row is some microseconds of work, of which torch would make several times as many.
        first, second, base = (values.detach().numpy() for values in (self.head.markov_w1.weight, self.head.markov_w2.weight, logits))
        ids, path = token_ids(torch.arange(len(second))).numpy(), [anchor.numpy()]
        for slot in range(depth - 1):
            path.append(ids[(first[path[-1]] @ second.T + base[:, slot]).argmax(1)])
        return torch.from_numpy(np.stack(path, 1))

    def _embed(self, lanes: Lanes) -> Tensor:
        """What W2 reads, [L, r]; stores the lanes' states."""
        embedded = self.head.markov_w1(lanes.token)
        if self.head.config.variant == "gated":
            embedded = self.head.gate(self.hidden[lanes.request, lanes.slot], embedded)
        elif self.head.config.variant == "rnn":
            state = self.memory[lanes.parent]
            hidden = self.hidden[lanes.request, lanes.slot]
            embedded, self.memory[lanes.expansion] = self.head.recur(state, embedded, hidden)
        return embedded


@final
class Component(Correction):
    """Shapes as stored by DSpark: markov_w1 [V, r], markov_w2 [V', r].

    gate_proj reads [hidden, e], joint_proj [state, e, hidden].
    """

    def __init__(self, config: Config, shape: Shape) -> None:
        super().__init__()
        self.config, self.rank = config, rank_for(config, shape)
        rank, hidden = self.rank, shape.hidden_size
        self.markov_w1 = nn.Embedding(shape.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, shape.draft_vocab_size, bias=False)
        nn.init.zeros_(self.markov_w2.weight)
        if config.variant == "gated":
            self.gate_proj = nn.Linear(hidden + rank, rank)
        elif config.variant == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)

    def forward(self, hidden: Tensor, previous: Tensor, borrowed: Borrowed, supervised: Tensor | None = None) -> Tensor:
        embedded = self.markov_w1(previous)
        if self.config.variant == "gated":
            embedded = self.gate(hidden, embedded)
        elif self.config.variant == "rnn":
            embedded = self._unroll(embedded, hidden)
        return borrowed.head(select(hidden, supervised)) + self.markov_w2(select(embedded, supervised))

    def start(self, hidden: Tensor, borrowed: Borrowed) -> MarkovState:
        return MarkovState(self, hidden, borrowed)

    def gate(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        return torch.sigmoid(self.gate_proj(torch.cat([hidden, embedded], dim=-1))) * embedded

    def recur(self, state: Tensor, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(output, new state), each [..., r]; the output reads the old state."""
        gate, candidate, output = self.joint_proj(torch.cat([state, embedded, hidden], dim=-1)).chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        return torch.tanh(output), gate * state + (1 - gate) * torch.tanh(candidate)

    def _unroll(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        state, outputs = torch.zeros_like(embedded[..., 0, :]), []
        for slot in range(embedded.shape[-2]):
            output, state = self.recur(state, embedded[..., slot, :], hidden[..., slot, :])
            outputs.append(output)
        return torch.stack(outputs, dim=-2)
