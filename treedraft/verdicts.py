"""Published claims held against measured cells: reproduced, refuted, or not resolved with so many prompts.

`claims.toml` says what was published and which two cells ask the same here; every number comes from the grids' CSV files.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, with_config

from treedraft.config import parse, read_toml
from treedraft.metrics import Interval
from treedraft.report import MARGIN, Arm, Study, Table, compare, known_grids, load_study


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """`first` and `second` are a label and a decode depth. "more": the first has the larger tau; "same": by less than `within`."""

    claim: str
    published: str
    grid: str
    first: tuple[str, int]
    second: tuple[str, int]
    expect: Literal["more", "same"] = "more"
    within: float = 0.0

    def __post_init__(self) -> None:
        if (self.expect == "same") != (self.within > 0):
            raise ValueError(f"claim {self.claim!r}: within is {self.within}; above 0 where \"same\" is expected, and only there")

    def verdict(self, difference: Interval) -> str:
        """Of the interval alone: no part of it may contradict a claim that is called reproduced, or agree with a refuted one.

        A lead counts from MARGIN tokens on.
        """
        low, high = difference.low, difference.high
        if self.expect == "more":
            return "reproduced" if low > 0 and difference.value >= MARGIN else "refuted" if high < MARGIN else "not resolved"
        if -self.within < low and high < self.within:
            return "reproduced"
        return "refuted" if low > self.within or high < -self.within else "not resolved"


def load_claims(path: Path) -> list[Claim]:
    """ValueError names the file and the key that is wrong."""
    return [parse(Claim, values, where=f"{path} [[claims]]") for values in read_toml(path).get("claims", [])]


def verdict_table(path: Path, folder: Path) -> Table:
    """A row a claim and mode, of the grids in `folder`, at temperature 0 as published where a grid has it.

    A claim whose grid has no results is "not run". ValueError if results lack a cell.
    """
    studies: dict[str, Study] = {}
    rows, sources = [], []
    for claim in load_claims(path):
        if claim.grid not in known_grids(folder):
            rows.append([claim.claim, claim.published, "", "", "not run", "", f"{claim.grid}.toml"])
            continue
        study = studies.setdefault(claim.grid, load_study(folder, claim.grid))
        temperature = min(study.temperatures)
        sources.append(study.source(temperature))
        for mode in sorted(study.modes, reverse=True):
            first, second = (_arm(study, claim, *cell, temperature, mode) for cell in (claim.first, claim.second))
            found = compare(first, second, study.domains)
            rows.append([
                claim.claim, claim.published, mode, str(found.difference), claim.verdict(found.difference),
                f"{found.detectable:.2f}", f"{claim.grid}.cells.csv",
            ])  # fmt: skip
    names = ("claim", "published", "mode", "here", "verdict", "resolves", "from")
    caption = (
        "tau(first) - tau(second), greedy unless the grid was decoded at temperature 1 alone, with 95 % paired-bootstrap intervals over prompts; "
        f"a lead counts from {MARGIN:g} tokens on; resolves: the gap that so many prompts show with 80 % power; " + "; ".join(dict.fromkeys(sources))
    )
    return Table(caption=caption, columns=[("", name) for name in names], rows=rows, names=3)


def _arm(study: Study, claim: Claim, label: str, depth: int, temperature: float, mode: str) -> Arm:
    arm = study.arm(label, temperature, mode, depth)
    if arm is None:
        raise ValueError(f"claim {claim.claim!r}: grid {claim.grid!r} has no {mode} of {label!r} at depth {depth}")
    return arm
