"""The files of a grid's results: <grid>.cells.csv, .prompts.csv, .controls.csv and .json.

Reports are made from them alone, and grids are completed from them: what a folder holds is not measured again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from treedraft import files
from treedraft.grid import Grid
from treedraft.run import commit, hardware

Frame = Any  # a pandas table or column; pandas, without types of its own, is imported where it is needed
Row = dict[str, Any]

# Columns <group>_<name> of lists, by depth or by bin; results from before they were counted lack them.
COUNTED = {
    "spine": ("kept", "left", "off"),
    "steps": ("drafts", "expected", "accepted"),
    "paths": ("drafts", "expected", "accepted"),
}
_TEXT = (
    *("grid", "cell", "label", "mode", "scorer", "admit", "shape", "prompt", "domain", "survival", "target", "hardware"),
    *("commit", "status", "control", "control_id", "costs_hardware", "costs_commit"),
    *(f"{group}_{name}" for group, names in COUNTED.items() for name in names),
)


@dataclass(frozen=True, slots=True)
class Measured:
    """Finished work: of every cell's id its row and those of its prompts, of every control's id its rows."""

    cells: dict[str, Row] = field(default_factory=dict[str, Row])
    prompts: dict[str, list[Row]] = field(default_factory=dict[str, list[Row]])
    controls: dict[str, list[Row]] = field(default_factory=dict[str, list[Row]])


NOTHING = Measured()


def measured_in(folder: Path | None) -> Measured:
    """What the files of a folder hold, of all its grids: an id names training, target and decoding, so that grids find each
    other's cells. A row that lacks what reports show today is left out, to be measured anew."""
    found = Measured()
    for path in sorted(folder.glob("*.cells.csv")) if folder is not None else ():
        rows = [row for row in _dicts(path) if row["status"] == "ok" and "spine_kept" in row]
        prompts = _grouped(path.with_name(path.name.replace(".cells.", ".prompts.")), "cell")
        found.cells.update({row["cell"]: row for row in rows if row["cell"] in prompts})
        found.prompts.update(prompts)
        found.controls.update(_grouped(path.with_name(path.name.replace(".cells.", ".controls.")), "control_id"))
    return found


def write_rows(
    folder: Path,
    grid: Grid,
    cell_rows: Sequence[Mapping[str, Any]],
    prompt_rows: Sequence[Mapping[str, Any]],
    control_rows: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Write the four files of a grid, but for the controls' where there are none."""
    import pandas as pd

    for name, rows in (("cells", cell_rows), ("prompts", prompt_rows), ("controls", control_rows)):
        if name == "controls" and not rows:
            continue
        with files.replacing(folder / f"{grid.name}.{name}.csv") as path:
            # A failed cell lacks counts; integers beside a gap stay integers.
            pd.DataFrame(list(rows)).convert_dtypes().to_csv(path, index=False, float_format="%.6g")
    record = {
        "name": grid.name,
        "question": grid.question,
        "comparisons": [list(pair) for pair in grid.comparisons()],
        "n_prompts": len({row["prompt"] for row in prompt_rows}),
        "rope_scaling": sorted({arm.train.rope_scaling or "none" for arm in grid.arms}),
        "hardware": hardware(),
        "commit": commit(),
    }
    files.write_json(folder / f"{grid.name}.json", record)


def read_rows(path: Path) -> Frame:
    """The table of a file. Names stay text ("none" is a correction, 007 a commit); an empty field is nan."""
    import pandas as pd

    try:
        return pd.read_csv(path, dtype=dict.fromkeys(_TEXT, object), keep_default_na=False, na_values=["", "nan"])
    except (pd.errors.ParserError, pd.errors.EmptyDataError) as error:
        raise ValueError(f"{path}: not a table ({error})") from error


def _dicts(path: Path) -> list[Row]:
    """The rows of a file without their empty fields; none where there is no file."""
    rows = read_rows(path).to_dict("records") if path.is_file() else []
    return [{name: value for name, value in row.items() if value == value} for row in rows]


def _grouped(path: Path, key: str) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in _dicts(path):
        if key in row:
            groups.setdefault(row[key], []).append(row)
    return groups
