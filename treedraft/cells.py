"""The work of a grid, cell by cell: train what is missing, decode what is missing, collect what is there.

A run's folder is complete when its result.json exists; it is written last, by rename. So a killed grid goes on where it
was, and two machines that share a disk skip each other's finished cells.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from treedraft import files, metrics, noise
from treedraft.config import DataConfig, DrafterConfig, canonical, short_hash
from treedraft.data.features import FeatureCache
from treedraft.data.prepare import training_sequences
from treedraft.data.prompts import Prompt, default_set, long_set, prompt_set
from treedraft.drafter import Drafter, load_drafter, shape_for, taps_for
from treedraft.evaluate import Replay, Trajectory, record
from treedraft.grid import Arm, Cell, EvaluateConfig
from treedraft.metrics import Rounds
from treedraft.results import COUNTED, NOTHING, Measured
from treedraft.run import commit, hardware, is_measured, rank_and_world, runs_folder, seed_everything
from treedraft.speculate import stage_costs
from treedraft.targets import load_target, parse_dtype
from treedraft.targets.hf import Target
from treedraft.trainer import Trainer

_TIMED_PROMPTS, _TIMED_TOKENS = 4, 32  # of a cell whose rounds are timed


def train_folder(arm: Arm) -> Path:
    return runs_folder() / "train" / arm.train_id


def cell_folder(cell: Cell) -> Path:
    return runs_folder() / "cells" / cell.cell_id


def is_done(folder: Path) -> bool:
    return (folder / "result.json").is_file()


def is_timed(cell: Cell) -> bool:
    """Cells with a context length are timed too, once: a clock's numbers are no part of a result that repeats."""
    return cell.evaluate.context is None or (cell_folder(cell) / "costs.json").is_file()


def steps_done(arm: Arm) -> int:
    """Steps that an arm has been trained for, as far as its metrics say."""
    folder = train_folder(arm)
    if is_done(folder):
        return arm.train.steps
    metrics_path = folder / "metrics.jsonl"
    lines = metrics_path.read_text(encoding="utf-8").splitlines() if metrics_path.is_file() else []
    return json.loads(lines[-1])["step"] if lines and lines[-1].endswith("}") else 0


