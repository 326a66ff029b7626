"""The tables of a grid's report, each made of a study."""

from __future__ import annotations

import itertools

import numpy as np

from treedraft.report.slots import calibration_text
from treedraft.report.study import MARGIN, RELATIVE_MARGIN, Arm, Setting, Study, counted, joined, same_drafter
from treedraft.report.table import Table


def tau_table(study: Study, temperature: float) -> Table:
    """Rows are drafters, columns mode x depth."""
    columns = [(mode, depth) for mode in study.modes for depth in study.depths(temperature, mode)]
    rows = [[label, *(_tau(study.arm(label, temperature, *column)) for column in columns)] for label in study.labels]
    several = any(len(arm.taus) > 1 for arm in study.arms.values())
    spread = "; ± is half the range over training seeds" if several else ""
    caption = (
        f"tau (emitted tokens a round) by mode and decode depth at temperature {temperature:g}"
        f"{_trained(study)}{spread}; {study.source(temperature)}."
    )
    return Table(
        caption=caption, columns=[("", "drafter"), *((mode, str(depth)) for mode, depth in columns)], rows=rows
    )


def comparison_table(study: Study, temperature: float) -> Table:
    """One row a pair and setting, with a verdict."""
    found = [item for item in study.comparisons if item.first.setting.temperature == temperature]
    rows = []
    for item in found:
        setting, seeds = item.first.setting, f"{len(item.first.taus)} / {len(item.second.taus)}"
        rows.append(
            [
                item.first.label,
                item.second.label,
                setting.mode,
                str(setting.depth),
                str(item.difference),
                item.verdict,
                item.domains,
                f"{item.detectable:.2f}",
                seeds,
            ]
        )
    gap = f"{np.median([item.detectable for item in found]):.2f}" if found else "-"
    caption = (
        f"tau(first) - tau(second) at temperature {temperature:g} with 95 % paired-bootstrap intervals over {study.resampled}; "
        f"a verdict needs an interval without 0 and a gap of {MARGIN:g} tokens and {RELATIVE_MARGIN:.0%}; "
        f"intervals are not corrected for their number; resolves: the gap that is shown with 80 % power, the median one {gap} tokens; "
        f"with one training seed a verdict is about two checkpoints, not about two methods; "
        f"{study.source(temperature)}."
    )
    names = ("first", "second", "mode", "depth", "difference", "verdict", "in domains", "resolves", "training seeds")
    return Table(caption=caption, columns=[("", name) for name in names], rows=rows, names=4)


def comparison_matrix(study: Study, temperature: float) -> Table:
    """The same on a screen: rows are pairs, columns mode x depth; * marks a verdict."""
    columns = [(mode, depth) for mode in study.modes for depth in study.depths(temperature, mode)]
    found = {(item.first.label, item.second.label, item.first.setting): item for item in study.comparisons}
    rows = []
    for first, second in study.pairs:
        items = [
            found.get((first, second, Setting(temperature=temperature, mode=mode, depth=depth)))
            for mode, depth in columns
        ]
        if any(items):
            rows.append(
                [
                    f"{first} - {second}",
                    *(f"{item.difference}{'*' if item.claimed else ' '}" if item else "-" for item in items),
                ]
            )
    caption = (
        f"Difference of tau at temperature {temperature:g} with its 95 % interval over {study.resampled}; "
        f"* excludes 0 and is at least {MARGIN:g} tokens and {RELATIVE_MARGIN:.0%}"
    )
    return Table(
        caption=caption, columns=[("", "first - second"), *((mode, str(depth)) for mode, depth in columns)], rows=rows
    )


def extrapolation_table(study: Study, temperature: float) -> Table | None:
    """What decoding at another depth than the trained one changes; None where nothing was decoded at both."""
    columns = [(mode, depth) for mode in study.modes for depth in study.depths(temperature, mode)]
    rows = [
        [label, *(_beyond(study, label, temperature, mode, depth) for mode, depth in columns)] for label in study.labels
    ]
    kept = [0] + [place for place in range(1, len(columns) + 1) if any(row[place].strip("-") for row in rows)]
    if len(kept) == 1:
        return None
    heads = [("", "drafter"), *((mode, f"{depth}") for mode, depth in columns)]
    caption = (
        f"tau at this depth minus tau at the trained depth, temperature {temperature:g}{_trained(study)}, "
        f"95 % paired-bootstrap intervals over {study.resampled}; {study.source(temperature)}."
    )
    return Table(
        caption=caption, columns=[heads[place] for place in kept], rows=[[row[place] for place in kept] for row in rows]
    )


