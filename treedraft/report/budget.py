"""What a suite of grids took: trainings, those that grids share counted once, their steps and their hours, all read from CSV files."""

from __future__ import annotations

from pathlib import Path

from treedraft.config import read_toml
from treedraft.report.study import joined, known_grids, load_study, span
from treedraft.report.table import Table


def budget_table(suite: Path, folder: Path) -> Table:
    """A row a grid of the suite's file, in its order, and a sum. ValueError if the file is no suite."""
    grids = read_toml(suite).get("grids")
    if not isinstance(grids, list):
        raise ValueError(f"{suite}: it names no grids")
    seen: set[tuple[object, ...]] = set()
    rows, total, hardware = [], [0, 0, 0, 0.0], []
    for name in grids:
        if name not in known_grids(folder):
            rows.append([name, *"------", "not run"])
            continue
        cells = load_study(folder, name).cells
        arms = cells.drop_duplicates(["label", "train_seed"])
        # A training is known by what it took: other grids have other labels for it.
        keys = list(zip(arms.train_seed, arms.train_steps, arms.train_seconds, strict=True))
        hours = sum(seconds for _, _, seconds in set(keys) - seen) / 3600
        counts = len(cells), len(keys), len(set(keys) - seen), hours
        seen |= set(keys)
        total = [before + more for before, more in zip(total, counts, strict=True)]
        seeds = (cells.decodings / cells.prompts).round()
        rows.append([name, *map(str, counts[:3]), span(arms.train_steps), span(cells.prompts), span(seeds), f"{hours:.2f}"])
        hardware += joined(cells.hardware, None).split("; ")
    rows.append(["all", *map(str, total[:3]), "", "", "", f"{total[3]:.2f}"])
    names = ("grid", "cells", "trainings", "of them new", "steps", "prompts", "sampling seeds", "hours of the new")
    caption = (
        "Trainings that an earlier grid of the table has too are not new. Hours are those of one process as it was trained, several side by side; "
        f"what recording and replay took is not in them; {'; '.join(dict.fromkeys(hardware)) or 'nothing was run'}."
    )
    return Table(caption=caption, columns=[("", name) for name in names], rows=rows)
