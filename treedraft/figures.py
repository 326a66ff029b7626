"""Figures of a grid (tau by depth, survival, tau by domain), and of what happens in a round, as notebooks show it.

In a grid's figures colour is the correction, the same in every grid, and line style the backbone. In a round's, blue is accepted, orange is the
bonus token and grey was drafted in vain.
"""

from __future__ import annotations

import base64
import io
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from treedraft.files import replacing, sha256

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from treedraft.report import Arm, Study
    from treedraft.speculate import Round
    from treedraft.trees.tree import DraftTree

DASHES = ((), (4, 1.6), (1, 1.2), (6, 1.4, 1, 1.4))
MARKERS = "osD^vPX<>*hp"
ALWAYS = ("none", "markov", "attention")  # corrections
SURVIVAL_FLOOR = 1e-3
REJECTED = "0.86"
Decode = Callable[[int], str]


def figures_of(study: Study) -> dict[str, Callable[[Study], Figure]]:
    """Name in <grid>-NAME.png and how it is drawn."""
    from treedraft.report.slots import slots_recorded

    if study.rungs:
        found = {"ladder": _ladder}
    elif study.contexts:
        found = {"context": _context}
    else:
        compared = {"differences": _differences} if study.comparisons else {}
        found = {"tau": _tau, **compared, "survival": _survival, "domains": _domains}
    if slots_recorded(study):
        found |= {"slots": _slots, "calibration": _calibration}
    return {**found, "outputs": _outputs}


def write_figures(study: Study, folder: Path) -> None:
    """Write the figures of a grid; the same numbers give the same bytes."""
    with _theme():
        for name, draw in figures_of(study).items():
            _save(draw(study), folder / f"{study.name}-{name}.png", sources=tables_of(folder, study.name))


def tables_of(folder: Path, grid: str) -> list[Path]:
    """What the figures of a grid are drawn from."""
    return [path for name in ("cells", "prompts", "controls") if (path := folder / f"{grid}.{name}.csv").is_file()]


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure that a notebook shows as an image, and as its title where there are none."""

    figure: Figure
    title: str

    def __repr__(self) -> str:
        return f"[{self.title}]"

    def _repr_png_(self) -> bytes:
        return _png(self.figure)


def draw(study: Study, name: str) -> Picture:
    """One of a grid's figures (see `figures_of`). ValueError with the choices if it has no such figure."""
    drawings = figures_of(study)
    if name not in drawings:
        from treedraft.registry import unknown

        raise ValueError(unknown("figure", name, list(drawings)))
    with _theme():
        return Picture(drawings[name](study), f"{study.name}: {name}")


def _save(figure: Figure, path: Path, *, sources: Sequence[Path] = ()) -> None:
    with replacing(path) as temporary:
        temporary.write_bytes(_png(figure, sources=sources))


def _png(figure: Figure, *, sources: Sequence[Path] = ()) -> bytes:
    """A PNG of 128 colours without dates or versions: a third of the size, and the same bytes again.

    With `sources`, the tables it was drawn from, it carries their digests.
    """
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    carried = PngInfo()
    if sources:
        carried.add_text("source sha256", _digests(sources))
    picture, small = io.BytesIO(), io.BytesIO()
    figure.savefig(picture, format="png", dpi=120, bbox_inches="tight")
    figure.set_layout_engine("none")  # laid out again it would move by a pixel
    with Image.open(picture) as image:
        image.convert("RGB").quantize(128, dither=Image.Dither.NONE).save(small, format="png", optimize=True, pnginfo=carried)
    return small.getvalue()


def _digests(sources: Sequence[Path]) -> str:
    return " ".join(map(sha256, sources))


def drawn_from(path: Path, sources: Sequence[Path]) -> bool:
    """Whether that PNG is there and carries the digests of these tables; what it looks like depends on the machine's fonts."""
    from PIL import Image

    if not path.is_file():
        return False
    with Image.open(path) as image:
        return image.info.get("source sha256") == _digests(sources)


@contextmanager
def _theme() -> Iterator[None]:
    import matplotlib.style
    import seaborn as sns

    with (
        matplotlib.style.context("default"),
        sns.axes_style("whitegrid"),
        sns.plotting_context("notebook", font_scale=0.85),
    ):
        yield


def _tau(study: Study) -> Figure:
    def panel(axes: Axes, temperature: float, mode: str) -> None:
        depths = study.depths(temperature, mode)
        step = min(np.diff(depths), default=4) * 0.22 / max(len(study.labels) - 1, 1)
        for place, label in enumerate(study.labels):
            arms = [arm for arm in (study.arm(label, temperature, mode, depth) for depth in depths) if arm]
            # Neighbours are set apart, or their error bars would hide each other.
            x = np.array([arm.setting.depth for arm in arms]) + (place - (len(study.labels) - 1) / 2) * step
            y = np.array([arm.tau for arm in arms])
            bounds = (
                np.array([[arm.tau - arm.interval.low, arm.interval.high - arm.tau] for arm in arms])
                .clip(0)
                .reshape(-1, 2)
                .T
            )
            axes.errorbar(x, y, yerr=bounds, elinewidth=1, capsize=0, **_look(study, label))
        axes.set_xticks(depths)
        _mark_trained(study, axes)

    return _panels(
        study,
        panel,
        title="tau by decode depth",
        x="decode depth (tokens drafted a round)",
        y="tau (emitted tokens a round)",
    )


