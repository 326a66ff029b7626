"""What a user may write, and what he is told if it is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from treedraft import registry
from treedraft.config import (
    DecodeConfig,
    DrafterConfig,
    TrainConfig,
    canonical,
    override,
    parse,
    parse_settings,
    read_toml,
    short_hash,
)
from treedraft.drafter import Drafter
from treedraft.grid import label_of, load_grid, load_grids
from treedraft.ops.layers import Shape

SHAPE = Shape(
    hidden_size=8, num_heads=2, kv_heads=1, head_dim=4, intermediate_size=8, rms_norm_eps=1e-6, vocab_size=9, draft_vocab_size=9, num_taps=1
)
GRID = """
question = "Which correction?"
target = "tiny"
compare = [["*/attention-fused", "*/none"], ["causal/*", "bidirectional/*"]]
[drafter]
block_size = 8
backbone = { num_layers = 2 }
[train]
steps = 5
[[arms]]
backbone = ["causal", "bidirectional"]
correction = ["none", { name = "attention", inputs = "fused" }]
seed = [0, 1]
[decode]
mode = "tree"
depth = [7, 15]
[evaluate]
count = 3
seeds = [0]
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "grid.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("kind", "values", "words"),
    [
        (TrainConfig, {"step": 5}, r"here: unknown key 'step' \(did you mean 'steps'\?\)"),
        (TrainConfig, {"steps": 0}, "train.steps is 0"),
        (TrainConfig, {"steps": "many"}, "steps = 'many'"),
        (TrainConfig, {"objective": "mse"}, "objective = 'mse'.*'ce', 'forward_kl' or 'dspark'"),
        (TrainConfig, {"sequences": 6, "micro_batches": 4}, "6 does not divide"),
        (TrainConfig, {"learning_rate": -1.0}, "learning_rate is -1"),
        (DrafterConfig, {"block_size": 1}, "block_size is 1; at least 2"),
        (DrafterConfig, {"layout": "sideways"}, "layout = 'sideways'"),
        (DrafterConfig, {"correction": {"rank": 3}}, "drafter.correction needs a name"),
        (DrafterConfig, {"draft_vocab_size": 0}, "draft_vocab_size is 0"),
        (DecodeConfig, {"budget": 0}, "budget is 0"),
        (DecodeConfig, {"width": 0}, "width is 0"),
        (DecodeConfig, {"depth": -3}, "depth is -3"),
        (DecodeConfig, {"temperature": float("nan")}, "temperature is nan"),
        (DecodeConfig, {"temperature": -0.5}, "temperature is -0.5"),
        (DecodeConfig, {"mode": "bush"}, "'chain' or 'tree'"),
    ],
)
def test_bad_values_are_named(kind: type, values: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse(kind, values, where="here")


@pytest.mark.parametrize(
    ("seam", "component", "words"),
    [
        ("correction", {"name": "atention"}, "did you mean 'attention'"),
        ("correction", {"name": "attention", "input": "fused"}, r"correction 'attention': unknown key 'input' \(did you mean 'inputs'"),
        ("correction", {"name": "attention", "inputs": "everything"}, "inputs = 'everything'"),
        ("correction", {"name": "markov", "rank": 0}, "correction.rank is 0"),
        ("correction", {"name": "markov", "size": 0}, "correction.size is 0"),
        ("correction", {"name": "markov", "size": 1, "rank": 3}, "set one of them"),
        ("correction", {"name": "none", "rank": 3}, "unknown key 'rank'"),
        ("backbone", {"name": "causl"}, "unknown backbone 'causl'.*'causal'"),
        ("backbone", {"name": "causal", "num_layers": 0}, "num_layers is 0"),
        ("backbone", {"name": "causal", "kv_heads": 2, "num_heads": 3}, "3 query heads do not divide"),
        ("context", {"name": "half"}, "unknown context 'half'"),
        ("context", {"name": "no.such.module"}, "no module"),
    ],
)
def test_bad_components_are_named(seam: str, component: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words), torch.device("meta"):
        Drafter(DrafterConfig(**{seam: component}), SHAPE)


def test_a_component_may_be_any_module() -> None:
    with torch.device("meta"):
        drafter = Drafter(DrafterConfig(correction={"name": "treedraft.corrections.markov", "rank": 2}), SHAPE)
    assert drafter.parameter_counts()["correction"] == 2 * 9 * 2
    assert registry.load("corrections", "markov") is registry.load("corrections", "treedraft.corrections.markov")


def test_depth_follows_the_layout() -> None:
    assert DrafterConfig(block_size=16).depth == 15
    assert DrafterConfig(block_size=16, layout="anchor-first").depth == 16


def test_settings() -> None:
    settings = parse_settings(["correction.rank=128", "train.decay = 7.0", "mode=chain", "taps=[1, 2]", "on=true", 'x.y="a=b"'])
    assert settings == {"correction.rank": 128, "train.decay": 7.0, "mode": "chain", "taps": [1, 2], "on": True, "x.y": "a=b"}
    for bad in ("rank", "=3"):
        with pytest.raises(ValueError, match="expected KEY=VALUE"):
            parse_settings([bad])


def test_override_copies() -> None:
    values = {"train": {"steps": 5}, "target": "tiny"}
    changed = override(values, {"train.steps": 7, "drafter.correction.rank": 3})
    assert changed == {"train": {"steps": 7}, "target": "tiny", "drafter": {"correction": {"rank": 3}}}
    assert values == {"train": {"steps": 5}, "target": "tiny"}
    with pytest.raises(ValueError, match="target is a value"):
        override(values, {"target.name": "x"})
    arms = {"arms": [{"context": ["full", {"name": "longspark", "window": 64}]}]}
    assert override(arms, {"arms.0.context.1.window": 256})["arms"][0]["context"][1]["window"] == 256
    assert override(arms, {"arms.0.context.0": "other"})["arms"][0]["context"][0] == "other" and arms["arms"][0]["context"][0] == "full"
    for key in ("arms.1.backbone", "arms.first.backbone", "arms.-1"):
        with pytest.raises(ValueError, match="no place in a list of 1"):
            override(arms, {key: "x"})


def test_equal_configs_have_equal_hashes() -> None:
    assert canonical(TrainConfig()) == canonical(parse(TrainConfig, {"steps": 400}, where=""))
    assert short_hash({"a": 1, "b": 2}) == short_hash({"b": 2, "a": 1}) != short_hash({"a": 1, "b": 3})
    assert short_hash({"a": 1}) == "015abd7f", "folders of earlier runs are found by this hash"


def test_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no file"):
        read_toml(tmp_path / "missing.toml")
    with pytest.raises(ValueError, match=r"grid.toml: not valid TOML.*line 2"):
        read_toml(write(tmp_path, "a = 1\nb = = 2\n"))


def test_a_grid_multiplies(tmp_path: Path) -> None:
    grid = load_grid(write(tmp_path, GRID))
    assert len(grid.cells) == 2 * 2 * 2 * 2 and len(grid.arms) == 8
    labels = {cell.arm.label for cell in grid.cells}
    assert labels == {f"{b}/{c}" for b in ("causal", "bidirectional") for c in ("none", "attention-fused")}
    assert all(cell.arm.drafter.backbone["num_layers"] == 2 and cell.arm.drafter.block_size == 8 for cell in grid.cells)
    assert {cell.arm.train.seed for cell in grid.cells} == {0, 1} and {cell.decode.depth for cell in grid.cells} == {7, 15}
    assert set(grid.comparisons()) == {
        ("causal/attention-fused", "causal/none"), ("bidirectional/attention-fused", "bidirectional/none"),
        ("causal/none", "bidirectional/none"), ("causal/attention-fused", "bidirectional/attention-fused"),
    }  # fmt: skip


def test_identities_are_stable_and_distinct(tmp_path: Path) -> None:
    path = write(tmp_path, GRID)
    first, again = load_grid(path), load_grid(path)
    ids = [cell.cell_id for cell in first.cells]
    assert ids == [cell.cell_id for cell in again.cells] and len(set(ids)) == len(ids)
    by_training = {cell.arm.train_id for cell in first.cells}
    assert len(by_training) == 8, "another depth or temperature reuses the weights"
    assert {cell.arm.train_id for cell in load_grid(path, settings={"decode.depth": 23}).cells} == by_training
    for key, value in (("train.steps", 6), ("train.seed", 1), ("data.tokens", 9), ("drafter.block_size", 9)):
        changed = {cell.arm.train_id for cell in load_grid(path, settings={key: value}).cells}
        assert not changed & by_training or key == "train.seed"
    assert not {cell.arm.train_id for cell in load_grid(path, target="pocket").cells} & by_training
    assert all(set(name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-") for name in ids)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"evaluation.count": 3}, "grid.toml: unknown table 'evaluation'.*did you mean 'evaluate'"),
        ({"decode.widht": 3}, r"grid.toml \[decode\]: unknown key 'widht'.*'width'"),
        ({"train.steps": -1}, r"grid.toml \[train\]: train.steps is -1"),
        ({"evaluate.count": 0}, "at least one prompt"),
        ({"drafter.blocks": 3}, "unknown key 'blocks'"),
        ({"decode.depth": []}, r"depth is \[\]: at least one value"),
    ],
)
def test_a_wrong_grid_is_named(tmp_path: Path, settings: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load_grid(write(tmp_path, GRID), settings=settings)


def test_a_suite_is_its_grids_which_share_trainings(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.toml").write_text(GRID)
    suite = tmp_path / "suite.toml"
    suite.write_text('question = "all"\ngrids = ["one", "two"]\n[set]\n"train.seed" = [3, 4, 5]\n')
    one, two = load_grids(suite)
    assert (one.name, two.name) == ("one", "two") and {arm.train_id for arm in one.arms} == {arm.train_id for arm in two.arms}
    assert load_grids(tmp_path / "one.toml") == [load_grid(tmp_path / "one.toml")]
    assert {arm.train.steps for grid in load_grids(suite, settings={"train.steps": 9}) for arm in grid.arms} == {9}
    suite.write_text('question = "all"\ngrids = ["one", "two"]\n[set]\n"train.steps" = 8\n[set.two]\n"train.steps" = 9\n')
    assert [{arm.train.steps for arm in grid.arms} for grid in load_grids(suite)] == [{8}, {9}]
    assert {arm.train.steps for grid in load_grids(suite, settings={"train.steps": 7}) for arm in grid.arms} == {7}, "a flag goes before"
    suite.write_text('question = "all"\ngrids = ["one"]\n[set.two]\n"train.steps" = 9\n')
    with pytest.raises(ValueError, match=r"suite.toml \[set\]: unknown table 'two'"):
        load_grids(suite)
    suite.write_text('question = "all"\ngrids = ["one", "tow"]\n')
    with pytest.raises(ValueError, match="suite.toml: unknown grid 'tow'.*did you mean 'two'"):
        load_grids(suite)


def test_arms_that_train_differently_are_told_apart_and_share_what_is_equal(tmp_path: Path) -> None:
    plain = 'question = "?"\ntarget = "tiny"\n[train]\nsteps = 5\n'
    arms = '[[arms]]\nobjective = ["ce", "forward_kl"]\ndecay = [7.0, "none"]\nseed = [0, 1]\n'
    grid = load_grid(write(tmp_path, plain + arms))
    name = label_of(grid.arms[0].drafter)
    assert {arm.label for arm in grid.arms} == {f"{name}, {loss}, {decay}" for loss in ("ce", "forward_kl") for decay in ("decay 7", "no decay")}
    assert len(grid.arms) == 8
    alone = load_grid(write(tmp_path, plain + 'objective = "forward_kl"\ndecay = 7.0\n'))
    assert alone.arms[0].label == name and alone.arms[0].train_id in {arm.train_id for arm in grid.arms}
    methods = load_grid(write(tmp_path, plain + '[[arms]]\nmethod = ["dflash", "jetspec++"]\n[[arms]]\nmethod = "dspark"\nblock_size = [7, 15]\n'))
    assert [arm.label for arm in methods.arms] == ["dflash", "jetspec++", "dspark/b7", "dspark/b15"]
    assert [arm.drafter.depth for arm in methods.arms] == [15, 15, 7, 15] and methods.arms[3].drafter.layout == "anchor-first"
    assert methods.arms[1].name == "tiny-causal-attention-s0"


def test_what_changes_nothing_is_in_no_name(tmp_path: Path) -> None:
    """How often a training is saved, and the seeds of a sampling where nothing is drawn."""
    path = write(tmp_path, GRID)
    first, saved = load_grid(path), load_grid(path, settings={"train.checkpoint_every": 7})
    assert [cell.cell_id for cell in first.cells] == [cell.cell_id for cell in saved.cells]
    settings = [{"decode.temperature": [1.0, 0.0], "evaluate.seeds": list(seeds)} for seeds in ((0, 1), (0, 1, 2))]
    seeds = [load_grid(path, settings=each).cells for each in settings]
    greedy = [cell.decode.temperature == 0 for cell in seeds[0]]
    assert [one.cell_id == two.cell_id for one, two in zip(*seeds, strict=True)] == greedy and {*greedy} == {True, False}
    assert {cell.evaluate.seeds for cell in seeds[1]} == {(0,), (0, 1, 2)}


def test_labels_name_the_numbers_in_which_drafters_differ(tmp_path: Path) -> None:
    arms = """
[[arms]]
context = [
    { name = "longspark", window = 8, summary = 2 },
    { name = "longspark", window = 8, summary = 4 },
    { name = "longspark", window = 8, summary = 4, boundary = false },
]
correction = { name = "markov", rank = 4 }
[[arms]]
context = "longspark"
correction = [{ name = "attention", mlp = false }, { name = "attention", mlp = true }]
[[arms]]
correction = { name = "none" }
block_size = [8, 16]
"""
    named = GRID.replace("backbone = { num", 'backbone = { name = "causal", num')
    text = named[: named.index("[[arms]]")] + arms + named[named.index("[decode]") :]
    labels = [cell.arm.label for cell in load_grid(write(tmp_path, text)).cells]
    longspark = [f"causal/longspark-{part}/markov" for part in ("summary2", "summary4", "summary4-no-boundary")]
    assert list(dict.fromkeys(labels)) == [
        *longspark, "causal/longspark/attention", "causal/longspark/attention-mlp", "causal/none/b8", "causal/none/b16",
    ]  # fmt: skip
