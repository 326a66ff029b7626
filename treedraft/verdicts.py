"""Published claims held against measured cells: reproduced, refuted, not resolved with so many prompts, or not reached.

`claims.toml` says what was published and which two cells ask the same here; every number comes from the grids' CSV files.
What was published and cannot be asked here stands there too, with the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import ConfigDict, with_config

from treedraft.config import parse, read_toml
from treedraft.grid import load_grid
from treedraft.metrics import Interval
from treedraft.report import (
    FEWEST_PROMPTS,
    MARGIN,
    RELATIVE_MARGIN,
    Arm,
    Study,
    Table,
    compare,
    drawn_gap,
    interval_of,
    known_grids,
    load_study,
)

Mode = Literal["tree", "chain"]


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """`first` and `second` are a label and a decode depth, decoded at `temperature` in each of `modes`.

    "more": the first has the larger tau; "not less": the second has not; "same": they differ by less than `within`. `over` says
    where: in the mean of the domains' own differences, as published means are over benchmarks, in all domains or in most; or,
    with `largest`, that the first's lead is larger in that domain than in any other.
    """

    claim: str
    published: str
    grid: str
    first: tuple[str, int]
    second: tuple[str, int]
    expect: Literal["more", "not less", "same"] = "more"
    within: float = 0.0
    temperature: float = 0.0
    modes: tuple[Mode, ...] = ("tree", "chain")
    over: Literal["mean", "all", "most"] = "mean"
    largest: str | None = None

    def __post_init__(self) -> None:
        if (self.expect == "same") != (self.within > 0):
            raise ValueError(f"claim {self.claim!r}: within is {self.within}; above 0 where \"same\" is expected, and only there")
        if self.largest is not None and (self.over, self.expect) != ("mean", "more"):
            raise ValueError(f"claim {self.claim!r}: largest is {self.largest!r}, over {self.over!r} and expect {self.expect!r}; it goes with neither")

    def verdict(self, differences: Sequence[Interval], margin: float = MARGIN) -> str:
        """Of the intervals alone, that of the mean or one a domain: see `judge`. In all or most of them, if the claim says so."""
        found = [self.judge(difference, margin) for difference in differences]
        wanted = self.wanted(len(found))
        if found.count("reproduced") >= wanted:
            return "reproduced"
        return "refuted" if len(found) - found.count("refuted") < wanted else "not resolved"

    def wanted(self, number: int) -> int:
        """Of so many intervals, how many have to agree."""
        return number // 2 + 1 if self.over == "most" else number

    def judge(self, difference: Interval, margin: float) -> str:
        """No part of an interval may contradict a claim that is called reproduced, or agree with a refuted one.

        A lead counts from `margin` tokens on, and so does a lag.
        """
        low, high = difference.low, difference.high
        if self.expect == "more":
            return "reproduced" if low > 0 and difference.value >= margin else "refuted" if high < margin else "not resolved"
        if self.expect == "not less":
            return "reproduced" if low > -margin else "refuted" if high < 0 and difference.value <= -margin else "not resolved"
        if -self.within < low and high < self.within:
            return "reproduced"
        return "refuted" if low > self.within or high < -self.within else "not resolved"


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True, slots=True, kw_only=True)
class Unasked:
    """A published statement that no grid asks."""

    claim: str
    published: str
    why: str


def load_claims(path: Path) -> list[Claim]:
    """ValueError names the file and the key that is wrong."""
    return [parse(Claim, values, where=f"{path} [[claims]]") for values in read_toml(path).get("claims", [])]


def verdict_text(path: Path, folder: Path) -> str:
    """How many claims got which verdict, the table of them, and below it what is not asked and why, as Markdown."""
    unasked = [parse(Unasked, values, where=f"{path} [[unasked]]") for values in read_toml(path).get("unasked", [])]
    lines = [f"- {item.claim} ({item.published}): {item.why}" for item in unasked]
    table = verdict_table(path, folder)
    tally = Counter(row[5] for row in table.rows)
    counts = ", ".join(f"{count} {verdict}" for verdict, count in tally.most_common())
    return f"Of {len(table.rows)} rows: {counts}.\n\n" + table.markdown() + ("\n".join(["\nNot asked here:\n", *lines, ""]) if lines else "")


def verdict_table(path: Path, folder: Path) -> Table:
    """A row a claim and mode, of the grids in `folder`.

    A claim whose cells have no results is "not run". ValueError if its grid has no such cells.
    """
    studies: dict[str, Study] = {}
    rows: list[list[str]] = []
    used: list[Study] = []
    for claim in load_claims(path):
        if claim.grid in known_grids(folder) and claim.grid not in studies:
            studies[claim.grid] = load_study(folder, claim.grid)
        study = studies.get(claim.grid)
        for mode in claim.modes:
            head = [claim.claim, claim.published, mode, f"{claim.temperature:g}"]
            cells = [study and study.arm(label, claim.temperature, mode, depth) for label, depth in (claim.first, claim.second)]
            if study is None or not all(cells):
                _check_filed(path, claim, mode)
                rows.append([*head, "", "not run", "", "", "", "", f"{claim.grid}.toml"])
                continue
            rows.append([*head, *_row(study, claim, *cells), f"{claim.grid}.cells.csv"])  # pyright: ignore[reportArgumentType]
            used += [study] if study not in used else []
    names = ("claim", "published", "mode", "T", "here", "verdict", "domains ahead", "get there", "resolves", "training seeds", "from")
    caption = (
        "tau(first) - tau(second), the mean of the domains' own differences (tables of comparisons pool the rounds of all prompts), or that of each domain, with 95 % paired-bootstrap "
        "intervals over prompts and training seeds (with one, a verdict is about two checkpoints, not about two methods; with three, intervals are too narrow where seeds act on the two arms apart: LOG.md); they are not corrected for their number; a lead counts from "
        f"{MARGIN:g} tokens and {RELATIVE_MARGIN:.0%} on; domains ahead: those in which the first has the larger tau; get there: rounds that accept as many drafts as the "
        "shallower depth has, or, of two drafters, as they were trained for. Not reached: so few of them that more drafts could not gain "
        f"so much. Resolves: the gap that shows with 80 % power, no less than a lead that counts; {_sources(used)}."
    )
    return Table(caption=caption, columns=[("", name) for name in names], rows=rows, names=4)


def _sources(studies: Sequence[Study]) -> str:
    """Prompts a domain, and every target, machine and commit once."""
    prompts = sorted({int((arm.domains == name).sum()) for study in studies for arm in study.arms.values() for name in study.domains})
    targets = dict.fromkeys(str(target) for study in studies for target in study.cells.target)
    parts = ([part for text in texts for part in text.split("; ")] for texts in ([study.hardware for study in studies], [study.commit for study in studies]))
    machines, commits = ("; ".join(dict.fromkeys(each)) for each in parts)
    if not studies:
        return "nothing was run"
    counts = " to ".join(map(str, dict.fromkeys((prompts[0], prompts[-1]))))
    return f"n = {counts} prompts a domain; target {', '.join(targets)}; {machines}; commit {commits}"


def _row(study: Study, claim: Claim, first: Arm, second: Arm) -> list[str]:
    """What was found, the verdict, domains ahead, the share of rounds that get as deep as is asked, and what resolves."""
    found, margin = compare(first, second, study.domains), max(MARGIN, RELATIVE_MARGIN * second.tau)
    gaps = _gaps(study, claim, first, second)
    ahead = sum(gap > 0 for gap in found.by_domain.values())
    share = _reaching(study, first, second)
    verdict = "not reached" if _out_of_reach(first, second, found.difference, share, margin) else claim.verdict([*gaps.values()], margin)
    fewest = min((first.domains == name).sum() for name in study.domains) if claim.over != "mean" or claim.largest else len(first.prompts)
    if fewest < FEWEST_PROMPTS:
        verdict = f"fewer than {FEWEST_PROMPTS} prompts"
    return [
        "; ".join(f"{name} {gap}".strip() for name, gap in gaps.items()), verdict, f"{ahead} of {len(found.by_domain)}",
        "" if share is None else f"{share:.1%}", _resolved(claim, [*gaps.values()], margin),
        " / ".join(dict.fromkeys((str(len(first.seeds)), str(len(second.seeds))))),
    ]  # fmt: skip


def _resolved(claim: Claim, gaps: Sequence[Interval], margin: float) -> str:
    """The smallest gap that would be shown in as many of the intervals as have to agree; "-" where nothing varies."""
    seen = sorted(gap.detectable for gap in gaps)[claim.wanted(len(gaps)) - 1]
    return f"{max(seen, margin):.2f}" if seen else "-"


def _gaps(study: Study, claim: Claim, first: Arm, second: Arm) -> dict[str, Interval]:
    """The difference in the mean of the domains that have prompts, or by domain, of a claim that is about domains; with
    `largest`, how far that domain's is ahead of each other's."""
    pairs = {name: (first.domain(name), second.domain(name)) for name in study.domains if name in first.domains}
    if claim.largest is None:
        if claim.over != "mean":
            return {name: compare(*pair, []).difference for name, pair in pairs.items()}
        value = float(np.mean([one.tau - other.tau for one, other in pairs.values()]))
        return {"": interval_of(value, np.mean([drawn_gap(*pair) for pair in pairs.values()], axis=0))}
    if claim.largest not in pairs:
        raise ValueError(f"claim {claim.claim!r}: no prompt of grid {claim.grid!r} is of domain {claim.largest!r}; there are {', '.join(pairs)}")
    lead = {name: (one.tau - other.tau, drawn_gap(one, other)) for name, (one, other) in pairs.items()}
    value, drawn = lead.pop(claim.largest)
    return {f"{claim.largest} - {name}": interval_of(value - own, drawn - other) for name, (own, other) in lead.items()}


def _reaching(study: Study, first: Arm, second: Arm) -> float | None:
    """The share of rounds that accept all drafts up to the shallower depth, or, of two drafters that both go beyond it, up
    to the trained one."""
    shallow = min(first.setting.depth, second.setting.depth)
    if first.label != second.label or first.setting.depth == second.setting.depth:
        shallow = min(shallow, study.trained_depths[first.label])
    deeper = first if first.setting.depth >= second.setting.depth else second
    return float(deeper.survival[shallow - 1]) if deeper.setting.depth > shallow else None


def _out_of_reach(first: Arm, second: Arm, difference: Interval, share: float | None, margin: float) -> bool:
    """Whether one drafter's deeper drafts have too few rounds to gain in: at most the drafts that are added, in so many rounds."""
    added = first.setting.depth - second.setting.depth
    if share is None or first.label != second.label or added == 0:
        return False
    return difference.low == difference.high == 0 or (added > 0 and added * share < margin)


def _check_filed(path: Path, claim: Claim, mode: str) -> None:
    """ValueError unless the grid's file has the claim's cells."""
    file = path.with_name(f"{claim.grid}.toml")
    cells = load_grid(file).cells if file.is_file() else ()
    known = {(cell.arm.label, cell.decode.depth, cell.decode.temperature, cell.decode.mode) for cell in cells}
    for label, depth in (claim.first, claim.second):
        if (label, depth, claim.temperature, mode) not in known:
            what = f"no {mode} of {label!r} at depth {depth} and temperature {claim.temperature:g}"
            raise ValueError(f"claim {claim.claim!r}: grid {claim.grid!r} has {what}")
