"""A grid's page with its figures, and the tables between markers in documents."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from treedraft.files import read_json, write_text
from treedraft.metrics import Interval
from treedraft.report.budget import budget_table
from treedraft.report.checks import control_table, output_table, power_table
from treedraft.report.floors import floor_table
from treedraft.report.slots import calibration_table, slot_table, slots_recorded
from treedraft.report.study import Study, known_grids, load_study
from treedraft.report.table import WIDTH, Table
from treedraft.report.tables import (
    cell_table,
    comparison_matrix,
    comparison_table,
    context_table,
    domain_table,
    extrapolation_table,
    ladder_table,
    main_table,
    ratio_table,
    tau_table,
    training_table,
)

MARKER = re.compile(r"(<!-- table: (\S+) (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


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
        for table in main_table(study, temperature).rich(title=f"{grid}: tau at temperature {temperature:g}", width=console.width):
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
    "slots": lambda study: [slot_table(study, study.headline_temperature)],
    "calibration": lambda study: [calibration_table(study, study.headline_temperature)],
    "outputs": lambda study: [output_table(study)],
    "controls": lambda study: [control_table(study)],
    "power": lambda study: [power_table(study)],
    "training": lambda study: [training_table(study)],
}


def fill_markers(path: Path, folder: Path) -> None:
    """Put generated tables between `<!-- table: GRID headline -->` and `<!-- end -->`. ValueError has file and line.

    `<!-- table: bench NAME -->` shows bench-NAME.json, what `python -m treedraft.bench NAME --output` wrote,
    `<!-- table: floors TARGET -->` shows floors-TARGET.csv of `python -m treedraft.floors`, and
    `<!-- table: budget SUITE -->` says what the grids of SUITE.toml, beside the folder, took, and
    `<!-- table: claims verdicts -->` holds the claims of claims.toml, likewise, against its grids. A grid that is
    filed there and has no results yet is said to be so.
    """
    write_text(path, filled(path, folder))


def filled(path: Path, folder: Path) -> str:
    text = path.read_text(encoding="utf-8")

    def insert(match: re.Match[str]) -> str:
        line = f"{path}:{text.count(chr(10), 0, match.start()) + 1}"
        grid, kind = match[2], match[3]
        if grid == "bench":
            if not (folder / f"bench-{kind}.json").is_file():
                raise ValueError(f"{line}: no bench-{kind}.json in {str(folder)!r}")
            return match[1] + _bench_table(folder / f"bench-{kind}.json") + match[4]
        if grid == "floors":
            if not (folder / f"floors-{kind}.csv").is_file():
                raise ValueError(f"{line}: no floors-{kind}.csv in {str(folder)!r}")
            return match[1] + floor_table(folder / f"floors-{kind}.csv").markdown() + match[4]
        if grid == "budget":
            return match[1] + budget_table(folder.parent / f"{kind}.toml", folder).markdown() + match[4]
        if grid == "claims":
            from treedraft.verdicts import verdict_text

            return match[1] + verdict_text(folder.parent / "claims.toml", folder) + match[4]
        if kind not in TABLES:
            raise ValueError(f"{line}: unknown table {kind!r}; known: {', '.join(TABLES)}")
        if grid not in known_grids(folder) and (folder.parent / f"{grid}.toml").is_file():
            return match[1] + f"*Not run yet: `python -m treedraft.ablate --grid {grid} --output ablations/results`.*\n" + match[4]
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
    if all(name.partition(" ")[0].isdigit() for name in parts):  # "2048 tokens" before "16384 tokens"
        parts = dict(sorted(parts.items(), key=lambda part: int(part[0].partition(" ")[0])))
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
    tables = [main_table(study, temperature).latex() for temperature in study.temperatures]
    return {folder / f"{study.name}.md": _page(study), folder / f"{study.name}.tex": headers + "\n".join(tables)}


def _page(study: Study) -> str:
    parts = [f"# {study.name}\n", f"{study.question}\n" if study.question else ""]
    parts.append(
        f"Generated by `python -m treedraft.report` from [{study.name}.cells.csv]({study.name}.cells.csv) "
        f"and [{study.name}.prompts.csv]({study.name}.prompts.csv).\n"
    )
    if study.arms:
        parts += [*_what_was_found(study), *_whether_to_believe_it(study)]
        parts += [_section("Training", [training_table(study)]), _section("Every cell", [cell_table(study)])]
    else:
        parts.append("No cell has finished.\n")
    if study.failed:
        parts.append("## Failed cells\n\n" + "\n".join(f"- `{cell}`: {reason}" for cell, reason in study.failed) + "\n")
    return "\n".join(part for part in parts if part)


def _what_was_found(study: Study) -> list[str]:
    temperatures = study.temperatures
    compared = [table for table in (comparison_table(study, t) for t in temperatures) if table.rows]
    if study.rungs or study.contexts:
        title, figure = ("Ladder", "ladder") if study.rungs else ("Context", "context")
        tables = [main_table(study, t) for t in temperatures]
        return [_section(title, tables, figure=f"{study.name}-{figure}.png"), _section("Comparisons", compared)]
    return [
        _section("tau", [tau_table(study, t) for t in temperatures], figure=f"{study.name}-tau.png"),
        _section("Comparisons", compared, figure=f"{study.name}-differences.png" if compared else None),
        _section("Other depths than the trained one", [extrapolation_table(study, t) for t in temperatures]),
        _section("Tree and chain", [ratio_table(study)]),
        _section("Domains", [domain_table(study, t) for t in temperatures], figure=f"{study.name}-domains.png"),
        _section("Survival by depth", [], figure=f"{study.name}-survival.png"),
    ]


def _whether_to_believe_it(study: Study) -> list[str]:
    """Per slot, calibration, outputs, controls and power; what older results lack is said to be missing."""
    recorded = slots_recorded(study)
    several = any(len(arm.taus) > 1 for arm in study.arms.values())
    parts = []
    slots = [slot_table(study, study.headline_temperature)]
    calibration = [calibration_table(study, t) for t in study.temperatures]
    for title, name, tables in (("Slot by slot", "slots", slots), ("Calibration", "calibration", calibration)):
        figure = f"{study.name}-{name}.png" if recorded else None
        parts.append(_section(title, tables, figure=figure) or f"## {title}\n\nNot recorded in these results.\n")
    parts.append(_section("Outputs", [output_table(study)], figure=f"{study.name}-outputs.png"))
    parts.append(_section("Controls", [control_table(study)]) or "## Controls\n\nNot measured in these results.\n")
    return [*parts, _section("Power", [power_table(study)] if several else [])]


def _section(title: str, tables: Iterable[Table | None], *, figure: str | None = None) -> str:
    bodies = [table.markdown() for table in tables if table]
    if figure:
        bodies.append(f"![{title}]({figure})\n")
    return "\n".join([f"## {title}\n", *bodies]) if bodies else ""


def stale_files(folder: Path, grid: str) -> list[Path]:
    """Texts that differ; of figures those that were drawn from other tables, since fonts differ between machines."""
    study = load_study(folder, grid)
    texts = [
        path
        for path, text in _texts(folder, study).items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]
    pictures = []
    if study.arms:
        from treedraft.figures import drawn_from, figures_of, tables_of

        sources = tables_of(folder, grid)
        pictures = [path for figure in figures_of(study) if not drawn_from(path := folder / f"{grid}-{figure}.png", sources)]
    return texts + pictures
