"""Every outcome of a random procedure with its exact probability: its decisions are replayed along all branches.

And the laws of table models, which is what such probabilities are held against.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result", bound=Hashable)
Laws = Callable[[tuple[int, ...]], Tensor]  # tokens so far -> law [V] of the next


class Tape:
    """Dice that make the decisions of a script, and the first possible one after its end."""

    def __init__(self, script: list[object]) -> None:
        self.script, self.taken, self.weight = script, [], 1.0
        self.others: list[list[object]] = []  # at every decision, what else was possible

    def chance(self, probability: float) -> bool:
        yes = min(1.0, max(0.0, probability))
        return bool(self._decide({True: yes, False: 1.0 - yes}))

    def pick(self, law: Tensor) -> int:
        assert abs(float(law.sum()) - 1) < 1e-9 and float(law.min()) >= 0, "not a law"
        return int(str(self._decide(dict(enumerate(law.tolist())))))

    def _decide(self, options: dict) -> object:
        possible = [option for option, probability in options.items() if probability > 0]
        place = len(self.taken)
        choice = self.script[place] if place < len(self.script) else possible[0]
        self.taken.append(choice)
        self.others.append([option for option in possible if option != choice])
        self.weight *= options[choice]
        return choice


def outcomes(run: Callable[[Tape], Result]) -> Iterator[tuple[Result, float]]:
    """Pairs of a result of `run` and its probability; equal results may come several times."""
    scripts: list[list[object]] = [[]]
    while scripts:
        tape = Tape(scripts.pop())
        yield run(tape), tape.weight
        for place in range(len(tape.script), len(tape.taken)):
            scripts += [[*tape.taken[:place], other] for other in tape.others[place]]


def law_of(run: Callable[[Tape], Result]) -> dict[Result, float]:
    law: dict[Result, float] = {}
    for result, weight in outcomes(run):
        law[result] = law.get(result, 0.0) + weight
    return law


def laws(vocab: int, seed: int, *, zeros: bool = False, greedy: bool = False) -> Laws:
    """A random law a history; with `zeros` some ids cannot be, with `greedy` all but one."""

    @functools.cache
    def law(path: tuple[int, ...]) -> Tensor:
        row = 1 + seed
        for token in path:
            row = (row * 1_000_003 + token + 1) % (2**31 - 1)
        generator = torch.Generator().manual_seed(row)
        logits = 1.5 * torch.randn(vocab, generator=generator, dtype=torch.float64)
        if zeros:
            hole = torch.rand(vocab, generator=generator) < 0.4
            hole[int(torch.randint(vocab, (), generator=generator))] = False
            logits = logits.masked_fill(hole, -torch.inf)
        return torch.eye(vocab, dtype=torch.float64)[int(logits.argmax())] if greedy else logits.softmax(-1)

    return law


def distance(p: Laws, vocab: int, length: int, verify: Callable[[Tape], tuple[int, ...]]) -> float:
    """Largest error of the law of the first `length` tokens, what a round did not emit drawn plainly after it."""

    def run(dice: Tape) -> tuple[int, ...]:
        emitted = verify(dice)
        while len(emitted) < length:
            emitted = (*emitted, dice.pick(p(emitted)))
        return emitted[:length]

    got = law_of(run)
    errors = []
    for path in itertools.product(range(vocab), repeat=length):
        expected = 1.0
        for place, token in enumerate(path):
            expected *= float(p(path[:place])[token])
        errors.append(abs(got.get(path, 0.0) - expected))
    return max(errors)