def _differences(study: Study) -> Figure:
    """A row a compared pair, a marker a depth; hollow where nothing may be claimed."""
    import seaborn as sns

    pairs = list(dict.fromkeys((item.first.label, item.second.label) for item in study.comparisons))
    depths = sorted({item.first.setting.depth for item in study.comparisons})
    colours = dict(zip(depths, sns.color_palette("viridis_r", len(depths)), strict=True))

    def panel(axes: Axes, temperature: float, mode: str) -> None:
        axes.axvline(0, color="0.4", linewidth=1)
        for item in study.comparisons:
            setting, gap = item.first.setting, item.difference
            if (setting.temperature, setting.mode) != (temperature, mode):
                continue
            place = depths.index(setting.depth)
            y = pairs.index((item.first.label, item.second.label)) + (place - (len(depths) - 1) / 2) * 0.7 / len(depths)
            colour = colours[setting.depth]
            axes.plot([gap.low, gap.high], [y, y], color=colour, linewidth=1.3)
            axes.plot([gap.value], [y], color=colour, marker=MARKERS[place % len(MARKERS)], markersize=4.5, linestyle="none",
                      markerfacecolor=colour if item.claimed else "white")  # fmt: skip
        _name_rows(axes, [f"{first} - {second}" for first, second in pairs])

    look = {"linestyle": "none", "markersize": 4.5}
    handles = [_handle(color=colours[depth], marker=MARKERS[place % len(MARKERS)], label=str(depth), **look) for place, depth in enumerate(depths)]
    claims = [_handle(color="0.3", marker="o", label="better", **look), _handle(color="0.3", marker="o", markerfacecolor="white", label="no difference shown", **look)]
    return _panels(
        study, panel, title="differences between drafters", x="difference of tau (tokens a round)", y="",
        height=0.9 + 0.09 * (1 + len(depths)) * len(pairs), legend=[("depth", handles), ("verdict", claims)],
        width=4.3 + 0.035 * max(len(first + second) for first, second in pairs),
    )  # fmt: skip


def _survival(study: Study) -> Figure:
    def shown_arms(temperature: float) -> list[Arm]:
        """The deepest arms of every mode: panels of a row share their scale."""
        deepest = [
            (mode, max(study.depths(temperature, mode))) for mode in study.modes if study.depths(temperature, mode)
        ]
        found = [study.arm(label, temperature, *setting) for setting in deepest for label in study.labels]
        return [arm for arm in found if arm]

    def panel(axes: Axes, temperature: float, mode: str) -> None:
        depth = max(study.depths(temperature, mode), default=1)
        for label in study.labels:
            arm = study.arm(label, temperature, mode, depth)
            if arm is not None:
                shown = np.where(arm.survival >= SURVIVAL_FLOOR, arm.survival, np.nan)
                axes.plot(np.arange(1, len(shown) + 1), shown, **{**_look(study, label), "marker": ""})
        lowest = min(arm.survival[arm.survival >= SURVIVAL_FLOOR].min(initial=1.0) for arm in shown_arms(temperature))
        axes.set(yscale="log", ylim=(lowest * 0.85, 1.05))
        ticks = [tick for tick in (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0) if tick >= lowest * 0.85]
        axes.set_yticks(ticks, [f"{tick:.1%}" if tick < 0.01 else f"{tick:.0%}" for tick in ticks])
        axes.minorticks_off()
        axes.set_xticks(_ticks(depth))
        _mark_trained(study, axes)

    return _panels(
        study,
        panel,
        title="survival at the deepest decode setting",
        x="draft position d (tokens)",
        y="rounds that accept at least d tokens",
        legend=_identity_legend(study, marked=False),
    )


def _domains(study: Study) -> Figure:
    """A row a drafter, a marker a domain: names stay readable however many drafters there are."""
    import seaborn as sns

    colours = sns.color_palette("colorblind", max(len(study.domains), 1))
    labels = study.labels

    def panel(axes: Axes, temperature: float, mode: str) -> None:
        for number, domain in enumerate(study.domains):
            for row, label in enumerate(labels):
                arm = study.at_trained_depth(label, temperature, mode)
                if arm is None or domain not in arm.domains:
                    continue
                found = arm.domain(domain).interval
                offset = (number - (len(study.domains) - 1) / 2) * 0.6 / max(len(study.domains), 1)
                bounds = np.array([[found.value - found.low], [found.high - found.value]]).clip(0)
                axes.errorbar(
                    [found.value], [row + offset], xerr=bounds, color=colours[number],
                    marker=MARKERS[number % len(MARKERS)], markersize=5, linestyle="none", elinewidth=1.2,
                    label=domain if not row else None,
                )  # fmt: skip
        _name_rows(axes, labels)

    height = 0.9 + 0.34 * len(labels)
    handles = [
        _handle(color=colour, marker=MARKERS[number % len(MARKERS)], linestyle="none", label=domain)
        for number, (domain, colour) in enumerate(zip(study.domains, colours, strict=False))
    ]
    return _panels(
        study,
        panel,
        title="tau by domain at the trained depth",
        x="tau (emitted tokens a round)",
        y="",
        height=height,
        legend=[("domain", handles)],
    )


