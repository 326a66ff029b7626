"""The long grid: prompt sets of a promised length, training text with long prompts in it, and a run of it in seconds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from treedraft import ablate, cells, report
from treedraft.cells import Workbench, collect, is_timed
from treedraft.config import DataConfig
from treedraft.controls import control_rows
from treedraft.data import prompts, regenerate, world
from treedraft.data.prepare import training_sequences
from treedraft.data.regenerate import Settings
from treedraft.grid import EvaluateConfig, Grid, load_grid
from treedraft.results import write_rows
from treedraft.targets import load_target, window_of
from treedraft.targets.hf import Target

ROOT = Path(__file__).parents[1]
GRIDS = ("long", "long-smollm2")
LENGTHS = (128, 256, 512, 1024, 2048)


@pytest.fixture(scope="module")
def pocket() -> Target:
    return load_target("pocket")


# -- prompts ----------------------------------------------------------------------------------------------------------


def test_a_set_has_so_many_facts_in_every_prompt() -> None:
    drawn = prompts.prompt_set("long-30", count=9)
    assert drawn == prompts.prompt_set("long-30", count=9) and drawn[:4] == prompts.prompt_set("long-30", count=4)
    assert drawn != prompts.prompt_set("long-30", count=9, seed=1)
    assert len({prompt.turns for prompt in drawn}) == len({prompt.id for prompt in drawn}) == 9
    for prompt in drawn:
        assert prompt.domain == "long" and prompt.turns[0].count("\nFact ") == 30
        assert world.split_of(prompt.turns[0]) == "evaluation"
    with pytest.raises(ValueError, match="unknown prompt set 'long-0'"):
        prompts.prompt_set("long-0")


@pytest.mark.parametrize("length", LENGTHS)
def test_prompts_are_as_long_as_promised(pocket: Target, length: int) -> None:
    def tokens(turns: Any) -> int:
        return len(pocket.encode_chat(turns))

    drawn = prompts.long_set(length, tokens, count=24)
    lengths = np.array([tokens(prompt.turns) for prompt in drawn])
    assert abs(lengths.mean() - length) < 0.1 * length
    assert np.abs(lengths - length).max() < 80, "no prompt is off by more than a few facts and questions"
    (facts,) = {prompt.turns[0].count("\nFact ") for prompt in drawn}
    around = [np.mean([tokens(prompt.turns) for prompt in prompts.prompt_set(f"long-{n}", count=8)]) for n in (facts - 1, facts, facts + 1)]
    assert np.argmin(np.abs(np.array(around) - length)) == 1, "no other number of facts comes nearer"


def test_a_length_that_no_prompt_has_is_refused(pocket: Target) -> None:
    with pytest.raises(ValueError, match="no long prompt has 20 tokens: with a single fact they have"):
        prompts.long_set(20, lambda turns: len(pocket.encode_chat(turns)))


def test_every_fourth_training_prompt_is_long_and_of_the_train_split(pocket: Target) -> None:
    settings = Settings(prompts="world-long", tokens=1)
    asked = regenerate._world_long(pocket, settings, range(40))
    assert [prompt.index for prompt in asked if prompt.domain == "long"] == list(range(3, 40, 4))
    assert asked == regenerate._world_long(pocket, settings, range(40))
    assert asked[20:] == regenerate._world_long(pocket, settings, range(20, 40)), "a shard does not depend on where it starts"
    plain = {prompt.index: prompt for prompt in regenerate._world(pocket, settings, range(40))}
    assert all(plain[prompt.index] == prompt for prompt in asked if prompt.domain != "long")
    evaluated = {tuple(pocket.encode_chat(one.turns)) for n in (4, 13, 29) for one in prompts.prompt_set(f"long-{n}", count=60)}
    many = [prompt for prompt in regenerate._world_long(pocket, settings, range(400)) if prompt.domain == "long"]
    assert not evaluated & {tuple(prompt.ids) for prompt in many}
    lengths = np.array([len(prompt.ids) for prompt in many])
    assert lengths.min() < 160 and 1600 < lengths.max() < 2150, "every length of the grid is trained on"
    assert 300 < np.median(lengths) < 700, "and each doubling of it equally often"


def test_training_text_is_named_by_its_prompts(tiny: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREEDRAFT_RUNS", str(tmp_path))
    given = {"tokens": 300, "max_new_tokens": 12}
    usual, named, mixed = (
        training_sequences(tiny, DataConfig(**given, prompts=name)) for name in (None, "world", "world-long")
    )
    assert usual.digest == named.digest != mixed.digest
    manifests = [json.loads(path.read_text()) for path in tmp_path.glob("data/*/manifest.json")]
    found = {manifest["provenance"]["prompts"]: manifest for manifest in manifests}
    assert len(manifests) == 2 and found["world-long"]["provenance"]["domains"] == ["math", "code", "chat", "long"]
    assert found["world"]["provenance"]["domains"] == ["math", "code", "chat"]


# -- the grid ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GRIDS)
def test_the_same_drafters_serve_every_length(name: str) -> None:
    grid = load_grid(ROOT / "ablations" / f"{name}.toml")
    sizes = [(64, 16, ""), (64, 0, ""), (0, 16, ""), (64, 16, "-no-boundary"), (64, 4, ""), (64, 64, ""), (256, 16, ""), (512, 16, "")]
    parts = ["-window{}-summary{}{}".format(*size) for size in sizes] if name == "long" else [""]
    swept = [f"bidirectional/longspark{part}/markov" for part in parts]
    assert [arm.label for arm in grid.arms] == ["causal/attention", "causal/longspark/attention", "bidirectional/markov", *swept]
    lengths = sorted({cell.evaluate.context or 0 for cell in grid.cells})
    assert len({cell.cell_id for cell in grid.cells}) == len(grid.cells)
    for arm in grid.arms:
        assert sorted({cell.evaluate.context for cell in grid.cells if cell.arm.train_id == arm.train_id}) == lengths
    assert all(f"-c{cell.evaluate.context}-" in cell.cell_id for cell in grid.cells)
    pairs = grid.comparisons()
    assert {("causal/longspark/attention", "causal/attention"), (swept[0], "bidirectional/markov")} <= set(pairs)
    assert {label for pair in pairs for label in pair} == {arm.label for arm in grid.arms}, "every arm is compared"
    widest = max(arm.drafter.context.get("window", 0) for arm in grid.arms)
    assert sum(length > widest for length in lengths) >= 2, "prompts longer than any window"
    ablate._check_windows(list(grid.cells))


def test_a_length_changes_no_identity_of_a_grid_without_one() -> None:
    core = load_grid(ROOT / "ablations" / "core.toml")
    assert core.arms[0].train_id == "pocket-causal-none-s0-5bce8b6f", "runs that were made before are found"
    assert core.cells[0].cell_id == "pocket-causal-none-s0-chain-d7-t1-0ff65163"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompts": "long"}, 'evaluate.context is not set for prompts \'long\': prompts = "long" needs a length'),
        ({"context": 64}, "evaluate.context is 64 for prompts 'of the target'"),
        ({"prompts": "world", "context": 64}, "evaluate.context is 64 for prompts 'world'"),
        ({"prompts": "long", "context": 0}, "evaluate.context is 0; at least 1 token"),
    ],
)
def test_a_length_goes_with_long_prompts(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        EvaluateConfig(**fields)


@pytest.mark.parametrize(
    ("target", "window", "lengths", "refused"),
    [("pocket", 4096, [2048, 4000], 4000), ("made", 8192, [7936, 7937], 7937), ("made", 8192, [7936], None)],
)
def test_lengths_beyond_the_window_are_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, window: int, lengths: list[int], refused: int | None
) -> None:
    monkeypatch.setenv("TREEDRAFT_CACHE", str(tmp_path))
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "config.json").write_text('{"max_position_embeddings": 8192}')
    assert window_of(target) == window and window_of("some/hub-id") is None
    grid = load_grid(ROOT / "ablations" / "long.toml", target=target, settings={"evaluate.context": lengths})
    if refused is None:
        return ablate._check_windows(list(grid.cells))
    words = f"evaluate.context {refused} and evaluate.max_new_tokens 256 do not fit the context window of {window} tokens of {target}"
    with pytest.raises(ValueError, match=words):
        ablate._check_windows(list(grid.cells))
    stretched = {"evaluate.context": lengths, "train.rope_scaling": "ntk:2"}
    ablate._check_windows(list(load_grid(ROOT / "ablations" / "long.toml", target=target, settings=stretched).cells))


def test_a_loaded_target_refuses_what_it_has_no_room_for(tiny: Target) -> None:
    bench = object.__new__(Workbench)
    bench.target = tiny
    with pytest.raises(ValueError, match="do not fit the context window of 512 tokens of tiny"):
        bench._prompts(EvaluateConfig(prompts="long", context=400, max_new_tokens=200))


# -- a run ------------------------------------------------------------------------------------------------------------

SMALL = {
    "train.steps": 2, "train.sequences": 4, "train.anchors": 2, "data.tokens": 300, "data.max_new_tokens": 12, "evaluate.count": 3,
    "evaluate.seeds": [0], "evaluate.max_new_tokens": 8, "evaluate.context": [250, 350], "drafter.tap_layers": [0, 1], "decode.budget": 16,
    "train.rope_scaling": "ntk:2",
}  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Grid]:
    """The grid of the file at the size of the tiny target, without other windows and summaries: trained, replayed and timed."""
    folder = tmp_path_factory.mktemp("long")
    grid = load_grid(ROOT / "ablations" / "long.toml", target="tiny", settings=SMALL)
    grid = replace(grid, cells=grid.cells[:8])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TREEDRAFT_RUNS", str(folder / "runs"))
        patch.setattr("os.sched_getaffinity", lambda _: {0})  # one thread: see conftest.py
        assert not any(map(is_timed, grid.cells))
        assert ablate._run(list(grid.cells), [grid], ablate.Arguments(jobs=1, cache_gb=0.1)) == {}
        assert all(map(is_timed, grid.cells))
        write_rows(folder, grid, *collect(grid.cells, {}, "long"), control_rows(list(grid.cells)))
    return folder, grid


def test_every_cell_has_a_length_a_time_and_a_state(finished: tuple[Path, Grid]) -> None:
    folder, grid = finished
    rows = pd.read_csv(folder / "long.cells.csv")
    assert len(rows) == len(grid.cells) == 8 and (rows.status == "ok").all() and (rows.tau >= 1).all()
    assert ((rows.prompt_tokens - rows.context).abs() < 0.1 * rows.context).all()
    assert (rows[["draft_ms", "update_ms"]] > 0).all().all() and (rows.timed_rounds > 0).all()
    full = rows[~rows.label.str.contains("longspark")]
    # Keys and values of two layers with two heads of 8, four bytes each; both columns are means over the same prompts.
    per_token = 2 * 2 * 2 * 8 * 4
    assert (full.state_bytes == full.state_shared_bytes).all()
    assert ((full.state_bytes / per_token - full.prompt_tokens).abs() < 1).all()
    fixed = rows[rows.label.str.contains("longspark")]
    ring, pairs, boundary = 64 * per_token, 2 * 4 * 16 * (1 + 8) * 4, 2 * 32 * 4
    assert (fixed.state_bytes == ring + pairs + boundary).all() and (fixed.state_shared_bytes == pairs + boundary).all()


def test_what_repeats_holds_no_clock(finished: tuple[Path, Grid], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, grid = finished
    monkeypatch.setenv("TREEDRAFT_RUNS", str(folder / "runs"))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    folders = [cells.cell_folder(cell) for cell in grid.cells]
    result = json.loads((folders[0] / "result.json").read_text())
    assert result["prompt_tokens"] > 200 and not any("_ms" in name for name in result)
    # Costs that are taken away are measured anew, and nothing else is done again.
    before = {path: path.stat().st_mtime_ns for folder in folders for path in folder.iterdir()}
    (folders[0] / "costs.json").unlink()
    assert ablate._run(list(grid.cells), [grid], ablate.Arguments(jobs=1)) == {} and is_timed(grid.cells[0])
    after = {path: path.stat().st_mtime_ns for folder in folders for path in folder.iterdir()}
    assert [path for path, time in after.items() if before[path] != time] == [folders[0] / "costs.json"]


def test_results_say_how_angles_were_scaled(finished: tuple[Path, Grid], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every cell, in its own file and in the tables; "none" where they were not."""
    folder, grid = finished
    monkeypatch.setenv("TREEDRAFT_RUNS", str(folder / "runs"))
    assert set(pd.read_csv(folder / "long.cells.csv").rope_scaling) == {"ntk:2"}
    assert json.loads((folder / "long.json").read_text())["rope_scaling"] == ["ntk:2"]
    assert json.loads((cells.cell_folder(grid.cells[0]) / "result.json").read_text())["rope_scaling"] == "ntk:2"
    plain = load_grid(ROOT / "ablations" / "long.toml", target="tiny")
    rows, _ = collect(plain.cells[:1], {plain.cells[0].cell_id: "not run"}, "long")
    assert [row["rope_scaling"] for row in rows] == ["none"]