class Workbench:
    """A target with what its cells share: training features, recorded trajectories, loaded drafters."""

    def __init__(
        self, target_name: str, *, cache_gb: float, dtype: str | None = None, rope_scaling: str | None = None
    ) -> None:
        self.settings = {"target_name": target_name, "cache_gb": cache_gb, "dtype": dtype, "rope_scaling": rope_scaling}
        self.target: Target = load_target(target_name, dtype=parse_dtype(dtype), rope_scaling=rope_scaling)
        self.cache_gb = cache_gb
        self._features: dict[str, FeatureCache] = {}
        self._replays: dict[str, Replay] = {}
        self._drafter: tuple[str, Drafter] | None = None

    def check(self, arm: Arm) -> None:
        """Build the arm's drafter without memory, so that a wrong option is found before any work is done."""
        with torch.device("meta"):
            Drafter(arm.drafter, shape_for(self.target, arm.drafter))

    def train(self, arm: Arm) -> dict[str, Any]:
        """Train an arm, or return what was trained before."""
        folder = train_folder(arm)
        if is_done(folder):
            return files.read_json(folder / "result.json")
        features = self.features(arm.data, arm.drafter)
        drafter = new_drafter(self.target, arm.drafter, features, seed=arm.train.seed)
        if arm.train.init is not None:
            drafter.adopt(Drafter.from_pretrained(arm.train.init, target=self.target))
            drafter.attach(self.target)
        return Trainer(drafter=drafter, target=self.target, features=features, config=arm.train, folder=folder).run()

    def evaluate(self, cell: Cell) -> dict[str, Any]:
        """Decode a cell by replay, or return what was measured before; its arm has to be trained."""
        folder = cell_folder(cell)
        if is_measured(folder):
            return files.read_json(folder / "result.json")
        drafter = self.drafter(cell.arm)
        drafter.check_candidates(cell.decode.candidates, cell.decode.scorer)
        replay = self.replay(cell.evaluate, cell.decode.temperature)
        rounds = replay.run(drafter, cell.decode)
        files.write_json(folder / "prompts.json", [
            {**prompt_row(item), "looped": int(replay.looped[item.prompt, item.seed])} for item in rounds
        ])  # fmt: skip
        result = {
            "cell": cell.cell_id,
            "train": cell.arm.train_id,
            "decode": asdict(cell.decode),
            **metrics.summary(rounds, cell.decode.depth),
            "prompt_tokens": float(np.mean([item.prompt_length for item in replay.trajectories])),
            "rope_scaling": self.target.rope_scaling,
            "hardware": hardware(),
            "commit": commit(),
        }
        files.write_json(folder / "result.json", result)
        return result

    @torch.no_grad()
    def time(self, cell: Cell) -> None:
        """Decode a few of the cell's prompts live and keep what a round's parts took and how much memory a request has."""
        drafter = load_drafter(str(train_folder(cell.arm) / "drafter"), target=self.target)  # as it decodes
        prompts = [self.target.encode_chat(prompt.turns) for prompt in self._prompts(cell.evaluate)[:_TIMED_PROMPTS]]
        measured = stage_costs(self.target, drafter, prompts, config=cell.decode, max_new_tokens=_TIMED_TOKENS)
        files.write_json(cell_folder(cell) / "costs.json", {**measured, "hardware": hardware(), "commit": commit()})

    def drafter(self, arm: Arm) -> Drafter:
        if self._drafter is None or self._drafter[0] != arm.train_id:
            self._drafter = arm.train_id, Drafter.from_pretrained(train_folder(arm) / "drafter", target=self.target)
        return self._drafter[1]

    def features(self, data: DataConfig, drafter: DrafterConfig) -> FeatureCache:
        """The feature cache for a data set and tapped layers, filled."""
        taps = taps_for(self.target, drafter)
        self.target.tap(taps.layers, cached=taps.cached)
        key = canonical(data) + str(taps)
        if key not in self._features:
            sequences = training_sequences(self.target, data)
            cache = FeatureCache(runs_folder() / "features", self.target, sequences, limit_gb=self.cache_gb)
            print(cache.estimate(), file=sys.stderr)
            cache.fill(*rank_and_world())
            self._features[key] = cache
        return self._features[key]

    def replay(self, evaluate: EvaluateConfig, temperature: float) -> Replay:
        """Recorded decodings of the evaluation prompts at a temperature; kept on disk, since every cell needs them."""
        key = f"{canonical(evaluate)}-t{temperature:g}"
        if key not in self._replays:
            if evaluate.context is not None:
                self._replays.clear()  # features of long prompts take gigabytes
            self._replays[key] = Replay(self.target, self._trajectories(evaluate, temperature))
        return self._replays[key]

    def _prompts(self, evaluate: EvaluateConfig) -> list[Prompt]:
        if evaluate.context is None:
            name = evaluate.prompts or default_set(self.target.name)
            found = prompt_set(name, count=evaluate.count)
            if evaluate.count is not None and len(found) < evaluate.count:
                print(f"prompt set {name!r} has {len(found)} prompts, not the {evaluate.count} of evaluate.count", file=sys.stderr)
            return found
        evaluate.check_window(self.target.name, self.target.max_length)
        return long_set(evaluate.context, lambda turns: len(self.target.encode_chat(turns)), count=evaluate.count)

    def _trajectories(self, evaluate: EvaluateConfig, temperature: float) -> list[Trajectory]:
        prompts = self._prompts(evaluate)
        identity = {
            "evaluate": canonical(evaluate),
            "prompts": [prompt.turns for prompt in prompts],
            "temperature": temperature,
            "target": self.target.fingerprint(),
            "dtype": str(self.target.dtype),
            "noise": noise.SCHEME,
            "rope_scaling": self.target.rope_scaling,
        }
        name = f"{self.target.name.replace('/', '--')}-t{temperature:g}-{short_hash(identity)}.json"
        path = runs_folder() / "trajectories" / name
        if not path.is_file():
            recorded = record(
                self.target,
                prompts,
                temperature=temperature,
                seeds=evaluate.seeds,
                max_new_tokens=evaluate.max_new_tokens,
            )
            files.write_json(path, [{**asdict(item), "ids": item.ids.tolist()} for item in recorded])
        return [Trajectory(**{**item, "ids": np.array(item["ids"])}) for item in files.read_json(path)]


def new_drafter(target: Target, config: DrafterConfig, features: FeatureCache, *, seed: int) -> Drafter:
    """An untrained drafter, its draft vocabulary the most frequent response tokens of the training set."""
    seed_everything(seed)
    shape = shape_for(target, config)
    drafter = Drafter(config, shape, draft_vocabulary(features, target, shape.draft_vocab_size))
    return drafter.to(target.device).attach(target)


