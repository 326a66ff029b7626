"""Negative controls of a grid, measured by the replay that measures its cells, on the same prompts.

A drafter that is always right commits depth + 1 tokens a round, but for the round that ends an answer; one that is never
right commits one; and an arm that is measured again differs from itself by nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from treedraft import files, noise
from treedraft.cells import Workbench, cell_folder, prompt_row
from treedraft.config import DecodeConfig, canonical, short_hash
from treedraft.drafter import Drafter
from treedraft.evaluate import Replay
from treedraft.grid import Cell, EvaluateConfig, shipped_weights
from treedraft.metrics import Rounds
from treedraft.results import NOTHING, Measured
from treedraft.run import is_measured, runs_folder
from treedraft.trees.scorers import MarginalScorer

ALWAYS, NEVER, AGAIN = "always right", "never right", "measured again"
_SHIFTS = {ALWAYS: 0, NEVER: 1}


@dataclass(frozen=True, slots=True)
class _Ids:
    """What the drafter that knows the record remembers: ids [S, T]."""

    ids: Tensor

    def rows(self, index: Tensor) -> _Ids:
        return _Ids(self.ids[index])


class Known:
    """Stands in for a drafter and is certain of `id + shift` wherever the record has `id`; its features are the ids [S, T, 1]."""

    def __init__(self, vocab_size: int, shift: int) -> None:
        self.vocab_size, self.shift = vocab_size, shift

    def remember(self, taps: Tensor, _positions: Tensor) -> _Ids:
        return _Ids(taps[..., 0])

    def hidden(self, memory: _Ids, _anchor_tokens: Tensor, anchors: Tensor, depth: int) -> Tensor:
        """The ids [S, A, D, 1] behind anchors [S, A]; beyond the end of a record some id, which nothing accepts."""
        places = anchors[..., None] + 1 + torch.arange(depth, device=anchors.device)
        found = memory.ids.gather(1, places.clamp(max=memory.ids.shape[1] - 1).flatten(1))
        return found.view(*places.shape, 1)

    def scorer(self, hidden: Tensor, _anchor: Tensor, _rung: str = "conditional", **_: Any) -> MarginalScorer:
        tokens = (hidden[..., 0] + self.shift) % self.vocab_size
        known, column = tokens.unique(return_inverse=True)
        log_q = torch.full((*tokens.shape, len(known)), -torch.inf, dtype=torch.float64, device=tokens.device)
        return MarginalScorer(log_q.scatter_(-1, column[..., None], 0.0), known)


def replay_known(replay: Replay, config: DecodeConfig, *, shift: int) -> list[Rounds]:
    """The rounds of a drafter that knows the record (shift 0), or is wrong about every token of it (any other)."""
    stub = cast(Drafter, Known(replay.target.vocab_size, shift))
    return replay.judge(stub, config, [ids[..., None] for ids in replay.padded_ids()])


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """One control in one setting; `cell` is the one that is measured again."""

    name: str
    target: str
    decode: DecodeConfig
    evaluate: EvaluateConfig
    rope_scaling: str | None = None
    cell: Cell | None = None

    @property
    def path(self) -> Path:
        return cell_folder(self.cell) / "again.json" if self.cell is not None else runs_folder() / "controls" / f"{self.control_id}.json"

    @property
    def control_id(self) -> str:
        if self.cell is not None:
            return f"{self.cell.cell_id}-again"
        identity: dict[str, Any] = {name: canonical(getattr(self, name)) for name in ("decode", "evaluate")}
        identity |= {"weights": shipped_weights(self.target), "rope_scaling": self.rope_scaling, "noise": noise.SCHEME}
        setting = f"{self.decode.mode}-d{self.decode.depth}-t{self.decode.temperature:g}"
        name = f"{self.name}-{self.target}-{setting}".replace("/", "--").replace(" ", "-")
        return f"{name}-{short_hash(identity)}"

    @property
    def full(self) -> int:
        """The most tokens that a round can emit: a budget below depth + 1 ends even a tree without branches."""
        drafts = self.decode.budget - self.decode.count_root if self.decode.mode == "tree" else self.decode.depth
        return 1 + min(self.decode.depth, drafts)

    def measure(self, bench: Workbench) -> None:
        replay = bench.replay(self.evaluate, self.decode.temperature)
        if self.cell is None:
            rounds = replay_known(replay, self.decode, shift=_SHIFTS[self.name])
        else:
            rounds = replay.run(bench.drafter(self.cell.arm), self.decode)
        files.write_json(self.path, [_row(item, self.full) for item in rounds])


def controls_of(cells: Sequence[Cell]) -> list[Control]:
    """The two stubs in every setting of the cells, however nodes are scored; and the first arm measured again, at about
    its trained depth: its first and last setting a temperature."""
    if not cells:
        return []
    settings = {}
    for cell in cells:
        decode = replace(cell.decode, scorer="conditional", candidates=None)
        settings[canonical(decode), canonical(cell.evaluate)] = decode, cell
    stubs = [
        Control(
            name=name, target=cell.arm.target, decode=decode, evaluate=cell.evaluate, rope_scaling=cell.arm.train.rope_scaling
        )
        for name, (decode, cell) in itertools.product(_SHIFTS, settings.values())
    ]
    arm = cells[0].arm
    own = [cell for cell in cells if cell.arm.train_id == arm.train_id]
    off = min(abs(cell.decode.depth - arm.drafter.depth) for cell in own)
    again: dict[str, Cell] = {}
    for temperature in dict.fromkeys(cell.decode.temperature for cell in own):
        near = [cell for cell in own if cell.decode.temperature == temperature]
        near = [cell for cell in near if abs(cell.decode.depth - arm.drafter.depth) == off] or near
        again |= {cell.cell_id: cell for cell in (near[0], near[-1])}
    twice = [
        Control(name=AGAIN, target=arm.target, decode=cell.decode, evaluate=cell.evaluate, cell=cell)
        for cell in again.values()
    ]
    return [*stubs, *twice]


def missing_controls(cells: Sequence[Cell], kept: Measured = NOTHING) -> list[Control]:
    """Those that are not measured yet and can be: what is measured again has to be measured here."""
    return [
        control for control in controls_of(cells)
        if not control.path.is_file() and control.control_id not in kept.controls
        and (control.cell is None or is_measured(cell_folder(control.cell)))
    ]  # fmt: skip


def control_rows(cells: Sequence[Cell], kept: Measured = NOTHING) -> list[dict[str, Any]]:
    """Rows of <grid>.controls.csv: a control, a setting and a prompt, its sampling seeds together."""
    rows: list[dict[str, Any]] = []
    for control in controls_of(cells):
        decode, cell = control.decode, control.cell
        setting = {
            "control_id": control.control_id, "control": control.name, "label": cell.arm.label if cell else "",
            "cell": cell.cell_id if cell else "",
            "mode": decode.mode, "depth": decode.depth, "temperature": decode.temperature, "width": decode.width,
            "budget": decode.budget, "scorer": decode.scorer, "admit": decode.admit, "shape": decode.shape, "full": control.full,
            "context": control.evaluate.context,
        }  # fmt: skip
        if not control.path.is_file():
            rows += [{**setting, **row, **setting} for row in kept.controls.get(control.control_id, ())]
            continue
        decoded: dict[str, list[dict[str, Any]]] = {}
        for row in files.read_json(control.path):
            decoded.setdefault(row["prompt"], []).append(row)
        for prompt, parts in decoded.items():
            sums = {name: sum(part[name] for part in parts) for name in ("emitted", "rounds", "rounds_cut", "fewest_rounds")}
            wholes = [part[name] for part in parts for name in ("least", "most") if part[name]]
            bounds = {"least": min(wholes, default=None), "most": max(wholes, default=None)}
            rows.append({**setting, "prompt": prompt, "decodings": len(parts), **sums, **bounds})
    return rows


def _row(item: Rounds, full: int) -> dict[str, Any]:
    """With the fewest rounds of at most `full` tokens that the output takes, and the least and the most that a round which
    nothing cut emitted (None where all were cut)."""
    whole = item.emitted[item.emitted > item.accepted].tolist()
    bounds = {"least": min(whole, default=None), "most": max(whole, default=None)}
    return {**prompt_row(item), "fewest_rounds": -(-int(item.emitted.sum()) // full), **bounds}
