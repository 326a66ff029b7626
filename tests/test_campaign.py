"""The suites by content: every grid of the campaign with the arms that its question names, trainings shared, on any target."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from treedraft import ablate
from treedraft.grid import Arm, Grid, load_grid, load_grids

FOLDER = Path(__file__).parents[1] / "ablations"
QUESTIONS = ("methods", "inputs", "matched", "markov", "depth", "core", "ladder", "loss", "seeds")
HEADLINE = {("causal", "attention"), ("bidirectional", "markov")}


def suite(name: str) -> dict[str, Grid]:
    return {grid.name: grid for grid in load_grids(FOLDER / f"{name}.toml")}


def pair(arm: Arm) -> tuple[Any, Any]:
    return arm.drafter.backbone["name"], arm.drafter.correction["name"]


def options(grid: Grid, key: str) -> set[Any]:
    return {arm.drafter.correction.get(key) for arm in grid.arms}


def decoded(grid: Grid, key: str) -> set[Any]:
    return {getattr(cell.decode, key) for cell in grid.cells}


@pytest.mark.parametrize("name", ["full", "campaign"])
def test_a_suite_asks_every_question(name: str) -> None:
    grids = suite(name)
    assert set(QUESTIONS) <= set(grids)
    assert all(decoded(grids[each], "mode") == {"chain", "tree"} for each in QUESTIONS if each != "ladder")
    assert all(0.0 in decoded(grids[each], "temperature") for each in QUESTIONS), "as the post decodes"
    masks, corrections = {"causal", "bidirectional"}, {"none", "markov", "attention"}
    for each in ("core", "depth"):
        assert {pair(arm) for arm in grids[each].arms} == {(mask, correction) for mask in masks for correction in corrections}
        assert {arm.drafter.depth for arm in grids[each].arms} == {15}
    assert decoded(grids["core"], "depth") == {7, 15, 23} and decoded(grids["depth"], "depth") == {15, 19, 23, 27, 31}
    assert {arm.label for arm in grids["methods"].arms} == {"dflash", "jetspec", "jetspec++", "dspark/b7", "dspark/b15"}
    assert decoded(grids["methods"], "depth") >= {7, 15}
    assert options(grids["inputs"], "inputs") == {None, "hidden", "parent", "sum"} and decoded(grids["inputs"], "depth") >= {15, 23}
    assert options(grids["matched"], "size") == {None, 1, 3} and options(grids["matched"], "mlp") == {None, True}
    assert options(grids["markov"], "variant") == {None, "gated", "rnn"}
    assert decoded(grids["ladder"], "scorer") == {"marginal", "per_depth", "conditional"}
    loss = {(pair(arm), arm.train.objective, arm.train.decay) for arm in grids["loss"].arms}
    assert loss == {(each, objective, decay) for each in HEADLINE for objective in ("ce", "forward_kl", "dspark") for decay in (7.0, None)}
    assert {(pair(arm), arm.train.seed) for arm in grids["seeds"].arms} == {(each, seed) for each in HEADLINE for seed in (0, 1, 2)}


def test_the_fixed_size_context_is_part_of_the_suites() -> None:
    assert "contexts" in suite("full") and {"contexts", "longspark", "slots", "long"} <= set(suite("campaign"))


def test_every_question_has_a_place_for_its_answer() -> None:
    """The list of grids names every file, and every one that is measured here has its tables in the text."""
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    elsewhere = {"full", "campaign", "qwen3-campaign", "smoke"}
    for path in FOLDER.glob("*.toml"):
        if "\nquestion = " in "\n" + path.read_text(encoding="utf-8"):
            assert f"| `{path.stem}` |" in text, path.stem
            assert f"<!-- table: {path.stem} " in text or path.stem in elsewhere, path.stem


def test_full_has_one_seed_and_the_campaign_three() -> None:
    full, campaign = suite("full"), suite("campaign")
    for name in QUESTIONS:
        assert {arm.train.seed for arm in full[name].arms} == ({0, 1, 2} if name == "seeds" else {0})
        assert {arm.train.seed for arm in campaign[name].arms} == {0, 1, 2}
        assert min(arm.train.steps for arm in campaign[name].arms) > max(arm.train.steps for arm in full[name].arms)
        assert {len(cell.evaluate.seeds) for cell in campaign[name].cells if cell.decode.temperature > 0} == {2}
    assert {arm.train.seed for arm in campaign["longspark"].arms} == {0, 1, 2}, "its claims have verdicts"
    headline = [cell for cell in campaign["seeds"].cells if cell.decode.mode == "tree"]
    assert {cell.evaluate.count for cell in headline} == {480} and {cell.decode.depth for cell in headline} >= {15, 23}


def test_the_power_can_be_read_before_the_rest_is_run() -> None:
    """`--grid seeds` alone trains and measures what the campaign would."""
    assert load_grid(FOLDER / "seeds.toml").cells == suite("campaign")["seeds"].cells


@pytest.mark.parametrize("name", ["full", "campaign"])
def test_what_grids_have_in_common_is_trained_once(name: str) -> None:
    """Six arms of the core serve as many as they can: all of `depth` and `ladder`, and one or more of every other grid."""
    grids = suite(name)
    core = {arm.train_id for arm in grids["core"].arms}
    for each in ("depth", "ladder"):
        assert {arm.train_id for arm in grids[each].arms} <= core
    shared = {each: len(core & {arm.train_id for arm in grids[each].arms}) // (3 if name == "campaign" else 1) for each in QUESTIONS}
    assert shared == {
        "core": 6, "depth": 6, "ladder": 3, "methods": 3, "inputs": 1, "matched": 2, "markov": 1,
        "loss": 2 if name == "full" else 0, "seeds": 2,
    }  # fmt: skip


@pytest.mark.parametrize("target", ["smollm2-135m", "Qwen/Qwen3-0.6B", "Qwen/Qwen3-14B"])
def test_a_grid_file_serves_any_target(target: str) -> None:
    """The cells of pocket's file with the other name, no layer number and no rank of pocket's among them."""
    for name in QUESTIONS:
        own, other = (load_grid(FOLDER / f"{name}.toml", target=each) for each in (None, target))
        assert [cell.arm.label for cell in own.cells] == [cell.arm.label for cell in other.cells]
        assert {arm.target for arm in other.arms} == {target} and {arm.drafter.tap_layers for arm in other.arms} == {None}
        assert options(other, "rank") == {None} and own.comparisons() == other.comparisons()


def test_the_campaign_of_a_qwen3_model_asks_the_same() -> None:
    grids = {grid.name: grid for grid in load_grids(FOLDER / "qwen3-campaign.toml", target="Qwen/Qwen3-8B")}
    assert set(grids) == set(suite("campaign"))
    for name, own in suite("campaign").items():
        assert {arm.label for arm in grids[name].arms} == {arm.label for arm in own.arms}, "labels leave out what all arms share"
        assert {arm.train.steps for arm in grids[name].arms} == {20_000} and options(grids[name], "rank") <= {None, 256}


def test_core_is_the_same_question_on_smollm2() -> None:
    pocket, other = load_grid(FOLDER / "core.toml"), load_grid(FOLDER / "core-smollm2.toml")
    assert other.name != pocket.name, "results have the name of their file"
    for key in ("mode", "depth", "temperature", "width", "budget"):
        assert decoded(other, key) == decoded(pocket, key)
    assert [arm.label for arm in other.arms] == [arm.label for arm in pocket.arms] and other.comparisons() == pocket.comparisons()
    assert {(arm.target, arm.drafter.draft_vocab_size) for arm in other.arms} == {("smollm2-135m", 8192)}


def test_another_target_does_not_write_over_results(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["ablate", "--grid", "core", "--output", str(FOLDER / "results"), "--dry-run"]
    monkeypatch.setattr(sys, "argv", command)
    assert ablate.main() == 0 and capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [*command, "--target", "smollm2-135m"])
    with pytest.raises(ValueError, match=r"core.cells.csv has results of pocket, not of smollm2-135m: give another folder"):
        ablate.main()