def ratio_table(study: Study) -> Table | None:
    """Tree over chain; None where one of them was not decoded."""
    trees = [mode for mode in study.modes if mode != "chain"]
    columns = [
        (t, mode, depth)
        for t in study.temperatures
        for mode in trees
        for depth in study.depths(t, mode)
        if depth in study.depths(t, "chain")
    ]
    if not columns:
        return None
    rows = []
    for label in study.labels:
        pairs = [(study.arm(label, t, mode, depth), study.arm(label, t, "chain", depth)) for t, mode, depth in columns]
        ratios = [same_drafter(tree, chain, ratio=True) if tree and chain else None for tree, chain in pairs]
        rows.append([label, *(f"{r.value:.2f} [{r.low:.2f}, {r.high:.2f}]" if r else "-" for r in ratios)])
    heads = [(f"T={t:g}" + (f" {mode}" if len(trees) > 1 else ""), f"depth {depth}") for t, mode, depth in columns]
    caption = (
        f"tau of the tree over tau of the chain by temperature and depth, "
        f"95 % paired-bootstrap intervals over {study.resampled}; {study.source()}."
    )
    return Table(caption=caption, columns=[("", "drafter"), *heads], rows=rows)


def ladder_table(study: Study, temperature: float) -> Table | None:
    """A row a drafter and tree, a column a rung of the conditioning ladder, and what every step up it brings."""
    if not study.rungs:
        return None
    steps = list(itertools.pairwise(study.rungs))
    rows = []
    for label, admit, budget, arms in study.ladder(temperature):
        gains = [
            same_drafter(arms[upper], arms[lower], ratio=False) if {lower, upper} <= arms.keys() else None
            for lower, upper in steps
        ]
        taus = [_tau(arms.get(rung)) for rung in study.rungs]
        rows.append([label, admit, str(budget), *taus, *(str(gain or "-") for gain in gains)])
    words = {rung: rung.replace("_", " ") for rung in study.rungs}
    columns = [("", "drafter"), ("", "admit"), ("", "budget"), *(("tau", words[rung]) for rung in study.rungs)]
    columns += [("gain", f"{words[upper]} - {words[lower]}") for lower, upper in steps]
    caption = (
        f"tau by how nodes are scored, temperature {temperature:g}: by the backbone alone, corrected once a depth along "
        f"the greedy path, corrected under every node's own ancestry; 95 % paired-bootstrap intervals over {study.resampled}; "
        f"{study.source(temperature)}."
    )
    return Table(caption=caption, columns=columns, rows=rows, names=3)


def context_table(study: Study, temperature: float) -> Table | None:
    """A row a prompt length and drafter: tau, and what drafting costs there; None unless the grid has several lengths."""
    if not study.contexts:
        return None
    places = [(item, label) for label in study.labels for item in study.behind(label, temperature)]
    rows = []
    for item, label in sorted(places, key=lambda place: place[0].context):
        tau = item.arm.interval
        rows.append([
            f"{item.context}", label, f"{item.tokens:.0f}", f"{tau.value:.2f} [{tau.low:.2f}, {tau.high:.2f}]",
            _number(item.draft_ms), _number(item.update_ms), _number(item.state_bytes / 1024),
        ])  # fmt: skip
    clock = study.cells[study.cells.temperature == temperature]
    named = {name: joined(clock[name], None) for name in ("costs_hardware", "costs_commit") if name in clock}
    caption = (
        f"tau with 95 % bootstrap intervals over {study.resampled}, the median milliseconds of a block's forward and of taking a "
        f"round's rows in, and what a drafter keeps of one request, an own copy of the target's window included, "
        f"temperature {temperature:g}; {study.source(temperature)}"
        + (f"; timed live, one request at a time, on {'; commit '.join(named.values())}." if named else "; not timed.")
    )
    names = ("context", "drafter", "prompt tokens", "tau", "draft ms", "update ms", "state KiB")
    return Table(caption=caption, columns=[("", name) for name in names], rows=rows, names=2)


def _number(value: float) -> str:
    return "-" if np.isnan(value) else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def main_table(study: Study, temperature: float) -> Table:
    """What the grid is about."""
    return ladder_table(study, temperature) or context_table(study, temperature) or tau_table(study, temperature)