def _name_rows(axes: Axes, names: Sequence[str]) -> None:
    """A row a name, the first on top, thin lines between them."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    for row in range(len(names) - 1):
        axes.axhline(row + 0.5, color="0.9", linewidth=0.8, zorder=0)


def _slots(study: Study) -> Figure:
    """Acceptance by draft position at the headline temperature, of paths on and off the greedy spine."""
    from treedraft.report.slots import slot_shares

    arms = study.headline_arms(study.headline_temperature)
    panels = [(mode, 1, "on the greedy spine") for mode in study.main_modes]
    panels += [(mode, 2, "off it") for mode in study.main_modes if mode.startswith("tree")]

    def panel(axes: Axes, place: int) -> None:
        mode, row, name = panels[place]
        for arm in arms:
            shares = slot_shares(arm) if arm.setting.mode == mode else None
            if shares is not None:
                axes.plot(np.arange(1, shares.shape[1] + 1), shares[row], **{**_look(study, arm.label), "markersize": 3.5})
        axes.set_title(_folded(f"{mode}, {name}"))
        axes.set(ylim=(0, 1.02), xlabel="draft position d (tokens)")
        axes.set_xticks(_ticks(max(arm.setting.depth for arm in arms)))
        _mark_trained(study, axes)

    title = f"acceptance slot by slot, temperature {study.headline_temperature:g}"
    y = "rounds that accept a draft, of those so far"
    return _row(study, panel, len(panels), title=title, y=y, legend=_identity_legend(study))


def _calibration(study: Study) -> Figure:
    """Reliability at the headline temperature, a point a bin of q: left of a draft given its parent, right of whole paths, on
    logarithmic scales."""
    from treedraft.report.slots import FEWEST_ROUNDS

    arms = study.headline_arms(study.headline_temperature)
    arms = [arm for arm in arms if arm.setting.mode == study.main_modes[-1]]
    panels = [("steps", "q of drafts below accepted nodes"), ("paths", "q of whole paths")]
    panels = panels[: 1 + any(arm.paths is not None for arm in arms)]

    def panel(axes: Axes, place: int) -> None:
        name, title = panels[place]
        ends = (0, 1) if name == "steps" else (3e-6, 1)
        axes.plot(ends, ends, color="0.6", linewidth=1, zorder=1)
        for arm in arms:
            counts = getattr(arm, name)
            if counts is not None:
                shown = (counts["drafts"] >= FEWEST_ROUNDS) & ((counts["accepted"] > 0) | (name == "steps"))  # a logarithm
                x, y = (counts[part][shown] / counts["drafts"][shown] for part in ("expected", "accepted"))
                axes.plot(x, y, **{**_look(study, arm.label), "markersize": 3.5})
        scale = "linear" if name == "steps" else "log"
        axes.set(xscale=scale, yscale=scale, xlim=ends, ylim=ends, aspect="equal", xlabel="mean q of a bin")
        axes.set_title(_folded(f"{study.main_modes[-1]}, {title}"))

    title = f"calibration, temperature {study.headline_temperature:g}"
    return _row(study, panel, len(panels), title=title, y="share accepted", legend=_identity_legend(study)[:-1], share=False)


def _outputs(study: Study) -> Figure:
    """Histogram of output lengths, a panel a temperature, domains stacked."""
    from treedraft.report.checks import outputs_of

    outputs, domains = outputs_of(study), study.domains
    edges = np.linspace(0, max(outputs.length.max(), 1), 25)

    def panel(axes: Axes, place: int) -> None:
        temperature = study.temperatures[place]
        own = outputs[outputs.temperature == temperature]
        lengths = [own.length[own.domain == name].to_numpy() for name in domains]
        axes.hist(lengths, bins=edges.tolist(), stacked=True, color=[_palette()[i % 10] for i in range(len(domains))], linewidth=0)
        axes.set_title(f"temperature {temperature:g}" + (" (greedy)" if temperature == 0 else ""))
        axes.set_xlabel("length of an output (tokens)")

    handles = [_patch(_palette()[i % 10], name) for i, name in enumerate(domains)]
    return _row(study, panel, len(study.temperatures), title="what the target wrote", y="outputs", legend=[("domain", handles)], share=False)


def _row(
    study: Study,
    panel: Callable[[Axes, int], None],
    count: int,
    *,
    title: str,
    y: str,
    legend: Sequence[tuple[str, list[Any]]],
    share: bool = True,
) -> Figure:
    """Panels side by side."""
    import seaborn as sns
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.7 * count + 1.4, 3.6), layout="constrained")
    row = figure.subplots(1, count, squeeze=False, sharey=share)[0]
    for place, axes in enumerate(row):
        panel(axes, place)
        axes.grid(linewidth=0.6, color="0.9")
    row[0].set_ylabel(y)
    sns.despine(fig=figure)
    figure.suptitle(f"{study.name}: {title}\n", fontweight="bold", linespacing=0.5)
    _legends(figure, legend)
    return figure


def _ladder(study: Study) -> Figure:
    """A column a drafter, a row a way of admitting nodes; a line a rung over the budget."""
    import seaborn as sns
    from matplotlib.figure import Figure

    colours = dict(zip(study.rungs, sns.color_palette("viridis_r", len(study.rungs)), strict=True))
    trees = study.ladder(study.headline_temperature)
    admits, budgets = sorted({tree[1] for tree in trees}), sorted({tree[2] for tree in trees})
    labels = study.labels
    figure = Figure(figsize=(2.9 * len(labels) + 1.6, 2.6 * len(admits) + 0.6), layout="constrained")
    grid = figure.subplots(len(admits), len(labels), squeeze=False, sharex=True, sharey=True)
    for row, admit in zip(grid, admits, strict=True):
        for axes, label in zip(row, labels, strict=True):
            for place, rung in enumerate(study.rungs):
                points = [(b, arms[rung]) for name, how, b, arms in trees if (name, how) == (label, admit) and rung in arms]
                x = np.array([budgets.index(budget) for budget, _ in points]) + 0.09 * (place - 1)
                y = np.array([arm.tau for _, arm in points])
                bounds = np.array([[a.tau - a.interval.low, a.interval.high - a.tau] for _, a in points]).clip(0)
                axes.errorbar(
                    x, y, yerr=bounds.reshape(-1, 2).T, color=colours[rung], marker=MARKERS[place], markersize=4.5,
                    linewidth=1.5, elinewidth=1,
                )  # fmt: skip
            axes.set_title(f"{label}, admit {admit}")
            axes.set_xticks(range(len(budgets)), [str(budget) for budget in budgets])
            axes.grid(linewidth=0.6, color="0.9")
        row[0].set_ylabel("tau (emitted tokens a round)")
    for axes in grid[-1]:
        axes.set_xlabel("budget (nodes, root included)")
    sns.despine(fig=figure)
    temperature = study.headline_temperature
    figure.suptitle(f"{study.name}: tau by rung, temperature {temperature:g}\n", fontweight="bold", linespacing=0.5)
    handles = [
        _handle(color=colours[rung], marker=MARKERS[place], label=rung.replace("_", " "))
        for place, rung in enumerate(study.rungs)
    ]
    _legends(figure, [("scored", handles)])
    return figure


def _context(study: Study) -> Figure:
    """Tau, the time of a draft and the drafter's state over the length of the prompts; a line a drafter."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.4, 3.6), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    for label in study.labels:
        items = study.behind(label, study.headline_temperature)
        tokens, look = [item.tokens for item in items], _look(study, label)
        arms = [item.arm for item in items]
        bounds = np.array([[arm.tau - arm.interval.low, arm.interval.high - arm.tau] for arm in arms]).clip(0)
        left.errorbar(tokens, [arm.tau for arm in arms], yerr=bounds.reshape(-1, 2).T, elinewidth=1, **look)
        middle.plot(tokens, [item.draft_ms for item in items], **look)
        right.plot(tokens, [item.state_bytes / 1024 for item in items], **look)
    for axes in (left, middle, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(study.contexts, [f"{length:,}" for length in study.contexts])
        axes.minorticks_off()
        axes.set_xlabel("context length (prompt tokens)")
        axes.grid(linewidth=0.6, color="0.9")
    left.set(title="accepted length", ylabel="tau (emitted tokens a round)")
    middle.set(title="one draft forward", ylabel="median of live rounds (ms)")
    right.set(title="drafter state", ylabel="a request (KiB)")
    if any(np.isfinite(line.get_ydata()).any() for line in right.lines):  # nothing where no cell was timed
        right.set_yscale("log")
        for axis in (right.yaxis.set_major_formatter, right.yaxis.set_minor_formatter):
            axis(lambda value, _: f"{value:,g}")
        middle.set_ylim(bottom=0)
    _despine(figure)
    temperature = study.headline_temperature
    figure.suptitle(f"{study.name}: growing context, temperature {temperature:g}\n", fontweight="bold", linespacing=0.5)
    handles = [_handle(**_look(study, label), label=label) for label in study.labels]
    _legends(figure, [("drafter", handles)])
    return figure


def draw_context_bench(table: Path) -> None:
    """What `bench context` measured, over the length of the prefix, beside its CSV file and of the same name."""
    import pandas as pd
    from matplotlib.figure import Figure

    rows = pd.read_csv(table)
    rows["mib"] = rows.bytes / 2**20
    panels = (("draft_ms", "one draft forward", "least of the repeats (ms)"), ("update_ms", "taking a round's rows in", "least of the repeats (ms)"), ("mib", "drafter state", "a request (MiB)"))
    with _theme():
        figure = Figure(figsize=(12.4, 3.6), layout="constrained")
        handles = []
        for axes, (column, title, unit) in zip(figure.subplots(1, 3), panels, strict=True):
            handles = []
            for place, (name, own) in enumerate(rows.groupby("context", sort=False)):
                look = {"color": _palette()[place], "marker": MARKERS[place], "markersize": 4.5, "linewidth": 1.5}
                axes.plot(own.tokens, own[column], **look)
                handles.append(_handle(**look, label=str(name)))
            axes.set_xscale("log", base=2)
            lengths = sorted(rows.tokens.unique())
            axes.set_xticks(lengths, [f"{length / 1024:.3g}" for length in lengths])
            axes.minorticks_off()
            axes.set(title=title, xlabel="tokens of the prefix (x 1,024)", ylabel=unit)
            if column == "update_ms":
                axes.set_ylim(bottom=0)
            else:
                axes.set_yscale("log")
                axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        _despine(figure)
        figure.suptitle("what a context costs behind a growing prefix\n", fontweight="bold", linespacing=0.5)
        _legends(figure, [("context", handles)])
        _save(figure, table.with_suffix(".png"), sources=[table])


def _panels(
    study: Study,
    panel: Callable[[Axes, float, str], None],
    *,
    title: str,
    x: str,
    y: str,
    height: float = 3.1,
    width: float = 4.3,
    legend: Sequence[tuple[str, list[Any]]] | None = None,
) -> Figure:
    """Rows are temperatures, columns modes; scales are shared within a row, legends stand outside on the right."""
    import seaborn as sns
    from matplotlib.figure import Figure

    temperatures, modes = study.temperatures, study.modes
    figure = Figure(figsize=(width * len(modes), height * len(temperatures) + 0.5), layout="constrained")
    grid = figure.subplots(len(temperatures), len(modes), squeeze=False, sharey="row", sharex="row" if not y else False)
    for row, temperature in zip(grid, temperatures, strict=True):
        for axes, mode in zip(row, modes, strict=True):
            if not study.depths(temperature, mode):
                axes.set_visible(False)
                continue
            panel(axes, temperature, mode)
            axes.set_title(f"{mode}, temperature {temperature:g}" + (" (greedy)" if temperature == 0 else ""))
            axes.grid(linewidth=0.6, color="0.9", axis="both" if y else "x")
        row[0].set_ylabel(y)
    for axes in grid[-1]:
        axes.set_xlabel(x)
    sns.despine(fig=figure)
    figure.suptitle(f"{study.name}: {title}\n", fontweight="bold", linespacing=0.5)
    _legends(figure, legend or _identity_legend(study))
    return figure


def _legends(figure: Figure, groups: Sequence[tuple[str, list[Any]]]) -> None:
    """One legend right of the panels; a group starts with its name in bold."""
    handles = []
    for title, entries in groups:
        handles += [_handle(linestyle="none", label=title), *entries]
    # Room for long names is not taken from the panels.
    longest = max(len(str(handle.get_label())) for handle in handles)
    width = figure.get_figwidth()
    figure.set_figwidth(width + 0.09 * max(0, longest - 24))
    figure.suptitle(figure.get_suptitle(), x=width / figure.get_figwidth() / 2, fontweight="bold", linespacing=0.5)
    legend = figure.legend(handles=handles, loc="outside right upper", frameon=False, handlelength=2.6)
    titles = {title for title, _ in groups}
    for text in legend.get_texts():
        if text.get_text() in titles:
            text.set_fontweight("bold")
            text.set_x(-30)


def _identity_legend(study: Study, *, marked: bool = True) -> list[tuple[str, list[Any]]]:
    backbones, corrections = _parts(study)
    colours = [
        _look(study, next(label for label in study.labels if _correction(label) == name)) for name in corrections
    ]
    styles = [_look(study, next(label for label in study.labels if _backbone(label) == name)) for name in backbones]
    groups = [
        (
            "correction",
            [
                _handle(
                    color=look["color"],
                    label=name,
                    **({"marker": look["marker"], "linestyle": "none"} if marked else {"linewidth": 3}),
                )
                for name, look in zip(corrections, colours, strict=True)
            ],
        )
    ]
    named = [(name, look) for name, look in zip(backbones, styles, strict=True) if name]
    if not named:
        groups = [("drafter", groups[0][1])]
    else:
        handles = [_handle(color="0.25", linestyle=look["linestyle"], label=name) for name, look in named]
        groups.append(("backbone", handles))
    groups.append(("depth", [_handle(color="0.5", linestyle=":", linewidth=1.4, label="trained")]))
    return groups


def _handle(**look: Any) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], **look)


