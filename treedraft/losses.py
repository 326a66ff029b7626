"""Training objectives, row by row: draft logits [M, V] against the target's token and its law over draft tokens.

The target's law is softmax of its logits at the draft columns (its tail outside a reduced draft vocabulary is left out,
as EAGLE-3 does). Rows are weighted and summed by the caller, so that any split of a batch gives the same gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CE_SHARE, L1_SHARE = 0.1, 0.9  # DSpark 2.4; its L1 is the raw sum of |q - p|, in 0..2


def ce(draft_logits: Tensor, labels: Tensor) -> Tensor:
    """-log q(label), [M]; labels are draft columns."""
    return torch.nn.functional.cross_entropy(_wide(draft_logits), labels, reduction="none")


def forward_kl(draft_logits: Tensor, target_logits: Tensor) -> Tensor:
    """KL(p || q), [M] (JetSpec 1.4 at distillation temperature 1)."""
    return _ForwardKL.apply(draft_logits, target_logits)  # pyright: ignore


def dspark(draft_logits: Tensor, target_logits: Tensor, labels: Tensor) -> Tensor:
    """0.1 CE + 0.9 L1, [M] (DSpark 2.4, without its confidence term)."""
    draft = torch.softmax(_wide(draft_logits), -1)
    distance = (draft - torch.softmax(_wide(target_logits), -1)).abs().sum(-1)
    return CE_SHARE * ce(draft_logits, labels) + L1_SHARE * distance


def position_weights(depth: int, decay: float | None, device: torch.device) -> Tensor:
    """exp(-(k - 1) / decay) for k = 1..depth, or ones: [D]."""
    positions = torch.arange(depth, device=device)
    return torch.ones(depth, device=device) if decay is None else torch.exp(-positions / decay)


def _wide(logits: Tensor) -> Tensor:
    """In float32, or in float64 where they are."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


class _ForwardKL(torch.autograd.Function):
    """Keeps q - p from the forward pass, which is the whole gradient: one read of the logits instead of three."""

    @staticmethod
    def forward(ctx: Any, draft_logits: Tensor, target_logits: Tensor) -> Tensor:
        ctx.dtype = draft_logits.dtype
        draft_logits, target_logits = _wide(draft_logits), _wide(target_logits)
        # softmax, not exp of log_softmax: exp is some twenty times slower where its result underflows.
        target = torch.softmax(target_logits, -1)
        log_ratio = torch.log_softmax(target_logits, -1).sub_(torch.log_softmax(draft_logits, -1))
        divergence = (target * log_ratio).sum(-1)
        ctx.save_for_backward(torch.softmax(draft_logits, -1).sub_(target))
        return divergence

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (difference,) = ctx.saved_tensors
        return (difference * gradients[0].unsqueeze(-1)).to(ctx.dtype), None