def domain_table(study: Study, temperature: float) -> Table:
    """Rows are drafters, columns mode x domain, at the trained depth."""
    modes = [mode for mode in study.modes if study.depths(temperature, mode)]
    rows = []
    for label in study.labels:
        arms = [study.at_trained_depth(label, temperature, mode) for mode in modes]
        rows.append([label, *(_tau(arm.domain(name)) if arm else "-" for arm in arms for name in study.domains)])
    columns = [(mode, name) for mode in modes for name in study.domains]
    caption = (
        f"tau by domain at the trained depth (else the nearest one decoded), temperature {temperature:g}; "
        f"{study.source(temperature)}."
    )
    return Table(caption=caption, columns=[("", "drafter"), *columns], rows=rows)


def training_table(study: Study) -> Table:
    """What was trained: parameters of each part, steps, blocks, seconds."""
    once = study.cells.drop_duplicates(["label", "train_seed"])
    rows = []
    for label, part in once.groupby("label", sort=False):
        first = part.iloc[0]
        sizes = [_count(first[f"parameters_{seam}"]) for seam in ("backbone", "context", "correction")]
        seeds = " ".join(_count(seed) for seed in sorted(part.train_seed))
        amounts = [
            _count(value)
            for value in (first.trained_depth, first.train_steps, first.train_blocks, part.train_seconds.mean())
        ]
        rows.append([str(label), *sizes, seeds, *amounts])
    names = (
        "drafter",
        "backbone",
        "context",
        "correction",
        "training seeds",
        "trained depth",
        "steps",
        "blocks",
        "seconds",
    )
    caption = (
        f"Parameters by part, and training, seconds as a mean over seeds; target {study.cells.target.iloc[0]}; "
        f"{study.hardware}; commit {study.commit}."
    )
    return Table(caption=caption, columns=[("", name) for name in names], rows=rows)


def cell_table(study: Study) -> Table:
    """Every cell, training seeds apart."""
    rows = []
    for row in study.cells.to_dict("records"):
        arm = study.arms[
            row["label"], Setting(temperature=float(row["temperature"]), mode=row["mode"], depth=int(row["depth"]))
        ]
        survived = float(str(row["survival"]).split()[-1])
        numbers = [f"{row['tau']:.2f}", f"{row['tau_macro']:.2f}", f"{survived:.3f}", _count(row["mean_nodes"])]
        counts = [_count(row["rounds"]), f"{row['rounds_cut'] / max(row['rounds'], 1):.1%}"]
        interval = f"[{arm.interval.low:.2f}, {arm.interval.high:.2f}]"
        errors = [calibration_text(counted([row], group)) for group in ("steps", "paths")]
        rows.append(
            [
                row["label"],
                _count(row["train_seed"]),
                row["mode"],
                _count(row["depth"]),
                f"{row['temperature']:g}",
                *numbers,
                *counts,
                *errors,
                interval,
            ]
        )
    names = (
        "drafter",
        "seed",
        "mode",
        "depth",
        "T",
        "tau",
        "tau by prompt",
        "full depth",
        "nodes",
        "rounds",
        "cut",
        "ECE of steps",
        "ECE of paths",
        "95 % of tau, all seeds",
    )
    caption = (
        "tau by prompt is the mean of the tau of every decoding; "
        "full depth is the share of rounds that accept a draft to its end; nodes are a mean, root included; "
        f"cut is the share of rounds ended by end-of-text or the cap; ECE is the expected calibration error of q (- where it was not recorded); {study.source()}."
    )
    return Table(caption=caption, columns=[("", name) for name in names], rows=rows, names=3)


def _tau(arm: Arm | None) -> str:
    if arm is None or np.isnan(arm.tau):
        return "-"
    return f"{arm.tau:.2f}" + (f" ±{np.ptp(arm.taus) / 2:.2f}" if len(arm.taus) > 1 else "")


def _count(number: float) -> str:
    return "-" if np.isnan(number) else f"{round(number):,}"


def _beyond(study: Study, label: str, temperature: float, mode: str, depth: int) -> str:
    trained = study.trained_depths[label]
    here, there = study.arm(label, temperature, mode, depth), study.arm(label, temperature, mode, trained)
    if depth == trained or here is None or there is None:
        return "-"
    return str(same_drafter(here, there, ratio=False) or "-")


def _trained(study: Study) -> str:
    depths = sorted(set(study.trained_depths.values()))
    return f", trained depth {depths[0]}" if len(depths) == 1 else ""