def _look(study: Study, label: str) -> dict[str, Any]:
    backbones, corrections = _parts(study)
    place = _places(corrections)[_correction(label)]
    dashes = DASHES[backbones.index(_backbone(label)) % len(DASHES)]
    return {
        "color": _palette()[place % 10],
        "linestyle": (0, dashes) if dashes else "-",
        "marker": MARKERS[place % len(MARKERS)],
        "markersize": 4.5,
        "linewidth": 1.5,
    }


def _places(corrections: Sequence[str]) -> dict[str, int]:
    """The colour of every correction: the three that all grids are about keep theirs, the others take what is left."""
    kept = [name for name in ALWAYS if name in corrections]
    others = [name for name in corrections if name not in ALWAYS]
    left = [*range(len(ALWAYS), 10), *(place for place, name in enumerate(ALWAYS) if name not in kept)] if kept else range(10)
    return {**{name: ALWAYS.index(name) for name in kept}, **{name: left[i % len(left)] for i, name in enumerate(others)}}


def _parts(study: Study) -> tuple[list[str], list[str]]:
    return list(dict.fromkeys(map(_backbone, study.labels))), list(dict.fromkeys(map(_correction, study.labels)))


def _backbone(label: str) -> str:
    """Nothing in the label of a published method, which has a name of its own."""
    from treedraft.registry import names

    first, _, rest = label.partition("/")
    return first if rest and first.partition("-")[0] in names("backbones") else ""


