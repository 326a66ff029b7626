"""The optimiser of matrices: torch's own up to the rounding of its bfloat16, every matrix as if it were alone."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from treedraft.muon import Muon, orthogonalised

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
SHAPES = ((24, 16), (16, 24), (16, 16), (16, 24))


def weights(seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def train(matrices: list[nn.Parameter], optimizer: torch.optim.Optimizer, steps: int) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for matrix in matrices:
            matrix.grad = torch.randn(matrix.shape, generator=generator)
        optimizer.step()


def test_steps_are_those_of_torch_up_to_its_rounding() -> None:
    ours, theirs = weights(), weights()
    train(ours, Muon(ours, lr=0.02, weight_decay=0.1), steps=5)
    train(theirs, torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"), steps=5)
    short = weights()
    train(short, Muon(short, lr=0.02, weight_decay=0.1), steps=4)
    for mine, its, fewer, start in zip(ours, theirs, short, weights(), strict=True):
        moved = (its - start).detach().norm()
        assert (mine - its).norm() < 0.02 * moved, "bfloat16 has eight bits"
        assert (fewer - its).norm() > 0.1 * moved, "and a step less is farther away"


def test_matrices_of_a_shape_do_not_see_each_other() -> None:
    """Together, transposed or not, and alone: the same step."""
    together = weights()
    train(together, Muon(together, lr=0.02, weight_decay=0.1), steps=1)
    alone = weights()
    for matrix, gradient in zip(alone, [matrix.grad for matrix in together], strict=True):
        matrix.grad = gradient
        Muon([matrix], lr=0.02, weight_decay=0.1).step()
    for mine, other in zip(together, alone, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)


def test_the_iteration_is_its_definition_and_nears_one() -> None:
    matrices = torch.randn((3, 8, 20), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = orthogonalised(matrices, COEFFICIENTS, 5, 1e-7)
    for matrix, direction in zip(matrices, found, strict=True):
        torch.testing.assert_close(direction, naive(matrix))
        values = torch.linalg.svdvals(direction)
        assert float(values.min()) > 0.6 and float(values.max()) < 1.3
    zero = torch.zeros((1, 8, 20))
    assert not orthogonalised(zero, COEFFICIENTS, 5, 1e-7).any(), "a matrix without a gradient stays"


def naive(matrix: Tensor) -> Tensor:
    """The quintic applied to the singular values."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / values.norm()
    a, b, c = COEFFICIENTS
    for _ in range(5):
        values = a * values + b * values**3 + c * values**5
    return left @ torch.diag(values) @ right


def test_it_goes_on_from_torchs_own_state() -> None:
    """A checkpoint of one is a checkpoint of the other."""
    first = weights()
    theirs = torch.optim.Muon(first, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    train(first, theirs, steps=2)
    other = copy.deepcopy(first)
    ours = Muon(other, lr=0.02, weight_decay=0.1)
    ours.load_state_dict(theirs.state_dict())
    train(first, theirs, steps=1)
    train(other, ours, steps=1)
    for mine, its in zip(other, first, strict=True):
        assert (mine - its).norm() < 0.02 * its.norm()
        torch.testing.assert_close(ours.state[mine]["momentum_buffer"], theirs.state[its]["momentum_buffer"])
