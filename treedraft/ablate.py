"""`python -m treedraft.ablate --grid core`: train and measure every cell of a grid, or of a suite of grids, and print its tables.

Run again after an interruption and only what is missing is done. Tables (Markdown, LaTeX, CSV) and figures go to
--output; what they hold already is kept, so that a long campaign can be handed from machine to machine with its results alone.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treedraft.cli import Repeated, parse_arguments, run_cli
from treedraft.config import parse_settings, read_toml
from treedraft.grid import Cell, Grid, load_grids
from treedraft.results import NOTHING, Measured, measured_in, write_rows
from treedraft.run import is_measured, runs_folder

GRIDS = Path(__file__).parent.parent / "ablations"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Flags of the command."""

    grid: str = "core"
    """A grid's name (see --list) or a TOML file."""
    target: str | None = None
    """Another target than the grid's: a name, a folder or a hub id."""
    data: str | None = None
    """A folder of training tokens made by `python -m treedraft.data regenerate` (default: the target's own)."""
    set: Repeated = ()
    """KEY=VALUE over the grid file, as in train.steps=800."""
    cell: str | None = None
    """Run this one cell (an id of --dry-run) and print its result."""
    limit: int | None = None
    """Run only the first cells."""
    list: bool = False
    """List the grids and stop."""
    dry_run: bool = False
    """List the cells with what is done of each and stop."""
    output: Path | None = None
    """Folder of tables and figures; cells that it holds are not measured again (default: runs/grids/NAME; runs/partial/NAME
    if not the whole grid as filed, made anew)."""
    cache_gb: float = 12.0
    """The largest feature cache to fill."""
    jobs: int | None = None
    """Arms that train side by side (default: one a CPU core; one on a GPU)."""


def main() -> int:
    arguments = parse_arguments(Arguments, program="python -m treedraft.ablate", description=__doc__ or "")
    if arguments.list:
        return _list()
    settings = parse_settings(arguments.set)
    if arguments.data:
        settings |= {"data.folder": arguments.data, "data.prompts": None}
    grids = load_grids(_grid_file(arguments.grid), target=arguments.target, settings=settings)
    cells = _chosen(grids, arguments)
    _check_windows(cells)
    if arguments.output is not None:
        _check_output(arguments.output, grids)
    kept = NOTHING if arguments.cell is not None else measured_in(arguments.output)
    if arguments.dry_run:
        return _dry_run(cells, kept)
    failures = _run(cells, grids, arguments, kept)
    if arguments.cell is not None:
        return _print_cell(cells[0], failures)
    from treedraft import report
    from treedraft.cells import collect
    from treedraft.controls import control_rows

    # A part of a grid, or a grid with other settings, must not replace the tables of the whole one.
    partial = any((arguments.limit, arguments.target, settings))
    folder = arguments.output or runs_folder() / ("partial" if partial else "grids") / Path(arguments.grid).stem
    chosen = {cell.cell_id for cell in cells} | set(kept.cells)
    for grid in grids:
        own = [cell for cell in grid.cells if cell.cell_id in chosen]
        if own:
            write_rows(folder, grid, *collect(own, failures, grid.name, kept), control_rows(own, kept))
            report.write_report(folder, grid.name)
            report.print_table(folder, grid.name)
    print(f"tables and figures: {folder}")
    for cell_id, reason in failures.items():
        print(f"failed: {cell_id}: {reason}", file=sys.stderr)
    return 1 if failures else 0


def _grid_file(name: str) -> Path:
    if name.endswith(".toml"):
        return Path(name)
    known = [path.stem for path in _grid_files()]
    if name not in known:
        from treedraft.registry import unknown

        raise ValueError(unknown("grid", name, known) + ", or a .toml file")
    return GRIDS / f"{name}.toml"


def _grid_files() -> list[Path]:
    """Grid files ask a question; other TOML files of the folder configure one training."""
    return [path for path in sorted(GRIDS.glob("*.toml")) if "question" in read_toml(path)]


def _list() -> int:
    for path in _grid_files():
        grids = load_grids(path)
        trainings, cells = {arm.train_id for grid in grids for arm in grid.arms}, sum(len(grid.cells) for grid in grids)
        print(f"{path.stem:<12} {len(trainings):>3} trainings {cells:>4} cells  {read_toml(path)['question']}")
    return 0