def _correction(label: str) -> str:
    """All that follows the backbone: the correction, after the context where that is not the full one."""
    return label.partition("/")[2] if _backbone(label) else label


def _mark_trained(study: Study, axes: Axes) -> None:
    for depth in sorted(set(study.trained_depths.values())):
        axes.axvline(depth, color="0.5", linestyle=":", linewidth=1.4, zorder=0)


def _folded(title: str) -> str:
    """In lines that fit a panel."""
    return textwrap.fill(title, 34)


def _ticks(depth: int) -> list[int]:
    step = max(1, round(depth / 8))
    return [1, *range(1 + step, depth + 1, step)]


# -- a round ----------------------------------------------------------------------------------------------------------


def accepted_colour() -> Any:
    return _palette()[0]


def bonus_colour() -> Any:
    return _palette()[1]


def visible(text: str) -> str:
    """A token's text with its spaces and line ends made visible, many spaces as their number."""
    text = re.sub(" {3,}", lambda spaces: f"␣×{len(spaces[0])}", text)
    return text.replace(" ", "␣").replace("\n", "↵").replace("\t", "⇥") or "∅"


def tree_figure(
    tree: DraftTree, decode: Decode, *, path: Sequence[int] = (), bonus: int | None = None, title: str = "A draft tree"
) -> Picture:
    """A tree from left to right, every node's best child to its right; beside a node its probability under its parent.

    The nodes of `path` are filled, and the target's own token after it, `bonus`, hangs below its last node.
    """
    from matplotlib.figure import Figure

    scores, parents = tree.scores.tolist(), tree.parents.tolist()
    depths, children = tree.depths.tolist(), [list(nodes) for nodes in tree.children()]
    texts = [visible(decode(token)) for token in tree.tokens.tolist()]
    if bonus is not None:
        parents, depths = [*parents, path[-1]], [*depths, depths[path[-1]] + 1]
        children = [*children, []]
        children[path[-1]].append(len(tree))
        texts.append(visible(decode(bonus)))
    rows = _rows(children)
    gap, height = 0.52, 0.29  # inches
    widths = [max(_width(t) for t, d in zip(texts, depths, strict=True) if d == depth) for depth in range(max(depths) + 1)]
    lefts = np.concatenate([[0.0], np.cumsum([width + gap for width in widths])]).tolist()
    with _theme():
        figure = Figure(figsize=(lefts[-1] - gap + 0.2, height * (max(rows) + 1) + 0.75))
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(-0.1, lefts[-1] - gap + 0.1), ylim=(height * (max(rows) + 1) + 0.2, -0.55))
        axes.set_axis_off()
        for depth, left in enumerate(lefts[:-1]):
            axes.text(left, -0.32, str(depth) if depth else "depth 0", fontsize=8, color="0.45")
        for node, parent in enumerate(parents):
            left, y, width = lefts[depths[node]], height * rows[node], _width(texts[node])
            colour, fill, ink = _node_look(node, path, len(tree))
            if node:
                # One stem a parent, right of its column, so that siblings hang from the same line.
                start, stem = lefts[depths[parent]] + _width(texts[parent]), left - gap + 0.1
                above = height * rows[parent]
                weight = 1.0 if node == len(tree) else float(np.exp(scores[node] - scores[parent]))
                axes.plot([start, stem, stem, left], [above, above, y, y], color=colour, linewidth=0.7 + 2.3 * weight,
                          linestyle=":" if node == len(tree) else "-", zorder=2 if node in path else 1, solid_joinstyle="miter")  # fmt: skip
                if node < len(tree):
                    axes.text(left - 0.03, y - 0.03, f"{weight:.2f}", fontsize=6.5, color="0.3", ha="right", va="bottom")
            axes.text(left + width / 2, y, texts[node], fontsize=8, family="monospace", ha="center", va="center", color=ink, zorder=4,
                      bbox={"boxstyle": "round,pad=0.25", "facecolor": fill, "edgecolor": colour, "linewidth": 1.0})  # fmt: skip
        _key(axes, (0, 0), ["anchor", "accepted", "rejected", *(["bonus (the target's own)"] if bonus is not None else [])] if path
             else ["anchor", "drafted"])  # fmt: skip
        axes.set_title(f"{title} ({len(tree)} nodes; number: probability under the parent)", loc="left", fontsize=10, fontweight="bold")
    return Picture(figure, title)


