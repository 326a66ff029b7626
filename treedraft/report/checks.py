"""What tells whether the other tables may be believed: the outputs themselves, negative controls, and how small a gap shows."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from treedraft.metrics import LOOP_PERIOD, LOOP_REPEATS, LOOP_TOKENS, Counts, Interval, paired_difference
from treedraft.report.study import Arm, Frame, Study, interval_of
from treedraft.report.table import Table

SEEDS_BOUND = 3.29  # standard errors: missed by one in a thousand where nothing is wrong
WIDTH_BAR = 0.15  # tokens: how narrow the interval of a comparison with several training seeds is asked to be


def outputs_of(study: Study) -> Frame:
    """A row a decoding by the target: temperature, prompt, domain, sampling_seed, length in tokens, looped (0, 1, nan unknown).

    Every drafter is judged along the same decodings, so one cell a temperature tells them all.
    """
    rows = study.prompts.assign(length=study.prompts.emitted + 1)  # the first token comes from the prompt's own forward
    if "looped" not in rows:
        rows["looped"] = np.nan
    key = ["temperature", "prompt", "sampling_seed"]
    return rows.groupby(key, as_index=False)[["domain", "length", "looped"]].first()  # the first that is known


def output_table(study: Study) -> Table:
    """A row a temperature and domain."""
    outputs, rows = outputs_of(study), []
    for temperature in study.temperatures:
        own = outputs[outputs.temperature == temperature]
        for name in ("all", *study.domains):
            part = own if name == "all" else own[own.domain == name]
            looped = f"{part.looped.mean():.1%}" if part.looped.notna().all() and len(part) else "not recorded"
            lengths = [f"{value:.0f}" for value in np.percentile(part.length, [0, 10, 50, 90, 100])] if len(part) else ["-"] * 5
            rows.append([f"{temperature:g}", name, str(len(part)), *lengths, looped])
    columns = [("", "T"), ("", "domain"), ("", "outputs"), *(("tokens", name) for name in ("least", "10 %", "median", "90 %", "most"))]
    caption = (
        f"What the target wrote, the same for every drafter; an output ends in a loop if its last {LOOP_TOKENS} tokens or more are one n-gram of at most "
        f"{LOOP_PERIOD}, {LOOP_REPEATS} times or more; {study.source()}."
    )
    return Table(caption=caption, columns=[*columns, ("", "ended in a loop")], rows=rows, names=2)


def control_table(study: Study) -> Table | None:
    """A row a control and setting, and whether what must come out came out; None where controls were not measured."""
    rows = _seed_rows(study)
    if study.controls is not None:
        keys = ["control", "label", "cell", "mode", "depth", "temperature"]
        for key, part in study.controls.fillna({"label": "", "cell": ""}).groupby(keys, sort=False):
            control, label, cell, mode, depth, temperature = cast(tuple[str, str, str, str, int, float], key)
            found = _again(study, cell, part) if cell else _stub(control, part)
            rows.append([f"{control} {label}".strip(), mode, f"{depth}", f"{temperature:g}", *found])
    if not rows:
        return None
    caption = (
        f"Negative controls, measured by the replay that measures the cells, on the same prompts. A drafter that knows the record emits depth + 1 tokens (fewer where a tree's budget is smaller) in every "
        f"round which the end of the output does not cut, so that tau is all tokens over the fewest rounds; one that is wrong about every token emits 1. "
        f"An arm minus itself, measured again: the difference of tau is 0. Two sampling seeds: the difference of tau, a mean over arms, is 0 within "
        f"{SEEDS_BOUND:g} standard errors (99.9 %), and the outputs differ; "
        f"{study.source()}."
    )
    names = ("control", "mode", "depth", "T", "measured", "must be", "holds")
    return Table(caption=caption, columns=[("", name) for name in names], rows=rows, names=2)


def _stub(control: str, part: Frame) -> list[str]:
    emitted, rounds, fewest = (int(part[name].sum()) for name in ("emitted", "rounds", "fewest_rounds"))
    due, each = (fewest, int(part.full.iloc[0])) if control == "always right" else (emitted, 1)
    whole = part.dropna(subset=["least"])
    holds = rounds == due and (whole.least == each).all() and (whole.most == each).all()
    return [f"{emitted / max(rounds, 1):.4f}", f"{emitted / max(due, 1):.4f}", "yes" if holds else "NO"]


def _again(study: Study, cell: str, part: Frame) -> list[str]:
    first = study.prompts[study.prompts.cell == cell].groupby("prompt", sort=True)[["emitted", "rounds"]].sum()
    second = part.set_index("prompt").loc[first.index]
    counts = [Counts(prompts=list(each.index), emitted=list(each.emitted), rounds=list(each.rounds)) for each in (first, second)]
    found = paired_difference(*counts)
    return [str(found), "+0.00", "yes" if found.value == 0 and found.low <= 0 <= found.high else "NO"]


def _seed_rows(study: Study) -> list[list[str]]:
    """One row a temperature: sampling seed a - sampling seed b, a mean over arms, and how many arms' own intervals hold 0.

    Arms are judged along the same two sets of outputs, so that their intervals hold 0 or miss it together: the count tells
    little, and the mean is what is held against a bound.
    """
    rows: list[list[str]] = []
    for temperature in study.temperatures:
        arms = [arm for (_, setting), arm in study.arms.items() if setting.temperature == temperature]
        gaps = [gap for arm in arms if (gap := _seed_gap(study, arm))]
        if not gaps:
            continue
        value, drawn = (np.mean(parts, axis=0) for parts in zip(*gaps, strict=True))
        held = sum(each.low <= 0 <= each.high for each in (interval_of(*gap) for gap in gaps))
        bound, alike = SEEDS_BOUND * float(np.std(drawn)), _alike(study, temperature)
        measured = "the same outputs" if alike else f"{value:+.3f}; {held} of {len(gaps)} arms hold 0"
        due, holds = "two sets of outputs" if alike else f"0 within {bound:.3f}", "NO" if alike or abs(value) > bound else "yes"
        rows.append(["two sampling seeds", "all", "all", f"{temperature:g}", measured, due, holds])
    return rows


def _alike(study: Study, temperature: float) -> bool:
    """Whether every decoding of one sampling seed has the tokens and rounds of the other's: a seed that is not used."""
    rows = study.prompts[study.prompts.temperature == temperature]
    one, other = (
        rows[rows.sampling_seed == seed].groupby(["cell", "prompt"])[["emitted", "rounds"]].sum() for seed in sorted(rows.sampling_seed.unique())[:2]
    )
    return one.equals(other)


