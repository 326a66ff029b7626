"""A grid goes on from the files of its results, on a machine that has nothing else of it."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pandas as pd
import pytest

from treedraft import ablate, cells
from treedraft.grid import Cell
from treedraft.results import measured_in

SMALL = {"train.steps": 2, "data.tokens": 200, "data.max_new_tokens": 8, "evaluate.count": 3, "evaluate.max_new_tokens": 8}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TREEDRAFT_RUNS", str(folder / "runs"))
        patch.setattr("os.sched_getaffinity", lambda _: {0})  # one thread: see conftest.py
        assert run(patch, folder / "results") == 0
    return folder / "results"


@pytest.fixture
def results(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The results of `smoke`, without its runs."""
    monkeypatch.setenv("TREEDRAFT_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    return shutil.copytree(finished, tmp_path / "results")


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, *flags: str) -> int:
    settings = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]
    argv = ["ablate", "--grid", "smoke", "--jobs", "1", "--cache-gb", "0.1", *settings, "--output", str(folder), *flags]
    monkeypatch.setattr(sys, "argv", argv)
    return ablate.main()


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".json"}


def counted(monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[str]]:
    """Ids of what is trained and of what is measured from here on."""
    trained, measured = [], []
    train, evaluate = cells.Workbench.train, cells.Workbench.evaluate

    def noted_train(self: cells.Workbench, arm: cells.Arm) -> object:
        trained.append(arm.train_id)
        return train(self, arm)

    def noted_evaluate(self: cells.Workbench, cell: Cell) -> object:
        measured.append(cell.cell_id)
        return evaluate(self, cell)

    monkeypatch.setattr(cells.Workbench, "train", noted_train)
    monkeypatch.setattr(cells.Workbench, "evaluate", noted_evaluate)
    return trained, measured


def test_finished_results_are_written_again_to_the_byte(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = bytes_of(results)
    assert {"smoke.cells.csv", "smoke.prompts.csv", "smoke.controls.csv", "smoke.md"} <= set(before)
    trained, measured = counted(monkeypatch)
    assert run(monkeypatch, results) == 0
    assert bytes_of(results) == before and not trained and not measured


def test_only_what_is_missing_is_measured(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell whose row is lost, or failed, or lacks what reports show, or has no prompts, is trained and measured again; the same
    numbers come out and the others' rows stay."""
    before, path = bytes_of(results), results / "smoke.cells.csv"
    rows = pd.read_csv(path, dtype=str, keep_default_na=False)
    lost, failed, older, without = rows.cell[[1, 3, 5, 6]]
    rows.loc[rows.cell == failed, "status"] = "failed: KeyError: 1"
    rows.loc[rows.cell == older, "spine_kept"] = ""
    rows[rows.cell != lost].to_csv(path, index=False)
    prompts = pd.read_csv(results / "smoke.prompts.csv", dtype=str, keep_default_na=False)
    prompts[prompts.cell != without].to_csv(results / "smoke.prompts.csv", index=False)
    _, measured = counted(monkeypatch)
    assert run(monkeypatch, results, "--dry-run") == 0 and not measured
    assert run(monkeypatch, results) == 0
    assert sorted(measured) == sorted([lost, failed, older, without])
    after = bytes_of(results)
    assert after["smoke.prompts.csv"] == before["smoke.prompts.csv"] and after["smoke.controls.csv"] == before["smoke.controls.csv"]
    anew = pd.read_csv(path, dtype=str, keep_default_na=False)
    clocks = ["train_seconds", "commit", "hardware"]
    again = rows.assign(**{name: anew[name] for name in ("status", "spine_kept")})
    pd.testing.assert_frame_equal(anew.drop(columns=clocks), again.drop(columns=clocks))


def test_a_part_of_a_grid_loses_nothing(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = bytes_of(results)
    assert run(monkeypatch, results, "--limit", "1") == 0
    assert bytes_of(results) == before


def test_other_grids_find_the_same_cells(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By id: a row's label is that of the grid that asks."""
    for path in results.glob("smoke.*"):
        path.rename(path.with_name(path.name.replace("smoke.", "other.")))
    trained, measured = counted(monkeypatch)
    assert run(monkeypatch, results) == 0
    assert not trained and not measured
    one, other = (pd.read_csv(results / f"{name}.cells.csv") for name in ("smoke", "other"))
    pd.testing.assert_frame_equal(one.drop(columns="grid"), other.drop(columns="grid"))
    assert set(one.grid) == {"smoke"}


def test_an_empty_folder_holds_nothing(tmp_path: Path) -> None:
    assert not measured_in(None).cells and not measured_in(tmp_path).cells and not measured_in(tmp_path / "none").cells