def mask_figure(
    tree: DraftTree, decode: Decode, *, prefix_length: int, path: Sequence[int] = (), title: str = "The ancestor mask"
) -> Picture:
    """Who sees whom when the target verifies the tree: a row a node, a column for the whole prefix, then one a node."""
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

    sees = tree.ancestors().numpy().astype(int)
    on_path = np.zeros(len(tree), dtype=int)
    on_path[list(path)] = 1
    cells = sees * (1 + np.outer(on_path, on_path))
    cells = np.concatenate([(1 + on_path)[:, None], np.zeros((len(tree), 1), dtype=int), cells], axis=1)
    texts = [visible(decode(token)) for token in tree.tokens.tolist()]
    size = max(2.6, 0.155 * len(tree))
    with _theme():
        figure = Figure(figsize=(size + 2.4, size + 0.9), layout="constrained")
        axes = figure.add_subplot()
        axes.imshow(cells, cmap=ListedColormap(["white", "0.68", accepted_colour()]), vmin=0, vmax=2, aspect="equal")
        axes.set_yticks(range(len(tree)), [f"{text}  {node}" for node, text in enumerate(texts)], family="monospace", fontsize=6.5)
        axes.set_xticks([0, *range(2, len(tree) + 2, 4)], ["prefix", *map(str, range(0, len(tree), 4))], fontsize=7)
        axes.set_xticks(np.arange(1.5, len(tree) + 2), minor=True)
        axes.set_yticks(np.arange(0.5, len(tree)), minor=True)
        axes.grid(visible=False, which="major")
        axes.grid(which="minor", color="0.93", linewidth=0.5)
        axes.tick_params(which="both", length=0)
        axes.set(xlabel=f"seen: the {prefix_length} tokens of the prefix, then nodes by number", ylabel="node that looks")
        axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
        handles = [_patch(accepted_colour(), "sees, on the accepted path"), _patch("0.68", "sees"), _patch("white", "hidden")]
        axes.legend(handles=handles[0 if path else 1 :], loc="upper right", fontsize=7.5, frameon=True)
    return Picture(figure, title)


def rounds_figure(
    rounds: Sequence[Round],
    *,
    origin: Literal["answer", "anchor"] = "answer",
    trained_depth: int | None = None,
    title: str = "Round by round",
) -> Picture:
    """A row a round: accepted drafts, the bonus token, and how much deeper the tree went.

    Rounds start where they stand in the answer, or side by side at their anchors (then `trained_depth` is marked).
    """
    from matplotlib.figure import Figure

    emitted = np.array([item.emitted for item in rounds])
    accepted = np.array([min(len(item.path) - 1, item.emitted) for item in rounds])
    deepest = np.array([int(item.tree.depths.max()) for item in rounds])
    # The first token of an answer comes from the prompt's own forward.
    left = 1 + np.concatenate([[0], np.cumsum(emitted)[:-1]]) if origin == "answer" else np.zeros(len(rounds), dtype=int)
    with _theme():
        figure = Figure(figsize=(9.2, 0.19 * len(rounds) + 1.3), layout="constrained")
        axes = figure.add_subplot()
        y, look = np.arange(1, len(rounds) + 1), {"height": 0.72, "edgecolor": "white", "linewidth": 0.6}
        for place in range(int(deepest.max(initial=0))):
            drawn = deepest > place
            colours = [accepted_colour() if place < count else REJECTED for count in accepted[drawn]]
            axes.barh(y[drawn], 1, left=(left + place)[drawn], color=colours, **look)
        bonus = emitted > accepted
        if origin == "answer":
            axes.barh(y[:1], 1, left=0, color="0.25", **look)
        axes.barh(y[bonus], 1, left=(left + accepted)[bonus], color=bonus_colour(), **look)
        axes.set(ylim=(len(rounds) + 0.6, 0.4), ylabel="round", xlim=(0, None))
        axes.set_yticks(_ticks(len(rounds)))
        axes.set_xlabel("place in the answer (tokens)" if origin == "answer" else "place behind the anchor (tokens)")
        axes.grid(axis="y", visible=False)
        handles = [_patch("0.25", "prompt's own forward")] if origin == "answer" else []
        handles += [_patch(accepted_colour(), "accepted"), _patch(bonus_colour(), "bonus"), _patch(REJECTED, "drafted in vain (deepest branch)")]
        if trained_depth is not None and origin == "anchor":
            axes.axvline(trained_depth, color="0.35", linestyle=":", linewidth=1.4)
            handles.append(_handle(color="0.35", linestyle=":", linewidth=1.4, label="trained depth"))
        figure.legend(handles=handles, loc="outside lower left", ncols=4, frameon=False, fontsize=8)
        axes.set_title(f"{title} (tau {emitted.mean():.2f} tokens a round)", loc="left", fontsize=10, fontweight="bold")
        _despine(figure)
    return Picture(figure, title)