def _dry_run(cells: list[Cell], kept: Measured) -> int:
    for cell in cells:
        trained = (runs_folder() / "train" / cell.arm.train_id / "result.json").is_file()
        measured = cell.cell_id in kept.cells or is_measured(runs_folder() / "cells" / cell.cell_id)
        print(f"{'done   ' if measured else 'trained' if trained else 'missing'} {cell.cell_id}")
    return 0


def _chosen(grids: list[Grid], arguments: Arguments) -> list[Cell]:
    if arguments.limit is not None and arguments.limit < 1:
        raise ValueError(f"--limit is {arguments.limit}; at least 1")
    if arguments.jobs is not None and arguments.jobs < 1:
        raise ValueError(f"--jobs is {arguments.jobs}; at least 1")
    by_id = {cell.cell_id: cell for grid in grids for cell in grid.cells}
    if arguments.cell is None:
        return list(by_id.values())[: arguments.limit]
    if arguments.cell not in by_id:
        from treedraft.registry import unknown

        known = unknown("cell", arguments.cell, list(by_id)[:3])
        raise ValueError(f"{known}, ... ({len(by_id)} in all: --dry-run lists them)")
    return [by_id[arguments.cell]]


def _check_windows(cells: list[Cell]) -> None:
    """Refuse prompts that are too long before a target is loaded, where its window is known by then."""
    from treedraft.config import ntk_factor
    from treedraft.targets import window_of

    for cell in {(cell.arm.target, cell.evaluate): cell for cell in cells if cell.evaluate.context is not None}.values():
        window, scaling = window_of(cell.arm.target), cell.arm.train.rope_scaling
        if window is not None:
            cell.evaluate.check_window(cell.arm.target, int(window * (ntk_factor(scaling) if scaling else 1)))


def _check_output(folder: Path, grids: list[Grid]) -> None:
    """Refuse to write over the same grid's results of another target."""
    import csv

    for grid in grids:
        path, target = folder / f"{grid.name}.cells.csv", grid.cells[0].arm.target
        if path.is_file():
            with path.open(encoding="utf-8", newline="") as stream:
                there = next((row["target"] for row in csv.DictReader(stream)), target)
            if there != target:
                raise ValueError(f"{path} has results of {there}, not of {target}: give another folder with --output")


def _run(cells: list[Cell], grids: list[Grid], arguments: Arguments, kept: Measured = NOTHING) -> dict[str, str]:
    """Do what is missing and was not kept; reasons of the cells, and controls, that failed."""
    from treedraft.cells import Workbench, cell_folder, is_timed
    from treedraft.controls import missing_controls
    from treedraft.jobs import attempt, run_side_by_side

    todo = [cell for cell in cells if cell.cell_id not in kept.cells]
    missing = [cell for cell in todo if not is_measured(cell_folder(cell))]
    untimed = [cell for cell in todo if not is_timed(cell)]
    chosen = set() if arguments.cell is not None else {cell.cell_id for cell in cells}
    checked = [[cell for cell in grid.cells if cell.cell_id in chosen] for grid in grids]
    if not (missing or untimed or any(missing_controls(own, kept) for own in checked)):
        return {}
    scalings = sorted({str(cell.arm.train.rope_scaling) for cell in cells})
    if len(scalings) > 1:
        raise ValueError(f"one target serves a grid: train.rope_scaling is one for all arms, not {', '.join(scalings)}")
    first = cells[0].arm
    bench = Workbench(first.target, cache_gb=arguments.cache_gb, rope_scaling=first.train.rope_scaling)
    by_arm: dict[str, list[Cell]] = {}
    for cell in missing:
        by_arm.setdefault(cell.arm.train_id, []).append(cell)
    for group in by_arm.values():
        bench.check(group[0].arm)
    failures = run_side_by_side(bench, list(by_arm.values()), arguments.jobs) if by_arm else {}
    # Clocks are read when no other cell is at work.
    for cell in untimed:
        if cell.cell_id not in failures:
            failures |= attempt(cell.cell_id, lambda cell=cell: bench.time(cell))
    for own in checked:
        for control in missing_controls(own, kept):
            failures |= attempt(control.path.stem, lambda control=control: control.measure(bench))
    return failures


def _print_cell(cell: Cell, failures: dict[str, str]) -> int:
    import json

    from treedraft.cells import cell_folder
    from treedraft.files import read_json

    if cell.cell_id in failures:
        print(f"failed: {cell.cell_id}: {failures[cell.cell_id]}", file=sys.stderr)
        return 1
    result: dict[str, Any] = read_json(cell_folder(cell) / "result.json")
    print(json.dumps(result, indent=2, sort_keys=True))
    return 0


if __name__ == "__main__":
    run_cli(main)
