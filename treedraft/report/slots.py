"""What happens slot by slot, on and off the drafter's greedy path, and whether drafts come true as often as q says."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from treedraft.report.study import Arm, Study
from treedraft.report.table import Table

FEWEST_ROUNDS = 30  # a share of fewer is not shown
_SHOWN = 10  # slots of a table
_QUANTITIES = ("rounds that accept a draft there", "of rounds on the spine so far", "of rounds off it")


def slot_shares(arm: Arm) -> np.ndarray | None:
    """[3, D] by slot: rounds that accept a draft there, of all; of those whose path had kept to the greedy spine so far; of
    those whose path had left it. nan where fewer than FEWEST_ROUNDS came so far; None where it was not recorded."""
    if arm.spine is None:
        return None
    kept, left, off = (arm.spine[name] for name in ("kept", "left", "off"))
    num_rounds = np.array([arm.sums[..., 1].sum()])
    before_on, before_off = np.concatenate([num_rounds, kept[:-1]]), np.concatenate([[0.0], off[:-1]])
    parts = ((kept + off, num_rounds.repeat(len(kept))), (kept + left, before_on), (off - left, before_off))
    return np.array([np.divide(part, of, out=np.full(len(of), np.nan), where=of >= FEWEST_ROUNDS) for part, of in parts])


def slots_recorded(study: Study) -> bool:
    """Whether the arms that figures show, those of the headline temperature, were measured slot by slot."""
    arms = study.headline_arms(study.headline_temperature)
    return bool(arms) and all(arm.spine and arm.steps for arm in arms)


def slot_table(study: Study, temperature: float) -> Table | None:
    """Three rows a drafter and mode; None where it was not recorded."""
    shares = [(arm, slot_shares(arm)) for arm in study.headline_arms(temperature)]
    known = [(arm, found) for arm, found in shares if found is not None]
    if not known:
        return None
    deepest = max(found.shape[1] for _, found in known)
    slots = np.unique(np.linspace(1, deepest, min(_SHOWN, deepest)).round().astype(int))
    rows = []
    for arm, found in known:
        for name, values in zip(_QUANTITIES, found, strict=True):
            texts = [_share(values[slot - 1]) if slot <= len(values) else "-" for slot in slots]
            if any(text != "-" for text in texts):
                rows.append([arm.label, arm.setting.mode, name, *texts])
    caption = (
        f"By draft position at temperature {temperature:g} and the trained depth (else the nearest one decoded): the greedy spine is the best child of "
        f"the best child ..., a chain's drafts; a path leaves it with the first draft that is not its parent's best, and is off it from there; "
        f"shares of fewer than {FEWEST_ROUNDS} rounds are left out; {study.source(temperature)}."
    )
    columns = [("", "drafter"), ("", "mode"), ("", ""), *(("slot", str(slot)) for slot in slots)]
    return Table(caption=caption, columns=columns, rows=rows, names=3)


def calibration_error(counts: Mapping[str, np.ndarray] | None) -> float:
    """Expected calibration error: how far the accepted share of a bin is from its mean probability, a mean over drafts."""
    if counts is None or not counts["drafts"].sum():
        return float("nan")
    return float(np.abs(counts["accepted"] - counts["expected"]).sum() / counts["drafts"].sum())


def calibration_table(study: Study, temperature: float) -> Table | None:
    """A row a drafter and mode; None where it was not recorded."""
    rows = []
    for arm in study.headline_arms(temperature):
        if arm.steps is None:
            continue
        row = [arm.label, arm.setting.mode, *_means(arm.steps, arm.steps["drafts"].sum(), 3), calibration_text(arm.steps)]
        rounds = arm.sums[..., 1].sum()
        rows.append([*row, *(_means(arm.paths, rounds, 2) if arm.paths else "--"), calibration_text(arm.paths)])
    if not rows:
        return None
    step, path = "a draft below an accepted node", "all drafts of a round"
    columns = [("", "drafter"), ("", "mode"), (step, "mean q"), (step, "accepted"), (step, "ECE")]
    columns += [(path, "sum of q"), (path, "accepted"), (path, "ECE")]
    caption = (
        f"Calibration at temperature {temperature:g} and the trained depth (else the nearest one decoded). Left: the probability q of a draft under its "
        f"parent, where the parent was accepted. Right: q of the whole path, over all nodes of a tree; its sum is how many drafts the tree's scores promise "
        f"a round. A chain is not drafted past its first rejection, so that its paths are not counted. ECE: expected calibration error in probability, a mean "
        f"over drafts; {study.source(temperature)}."
    )
    return Table(caption=caption, columns=columns, rows=rows, names=2)


def _means(counts: Mapping[str, np.ndarray], size: float, digits: int) -> list[str]:
    return [f"{counts[name].sum() / max(size, 1):.{digits}f}" for name in ("expected", "accepted")]


def calibration_text(counts: Mapping[str, np.ndarray] | None) -> str:
    error = calibration_error(counts)
    return "-" if np.isnan(error) else f"{error:.4f}"


def _share(value: float) -> str:
    return "-" if np.isnan(value) else f"{value:.3f}"
