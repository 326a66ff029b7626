"""Every outcome of a random procedure with its exact probability: its decisions are replayed along all branches."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import TypeVar

from torch import Tensor

Result = TypeVar("Result", bound=Hashable)


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
