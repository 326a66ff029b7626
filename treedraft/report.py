"""Tables and figures of a grid, generated from its CSV files alone: the same input gives the same bytes.

`python -m treedraft.report` regenerates every report of a folder and the tables between markers in README.md and
ablations/README.md, so that no number is typed by hand; `--check` only says what would change.

Read: <grid>.json, <grid>.cells.csv, <grid>.prompts.csv. Written: <grid>.md, <grid>.tex, <grid>-tau.png,
<grid>-survival.png, <grid>-domains.png; of a grid that climbs the conditioning ladder <grid>-ladder.png alone, of one whose
prompts have several lengths <grid>-context.png alone.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from treedraft.cli import parse_arguments, run_cli
from treedraft.files import read_json, write_text
from treedraft.metrics import BOOTSTRAP_DRAWS, Interval

if TYPE_CHECKING:
    from rich.table import Table as RichTable

Frame = Any  # a pandas table or column; pandas, without types of its own, is imported where it is needed
RUNGS = ("marginal", "per_depth", "conditional")
MARGIN, RELATIVE_MARGIN = 0.05, 0.01  # a claim needs a gap of at least this many tokens and this share of tau
FEWEST_PROMPTS = 30  # below it nothing is claimed
WIDTH = 120  # columns of a printed table
MARKER = re.compile(r"(<!-- table: (\S+) (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


# -- what was measured ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Setting:
    """One way of decoding. `mode` also names width, budget, scorer, admit and context where a grid has several."""

    temperature: float
    mode: str
    depth: int


class Bootstrap:
    """Resampled prompts, and the training seeds of each arm with them: one weight matrix for every arm.

    Gives the very numbers of `metrics.seeded_difference`, which draws the matrix anew in each call.
    """

    def __init__(self, num_prompts: int, *, draws: int = BOOTSTRAP_DRAWS, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        chosen = rng.integers(num_prompts, size=(draws, num_prompts))
        flat = chosen + np.arange(draws)[:, None] * num_prompts
        self.weights = (
            np.bincount(flat.ravel(), minlength=draws * num_prompts).reshape(draws, num_prompts).astype(float)
        )
        self._after = rng
        self._picked: dict[tuple[int, ...], list[np.ndarray]] = {}

    def ratios(self, sums: np.ndarray) -> np.ndarray:
        """Tau [draws, K] of every resample from sums [K, P, 2] of emitted tokens and rounds; nan without rounds."""
        num_seeds, num_prompts, _ = sums.shape
        drawn = self.weights @ sums.transpose(1, 0, 2).reshape(num_prompts, -1)
        emitted, rounds = np.moveaxis(drawn.reshape(-1, num_seeds, 2), -1, 0)
        return np.divide(emitted, rounds, out=np.full_like(emitted, np.nan), where=rounds > 0)

    def seeds(self, *ratios: np.ndarray) -> list[np.ndarray]:
        """Means [draws] over resampled training seeds of arms that were trained apart."""
        sizes = tuple(each.shape[1] for each in ratios)
        if sizes not in self._picked:
            rng = copy.deepcopy(self._after)
            self._picked[sizes] = [rng.integers(size, size=(len(self.weights), size)) for size in sizes]
        return [
            np.take_along_axis(each, picks, axis=1).mean(1)
            for each, picks in zip(ratios, self._picked[sizes], strict=True)
        ]


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A label decoded one way: sums [K, P, 2] of emitted tokens and rounds of K training seeds on P prompts."""

    label: str
    setting: Setting
    prompts: tuple[str, ...]
    domains: np.ndarray
    sums: np.ndarray
    bootstrap: Bootstrap = field(repr=False)
    survival: np.ndarray

    @cached_property
    def taus(self) -> np.ndarray:
        """Tau [K] of every training seed."""
        return _ratio(self.sums.sum(1))

    @property
    def tau(self) -> float:
        return float(self.taus.mean())

    @cached_property
    def drawn(self) -> np.ndarray:
        """Tau [draws, K] of every resample."""
        return self.bootstrap.ratios(self.sums)

    @cached_property
    def interval(self) -> Interval:
        return _interval(self.tau, self.bootstrap.seeds(self.drawn)[0])

    def domain(self, name: str) -> Arm:
        """The same arm on the prompts of one domain; the others weigh nothing, so that arms stay paired."""
        sums = self.sums * (self.domains == name)[None, :, None]
        return Arm(**{**{key: getattr(self, key) for key in Arm.__dataclass_fields__}, "sums": sums})


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """tau(first) - tau(second), decoded alike."""

    first: Arm
    second: Arm
    difference: Interval
    by_domain: Mapping[str, float]

    @property
    def verdict(self) -> str:
        """ "first better" and the like; nothing is claimed within the margin or with an interval that holds 0."""
        if len(self.first.prompts) < FEWEST_PROMPTS:
            return f"fewer than {FEWEST_PROMPTS} prompts"
        margin = max(MARGIN, RELATIVE_MARGIN * self.second.tau)
        if self.difference.low <= 0 <= self.difference.high or abs(self.difference.value) < margin:
            return "no difference shown"
        return "first better" if self.difference.value > 0 else "second better"

    @property
    def claimed(self) -> bool:
        return self.verdict.endswith("better")

    @property
    def domains(self) -> str:
        """Where a claim holds: "all 3", or the domains in which the other arm is ahead."""
        against = [name for name, gap in self.by_domain.items() if gap * self.difference.value <= 0]
        if not self.claimed or not self.by_domain:
            return ""
        return "not in " + ", ".join(against) if against else f"all {len(self.by_domain)}"

    @property
    def detectable(self) -> float:
        """The true gap that this many prompts would show in four of five repetitions (2.8 standard errors)."""
        return 2.8 / 3.92 * (self.difference.high - self.difference.low)