def words_figure(rows: Mapping[str, Sequence[str]], *, reference: str, title: str) -> Picture:
    """Texts slot by slot, a row a name; a text equal to that of the row `reference` is filled."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    right = rows[reference]
    widths = [max(_width(visible(texts[slot])) for texts in rows.values()) + 0.1 for slot in range(len(right))]
    lefts, height = np.concatenate([[0.0], np.cumsum(widths)]).tolist(), 0.3
    with _theme():
        margin = 0.075 * max(map(len, rows)) + 0.15
        figure = Figure(figsize=(lefts[-1] + margin, height * len(rows) + 0.45))
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(-margin, lefts[-1]), ylim=(height * len(rows) + 0.1, -0.35))
        axes.set_axis_off()
        for slot, left in enumerate(lefts[:-1]):
            axes.text(left + widths[slot] / 2, -0.12, str(slot + 1), fontsize=7.5, color="0.45", ha="center")
        axes.text(-0.1, -0.12, "draft position", fontsize=7.5, color="0.45", ha="right")
        for row, (name, texts) in enumerate(rows.items()):
            axes.text(-0.1, height * (row + 0.5), name, fontsize=8.5, ha="right", va="center", fontweight="bold" if name == reference else "normal")
            for slot, text in enumerate(texts):
                same = text == right[slot]
                fill = "0.3" if name == reference else accepted_colour() if same else "0.95"
                place = (lefts[slot], height * row)
                axes.add_patch(Rectangle(place, widths[slot], height, facecolor=fill, edgecolor="white", linewidth=1.2))
                axes.text(place[0] + widths[slot] / 2, place[1] + height / 2, visible(text), fontsize=8, family="monospace",
                          ha="center", va="center", color="white" if same else "0.2")  # fmt: skip
        axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
    return Picture(figure, title)


# -- curves -----------------------------------------------------------------------------------------------------------


def curves_figure(panels: Mapping[str, Mapping[str, np.ndarray]], *, x: str, y: str, title: str) -> Picture:
    """Curves over positions 1, 2, ... in panels that share a scale; a name keeps its colour and marker in every panel."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(name for curves in panels.values() for name in curves))
    with _theme():
        figure = Figure(figsize=(4.3 * len(panels) + 0.4, 3.3), layout="constrained")
        row = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
        for axes, (heading, curves) in zip(row, panels.items(), strict=True):
            for name, values in curves.items():
                place = names.index(name)
                axes.plot(np.arange(1, len(values) + 1), values, color=_palette()[place], marker=MARKERS[place], markersize=4, linewidth=1.6)
            axes.set_title(heading, fontsize=9.5)
            axes.set_xlabel(x)
            axes.set_xticks(_ticks(max(map(len, curves.values()))))
        row[0].set_ylabel(y)
        _despine(figure)
        handles = [_handle(color=_palette()[place], marker=MARKERS[place], markersize=4, label=name) for place, name in enumerate(names)]
        figure.legend(handles=handles, loc="outside right upper", frameon=False, fontsize=8.5)
        figure.suptitle(title, fontweight="bold", fontsize=10, x=0.01, ha="left")
    return Picture(figure, title)


