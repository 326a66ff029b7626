"""A grid goes on when a cell fails, and controls belong to the outputs that they were measured on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from treedraft import ablate, controls
from treedraft.cells import cell_folder, collect
from treedraft.config import DecodeConfig
from treedraft.evaluate import Replay
from treedraft.grid import load_grid
from treedraft.run import is_measured

ROOT = Path(__file__).parents[1]
SMALL = {"train.steps": 2, "data.tokens": 200, "data.max_new_tokens": 8, "evaluate.count": 3, "evaluate.max_new_tokens": 8}


def test_a_cell_that_fails_takes_nobody_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREEDRAFT_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})  # one thread: see conftest.py
    grid = load_grid(ROOT / "ablations" / "smoke.toml", settings=SMALL)
    arguments = ablate.Arguments(jobs=1, cache_gb=0.1)
    arm = [cell for cell in grid.cells if cell.arm.train_id == grid.cells[0].arm.train_id and cell.decode.temperature == 1]
    chains, trees = ([cell for cell in arm if cell.decode.mode == mode] for mode in ("chain", "tree"))
    cells, own = [*chains[:1], *trees[:1]], Replay.run

    def broken(self: Replay, drafter: object, config: DecodeConfig) -> object:
        if config.mode == "tree":
            raise RuntimeError("no trees today")
        return own(self, drafter, config)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(Replay, "run", broken)
    failures = ablate._run(cells, [replace(grid, cells=tuple(cells))], arguments)
    assert failures == {cells[1].cell_id: "RuntimeError: no trees today"}
    assert [row["status"][:6] for row in collect(cells, failures, "smoke")[0]] == ["ok", "failed"]
    again = [control for control in controls.controls_of(cells) if control.name == controls.AGAIN]
    assert [control.path.is_file() for control in again] == [True, False], "what was not measured is not measured again"

    # A result that lacks what is recorded now is measured anew; if that fails the old numbers do not stand for new ones.
    monkeypatch.setattr(Replay, "run", own)
    assert ablate._run(cells, [replace(grid, cells=tuple(cells))], arguments) == {}
    path = cell_folder(cells[1]) / "result.json"
    result = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in result.items() if name != "spine"}))
    assert not is_measured(path.parent)
    monkeypatch.setattr(Replay, "run", broken)
    failures = ablate._run(cells, [replace(grid, cells=tuple(cells))], arguments)
    assert [row["status"][:6] for row in collect(cells, failures, "smoke")[0]] == ["ok", "failed"]
    monkeypatch.setattr(Replay, "run", own)
    assert ablate._run(cells, [replace(grid, cells=tuple(cells))], arguments) == {}
    assert json.loads(path.read_text())["spine"] == result["spine"]


def test_controls_belong_to_one_set_of_outputs() -> None:
    """Other rotary angles, another cap or other prompts are other outputs."""
    paths = []
    for settings in ({}, {"train.rope_scaling": "ntk:2"}, {"evaluate.max_new_tokens": 9}, {"evaluate.count": 2}):
        grid = load_grid(ROOT / "ablations" / "smoke.toml", settings={**SMALL, **settings})
        paths += [control.path for control in controls.controls_of(list(grid.cells)) if control.cell is None]
    assert len(set(paths)) == len(paths)


@pytest.mark.parametrize("path", [path for path in sorted((ROOT / "ablations").glob("*.toml")) if "[[arms]]" in path.read_text()], ids=lambda path: path.stem)
def test_every_grid_has_every_control(path: Path) -> None:
    """In every setting of its cells the two stubs, and at every temperature an arm that is measured again."""
    cells = load_grid(path).cells
    found = controls.controls_of(cells)
    settings = {(cell.decode.mode, cell.decode.depth, cell.decode.temperature, cell.evaluate.context) for cell in cells}
    for name in (controls.ALWAYS, controls.NEVER):
        own = [control for control in found if control.name == name]
        assert {(item.decode.mode, item.decode.depth, item.decode.temperature, item.evaluate.context) for item in own} == settings
    again = [control for control in found if control.name == controls.AGAIN]
    assert {control.decode.temperature for control in again} == {cell.decode.temperature for cell in cells}
    assert len({control.path for control in found}) == len(found)