@dataclass(frozen=True, slots=True, kw_only=True)
class Behind:
    """An arm behind prompts of about `context` tokens, `tokens` on average, and what drafting there costs.

    Milliseconds are medians over live rounds; nan where nothing was timed.
    """

    context: int
    tokens: float
    arm: Arm
    draft_ms: float
    update_ms: float
    state_bytes: float


@dataclass(frozen=True, kw_only=True)
class Study:
    """A grid's results, ready for tables."""

    name: str
    question: str
    pairs: tuple[tuple[str, str], ...]
    cells: Frame
    failed: tuple[tuple[str, str], ...]
    arms: Mapping[tuple[str, Setting], Arm]
    hardware: str
    commit: str

    @cached_property
    def labels(self) -> list[str]:
        return list(dict.fromkeys(label for label, _ in self.arms))

    @cached_property
    def settings(self) -> list[Setting]:
        return sorted({setting for _, setting in self.arms})

    @cached_property
    def temperatures(self) -> list[float]:
        """Highest first: sampling is the headline, greedy the cross-check."""
        return sorted({setting.temperature for setting in self.settings}, reverse=True)

    @property
    def headline_temperature(self) -> float:
        return 1.0 if 1.0 in self.temperatures else self.temperatures[0]

    @cached_property
    def modes(self) -> list[str]:
        """Chain first; trees by growing numbers."""
        return sorted(
            {setting.mode for setting in self.settings},
            key=lambda mode: [part.zfill(9) if part.isdigit() else part for part in mode.split()],
        )

    @cached_property
    def rungs(self) -> list[str]:
        """How nodes were scored, in the order of the conditioning ladder; empty unless the grid climbs it."""
        found = [rung for rung in RUNGS if rung in set(self.cells.scorer)]
        return found if len(found) > 1 else []

    def ladder(self, temperature: float) -> list[tuple[str, str, int, dict[str, Arm]]]:
        """(label, shape, budget, arm of every rung) of every tree of one drafter that was scored in several ways.

        The shape is how nodes are admitted, with width and depth where trees of the grid differ in them.
        """
        trees = self.cells["mode"].str.startswith("tree")
        cells = self.cells[(self.cells.temperature == temperature) & trees]
        varying = [name for name in ("width", "depth") if self.cells[trees][name].nunique() > 1]
        found = []
        for key, rows in cells.groupby(["label", "admit", "budget", "width", "depth"], sort=False):
            label, admit, budget, width, depth = cast(tuple[str, str, int, int, int], key)
            more = {"width": width, "depth": depth}
            shape = " ".join([admit, *(f"{name} {more[name]}" for name in varying)])
            arms = {row.scorer: self.arm(label, temperature, row.mode, depth) for row in rows.itertuples()}
            found.append((label, shape, int(budget), {rung: arm for rung, arm in arms.items() if arm is not None}))
        return found

    @cached_property
    def contexts(self) -> list[int]:
        """Lengths of the prompts, ascending; empty unless the grid has several."""
        found = sorted({int(value) for value in self.cells.context.dropna()}) if "context" in self.cells else []
        return found if len(found) > 1 else []

    def behind(self, label: str, temperature: float) -> list[Behind]:
        """A drafter at growing context; of several modes and depths the last one, a tree at the largest depth."""
        rows = self.cells[(self.cells.label == label) & (self.cells.temperature == temperature)].copy()
        if rows.empty:
            return []
        rows["kind"] = rows["mode"].str.startswith("tree")
        last = rows.sort_values(["kind", "depth"]).iloc[-1]
        rows = rows[(rows.kind == last.kind) & (rows.depth == last.depth)]
        found = []
        for (context, mode), seeds in rows.groupby(["context", "mode"]):
            arm = self.arms[label, Setting(temperature=temperature, mode=str(mode), depth=int(last.depth))]
            means = {
                name: float(seeds[name].mean()) if name in seeds else np.nan
                for name in ("prompt_tokens", "draft_ms", "update_ms", "state_bytes")
            }
            found.append(Behind(context=int(context), tokens=means.pop("prompt_tokens"), arm=arm, **means))
        return found

    @cached_property
    def domains(self) -> list[str]:
        return sorted({str(name) for arm in self.arms.values() for name in arm.domains})

    @cached_property
    def trained_depths(self) -> dict[str, int]:
        return {str(label): int(depth) for label, depth in self.cells.groupby("label").trained_depth.first().items()}

    def depths(self, temperature: float, mode: str) -> list[int]:
        return [s.depth for s in self.settings if s.temperature == temperature and s.mode == mode]

    def arm(self, label: str, temperature: float, mode: str, depth: int) -> Arm | None:
        return self.arms.get((label, Setting(temperature=temperature, mode=mode, depth=depth)))

    def at_trained_depth(self, label: str, temperature: float, mode: str) -> Arm | None:
        """The arm at the depth it was trained for, else at the nearest one that was decoded."""
        depths = [depth for depth in self.depths(temperature, mode) if self.arm(label, temperature, mode, depth)]
        trained = self.trained_depths.get(label, 0)
        return (
            self.arm(label, temperature, mode, min(depths, key=lambda depth: abs(depth - trained))) if depths else None
        )

    @cached_property
    def comparisons(self) -> list[Comparison]:
        """Every named pair in every setting that both were decoded in, on the same prompts."""
        return [
            compare(self.arms[first, setting], self.arms[second, setting], self.domains)
            for first, second in self.pairs
            for setting in self.settings
            if (first, setting) in self.arms
            and (second, setting) in self.arms
            and self.arms[first, setting].prompts == self.arms[second, setting].prompts
        ]

    def source(self, temperature: float | None = None) -> str:
        """Who was measured on how much, where: the end of every caption."""
        cells = self.cells if temperature is None else self.cells[self.cells.temperature == temperature]
        prompts, seeds = _span(cells.prompts), _span((cells.decodings / cells.prompts).round())
        targets = ", ".join(dict.fromkeys(self.cells.target.astype(str)))
        size = f"n = {prompts} prompts x {seeds} sampling seed{'' if seeds == '1' else 's'}"
        return f"{size}, target {targets}; {self.hardware}; commit {self.commit}"


def load_study(folder: Path, grid: str) -> Study:
    """Read the three files of a grid; ValueError names what is missing or does not fit."""
    info = read_json(_existing(folder / f"{grid}.json", folder))
    table = _read_csv(folder / f"{grid}.cells.csv", folder)
    finished = table.status == "ok"
    cells = table[finished].copy()
    if "shape" in cells:
        cells["shape"] = cells["shape"].fillna("")
    cells["mode"] = _modes(cells)
    failed = tuple((str(row.cell), str(row.status).removeprefix("failed: ")) for row in table[~finished].itertuples())
    return Study(
        name=grid,
        question=str(info.get("question", "")),
        pairs=tuple((str(first), str(second)) for first, second in info.get("comparisons", [])),
        cells=cells,
        failed=failed,
        arms=_arms(cells, _read_csv(folder / f"{grid}.prompts.csv", folder), where=f"{grid}.prompts.csv"),
        hardware=_joined(cells.hardware, info.get("hardware")),
        commit=_joined(cells.commit, info.get("commit")),
    )


def known_grids(folder: Path) -> list[str]:
    return sorted(path.name.removesuffix(".cells.csv") for path in folder.glob("*.cells.csv"))


def _existing(path: Path, folder: Path) -> Path:
    if not path.is_file():
        raise ValueError(
            f"no file {str(path)!r}; grids with results in {str(folder)!r}: {', '.join(known_grids(folder)) or 'none'}"
        )
    return path


def _read_csv(path: Path, folder: Path) -> Frame:
    """Names stay text ("none" is a correction, 007 a commit); an empty field is nan."""
    import pandas as pd

    text = (
        "grid",
        "cell",
        "label",
        "mode",
        "scorer",
        "admit",
        "shape",
        "prompt",
        "domain",
        "survival",
        "target",
        "hardware",
        "commit",
        "status",
        "costs_hardware",
        "costs_commit",
    )
    try:
        return pd.read_csv(
            _existing(path, folder), dtype=dict.fromkeys(text, object), keep_default_na=False, na_values=["", "nan"]
        )  # fmt: skip
    except (pd.errors.ParserError, pd.errors.EmptyDataError) as error:
        raise ValueError(f"{path}: not a table ({error})") from error


def _modes(cells: Frame) -> list[str]:
    """ "tree", or "tree budget 64" where trees of one grid differ in more than depth and temperature."""
    shaping = {"tree": ("width", "budget", "scorer", "admit", "shape", "context"), "chain": ("scorer", "context")}
    varying = {
        mode: [name for name in names if name in cells and cells[cells["mode"] == mode][name].nunique() > 1]
        for mode, names in shaping.items()
    }
    rows = cells.to_dict("records")
    return [
        " ".join([row["mode"], *(f"{name} {_plain(row[name])}" for name in varying.get(row["mode"], ()) if row[name] != "")])
        for row in rows
    ]


def _plain(value: Any) -> str:
    """255 also where a missing value in its column made it 255.0."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def _arms(cells: Frame, prompts: Frame, *, where: str) -> dict[tuple[str, Setting], Arm]:
    domains = prompts.drop_duplicates("prompt").set_index("prompt").domain
    totals = prompts.groupby(["cell", "prompt"], sort=True)[["emitted", "rounds"]].sum()
    sums = {cell: part.droplevel(0) for cell, part in totals.groupby(level=0)}
    bootstraps: dict[int, Bootstrap] = {}
    arms = {}
    for key, rows in cells.groupby(["label", "temperature", "mode", "depth"], sort=False):
        label, temperature, mode, depth = cast(tuple[str, float, str, int], key)
        lost = [cell for cell in rows.cell if cell not in sums]
        if lost:
            raise ValueError(f"{where}: no rows of cell {lost[0]!r}, which finished")
        seeds = [sums[cell] for cell in rows.sort_values("train_seed").cell]
        order = tuple(seeds[0].index)
        if any(tuple(each.index) != order for each in seeds):
            raise ValueError(f"{where}: the training seeds of {label!r} were decoded on different prompts")
        setting = Setting(temperature=float(temperature), mode=str(mode), depth=int(depth))
        if len(order) not in bootstraps:
            bootstraps[len(order)] = Bootstrap(len(order))
        arms[str(label), setting] = Arm(
            label=str(label), setting=setting, prompts=order, domains=domains.loc[list(order)].to_numpy(),
            sums=np.stack([each.to_numpy(float) for each in seeds]), bootstrap=bootstraps[len(order)],
            survival=np.mean([np.array(str(text).split(), dtype=float) for text in rows.survival], axis=0),
        )  # fmt: skip
    return arms


def _ratio(sums: np.ndarray) -> np.ndarray:
    emitted, rounds = np.moveaxis(sums, -1, 0)
    return np.divide(emitted, rounds, out=np.full_like(emitted, np.nan), where=rounds > 0)


def _interval(value: float, drawn: np.ndarray) -> Interval:
    drawn = drawn[~np.isnan(drawn)]
    low, high = np.percentile(drawn, [2.5, 97.5]) if len(drawn) else (np.nan, np.nan)
    return Interval(value=value, low=float(low), high=float(high))


def compare(first: Arm, second: Arm, domains: Sequence[str]) -> Comparison:
    """Two arms on the same prompts; one drafter's training seeds are resampled together, two drafters' apart."""
    if first.label == second.label:
        (one,), (other,) = first.bootstrap.seeds(first.drawn), second.bootstrap.seeds(second.drawn)
    else:
        one, other = first.bootstrap.seeds(first.drawn, second.drawn)
    gaps = {name: first.domain(name).tau - second.domain(name).tau for name in domains if name in first.domains}
    return Comparison(
        first=first, second=second, difference=_interval(first.tau - second.tau, one - other), by_domain=gaps
    )


def _same_drafter(first: Arm, second: Arm, *, ratio: bool) -> Interval | None:
    """The change of one drafter between two settings: prompts and training seeds are resampled together."""
    if first.prompts != second.prompts or first.drawn.shape != second.drawn.shape:
        return None
    (one,), (other,) = first.bootstrap.seeds(first.drawn), second.bootstrap.seeds(second.drawn)
    if ratio:
        return _interval(first.tau / second.tau, one / other)
    return _interval(first.tau - second.tau, one - other)


def _span(numbers: Frame) -> str:
    low, high = int(numbers.min()), int(numbers.max())
    return f"{low}" if low == high else f"{low} to {high}"


def _joined(column: Frame, otherwise: Any) -> str:
    return "; ".join(dict.fromkeys(column.dropna().astype(str))) or str(otherwise or "unknown")


# -- tables -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Text in rows. A column is (group, name); `names` counts the leading columns that are read, not compared."""

    caption: str
    columns: Sequence[tuple[str, str]]
    rows: Sequence[Sequence[str]]
    names: int = 1

    def markdown(self) -> str:
        header = [" ".join(filter(None, column)) for column in self.columns]
        rule = ["---" if place < self.names else "---:" for place in range(len(header))]
        lines = ["| " + " | ".join(cells) + " |" for cells in (header, rule, *self.rows)]
        return "\n".join(lines) + f"\n\n*{self.caption}*\n"

    def latex(self) -> str:
        groups = _runs([group for group, _ in self.columns])
        top = " & ".join(
            rf"\multicolumn{{{size}}}{{c}}{{{_tex(group)}}}" if group else "&".join([""] * size)
            for group, _, size in groups
        )
        rules = " ".join(rf"\cmidrule(lr){{{start + 1}-{start + size}}}" for group, start, size in groups if group)
        names = " & ".join(_tex(name) for _, name in self.columns)
        body = [" & ".join(map(_tex, row)) + r" \\" for row in self.rows]
        lines = [
            r"\begin{table}",
            r"  \centering",
            rf"  \caption{{{_tex(self.caption)}}}",
            rf"  \begin{{tabular}}{{{'l' * self.names}{'r' * (len(self.columns) - self.names)}}}",
            r"    \toprule",
            rf"    {top} \\",
            f"    {rules}",
            rf"    {names} \\",
            r"    \midrule",
            *(f"    {line}" for line in body),
            r"    \bottomrule",
            r"  \end{tabular}",
            r"\end{table}",
        ]
        return "\n".join(lines) + "\n"

    def rich(self, *, title: str, width: int = WIDTH) -> list[RichTable]:
        """As many tables as the width needs, each with the naming columns; the last one carries the caption."""
        from rich import box
        from rich.table import Table as RichTable

        sizes = [
            max(len(text) for text in (*column, *(row[place] for row in self.rows))) + 2
            for place, column in enumerate(self.columns)
        ]
        parts = _split(sizes, self.names, width - 1)
        tables = []
        for number, part in enumerate(parts):
            last = number == len(parts) - 1
            table = RichTable(
                title=title if not number else None, caption=self.caption if last else None,
                title_justify="left", caption_justify="left",
                box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0),
            )  # fmt: skip
            shown: str | None = None
            for place in part:
                group, name = self.columns[place]
                heading = f"{group if group != shown else ''}\n{name}"
                shown = group
                table.add_column(heading, justify="left" if place < self.names else "right", no_wrap=True)
            for row in self.rows:
                table.add_row(*(row[place] for place in part))
            tables.append(table)
        return tables


def tau_table(study: Study, temperature: float) -> Table:
    """Rows are drafters, columns mode x depth."""
    columns = [(mode, depth) for mode in study.modes for depth in study.depths(temperature, mode)]
    rows = [[label, *(_tau(study.arm(label, temperature, *column)) for column in columns)] for label in study.labels]
    several = any(len(arm.taus) > 1 for arm in study.arms.values())
    spread = "; ± is half the range over training seeds" if several else ""
    caption = (
        f"tau (emitted tokens a round) by mode and decode depth at temperature {temperature:g}"
        f"{_trained(study)}{spread}; {study.source(temperature)}."
    )
    return Table(
        caption=caption, columns=[("", "drafter"), *((mode, str(depth)) for mode, depth in columns)], rows=rows
    )


def comparison_table(study: Study, temperature: float) -> Table:
    """One row a pair and setting, with a verdict."""
    found = [item for item in study.comparisons if item.first.setting.temperature == temperature]
    rows = []
    for item in found:
        setting, seeds = item.first.setting, f"{len(item.first.taus)} / {len(item.second.taus)}"
        rows.append(
            [
                item.first.label,
                item.second.label,
                setting.mode,
                str(setting.depth),
                str(item.difference),
                item.verdict,
                item.domains,
                seeds,
            ]
        )
    gap = f"{np.median([item.detectable for item in found]):.2f}" if found else "-"
    caption = (
        f"tau(first) - tau(second) at temperature {temperature:g} with 95 % paired-bootstrap intervals over prompts; "
        f"a verdict needs an interval without 0 and a gap of {MARGIN:g} tokens and {RELATIVE_MARGIN:.0%}; "
        f"intervals are not corrected for their number; the median gap shown with 80 % power is {gap} tokens; "
        f"with one training seed a verdict is about two checkpoints, not about two methods; "
        f"{study.source(temperature)}."
    )
    names = ("first", "second", "mode", "depth", "difference", "verdict", "in domains", "training seeds")
    return Table(caption=caption, columns=[("", name) for name in names], rows=rows, names=4)


def comparison_matrix(study: Study, temperature: float) -> Table:
    """The same on a screen: rows are pairs, columns mode x depth; * marks a verdict."""
    columns = [(mode, depth) for mode in study.modes for depth in study.depths(temperature, mode)]
    found = {(item.first.label, item.second.label, item.first.setting): item for item in study.comparisons}
    rows = []
    for first, second in study.pairs:
        items = [
            found.get((first, second, Setting(temperature=temperature, mode=mode, depth=depth)))
            for mode, depth in columns
        ]
        if any(items):
            rows.append(
                [
                    f"{first} - {second}",
                    *(f"{item.difference}{'*' if item.claimed else ' '}" if item else "-" for item in items),
                ]
            )
    caption = (
        f"Difference of tau at temperature {temperature:g} with its 95 % interval over prompts; "
        f"* excludes 0 and is at least {MARGIN:g} tokens and {RELATIVE_MARGIN:.0%}"
    )
    return Table(
        caption=caption, columns=[("", "first - second"), *((mode, str(depth)) for mode, depth in columns)], rows=rows
    )


def extrapolation_table(study: Study, temperature: float) -> Table | None:
    """What decoding at another depth than the trained one changes; None where nothing was decoded at both."""
    columns = [(mode, depth) for mode in study.modes for depth in study.depths(temperature, mode)]
    rows = [
        [label, *(_beyond(study, label, temperature, mode, depth) for mode, depth in columns)] for label in study.labels
    ]
    kept = [0] + [place for place in range(1, len(columns) + 1) if any(row[place].strip("-") for row in rows)]
    if len(kept) == 1:
        return None
    heads = [("", "drafter"), *((mode, f"{depth}") for mode, depth in columns)]
    caption = (
        f"tau at this depth minus tau at the trained depth, temperature {temperature:g}{_trained(study)}, "
        f"95 % paired-bootstrap intervals over prompts; {study.source(temperature)}."
    )
    return Table(
        caption=caption, columns=[heads[place] for place in kept], rows=[[row[place] for place in kept] for row in rows]
    )


def ratio_table(study: Study) -> Table | None:
    """Tree over chain; None where one of them was not decoded."""
    trees = [mode for mode in study.modes if mode != "chain"]
    columns = [
        (t, mode, depth)
        for t in study.temperatures
        for mode in trees
        for depth in study.depths(t, mode)
        if depth in study.depths(t, "chain")
    ]
    if not columns:
        return None
    rows = []
    for label in study.labels:
        pairs = [(study.arm(label, t, mode, depth), study.arm(label, t, "chain", depth)) for t, mode, depth in columns]
        ratios = [_same_drafter(tree, chain, ratio=True) if tree and chain else None for tree, chain in pairs]
        rows.append([label, *(f"{r.value:.2f} [{r.low:.2f}, {r.high:.2f}]" if r else "-" for r in ratios)])
    heads = [(f"T={t:g}" + (f" {mode}" if len(trees) > 1 else ""), f"depth {depth}") for t, mode, depth in columns]
    caption = (
        f"tau of the tree over tau of the chain by temperature and depth, "
        f"95 % paired-bootstrap intervals over prompts; {study.source()}."
    )
    return Table(caption=caption, columns=[("", "drafter"), *heads], rows=rows)


def ladder_table(study: Study, temperature: float) -> Table | None:
    """A row a drafter and tree, a column a rung of the conditioning ladder, and what every step up it brings."""
    if not study.rungs:
        return None
    steps = list(itertools.pairwise(study.rungs))
    rows = []
    for label, admit, budget, arms in study.ladder(temperature):
        gains = [
            _same_drafter(arms[upper], arms[lower], ratio=False) if {lower, upper} <= arms.keys() else None
            for lower, upper in steps
        ]
        taus = [_tau(arms.get(rung)) for rung in study.rungs]
        rows.append([label, admit, str(budget), *taus, *(str(gain or "-") for gain in gains)])
    words = {rung: rung.replace("_", " ") for rung in study.rungs}
    columns = [("", "drafter"), ("", "admit"), ("", "budget"), *(("tau", words[rung]) for rung in study.rungs)]
    columns += [("gain", f"{words[upper]} - {words[lower]}") for lower, upper in steps]
    caption = (
        f"tau by how nodes are scored, temperature {temperature:g}: by the backbone alone, corrected once a depth along "
        f"the greedy path, corrected under every node's own ancestry; 95 % paired-bootstrap intervals over prompts; "
        f"{study.source(temperature)}."
    )
    return Table(caption=caption, columns=columns, rows=rows, names=3)


def context_table(study: Study, temperature: float) -> Table | None:
    """A row a prompt length and drafter: tau, and what drafting costs there; None unless the grid has several lengths."""
    if not study.contexts:
        return None
    places = [(item, label) for label in study.labels for item in study.behind(label, temperature)]
    rows = []
    for item, label in sorted(places, key=lambda place: place[0].context):
        tau = item.arm.interval
        rows.append([
            f"{item.context}", label, f"{item.tokens:.0f}", f"{tau.value:.2f} [{tau.low:.2f}, {tau.high:.2f}]",
            _number(item.draft_ms), _number(item.update_ms), _number(item.state_bytes / 1024),
        ])  # fmt: skip
    clock = study.cells[study.cells.temperature == temperature]
    named = {name: _joined(clock[name], None) for name in ("costs_hardware", "costs_commit") if name in clock}
    caption = (
        f"tau with 95 % bootstrap intervals over prompts, the median milliseconds of a block's forward and of taking a "
        f"round's rows in, and what a drafter keeps of one request, an own copy of the target's window included, "
        f"temperature {temperature:g}; {study.source(temperature)}"
        + (f"; timed live, one request at a time, on {'; commit '.join(named.values())}." if named else "; not timed.")
    )
    names = ("context", "drafter", "prompt tokens", "tau", "draft ms", "update ms", "state KiB")
    return Table(caption=caption, columns=[("", name) for name in names], rows=rows, names=2)


def _number(value: float) -> str:
    return "-" if np.isnan(value) else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _main_table(study: Study, temperature: float) -> Table:
    """What the grid is about."""
    return ladder_table(study, temperature) or context_table(study, temperature) or tau_table(study, temperature)


def domain_table(study: Study, temperature: float) -> Table:
    """Rows are drafters, columns mode x domain, at the trained depth."""
    modes = [mode for mode in study.modes if study.depths(temperature, mode)]
    rows = []
    for label in study.labels:
        arms = [study.at_trained_depth(label, temperature, mode) for mode in modes]
        rows.append([label, *(_tau(arm.domain(name)) if arm else "-" for arm in arms for name in study.domains)])
    columns = [(mode, name) for mode in modes for name in study.domains]
    caption = (
        f"tau by domain at the trained depth (else the nearest one decoded), temperature {temperature:g}; "
        f"{study.source(temperature)}."
    )
    return Table(caption=caption, columns=[("", "drafter"), *columns], rows=rows)


def training_table(study: Study) -> Table:
    """What was trained: parameters of each part, steps, blocks, seconds."""
    once = study.cells.drop_duplicates(["label", "train_seed"])
    rows = []
    for label, part in once.groupby("label", sort=False):
        first = part.iloc[0]
        sizes = [_count(first[f"parameters_{seam}"]) for seam in ("backbone", "context", "correction")]
        seeds = " ".join(_count(seed) for seed in sorted(part.train_seed))
        amounts = [
            _count(value)
            for value in (first.trained_depth, first.train_steps, first.train_blocks, part.train_seconds.mean())
        ]
        rows.append([str(label), *sizes, seeds, *amounts])
    names = (
        "drafter",
        "backbone",
        "context",
        "correction",
        "training seeds",
        "trained depth",
        "steps",
        "blocks",
        "seconds",
    )
    caption = (
        f"Parameters by part, and training, seconds as a mean over seeds; target {study.cells.target.iloc[0]}; "
        f"{study.hardware}; commit {study.commit}."
    )
    return Table(caption=caption, columns=[("", name) for name in names], rows=rows)


def cell_table(study: Study) -> Table:
    """Every cell, training seeds apart."""
    rows = []
    for row in study.cells.to_dict("records"):
        arm = study.arms[
            row["label"], Setting(temperature=float(row["temperature"]), mode=row["mode"], depth=int(row["depth"]))
        ]
        survived = float(str(row["survival"]).split()[-1])
        numbers = [f"{row['tau']:.2f}", f"{row['tau_macro']:.2f}", f"{survived:.3f}", _count(row["mean_nodes"])]
        counts = [_count(row["rounds"]), f"{row['rounds_cut'] / max(row['rounds'], 1):.1%}"]
        interval = f"[{arm.interval.low:.2f}, {arm.interval.high:.2f}]"
        rows.append(
            [
                row["label"],
                _count(row["train_seed"]),
                row["mode"],
                _count(row["depth"]),
                f"{row['temperature']:g}",
                *numbers,
                *counts,
                interval,
            ]
        )
    names = (
        "drafter",
        "seed",
        "mode",
        "depth",
        "T",
        "tau",
        "tau by prompt",
        "full depth",
        "nodes",
        "rounds",
        "cut",
        "95 % of tau, all seeds",
    )
    caption = (
        "tau by prompt is the mean of the tau of every decoding; "
        "full depth is the share of rounds that accept a draft to its end; nodes are a mean, root included; "
        f"cut is the share of rounds ended by end-of-text or the cap; {study.source()}."
    )
    return Table(caption=caption, columns=[("", name) for name in names], rows=rows, names=3)


def _tau(arm: Arm | None) -> str:
    if arm is None or np.isnan(arm.tau):
        return "-"
    return f"{arm.tau:.2f}" + (f" ±{np.ptp(arm.taus) / 2:.2f}" if len(arm.taus) > 1 else "")


def _count(number: float) -> str:
    return "-" if np.isnan(number) else f"{round(number):,}"


def _beyond(study: Study, label: str, temperature: float, mode: str, depth: int) -> str:
    trained = study.trained_depths[label]
    here, there = study.arm(label, temperature, mode, depth), study.arm(label, temperature, mode, trained)
    if depth == trained or here is None or there is None:
        return "-"
    return str(_same_drafter(here, there, ratio=False) or "-")


def _trained(study: Study) -> str:
    depths = sorted(set(study.trained_depths.values()))
    return f", trained depth {depths[0]}" if len(depths) == 1 else ""


def _tex(text: str) -> str:
    escaped = re.sub(r"([&%$#_{}])", r"\\\1", text)
    return escaped.replace("±", r"$\pm$").replace("~", r"\textasciitilde{}")


def _runs(groups: Sequence[str]) -> list[tuple[str, int, int]]:
    """(group, start, size) of neighbours that share a group."""
    runs: list[tuple[str, int, int]] = []
    for place, group in enumerate(groups):
        if runs and runs[-1][0] == group:
            runs[-1] = (group, runs[-1][1], runs[-1][2] + 1)
        else:
            runs.append((group, place, 1))
    return runs


def _split(sizes: Sequence[int], names: int, width: int) -> list[list[int]]:
    """Columns of each part so that none is wider than `width`, in equal shares; naming columns come first in each."""
    fixed, rest = list(range(names)), list(range(names, len(sizes)))
    room = max(width - sum(sizes[:names]), max(sizes[names:], default=1))
    for parts in range(1, len(rest) + 1):
        share = -(-len(rest) // parts)
        chunks = [rest[start : start + share] for start in range(0, len(rest), share)]
        if all(sum(sizes[place] for place in chunk) <= room for chunk in chunks):
            return [fixed + chunk for chunk in chunks]
    return [fixed]


# -- reports ----------------------------------------------------------------------------------------------------------


def write_report(folder: Path, grid: str) -> None:
    """Write <grid>.md, <grid>.tex and the figures from the grid's three files alone."""
    study = load_study(folder, grid)
    for path, text in _texts(folder, study).items():
        write_text(path, text)
    if study.arms:
        from treedraft.figures import write_figures

        write_figures(study, folder)


def print_table(folder: Path, grid: str) -> None:
    """Tau by drafter, mode and depth on stdout, a table a temperature, and comparisons at the headline temperature."""
    from rich.console import Console
    from rich.text import Text

    study = load_study(folder, grid)
    console = Console(width=None, highlight=False)
    console.width = min(console.width, WIDTH) if console.is_terminal else WIDTH
    if not study.arms:
        console.print(f"{grid}: no cell has finished")
        return
    for temperature in study.temperatures:
        for table in _main_table(study, temperature).rich(title=f"{grid}: tau at temperature {temperature:g}", width=console.width):
            console.print(table)
    compared = comparison_matrix(study, study.headline_temperature)
    if compared.rows:
        for table in compared.rich(
            title=f"{grid}: differences at temperature {study.headline_temperature:g}", width=console.width
        ):
            console.print(table)
    for cell, reason in study.failed:
        console.print(Text(f"failed: {cell}: {reason}"))


TABLES = {
    "headline": lambda study: [tau_table(study, study.headline_temperature)],
    "comparisons": lambda study: [comparison_table(study, study.headline_temperature)],
    "extrapolation": lambda study: [extrapolation_table(study, study.headline_temperature)],
    "ratio": lambda study: [ratio_table(study)],
    "ladder": lambda study: [ladder_table(study, study.headline_temperature)],
    "context": lambda study: [context_table(study, study.headline_temperature)],
    "domains": lambda study: [domain_table(study, study.headline_temperature)],
    "training": lambda study: [training_table(study)],
}


def fill_markers(path: Path, folder: Path) -> None:
    """Put generated tables between `<!-- table: GRID headline -->` and `<!-- end -->`. ValueError has file and line.

    `<!-- table: bench NAME -->` shows bench-NAME.json, what `python -m treedraft.bench NAME --output` wrote, and
    `<!-- table: claims verdicts -->` holds the claims of claims.toml, beside the folder, against its grids.
    """
    write_text(path, _filled(path, folder))


def _filled(path: Path, folder: Path) -> str:
    text = path.read_text(encoding="utf-8")

    def insert(match: re.Match[str]) -> str:
        line = f"{path}:{text.count(chr(10), 0, match.start()) + 1}"
        grid, kind = match[2], match[3]
        if grid == "bench":
            if not (folder / f"bench-{kind}.json").is_file():
                raise ValueError(f"{line}: no bench-{kind}.json in {str(folder)!r}")
            return match[1] + _bench_table(folder / f"bench-{kind}.json") + match[4]
        if grid == "claims":
            from treedraft.verdicts import verdict_table

            return match[1] + verdict_table(folder.parent / "claims.toml", folder).markdown() + match[4]
        if kind not in TABLES:
            raise ValueError(f"{line}: unknown table {kind!r}; known: {', '.join(TABLES)}")
        if grid not in known_grids(folder):
            raise ValueError(
                f"{line}: no results of grid {grid!r} in {str(folder)!r}; "
                f"known: {', '.join(known_grids(folder)) or 'none'}"
            )
        study = load_study(folder, grid)
        found = [table for table in TABLES[kind](study) if table] if study.arms else []
        return match[1] + "\n".join(table.markdown() for table in found) + match[4]

    return MARKER.sub(insert, text)


def _bench_table(path: Path) -> str:
    """One benchmark's numbers: a column for each thing that was measured, settings in the caption; else one column of all."""
    record = read_json(path)
    where = f"`python -m treedraft.bench {record.pop('benchmark')}`; {record.pop('hardware')}; commit {record.pop('commit')}"
    parts = {name: value for name, value in record.items() if isinstance(value, dict)}
    alone = {name: value for name, value in record.items() if name not in parts}
    if parts:
        settings = "; ".join(f"{_words(name)} {_bench_value(value)}" for name, value in alone.items())
        where = f"{settings}; {where}" if settings else where
    else:
        parts = {"": alone}
    names = dict.fromkeys(name for part in parts.values() for name in part)
    lines = ["| | " + " | ".join(map(_words, parts)) + " |", "| --- |" + " ---: |" * len(parts)]
    for name in names:
        cells = (_bench_value(part[name]) if name in part else "" for part in parts.values())
        lines.append(f"| {_words(name)} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", f"*{where}.*", ""])


def _words(name: str) -> str:
    return name.replace("_", " ")


def _bench_value(value: Any) -> str:
    if isinstance(value, list):
        return str(Interval(value=value[0], low=value[1], high=value[2]))
    if isinstance(value, float):
        return f"{value:.3g}" if value < 100 else f"{value:.0f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _texts(folder: Path, study: Study) -> dict[Path, str]:
    sources = f"{study.name}.cells.csv and {study.name}.prompts.csv"
    headers = f"% Generated by python -m treedraft.report from {sources}. Needs booktabs.\n"
    tables = [_main_table(study, temperature).latex() for temperature in study.temperatures]
    return {folder / f"{study.name}.md": _page(study), folder / f"{study.name}.tex": headers + "\n".join(tables)}


def _page(study: Study) -> str:
    parts = [f"# {study.name}\n", f"{study.question}\n" if study.question else ""]
    parts.append(
        f"Generated by `python -m treedraft.report` from [{study.name}.cells.csv]({study.name}.cells.csv) "
        f"and [{study.name}.prompts.csv]({study.name}.prompts.csv).\n"
    )
    if study.rungs or study.contexts:
        title, figure = ("Ladder", "ladder") if study.rungs else ("Context", "context")
        tables = [_main_table(study, t) for t in study.temperatures]
        parts += [_section(title, tables, figure=f"{study.name}-{figure}.png")]
        compared = [t for t in (comparison_table(study, t) for t in study.temperatures) if t.rows]
        parts += [_section("Comparisons", compared), _section("Training", [training_table(study)])]
        parts += [_section("Every cell", [cell_table(study)])]
    elif study.arms:
        parts += [_section("tau", [tau_table(study, t) for t in study.temperatures], figure=f"{study.name}-tau.png")]
        parts += [
            _section("Comparisons", [t for t in (comparison_table(study, t) for t in study.temperatures) if t.rows])
        ]
        parts += [
            _section("Other depths than the trained one", [extrapolation_table(study, t) for t in study.temperatures])
        ]
        parts += [_section("Tree and chain", [ratio_table(study)])]
        parts += [
            _section(
                "Domains", [domain_table(study, t) for t in study.temperatures], figure=f"{study.name}-domains.png"
            )
        ]
        parts += [_section("Survival by depth", [], figure=f"{study.name}-survival.png")]
        parts += [_section("Training", [training_table(study)])]
        parts += [_section("Every cell", [cell_table(study)])]
    else:
        parts.append("No cell has finished.\n")
    if study.failed:
        parts.append("## Failed cells\n\n" + "\n".join(f"- `{cell}`: {reason}" for cell, reason in study.failed) + "\n")
    return "\n".join(part for part in parts if part)


def _section(title: str, tables: Iterable[Table | None], *, figure: str | None = None) -> str:
    bodies = [table.markdown() for table in tables if table]
    if figure:
        bodies.append(f"![{title}]({figure})\n")
    return "\n".join([f"## {title}\n", *bodies]) if bodies else ""


# -- command ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Regenerate tables and figures."""

    folder: Path = Path("ablations/results")
    """Where the CSV files are; README.md one and two folders up are filled too."""
    grid: str | None = None
    """One grid; None means all in the folder."""
    check: bool = False
    """Write nothing; exit 1 with the files that differ from what would be generated."""


def main() -> int:
    arguments = parse_arguments(
        Arguments,
        program="python -m treedraft.report",
        description="Generate the tables and figures of measured grids.",
    )
    folder = arguments.folder
    grids = [arguments.grid] if arguments.grid else known_grids(folder)
    if not grids:
        raise ValueError(f"no *.cells.csv in {str(folder)!r}; run python -m treedraft.ablate first")
    documents = [path for path in _documents(folder) if path.is_file()]
    if arguments.check:
        stale = [path for grid in grids for path in _stale(folder, grid)]
        stale += [path for path in documents if _filled(path, folder) != path.read_text(encoding="utf-8")]
        for path in stale:
            print(path)
        return 1 if stale else 0
    for grid in grids:
        write_report(folder, grid)
    for path in documents:
        fill_markers(path, folder)
    return 0


def _documents(folder: Path) -> list[Path]:
    home = folder.resolve().parent
    return [home.parent / "README.md", home / "README.md"]


def _stale(folder: Path, grid: str) -> list[Path]:
    """Texts that differ; of figures only those that are missing, since fonts differ between machines."""
    study = load_study(folder, grid)
    texts = [
        path
        for path, text in _texts(folder, study).items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]
    pictures = []
    if study.arms:
        from treedraft.figures import figures_of

        pictures = [folder / f"{grid}-{figure}.png" for figure in figures_of(study)]
    return texts + [path for path in pictures if not path.is_file()]


if __name__ == "__main__":
    run_cli(main)
