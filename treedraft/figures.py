"""Figures of a grid: tau by depth, survival, tau by domain. Colour is the correction, line style the backbone."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from treedraft.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from treedraft.report import Arm, Study

DASHES = ((), (4, 1.6), (1, 1.2), (6, 1.4, 1, 1.4))
MARKERS = "osD^vPX<>*hp"
SURVIVAL_FLOOR = 1e-3


def figures_of(study: Study) -> dict[str, Callable[[Study], Figure]]:
    """Name in <grid>-NAME.png and how it is drawn."""
    if study.rungs:
        return {"ladder": _ladder}
    return {"tau": _tau, "survival": _survival, "domains": _domains}


def write_figures(study: Study, folder: Path) -> None:
    """Write the figures of a grid; the same numbers give the same bytes."""
    with _theme():
        for name, draw in figures_of(study).items():
            _save(draw(study), folder / f"{study.name}-{name}.png")


def _save(figure: Figure, path: Path) -> None:
    """A PNG of 128 colours without dates or versions: a third of the size, and the same bytes again."""
    from PIL import Image

    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120, bbox_inches="tight")
    with replacing(path) as temporary, Image.open(picture) as image:
        image.convert("RGB").quantize(128, dither=Image.Dither.NONE).save(temporary, format="png", optimize=True)


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
        axes.set_yticks(range(len(labels)), labels)
        axes.set_ylim(len(labels) - 0.5, -0.5)
        axes.grid(axis="y", visible=False)
        for row in range(len(labels) - 1):
            axes.axhline(row + 0.5, color="0.9", linewidth=0.8, zorder=0)

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


def _panels(
    study: Study,
    panel: Callable[[Axes, float, str], None],
    *,
    title: str,
    x: str,
    y: str,
    height: float = 3.1,
    legend: Sequence[tuple[str, list[Any]]] | None = None,
) -> Figure:
    """Rows are temperatures, columns modes; scales are shared within a row, legends stand outside on the right."""
    import seaborn as sns
    from matplotlib.figure import Figure

    temperatures, modes = study.temperatures, study.modes
    figure = Figure(figsize=(4.3 * len(modes), height * len(temperatures) + 0.5), layout="constrained")
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
    if named:
        handles = [_handle(color="0.25", linestyle=look["linestyle"], label=name) for name, look in named]
        groups.append(("backbone", handles))
    groups.append(("depth", [_handle(color="0.5", linestyle=":", linewidth=1.4, label="trained")]))
    return groups


def _handle(**look: Any) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], **look)


def _look(study: Study, label: str) -> dict[str, Any]:
    import seaborn as sns

    backbones, corrections = _parts(study)
    place = corrections.index(_correction(label))
    dashes = DASHES[backbones.index(_backbone(label)) % len(DASHES)]
    return {
        "color": sns.color_palette("colorblind", 10)[place % 10],
        "linestyle": (0, dashes) if dashes else "-",
        "marker": MARKERS[place % len(MARKERS)],
        "markersize": 4.5,
        "linewidth": 1.5,
    }


def _parts(study: Study) -> tuple[list[str], list[str]]:
    return list(dict.fromkeys(map(_backbone, study.labels))), list(dict.fromkeys(map(_correction, study.labels)))


def _backbone(label: str) -> str:
    """Nothing in the label of a published method, which has a name of its own."""
    return label.partition("/")[0] if "/" in label else ""


def _correction(label: str) -> str:
    """All that follows the backbone: the correction, after the context where that is not the full one."""
    return label.partition("/")[2] or label


def _mark_trained(study: Study, axes: Axes) -> None:
    for depth in sorted(set(study.trained_depths.values())):
        axes.axvline(depth, color="0.5", linestyle=":", linewidth=1.4, zorder=0)


def _ticks(depth: int) -> list[int]:
    step = max(1, round(depth / 8))
    return [1, *range(1 + step, depth + 1, step)]