def shares_figure(shares: Mapping[str, np.ndarray], *, x: str, y: str, title: str) -> Picture:
    """Shares that add up to 1 at every position 1, 2, ..., stacked in the order given; the last is grey."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    with _theme():
        figure = Figure(figsize=(7.4, 3.3), layout="constrained")
        axes = figure.add_subplot()
        bottom: Any = 0.0
        for place, (name, values) in enumerate(shares.items()):
            colour = REJECTED if place == len(shares) - 1 else _palette()[place]
            axes.bar(np.arange(1, len(values) + 1), values, bottom=bottom, color=colour, width=0.86, label=name)
            bottom = bottom + values
        axes.set(xlabel=x, ylabel=y, ylim=(0, 1))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_xticks(range(1, len(bottom) + 1))
        axes.grid(axis="x", visible=False)
        _despine(figure)
        figure.legend(loc="outside right upper", frameon=False, fontsize=8.5, reverse=True)
        figure.suptitle(title, fontweight="bold", fontsize=10, x=0.01, ha="left")
    return Picture(figure, title)


def pairs_figure(panels: Mapping[str, np.ndarray], *, x: str, y: str, title: str) -> Picture:
    """Points [n, 2] against the line where both are equal, in square panels of one scale."""
    from matplotlib.figure import Figure

    everything = np.concatenate([*panels.values()])
    low, high = float(everything.min()), float(everything.max())
    ends = (low - 0.05 * (high - low + 1), high + 0.05 * (high - low + 1))
    with _theme():
        figure = Figure(figsize=(3.4 * len(panels) + 0.4, 3.7), layout="constrained")
        row = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
        for place, (axes, (heading, points)) in enumerate(zip(row, panels.items(), strict=True)):
            axes.plot(ends, ends, color="0.6", linewidth=1, zorder=1)
            axes.scatter(*points.T, s=9, color=_palette()[place], alpha=0.45, linewidths=0, zorder=2)
            axes.set(xlim=ends, ylim=ends, aspect="equal", xlabel=x)
            axes.set_title(heading, fontsize=9.5)
        row[0].set_ylabel(y)
        _despine(figure)
        figure.suptitle(title, fontweight="bold", fontsize=10, x=0.01, ha="left")
    return Picture(figure, title)


def depth_figure(
    study: Study, depth: int, *, mode: str = "chain", temperature: float = 1.0, labels: Sequence[str] | None = None
) -> Picture:
    """What a round gives if its drafts end at `depth`: survival up to there, and tau = 1 + S_1 + ... + S_depth.

    From the arms (those of `labels`) that were decoded deepest, which says it exactly of a causal backbone's chain. Where rounds are cut by the end of an answer tau is a little smaller.
    ValueError if the study has no arm of this mode and temperature, or none so deep.
    """
    from matplotlib.figure import Figure

    deepest = max(study.depths(temperature, mode), default=0)
    if not 1 <= depth <= deepest:
        raise ValueError(f"depth is {depth}; {mode} at temperature {temperature:g} was measured at 1 to {deepest}")
    arms = {label: arm for label in labels or study.labels if (arm := study.arm(label, temperature, mode, deepest))}
    title = f"{study.name}: drafts that end at depth {depth} ({mode}, temperature {temperature:g})"
    with _theme():
        figure = Figure(figsize=(10.4, 3.4), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
        for row, (label, arm) in enumerate(arms.items()):
            look = _look(study, label)
            places = np.arange(1, deepest + 1)
            left.plot(places, arm.survival, **{**look, "marker": "", "alpha": 0.22})
            left.plot(places[:depth], arm.survival[:depth], **{**look, "marker": ""})
            reached = 1 + arm.survival[:depth].sum()
            right.plot([1, reached], [row, row], **{**look, "marker": ""})
            right.plot([reached], [row], color=look["color"], marker=look["marker"], markersize=6)
            right.annotate(f"{reached:.2f}", (reached, row), xytext=(8, 0), textcoords="offset points", va="center", fontsize=8)
        left.set(yscale="log", ylim=(SURVIVAL_FLOOR, 1.1), xlabel="draft position d (tokens)", ylabel="rounds that accept at least d tokens")
        left.set_yticks([0.001, 0.01, 0.1, 1.0], ["0.1%", "1%", "10%", "100%"])
        left.minorticks_off()
        left.set_xticks(_ticks(deepest))
        left.axvspan(depth + 0.5, deepest + 0.5, color="0.95", zorder=0)
        _mark_trained(study, left)
        widest = 1 + max(float(arm.survival.sum()) for arm in arms.values())
        right.set(xlim=(1, widest + 0.35), xlabel="tau (emitted tokens a round)")
        right.set_yticks(range(len(arms)), list(arms))
        right.set_ylim(len(arms) - 0.5, -0.5)
        right.grid(axis="y", visible=False)
        _despine(figure)
        _legends(figure, _identity_legend(study, marked=False))
        figure.suptitle(f"{title}\n", fontweight="bold", linespacing=0.5)
    return Picture(figure, title)


@dataclass(frozen=True, slots=True)
class Slider:
    """A widget that redraws a picture; where no kernel runs, as in a rendered file, the picture alone."""

    widget: Any
    picture: Picture

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        image = base64.b64encode(self.picture._repr_png_()).decode()
        return {**self.widget._repr_mimebundle_(), "image/png": image, "text/plain": repr(self.picture)}


def slider(draw_at: Callable[[int], Picture], values: Sequence[int], *, start: int, name: str) -> Slider:
    """A slider over `values` above the picture that `draw_at` makes of its value. ValueError if `start` is none of them."""
    if start not in values:
        raise ValueError(f"{name} starts at {start}, which is not one of {list(values)}")
    import ipywidgets

    shown = draw_at(start)
    control = ipywidgets.SelectionSlider(options=list(values), value=start, description=name, continuous_update=False)
    image = ipywidgets.Image(value=shown._repr_png_(), format="png")
    control.observe(lambda change: setattr(image, "value", draw_at(change["new"])._repr_png_()), names="value")
    return Slider(ipywidgets.VBox([control, image]), shown)


def _palette() -> Any:
    import seaborn as sns

    return sns.color_palette("colorblind", 10)


def _despine(figure: Figure) -> None:
    import seaborn as sns

    sns.despine(fig=figure)
    for axes in figure.axes:
        axes.tick_params(grid_linewidth=0.6, grid_color="0.9")


def _width(text: str) -> float:
    """Inches of a box around text of 8 points in the monospaced font."""
    return 0.067 * len(text) + 0.1


def _rows(children: Sequence[Sequence[int]]) -> list[int]:
    """A row of the page for every node: the first child goes on in its parent's, the others open new ones below."""
    rows, stack, used = [0] * len(children), [(0, 0)], 0
    while stack:
        node, row = stack.pop()
        if row < 0:
            used += 1
            row = used
        rows[node] = row
        stack += [(child, -1) for child in reversed(children[node][1:])]
        stack += [(child, row) for child in children[node][:1]]
    return rows


def _node_look(node: int, path: Sequence[int], num_nodes: int) -> tuple[Any, Any, Any]:
    """Colours of line, box and text."""
    if node == 0:
        return "0.25", "0.25", "white"
    if node == num_nodes:
        return bonus_colour(), bonus_colour(), "white"
    if node in path:
        return accepted_colour(), accepted_colour(), "white"
    return "0.72", "white", "0.3"


def _key(axes: Axes, place: tuple[float, float], names: Sequence[str]) -> None:
    colours = {"anchor": "0.25", "accepted": accepted_colour()}
    handles = [_patch(colours.get(name, bonus_colour() if name.startswith("bonus") else "white"), name) for name in names]
    axes.legend(handles=handles, loc="lower left", bbox_to_anchor=place, ncols=len(names), frameon=False, fontsize=8, borderpad=0)


def _patch(colour: Any, label: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(facecolor=colour, edgecolor="0.6", linewidth=0.6, label=label)