def seed_difference(study: Study, arm: Arm) -> Interval | None:
    """Tau of an arm's first sampling seed minus that of its second; None with one seed."""
    gap = _seed_gap(study, arm)
    return None if gap is None else interval_of(*gap)


def _seed_gap(study: Study, arm: Arm) -> tuple[float, np.ndarray] | None:
    """The same as a value and its resamples [draws]."""
    cells = _cells_of(study, arm)
    seeds = sorted(study.prompts[study.prompts.cell == cells[0]].sampling_seed.unique())[:2]
    if len(seeds) < 2:
        return None
    rows = study.prompts[study.prompts.cell.isin(cells)]
    sums = []
    for seed in seeds:
        own = rows[rows.sampling_seed == seed].groupby("prompt")[["emitted", "rounds"]].sum()
        sums.append(own.reindex(list(arm.prompts), fill_value=0).to_numpy(float)[None])
    (one,), (other,) = (arm.bootstrap.seeds(arm.bootstrap.ratios(each)) for each in sums)
    values = [each[..., 0].sum() / each[..., 1].sum() for each in sums]
    return values[0] - values[1], one - other


def _cells_of(study: Study, arm: Arm) -> list[Any]:
    cells, setting = study.cells, arm.setting
    own = (cells.label == arm.label) & (cells["mode"] == setting.mode)
    return list(cells[own & (cells.depth == setting.depth) & (cells.temperature == setting.temperature)].cell)


def power_table(study: Study) -> Table | None:
    """How wide the intervals of comparisons are; None without comparisons."""
    rows = []
    for item in study.comparisons:
        setting, seeds = item.first.setting, f"{len(item.first.taus)} / {len(item.second.taus)}"
        where = [f"{item.first.label} - {item.second.label}", setting.mode, str(setting.depth), f"{setting.temperature:g}"]
        narrow = "yes" if item.width < WIDTH_BAR else "no"
        alike = item.first.seeds == item.second.seeds
        each = " ".join(f"{gap:+.2f}" for gap in item.first.taus - item.second.taus) if alike else "-"
        rows.append([*where, str(item.difference), each, f"{item.width:.2f}", narrow, f"{item.detectable:.2f}", seeds])
    if not rows:
        return None
    names = ("difference of", "mode", "depth", "T", "tau", "each seed", "width", f"below {WIDTH_BAR:g}", "resolves", "training seeds")
    caption = (
        "Power: the difference with every training seed, the width of the 95 % interval in tokens (too narrow where three seeds act on the two arms apart: LOG.md), whether it is as narrow as was asked beforehand, and the gap that so many prompts and seeds show "
        f"with 80 % power; {study.source()}."
    )
    return Table(caption=caption, columns=[("", name) for name in names], rows=rows, names=2)