def test_the_report_has_a_row_a_length_and_a_figure(finished: tuple[Path, Grid]) -> None:
    folder, _ = finished
    report.write_report(folder, "long")
    study = report.load_study(folder, "long")
    assert study.contexts == [250, 350] and study.modes == ["tree context 250", "tree context 350"]
    table = report.context_table(study, 1.0)
    assert table is not None
    assert [(row[0], row[1]) for row in table.rows] == [(str(length), label) for length in (250, 350) for label in study.labels]
    assert "timed live" in table.caption and "n = 3 prompts" in table.caption and "target tiny, rope scaling ntk:2;" in table.caption
    items = study.behind("causal/attention", 1.0)
    assert [item.context for item in items] == [250, 350] and items[0].state_bytes < items[1].state_bytes
    assert items[0].arm.prompts != items[1].arm.prompts, "every length has prompts of its own"
    others = {f"long-{name}.png" for name in ("slots", "calibration", "outputs")}
    assert {path.name for path in folder.glob("*.png")} == {"long-context.png", *others}
    page = (folder / "long.md").read_text()
    assert "![Context](long-context.png)" in page and page.count("state KiB") == 1
    for title in ("## Slot by slot", "## Calibration", "## Controls"):
        assert page.index(title) < page.index("## Training")
    assert "in these results" not in page
    controls = page[page.index("## Controls") : page.index("## Training")]
    assert controls.count("| yes |") == 2 * 2 + 2 and "| NO |" not in controls, "two stubs a length, one arm twice again"
    assert len(study.comparisons) == 2 * 2, "pairs, lengths"


def test_a_grid_that_was_not_timed_says_so(finished: tuple[Path, Grid], tmp_path: Path) -> None:
    folder, _ = finished
    rows = pd.read_csv(folder / "long.cells.csv", keep_default_na=False)
    rows = rows.drop(columns=[name for name in rows if name.endswith("_ms") or name.startswith(("costs_", "state_"))])
    rows.to_csv(tmp_path / "long.cells.csv", index=False)
    for name in ("long.prompts.csv", "long.json"):
        (tmp_path / name).write_text((folder / name).read_text())
    table = report.context_table(report.load_study(tmp_path, "long"), 1.0)
    assert table is not None and table.caption.endswith("not timed.") and all(row[4:] == ["-", "-", "-"] for row in table.rows)
    report.write_report(tmp_path, "long")


def test_other_grids_have_no_lengths(tmp_path: Path) -> None:
    study = report.load_study(ROOT / "ablations" / "results", "core")
    assert study.contexts == [] and report.context_table(study, 1.0) is None