def draft_vocabulary(features: FeatureCache, target: Target, size: int) -> torch.Tensor:
    """The `size` most frequent response tokens, ascending ids [V']; end-of-text always, ties and gaps by lowest id."""
    counts = np.zeros(target.vocab_size, dtype=np.int64)
    for ids, prompt_length in zip(features.sequences.ids, features.sequences.prompt_lengths, strict=True):
        np.add.at(counts, ids[prompt_length:], 1)
    counts[[token for token in target.eos_token_ids if token < target.vocab_size]] = np.iinfo(np.int64).max
    kept = np.argsort(-counts, kind="stable")[:size]
    return torch.from_numpy(np.sort(kept))


def prompt_row(item: Rounds) -> dict[str, Any]:
    """What <grid>.prompts.csv says of one decoding."""
    return {
        "prompt": item.prompt,
        "domain": item.domain,
        "sampling_seed": item.seed,
        "emitted": int(item.emitted.sum()),
        "rounds": item.num_rounds,
        "rounds_cut": int((item.emitted <= item.accepted).sum()),
    }


def collect(
    cells: Sequence[Cell], failures: Mapping[str, str], name: str, kept: Measured = NOTHING
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of <grid>.cells.csv and <grid>.prompts.csv for the cells that are done or failed, or whose rows were `kept`."""
    cell_rows: list[dict[str, Any]] = []
    prompt_rows: list[dict[str, Any]] = []
    for cell in cells:
        decode, arm = cell.decode, cell.arm
        setting = {"mode": decode.mode, "depth": decode.depth, "temperature": decode.temperature}
        shared = {"cell": cell.cell_id, "label": arm.label, "train_seed": arm.train.seed, **setting}
        row: dict[str, Any] = {"grid": name, **shared, "width": decode.width, "budget": decode.budget,
                               "scorer": decode.scorer, "admit": decode.admit,
                               "shape": decode.shape, "target": arm.target, "rope_scaling": arm.train.rope_scaling or "none",
                               "trained_depth": arm.drafter.depth}  # fmt: skip
        if cell.cell_id in failures:
            row["status"] = f"failed: {failures[cell.cell_id]}"
            found: list[dict[str, Any]] = []
        elif is_done(cell_folder(cell)):
            result = files.read_json(cell_folder(cell) / "result.json")
            trained = files.read_json(train_folder(arm) / "result.json")
            row |= _result_columns(result, trained) | _context_columns(cell, result)
            found = files.read_json(cell_folder(cell) / "prompts.json")
        elif cell.cell_id in kept.cells:
            row = {**row, **kept.cells[cell.cell_id], **row}
            found = kept.prompts[cell.cell_id]
        else:
            continue
        cell_rows.append(row)
        prompt_rows += [{**shared, **item, **shared} for item in found]
    return cell_rows, prompt_rows


def _context_columns(cell: Cell, result: Mapping[str, Any]) -> dict[str, Any]:
    """Of a cell with a context length: how long its prompts are, and what was measured behind them."""
    if cell.evaluate.context is None:
        return {}
    path = cell_folder(cell) / "costs.json"
    costs = files.read_json(path) if path.is_file() else {}
    named = {f"costs_{name}" if name in ("hardware", "commit") else name: value for name, value in costs.items()}
    return {"context": cell.evaluate.context, "prompt_tokens": result["prompt_tokens"], **named}


def _result_columns(result: Mapping[str, Any], trained: Mapping[str, Any]) -> dict[str, Any]:
    counts = ("prompts", "decodings", "rounds", "rounds_cut", "emitted", "mean_nodes")
    plain = ("tau", "tau_macro", *counts, "hardware", "commit")
    return {
        **{name: result[name] for name in plain},
        **{f"tau_{domain}": value for domain, value in result["tau_by_domain"].items()},
        "survival": " ".join(f"{value:.4f}" for value in result["survival"]),
        **{
            f"{group}_{name}": " ".join(f"{value:.10g}" for value in values)
            for group in COUNTED
            for name, values in (result.get(group) or {}).items()
        },
        **({"candidate_recall": result["candidate_recall"]} if result.get("candidate_recall") is not None else {}),
        **{f"parameters_{part}": count for part, count in trained["parameters"].items()},
        **{f"train_{name}": trained[name] for name in ("steps", "blocks", "seconds")},
        "status": "ok",
    }
