"""Muon (Jordan et al. 2024; Liu et al., arXiv 2502.16982) in the arithmetic that a device is fast at.

torch's Newton-Schulz iteration computes in bfloat16 everywhere, one matrix at a time. A processor without instructions for
bfloat16 takes a hundred times as long for such products as for those in float32, which made it nine tenths of a training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


class Muon(torch.optim.Muon):
    """torch's optimiser, its state and its rule for the learning rate (that of AdamW, "match_rms_adamw"), with the updates
    of all matrices of a shape orthogonalised at once: in float32 on a CPU, on every other device in bfloat16, like torch's."""

    def __init__(self, matrices: Iterable[Tensor], *, lr: float, weight_decay: float) -> None:
        super().__init__(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            alike: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = {}
            for matrix in group["params"]:
                if matrix.grad is not None:
                    alike.setdefault(tuple(sorted(matrix.shape)), []).append((matrix, self._moved(matrix, matrix.grad, group)))
            for pairs in alike.values():
                _update([matrix for matrix, _ in pairs], [moved for _, moved in pairs], group)
        return loss

    def _moved(self, matrix: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        """The gradient with Nesterov's momentum."""
        state, momentum = self.state[matrix], group["momentum"]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(matrix)
        return gradient.lerp(state["momentum_buffer"].lerp_(gradient, 1 - momentum), momentum)


def _update(matrices: Sequence[Tensor], gradients: Sequence[Tensor], group: dict[str, Any]) -> None:
    """Step matrices of one shape, some of them transposed."""
    dtype = torch.float32 if matrices[0].device.type == "cpu" else torch.bfloat16
    wide = torch.stack([gradient.T if gradient.shape[0] > gradient.shape[1] else gradient for gradient in gradients])
    directions = orthogonalised(wide.to(dtype), group["ns_coefficients"], group["ns_steps"], group["eps"])
    for matrix, direction in zip(matrices, directions, strict=True):
        matrix.mul_(1 - group["lr"] * group["weight_decay"])
        direction = direction if matrix.shape == direction.shape else direction.T
        matrix.add_(direction, alpha=-group["lr"] * 0.2 * math.sqrt(max(matrix.shape)))


def orthogonalised(matrices: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Wide matrices [B, m, n], m <= n, with their singular values brought near 1 by `steps` of the quintic iteration
    X <- a X + (b A + c A A) X, A = X X^T."""
    a, b, c = coefficients
    wide = matrices / torch.linalg.matrix_norm(matrices, keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = wide @ wide.mT
        wide = torch.baddbmm(wide, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide
