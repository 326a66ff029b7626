"""What a grid measured, read from its CSV files alone: arms with their bootstraps, and comparisons with verdicts."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np

from treedraft.files import read_json
from treedraft.metrics import BOOTSTRAP_DRAWS, Interval, draw_prompts, draw_seeds
from treedraft.results import COUNTED, Frame, read_rows

RUNGS = ("marginal", "per_depth", "conditional")
MARGIN, RELATIVE_MARGIN = 0.05, 0.01  # a claim needs a gap of at least this many tokens and this share of tau
FEWEST_PROMPTS = 30  # below it nothing is claimed


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Setting:
    """One way of decoding. `mode` also names width, budget, scorer, admit and context where a grid has several."""

    temperature: float
    mode: str
    depth: int


class Bootstrap:
    """Resampled prompts, [P] of these domains, and the training seeds of arms with them: one weight matrix for every arm.

    Gives the very numbers of `metrics.seeded_difference`, which draws the matrix anew in each call.
    """

    def __init__(self, domains: Sequence[str] | np.ndarray, *, draws: int = BOOTSTRAP_DRAWS, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.weights = draw_prompts(rng, domains, draws)
        self._after = rng
        self._picked: dict[tuple[int, ...], list[np.ndarray]] = {}

    def ratios(self, sums: np.ndarray) -> np.ndarray:
        """Tau [draws, K] of every resample from sums [K, P, 2] of emitted tokens and rounds; nan without rounds."""
        num_seeds, num_prompts, _ = sums.shape
        drawn = self.weights @ sums.transpose(1, 0, 2).reshape(num_prompts, -1)
        emitted, rounds = np.moveaxis(drawn.reshape(-1, num_seeds, 2), -1, 0)
        return np.divide(emitted, rounds, out=np.full_like(emitted, np.nan), where=rounds > 0)

    def seeds(self, *ratios: np.ndarray) -> list[np.ndarray]:
        """Means [draws] over resampled training seeds of arms that were trained apart; one arm at a time: together."""
        sizes = tuple(each.shape[1] for each in ratios)
        if sizes not in self._picked:
            rng = copy.deepcopy(self._after)
            self._picked[sizes] = [draw_seeds(rng, size, len(self.weights)) for size in sizes]
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
    spine: Mapping[str, np.ndarray] | None = None
    """By depth, rounds on and off the greedy spine (see metrics.spine_counts), all training seeds together."""
    steps: Mapping[str, np.ndarray] | None = None
    paths: Mapping[str, np.ndarray] | None = None
    """Drafts by probability (see metrics.tallied): of a step, of a whole path."""
    seeds: tuple[int, ...] = ()
    """Training seeds [K], in the order of `sums`."""

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
        return interval_of(self.tau, self.bootstrap.seeds(self.drawn)[0])

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
    def width(self) -> float:
        """Of the interval, in tokens."""
        return self.difference.high - self.difference.low

    @property
    def detectable(self) -> float:
        return self.difference.detectable


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
    prompts: Frame
    controls: Frame | None
    hardware: str
    commit: str

    @cached_property
    def labels(self) -> list[str]:
        return list(dict.fromkeys(label for label, _ in self.arms))

    @cached_property
    def settings(self) -> list[Setting]:
        found = {setting for _, setting in self.arms}
        return sorted(found, key=lambda setting: (setting.temperature, _by_number(setting.mode), setting.depth))

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
        return sorted({setting.mode for setting in self.settings}, key=_by_number)

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
        """A drafter at growing context; of several ways of decoding the last one, the largest tree at the largest depth."""
        rows = self.cells[(self.cells.label == label) & (self.cells.temperature == temperature)].copy()
        if rows.empty:
            return []
        rows["kind"] = rows["mode"].str.startswith("tree")
        shaping = ["kind", "depth", "budget", "width", "scorer", "admit"]
        last = rows.sort_values(shaping).iloc[-1]
        rows = rows[(rows[shaping] == last[shaping]).all(axis=1)]
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

    def headline_arms(self, temperature: float) -> list[Arm]:
        """Every drafter at about its trained depth, decoded as a chain, and as the last of the trees."""
        found = [self.at_trained_depth(label, temperature, mode) for label in self.labels for mode in self.main_modes]
        return [arm for arm in found if arm]

    @cached_property
    def main_modes(self) -> list[str]:
        """The chain, and the last (the largest) of the trees, of a ladder the top rung's."""
        trees = [mode for mode in self.modes if mode.startswith("tree")]
        trees = [mode for mode in trees if not self.rungs or f"scorer {self.rungs[-1]}" in mode]
        return [mode for mode in self.modes if not mode.startswith("tree")][:1] + trees[-1:]

    @cached_property
    def resampled(self) -> str:
        """What intervals are taken over."""
        return "prompts and training seeds" if any(len(arm.taus) > 1 for arm in self.arms.values()) else "prompts"

    def source(self, temperature: float | None = None) -> str:
        """Who was measured on how much, where: the end of every caption."""
        cells = self.cells if temperature is None else self.cells[self.cells.temperature == temperature]
        prompts, seeds = span(cells.prompts), span((cells.decodings / cells.prompts).round())
        targets = ", ".join(dict.fromkeys(self.cells.target.astype(str)))
        scaled = set(self.cells.rope_scaling.dropna()) - {"none"} if "rope_scaling" in self.cells else set()
        targets += "".join(f", rope scaling {scaling}" for scaling in sorted(scaled))
        size = f"n = {prompts} prompts x {seeds} sampling seed{'' if seeds == '1' else 's'}"
        return f"{size}, target {targets}; {self.hardware}; commit {self.commit}"


def load_study(folder: Path, grid: str) -> Study:
    """Read the files of a grid; ValueError names what is missing or does not fit."""
    info = read_json(_existing(folder / f"{grid}.json", folder))
    table = read_rows(_existing(folder / f"{grid}.cells.csv", folder))
    finished = table.status == "ok"
    cells = table[finished].copy()
    if "shape" in cells:
        cells["shape"] = cells["shape"].fillna("")
    cells["mode"] = _modes(cells)
    prompts = read_rows(_existing(folder / f"{grid}.prompts.csv", folder))
    path = folder / f"{grid}.controls.csv"
    controls = read_rows(path) if path.is_file() else None
    if controls is not None:
        controls["shape"] = controls["shape"].fillna("")
        controls["mode"] = _modes(controls)
    failed = tuple((str(row.cell), str(row.status).removeprefix("failed: ")) for row in table[~finished].itertuples())
    return Study(
        name=grid,
        question=str(info.get("question", "")),
        pairs=tuple((str(first), str(second)) for first, second in info.get("comparisons", [])),
        cells=cells,
        failed=failed,
        arms=_arms(cells, prompts, where=f"{grid}.prompts.csv"),
        prompts=prompts,
        controls=controls,
        hardware=joined(cells.hardware, info.get("hardware")),
        commit=joined(cells.commit, info.get("commit")),
    )


def known_grids(folder: Path) -> list[str]:
    return sorted(path.name.removesuffix(".cells.csv") for path in folder.glob("*.cells.csv"))


def _existing(path: Path, folder: Path) -> Path:
    if not path.is_file():
        raise ValueError(
            f"no file {str(path)!r}; grids with results in {str(folder)!r}: {', '.join(known_grids(folder)) or 'none'}"
        )
    return path


def _modes(cells: Frame) -> list[str]:
    """ "tree", or "tree budget 64" where trees of one grid differ in more than depth and temperature."""
    shaping = {"tree": ("width", "budget", "scorer", "admit", "shape", "context"), "chain": ("scorer", "shape", "context")}
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
    bootstraps: dict[tuple[str, ...], Bootstrap] = {}
    arms = {}
    for key, rows in cells.groupby(["label", "temperature", "mode", "depth"], sort=False):
        label, temperature, mode, depth = cast(tuple[str, float, str, int], key)
        lost = [cell for cell in rows.cell if cell not in sums]
        if lost:
            raise ValueError(f"{where}: no rows of cell {lost[0]!r}, which finished")
        rows = rows.sort_values("train_seed")
        if mode.startswith("chain"):  # a chain of another budget or width is the same chain
            rows = rows.drop_duplicates("train_seed")
        seeds = [sums[cell] for cell in rows.cell]
        order = tuple(seeds[0].index)
        if any(tuple(each.index) != order for each in seeds):
            raise ValueError(f"{where}: the training seeds of {label!r} were decoded on different prompts")
        setting = Setting(temperature=float(temperature), mode=str(mode), depth=int(depth))
        named = domains.loc[list(order)].to_numpy()
        if tuple(named) not in bootstraps:
            bootstraps[tuple(named)] = Bootstrap(named)
        arms[str(label), setting] = Arm(
            label=str(label), setting=setting, prompts=order, domains=named, seeds=tuple(rows.train_seed),
            sums=np.stack([each.to_numpy(float) for each in seeds]), bootstrap=bootstraps[tuple(named)],
            survival=np.mean([np.array(str(text).split(), dtype=float) for text in rows.survival], axis=0),
            **{group: counted(rows.to_dict("records"), group) for group in COUNTED},
        )  # fmt: skip
    return arms


def counted(rows: Sequence[Mapping[str, Any]], group: str) -> dict[str, np.ndarray] | None:
    """The lists of a group (see COUNTED), added up over rows of cells; None unless all of them have it."""
    found = {}
    for name in COUNTED[group]:
        texts = [row.get(f"{group}_{name}") for row in rows]
        if not all(isinstance(text, str) for text in texts):
            return None
        found[name] = np.sum([np.array(str(text).split(), dtype=float) for text in texts], axis=0)
    return found


def _ratio(sums: np.ndarray) -> np.ndarray:
    emitted, rounds = np.moveaxis(sums, -1, 0)
    return np.divide(emitted, rounds, out=np.full_like(emitted, np.nan), where=rounds > 0)


def interval_of(value: float, drawn: np.ndarray) -> Interval:
    drawn = drawn[~np.isnan(drawn)]
    low, high = np.percentile(drawn, [2.5, 97.5]) if len(drawn) else (np.nan, np.nan)
    return Interval(value=value, low=float(low), high=float(high))


def compare(first: Arm, second: Arm, domains: Sequence[str]) -> Comparison:
    """Two arms on the same prompts. Arms with the same training seeds draw them at once, since those share the first weights
    and the order of the text; others draw theirs apart."""
    gaps = {name: first.domain(name).tau - second.domain(name).tau for name in domains if name in first.domains}
    return Comparison(
        first=first, second=second, difference=interval_of(first.tau - second.tau, drawn_gap(first, second)), by_domain=gaps
    )


def drawn_gap(first: Arm, second: Arm) -> np.ndarray:
    """tau(first) - tau(second) [draws] of every resample."""
    draw = first.bootstrap.seeds
    if first.seeds == second.seeds:
        (one,), (other,) = draw(first.drawn), draw(second.drawn)
    else:
        one, other = draw(first.drawn, second.drawn)
    return one - other


def same_drafter(first: Arm, second: Arm, *, ratio: bool) -> Interval | None:
    """The change of one drafter between two settings: prompts and training seeds are resampled together."""
    if first.prompts != second.prompts or first.drawn.shape != second.drawn.shape:
        return None
    (one,), (other,) = first.bootstrap.seeds(first.drawn), second.bootstrap.seeds(second.drawn)
    if ratio:
        return interval_of(first.tau / second.tau, one / other)
    return interval_of(first.tau - second.tau, one - other)


def span(numbers: Frame) -> str:
    low, high = int(numbers.min()), int(numbers.max())
    return f"{low}" if low == high else f"{low} to {high}"


def _by_number(mode: str) -> list[str]:
    return [part.zfill(9) if part.isdigit() else part for part in mode.split()]


def joined(column: Frame, otherwise: Any) -> str:
    return "; ".join(dict.fromkeys(column.dropna().astype(str))) or str(otherwise or "unknown")


