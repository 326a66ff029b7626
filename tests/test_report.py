"""Reports from made-up CSV files: numbers agree with `metrics`, bytes repeat, tables fit, markers fill, `--check` notices."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from treedraft import figures, report
from treedraft.figures import drawn_from
from treedraft.metrics import (
    Counts,
    Rounds,
    draw_prompts,
    draw_seeds,
    paired_difference,
    seeded_difference,
    spine_counts,
)
from treedraft.report.__main__ import main
from treedraft.report.checks import control_table, output_table, outputs_of, power_table, seed_difference
from treedraft.report.pages import filled
from treedraft.report.slots import calibration_error, calibration_table, slot_shares, slot_table

ROOT = Path(__file__).parents[1]
CORE = [
    f"{backbone}/{correction}"
    for backbone in ("causal", "bidirectional")
    for correction in ("none", "markov", "attention")
]
DOMAINS = ("math", "code", "chat")


def make_grid(
    folder: Path,
    name: str = "made",
    *,
    labels: Sequence[str] = CORE,
    modes: Sequence[str] = ("chain", "tree"),
    depths: Sequence[int] = (7, 15, 23),
    temperatures: Sequence[float] = (1.0, 0.0),
    prompts: int = 40,
    seeds: int = 3,
    train_seeds: dict[str, int] | None = None,
    budgets: Sequence[int] = (255,),
    failed: Sequence[str] = (),
    recorded: bool = False,
) -> None:
    """Rounds that accept geometrically, better for causal corrections, trees, low temperature and easy prompts.

    With `recorded` what newer results add: spines, drafts by probability, loops and controls.
    """
    rng = np.random.default_rng(1)
    ease = rng.normal(0, 0.03, prompts)
    cells, rows = [], []
    for label in labels:
        for train_seed in range((train_seeds or {}).get(label, 1)):
            for temperature in temperatures:
                for mode in modes:
                    for budget in budgets if mode == "tree" else budgets[:1]:
                        for depth in depths:
                            cell = f"{name}-{label.replace('/', '-')}-s{train_seed}-{mode}{budget}-d{depth}-t{temperature:g}"
                            common = {
                                "cell": cell, "label": label, "train_seed": train_seed, "mode": mode, "depth": depth, "temperature": temperature,
                            }  # fmt: skip
                            rate = (
                                0.74
                                + 0.05 * ("none" not in label)
                                + 0.02 * ("attention" in label)
                                + 0.01 * label.startswith("causal")
                            )
                            rate += 0.05 * (mode == "tree") + 0.04 * (temperature == 0) + 0.005 * train_seed
                            accepted = []
                            for place in range(prompts):
                                domain = DOMAINS[place % 3]
                                for seed in range(seeds):
                                    p = np.clip(
                                        rate + ease[place] + 0.02 * (domain == "math") - 0.04 * (domain == "chat"),
                                        0.05,
                                        0.98,
                                    )
                                    drawn = np.minimum(rng.geometric(1 - p, size=20) - 1, depth)
                                    accepted.append(drawn)
                                    rows.append({
                                        **common, "prompt": f"{domain}-{place:03d}", "domain": domain, "sampling_seed": seed,
                                        "emitted": int((drawn + 1).sum()), "rounds": 20, "rounds_cut": 1,
                                        **({"looped": int(place == 0)} if recorded else {}),
                                    })  # fmt: skip
                            every = np.stack(accepted)
                            taus = {
                                f"tau_{domain}": (every[np.arange(len(every)) // seeds % 3 == i] + 1).mean()
                                for i, domain in enumerate(DOMAINS)
                            }
                            survival = [(every >= d).mean() for d in range(1, depth + 1)]
                            broken = cell in failed
                            more = recorded_columns(every, depth, tree=mode == "tree") if recorded and not broken else {}
                            cells.append({
                                "grid": name, **common, "width": 7, "budget": budget, "scorer": "conditional",
                                "tau": "" if broken else (every + 1).mean(), "tau_macro": (every + 1).mean(1).mean(), **taus, "prompts": prompts,
                                "decodings": prompts * seeds, "rounds": every.size, "rounds_cut": len(every), "emitted": int((every + 1).sum()),
                                "mean_nodes": budget if mode == "tree" else depth + 1, "survival": " ".join(f"{s:.6g}" for s in survival), **more,
                                "trained_depth": 15, "parameters_backbone": 1_000_000, "parameters_context": 50_000,
                                "parameters_correction": 0 if "none" in label else 120_000, "train_steps": 400, "train_blocks": 102_400,
                                "train_seconds": 81.5, "target": "pocket", "hardware": "a processor, 2 threads", "commit": "0123456",
                                "status": "failed: the loss is not finite" if broken else "ok",
                            })  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    for part, table in (("cells", cells), ("prompts", [row for row in rows if row["cell"] not in failed])):
        with (folder / f"{name}.{part}.csv").open("w", newline="") as stream:
            writer = csv.DictWriter(stream, dict.fromkeys(key for row in table for key in row))
            writer.writeheader()
            writer.writerows(table)
    if recorded:
        write_controls(folder / f"{name}.controls.csv", rows)
    pairs = [[f"{b}/{c}", f"{b}/none"] for c in ("markov", "attention") for b in ("causal", "bidirectional")]
    pairs += [[f"{b}/attention", f"{b}/markov"] for b in ("causal", "bidirectional")]
    pairs += [[f"causal/{c}", f"bidirectional/{c}"] for c in ("none", "markov", "attention")]
    info = {
        "name": name,
        "question": "Which drafter?",
        "comparisons": pairs,
        "hardware": "a processor",
        "commit": "0123456",
        "n_prompts": prompts,
    }
    (folder / f"{name}.json").write_text(json.dumps(info))


def recorded_columns(accepted: np.ndarray, depth: int, *, tree: bool) -> dict[str, str]:
    """Paths leave the spine after one draft in every other round; q says twice what comes true."""
    accepted = accepted.ravel()
    spine = np.where(np.arange(len(accepted)) % 2 & tree, np.minimum(accepted, 1), accepted)
    rounds = Rounds(prompt="", domain="", seed=0, accepted=accepted, emitted=accepted + 1, nodes=accepted, spine=spine)
    steps, paths = ("100 100", "20 80", "10 40"), ("1000 200", "20 90", "10 45")
    lists: dict[str, Sequence[object]] = {f"spine_{key}": values for key, values in (spine_counts([rounds], depth) or {}).items()}
    lists |= {f"steps_{key}": text.split() for key, text in zip(("drafts", "expected", "accepted"), steps, strict=True)}
    if tree:
        lists |= {f"paths_{key}": text.split() for key, text in zip(("drafts", "expected", "accepted"), paths, strict=True)}
    return {key: " ".join(map(str, values)) for key, values in lists.items()}


def write_controls(path: Path, rows: Sequence[dict[str, object]]) -> None:
    """The three controls of the first cell's setting."""
    own = [row for row in rows if row["cell"] == rows[0]["cell"]]
    setting = {"mode": rows[0]["mode"], "depth": rows[0]["depth"], "temperature": rows[0]["temperature"]}
    table = []
    for control in ("always right", "never right", "measured again"):
        for prompt in dict.fromkeys(row["prompt"] for row in own):
            parts = [row for row in own if row["prompt"] == prompt]
            emitted, full = sum(int(str(row["emitted"])) for row in parts), int(str(rows[0]["depth"])) + 1
            fewest = sum(-(-int(str(row["emitted"])) // full) for row in parts)
            each, rounds = {"always right": (full, fewest), "never right": (1, emitted)}.get(control, (1, 20 * len(parts)))
            named = {"label": rows[0]["label"], "cell": rows[0]["cell"]} if control == "measured again" else {"label": "", "cell": ""}
            table.append({
                "control": control, **named, **setting, "width": 7, "budget": 255, "scorer": "conditional", "admit": "fanout", "shape": "",
                "full": full, "prompt": prompt, "decodings": len(parts), "emitted": emitted, "rounds": rounds, "rounds_cut": 1,
                "fewest_rounds": fewest, "least": each, "most": each,
            })  # fmt: skip
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, table[0].keys())
        writer.writeheader()
        writer.writerows(table)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A written report of a core-like grid with three training seeds of one pair, in <root>/ablations/results."""
    folder = tmp_path_factory.mktemp("checkout") / "ablations" / "results"
    make_grid(
        folder, train_seeds={"causal/attention": 3, "bidirectional/markov": 3}, temperatures=(1.0,), depths=(7, 15, 23)
    )
    report.write_report(folder, "made")
    return folder


def counts(folder: Path, label: str, train_seed: int, depth: int, mode: str) -> Counts:
    with (folder / "made.prompts.csv").open() as stream:
        rows = [
            row for row in csv.DictReader(stream)
            if (row["label"], row["train_seed"], row["depth"], row["mode"]) == (label, str(train_seed), str(depth), mode)
        ]  # fmt: skip
    return Counts(
        prompts=[r["prompt"] for r in rows],
        emitted=[float(r["emitted"]) for r in rows],
        rounds=[float(r["rounds"]) for r in rows],
        domains=[r["domain"] for r in rows],
    )


def difference(study: report.Study, first: str, second: str) -> report.Comparison:
    return next(
        c
        for c in study.comparisons
        if (c.first.label, c.second.label, c.first.setting.mode, c.first.setting.depth) == (first, second, "tree", 15)
    )


def test_intervals_are_those_of_metrics(results: Path) -> None:
    study = report.load_study(results, "made")
    one = difference(study, "causal/markov", "causal/none").difference
    expected = paired_difference(
        counts(results, "causal/markov", 0, 15, "tree"), counts(results, "causal/none", 0, 15, "tree")
    )
    assert (one.value, one.low, one.high) == pytest.approx((expected.value, expected.low, expected.high), abs=1e-12)
    arms = {label: [counts(results, label, seed, 15, "tree") for seed in range(3)] for label in ("causal/attention", "bidirectional/markov")}
    several = difference(study, "causal/attention", "causal/none").difference
    expected = seeded_difference(arms["causal/attention"], [counts(results, "causal/none", 0, 15, "tree")])
    assert (several.value, several.low, several.high) == pytest.approx(
        (expected.value, expected.low, expected.high), abs=1e-12
    )
    both = [study.arm(label, 1.0, "tree", 15) for label in arms]
    paired = report.compare(*both, study.domains).difference
    expected = seeded_difference(*arms.values(), together=True)
    assert (paired.value, paired.low, paired.high) == pytest.approx((expected.value, expected.low, expected.high), abs=1e-12)
    apart = seeded_difference(*arms.values())
    assert apart.value == pytest.approx(paired.value) and (apart.low, apart.high) != (paired.low, paired.high)
    with pytest.raises(ValueError, match="3 and 1 training seeds cannot be drawn together"):
        seeded_difference(arms["causal/attention"], arms["bidirectional/markov"][:1], together=True)


def test_prompts_are_drawn_within_their_domains() -> None:
    domains = np.array(["math", "code", "math", "chat", "math"])
    weights = draw_prompts(np.random.default_rng(0), domains, 4000)
    for name, size in (("math", 3), ("code", 1), ("chat", 1)):
        assert (weights[:, domains == name].sum(1) == size).all()
    assert weights.mean(0) == pytest.approx(np.ones(5), abs=0.05) and weights[:, 0].max() == 3


def test_drawn_seeds_spread_as_their_mean_does() -> None:
    """The variance of a mean of K values is s^2 / K, s^2 with K - 1 in the denominator."""
    for taus in ([4.0, 4.5, 4.1], [4.0, 4.5], [3.0, 4.0, 5.0, 7.0]):
        drawn = np.array(taus)[draw_seeds(np.random.default_rng(0), len(taus), 100_000)].mean(1)
        assert drawn.var() == pytest.approx(np.var(taus, ddof=1) / len(taus), rel=0.02)
    assert (draw_seeds(np.random.default_rng(0), 1, 5) == 0).all()


def test_what_a_seed_does_to_both_arms_is_no_difference() -> None:
    """Two arms that every seed moves alike: drawn together they differ by what they do, drawn apart by luck as well."""
    prompts = [f"p{number}" for number in range(30)]
    one, two = ([Counts(prompts=prompts, emitted=[lead + luck] * 30, rounds=[1.0] * 30) for luck in (4.0, 5.0, 7.0)] for lead in (0.5, 0.0))
    found = seeded_difference(one, two, together=True, draws=500)
    assert (found.value, found.low, found.high) == pytest.approx((0.5, 0.5, 0.5))
    apart = seeded_difference(one, two, draws=500)
    assert apart.low < -1 and apart.high > 2


def test_tau_and_domains_are_those_of_the_cells(results: Path) -> None:
    study = report.load_study(results, "made")
    for row in study.cells[study.cells.label == "causal/markov"].itertuples():
        arm = study.arm("causal/markov", row.temperature, row.mode, row.depth)
        assert arm.tau == pytest.approx(row.tau)
        assert [arm.domain(name).tau for name in DOMAINS] == pytest.approx([row.tau_math, row.tau_code, row.tau_chat])


@pytest.mark.parametrize(
    ("interval", "prompts", "verdict"),
    [
        ((0.30, 0.20, 0.40), 40, "first better"),
        ((-0.30, -0.40, -0.20), 40, "second better"),
        ((0.30, -0.01, 0.61), 40, "no difference shown"),
        ((0.04, 0.03, 0.05), 40, "no difference shown"),  # certain, but below the margin of 0.05
        ((0.08, 0.07, 0.09), 40, "no difference shown"),  # 1 % of tau 10 is 0.1
        ((0.30, 0.20, 0.40), 29, "fewer than 30 prompts"),
    ],
)
def test_a_verdict_needs_an_interval_and_a_margin(
    interval: tuple[float, float, float], prompts: int, verdict: str
) -> None:
    sums = np.tile([10.0, 1.0], (1, prompts, 1))
    setting = report.Setting(temperature=1.0, mode="tree", depth=15)
    arm = report.Arm(
        label="a/b", setting=setting, prompts=tuple(map(str, range(prompts))), domains=np.array(["math"] * prompts),
        sums=sums, bootstrap=report.Bootstrap(["math"] * prompts, draws=10), survival=np.ones(15),
    )  # fmt: skip
    value, low, high = interval
    gaps = {"math": 0.2, "chat": -0.1}
    found = report.Comparison(
        first=arm, second=arm, difference=report.Interval(value=value, low=low, high=high), by_domain=gaps
    )
    assert found.verdict == verdict
    assert found.domains == {"first better": "not in chat", "second better": "not in math"}.get(verdict, "")


def test_the_page_says_what_was_measured(results: Path) -> None:
    page = (results / "made.md").read_text()
    for text in (
        "n = 40 prompts x 3 sampling seeds",
        "a processor, 2 threads",
        "commit 0123456",
        "first better",
        "causal/attention",
        "trained depth 15",
    ):
        assert text in page
    for heading in (
        "## tau",
        "## Comparisons",
        "## Other depths",
        "## Tree and chain",
        "## Domains",
        "## Training",
        "## Every cell",
    ):
        assert heading in page
    assert "nan" not in page
    latex = (results / "made.tex").read_text()
    assert latex.count(r"\toprule") == latex.count(r"\bottomrule") == 1
    assert r"\multicolumn{3}{c}{tree}" in latex and r"$\pm$" in latex


def test_the_same_input_gives_the_same_bytes(results: Path) -> None:
    written = [*results.glob("made.md"), *results.glob("made.tex"), *results.glob("made-*.png")]
    before = {path: path.read_bytes() for path in written}
    assert len(before) == 7 and all(len(data) < 150_000 for data in before.values())
    report.write_report(results, "made")
    assert {path: path.read_bytes() for path in written} == before


def test_the_printed_table_fits(
    results: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    report.print_table(results, "made")
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 120
    assert "causal/attention - bidirectional/attention" in printed and "±" in printed and "…" not in printed


def test_a_thin_grid_reports_what_it_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failed = "thin-causal-markov-s0-tree255-d5-t0"
    make_grid(
        tmp_path,
        "thin",
        labels=CORE[:2],
        modes=("tree",),
        depths=(5,),
        temperatures=(0.0,),
        prompts=3,
        seeds=1,
        failed=[failed],
    )
    report.write_report(tmp_path, "thin")
    page = (tmp_path / "thin.md").read_text()
    assert "the loss is not finite" in page and "Comparisons" not in page and "Tree and chain" not in page
    report.print_table(tmp_path, "thin")
    assert failed in capsys.readouterr().out


def test_a_grid_without_a_finished_cell_reports_its_failures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = ["none-causal-none-s0-chain255-d5-t0", "none-causal-markov-s0-chain255-d5-t0"]
    make_grid(
        tmp_path,
        "none",
        labels=CORE[:2],
        modes=("chain",),
        depths=(5,),
        temperatures=(0.0,),
        prompts=3,
        failed=failed[1:],
    )
    cells = tmp_path / "none.cells.csv"
    cells.write_text(cells.read_text().replace(",ok", ",failed: out of memory"))
    report.write_report(tmp_path, "none")
    assert "out of memory" in (tmp_path / "none.md").read_text()
    report.print_table(tmp_path, "none")
    assert "no cell has finished" in capsys.readouterr().out


def test_trees_that_differ_in_budget_stay_apart(tmp_path: Path) -> None:
    make_grid(tmp_path, labels=CORE[:1], depths=(7,), temperatures=(1.0,), prompts=4, budgets=(64, 255))
    assert report.load_study(tmp_path, "made").modes == ["chain", "tree budget 64", "tree budget 255"]


def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, "-m", "treedraft.report", *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_command_fills_documents_and_checks(results: Path) -> None:
    readme, second = results.parents[1] / "README.md", results.parent / "README.md"
    readme.write_text("# top\n\n<!-- table: made headline -->\n<!-- end -->\n\nafter\n")
    second.write_text("no marker\n")
    stale = command("--folder", results, "--check")
    assert (stale.returncode, stale.stdout.split()) == (1, [str(readme)])
    assert command("--folder", results).returncode == 0
    filled = readme.read_text()
    assert (
        "| drafter | chain 7 |" in filled and "n = 40 prompts" in filled and filled.endswith("<!-- end -->\n\nafter\n")
    )
    assert second.read_text() == "no marker\n"
    assert command("--folder", results, "--check").returncode == 0
    page = results / "made.md"
    page.write_text(page.read_text().replace("tau", "tao", 1))
    (results / "made-tau.png").unlink()
    stale = command("--folder", results, "--check")
    assert (stale.returncode, stale.stdout.split()) == (1, [str(page), str(results / "made-tau.png")])
    report.write_report(results, "made")


def test_the_figure_of_a_context_bench_is_that_of_its_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It carries the table's digest, so that a stale one is seen where fonts differ too; units, and a palette for all eyes."""
    table, committed = tmp_path / "bench-context.csv", ROOT / "ablations" / "results" / "bench-context.csv"
    assert drawn_from(committed.with_suffix(".png"), [committed])
    table.write_bytes(committed.read_bytes())
    make_grid(tmp_path, labels=CORE[:1], depths=(15,), prompts=4, seeds=1)
    report.write_report(tmp_path, "made")
    saved: list[Any] = []
    monkeypatch.setattr(figures, "_save", lambda figure, path, **_: saved.append(figure))
    figures.draw_context_bench(table)
    monkeypatch.undo()
    panels = saved[0].axes
    assert [axes.get_ylabel() for axes in panels] == ["least of the repeats (ms)"] * 2 + ["a request (MiB)"]
    assert all(line.get_color() == figures._palette()[place] for axes in panels for place, line in enumerate(axes.lines))
    assert panels[2].lines[0].get_ydata().tolist()[:2] == [0.625, 1.25]

    def stale(*flags: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["report", "--folder", str(tmp_path), *flags])
        main()
        return capsys.readouterr().out.split()

    figure = table.with_suffix(".png")
    assert stale("--check") == [str(figure)]
    assert stale() == stale("--check") == []
    table.write_text(table.read_text().replace("655360", "655361"))
    assert stale("--check") == [str(figure)]


@pytest.mark.parametrize(
    ("marker", "message"),
    [
        ("made nothing", r"README.md:3: unknown table 'nothing'"),
        ("other headline", r"README.md:3: no results of grid 'other'.*made"),
    ],
)
def test_a_wrong_marker_is_named_with_its_line(results: Path, tmp_path: Path, marker: str, message: str) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"# top\n\n<!-- table: {marker} -->\n<!-- end -->\n")
    with pytest.raises(ValueError, match=message):
        report.fill_markers(readme, results)


def test_a_benchmark_is_a_table(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("<!-- table: bench tree -->\n<!-- end -->\n")
    with pytest.raises(ValueError, match=r"README.md:1: no bench-tree.json in"):
        report.fill_markers(readme, tmp_path)
    numbers = {"benchmark": "tree", "budget": 1255, "ratio": 3.14159, "tree": {"tau_gap": [0.5, 0.25, 0.75]}}
    (tmp_path / "bench-tree.json").write_text(json.dumps({**numbers, "hardware": "a processor", "commit": "0123456"}))
    report.fill_markers(readme, tmp_path)
    for row in ("| | tree |", "| tau gap | +0.50 [+0.25, +0.75] |", "*budget 1,255; ratio 3.14; `python", "commit 0123456"):
        assert row in readme.read_text()
    (tmp_path / "bench-tree.json").write_text(json.dumps({"benchmark": "tree", "share": 0.5, "hardware": "", "commit": ""}))
    report.fill_markers(readme, tmp_path)
    assert "| share | 0.5 |" in readme.read_text()
    lengths = {f"{number} tokens": {"ms": float(number)} for number in (131072, 2048, 16384)}
    (tmp_path / "bench-tree.json").write_text(json.dumps({"benchmark": "tree", **lengths, "hardware": "", "commit": ""}))
    report.fill_markers(readme, tmp_path)
    assert "| | 2048 tokens | 16384 tokens | 131072 tokens |" in readme.read_text()


def test_a_suite_has_a_budget(tmp_path: Path) -> None:
    """Two grids that share an arm: it is trained once, and hours are those of what was trained."""
    import pandas as pd

    folder = tmp_path / "results"
    for name, labels in (("one", CORE[:2]), ("two", CORE[1:3])):
        make_grid(folder, name, labels=labels, depths=(7,), prompts=3, train_seeds={CORE[1]: 2})
        path = folder / f"{name}.cells.csv"
        cells = pd.read_csv(path, keep_default_na=False)
        cells["train_seconds"] = 3600.0 * (1 + cells.label.map(CORE.index) + cells.train_seed / 4)
        cells.to_csv(path, index=False)
    (tmp_path / "both.toml").write_text('question = "?"\ngrids = ["one", "two", "three"]\n')
    readme = tmp_path / "README.md"
    readme.write_text("<!-- table: budget both -->\n<!-- end -->\n")
    report.fill_markers(readme, folder)
    for row in ("| one | 12 | 3 | 3 | 400 | 3 | 3 | 5.25 |", "| two | 12 | 3 | 1 | 400 | 3 | 3 | 3.00 |",
                "| three | - | - | - | - | - | - | not run |", "| all | 24 | 6 | 4 |  |  |  | 8.25 |"):  # fmt: skip
        assert row in readme.read_text()
    (tmp_path / "three.toml").write_text('question = "?"\n')
    readme.write_text("<!-- table: three headline -->\n<!-- end -->\n")
    report.fill_markers(readme, folder)
    assert "*Not run yet: `python -m treedraft.ablate --grid three --output ablations/results`.*" in readme.read_text()
    readme.write_text("<!-- table: budget three -->\n<!-- end -->\n")
    with pytest.raises(ValueError, match=r"three.toml: it names no grids"):
        report.fill_markers(readme, folder)


def test_what_is_missing_is_one_sentence(tmp_path: Path) -> None:
    for arguments in (["--folder", tmp_path], ["--folder", tmp_path, "--grid", "core"], ["--folders", tmp_path]):
        answer = command(*arguments)
        assert answer.returncode == 2 and answer.stderr.startswith("error: ") and answer.stderr.count("\n") == 1


def test_help_needs_no_libraries() -> None:
    code = "import sys, treedraft.report; sys.exit(bool({'torch', 'pandas', 'matplotlib', 'seaborn', 'rich'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_a_core_grid_is_quick(tmp_path: Path) -> None:
    make_grid(tmp_path, prompts=120)
    start = time.process_time()
    report.write_report(tmp_path, "made")
    assert time.process_time() - start < 16  # twice the aim: machines differ


def test_a_ladder_has_a_row_a_tree_and_a_column_a_rung(tmp_path: Path) -> None:
    import pandas as pd

    make_grid(tmp_path, "ladder", labels=("causal/none", "causal/markov"), modes=("tree",), depths=(15,), temperatures=(1.0,), budgets=(16, 64, 255))
    path = tmp_path / "ladder.cells.csv"
    cells = pd.read_csv(path, dtype={"label": str, "commit": str}, keep_default_na=False)
    cells["scorer"] = cells.budget.map({16: "marginal", 64: "per_depth", 255: "conditional"})
    cells["budget"], cells["admit"] = 64, "pop"
    cells.to_csv(path, index=False)
    study = report.load_study(tmp_path, "ladder")
    assert study.rungs == ["marginal", "per_depth", "conditional"]
    table = report.ladder_table(study, 1.0)
    assert table is not None and [row[:3] for row in table.rows] == [["causal/none", "pop", "64"], ["causal/markov", "pop", "64"]]
    assert [name for _, name in table.columns[3:]] == [*(rung.replace("_", " ") for rung in study.rungs), "per depth - marginal", "conditional - per depth"]
    mode = {row.scorer: row.mode for row in study.cells.itertuples()}
    arms = [study.arm("causal/markov", 1.0, mode[rung], 15) for rung in study.rungs]
    assert all(arms) and table.rows[1][3:6] == [f"{arm.tau:.2f}" for arm in arms if arm]
    report.write_report(tmp_path, "ladder")
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["ladder-ladder.png", "ladder-outputs.png"]
    assert "## Ladder" in (tmp_path / "ladder.md").read_text() and "conditional" in (tmp_path / "ladder.tex").read_text()
    assert report.stale_files(tmp_path, "ladder") == []


# -- what tells whether to believe it ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small grid with everything that newer results record, reported."""
    folder = tmp_path_factory.mktemp("newer")
    make_grid(folder, labels=CORE[:2], depths=(5, 7), train_seeds={CORE[1]: 2}, recorded=True)
    report.write_report(folder, "made")
    return folder


def test_old_results_say_what_they_lack(results: Path) -> None:
    page = (results / "made.md").read_text()
    assert page.count("Not recorded in these results.") == 2 and "not recorded" in page[page.index("## Outputs") :]
    study = report.load_study(results, "made")
    assert slot_table(study, 1.0) is None and calibration_table(study, 1.0) is None
    table = control_table(study)
    assert table is not None and [row[0] for row in table.rows] == ["two sampling seeds"]


def test_slots_are_shares_of_the_rounds_that_came_so_far(newer: Path) -> None:
    study = report.load_study(newer, "made")
    arm = study.arm("causal/none", 1.0, "tree", 7)
    assert arm is not None and arm.spine is not None
    reached, on, off = slot_shares(arm)
    assert reached == pytest.approx(arm.survival, abs=1e-6)
    kept, gone = arm.spine["kept"], arm.spine["off"]
    for slot in range(1, 7):  # by hand, of the rounds whose path was on the spine, or off it, one slot before
        assert on[slot] == pytest.approx((kept[slot] + arm.spine["left"][slot]) / kept[slot - 1])
        if gone[slot - 1]:
            assert off[slot] == pytest.approx((gone[slot] - arm.spine["left"][slot]) / gone[slot - 1])
    chain = study.arm("causal/none", 1.0, "chain", 7)
    assert chain is not None and np.isnan(slot_shares(chain)[2]).all()
    # On or off, every slot adds up to the conditional acceptance of all rounds.
    before = np.concatenate([[1.0], reached[:-1]])
    rounds = arm.sums[..., 1].sum()
    on_before, off_before = np.concatenate([[rounds], kept[:-1]]), np.concatenate([[0], gone[:-1]])
    whole = (np.nan_to_num(on) * on_before + np.nan_to_num(off) * off_before) / (on_before + off_before)
    assert whole == pytest.approx(reached / before)
    two = study.arm("causal/markov", 1.0, "tree", 7)
    assert two is not None and two.spine is not None and len(two.taus) == 2
    assert slot_shares(two)[0] == pytest.approx(two.survival, abs=1e-6)


def test_calibration_error_by_hand(newer: Path) -> None:
    study = report.load_study(newer, "made")
    arm = study.arm("causal/none", 1.0, "tree", 7)
    assert arm is not None
    assert calibration_error(arm.steps) == pytest.approx((10 + 40) / 200)
    assert calibration_error(arm.paths) == pytest.approx((10 + 45) / 1200)
    assert np.isnan(calibration_error(None))
    table = calibration_table(study, 1.0)
    assert table is not None and {row[1] for row in table.rows} == {"chain", "tree"}
    tree = next(row for row in table.rows if row[:2] == ["causal/none", "tree"])
    assert tree[2:5] == ["0.500", "0.250", "0.2500"] and tree[7] == "0.0458"
    assert next(row for row in table.rows if row[1] == "chain")[5:] == ["-", "-", "-"]


def test_outputs_are_counted_once(newer: Path) -> None:
    study = report.load_study(newer, "made")
    outputs = outputs_of(study)
    assert len(outputs) == 2 * 40 * 3 and outputs.looped.sum() == 2 * 3
    rows = {(row[0], row[1]): row for row in output_table(study).rows}
    assert rows["1", "all"][2] == "120" and rows["1", "all"][-1] == "2.5%"  # the first of 40 prompts
    assert rows["0", "code"][-1] == "0.0%"


def test_controls_hold_and_a_wrong_one_is_seen(newer: Path, tmp_path: Path) -> None:
    import pandas as pd

    def verdicts(folder: Path) -> dict[str, str]:
        table = control_table(report.load_study(folder, "made"))
        return {row[0]: row[-1] for row in table.rows if row[0] != "two sampling seeds"}

    assert verdicts(newer) == {"always right": "yes", "never right": "yes", "measured again causal/none": "yes"}
    for name in ("made.json", "made.cells.csv", "made.prompts.csv"):
        (tmp_path / name).write_bytes((newer / name).read_bytes())
    controls = pd.read_csv(newer / "made.controls.csv")
    first = controls.groupby("control").head(1).index
    controls.loc[first, "rounds"] += 1
    controls.to_csv(tmp_path / "made.controls.csv", index=False)
    assert verdicts(tmp_path) == {"always right": "NO", "never right": "NO", "measured again causal/none": "NO"}


def test_sampling_seeds_are_paired_by_prompt(newer: Path) -> None:
    study = report.load_study(newer, "made")
    arm = study.arm("causal/none", 1.0, "tree", 7)
    assert arm is not None
    with (newer / "made.prompts.csv").open() as stream:
        rows = [r for r in csv.DictReader(stream) if (r["label"], r["depth"], r["mode"], r["temperature"]) == ("causal/none", "7", "tree", "1.0")]
    arms = [
        Counts(prompts=[r["prompt"] for r in own], emitted=[float(r["emitted"]) for r in own], rounds=[float(r["rounds"]) for r in own],
               domains=[r["domain"] for r in own])
        for own in ([r for r in rows if r["sampling_seed"] == seed] for seed in "01")
    ]
    found, expected = seed_difference(study, arm), paired_difference(*arms)
    assert found is not None
    assert (found.value, found.low, found.high) == pytest.approx((expected.value, expected.low, expected.high), abs=1e-12)


def test_sampling_seeds_that_are_not_alike_are_seen(newer: Path, tmp_path: Path) -> None:
    import pandas as pd

    def row(change: Callable[[Any], Any]) -> list[str]:
        prompts = change(pd.read_csv(newer / "made.prompts.csv", keep_default_na=False))
        prompts.to_csv(tmp_path / "made.prompts.csv", index=False)
        table = control_table(report.load_study(tmp_path, "made"))
        return next(row for row in table.rows if row[0] == "two sampling seeds" and row[3] == "1")

    for name in ("made.json", "made.cells.csv"):
        (tmp_path / name).write_bytes((newer / name).read_bytes())
    fair = row(lambda prompts: prompts)
    assert fair[-1] == "yes" and fair[4].endswith("of 8 arms hold 0") and fair[5].startswith("0 within 0.")
    # One sampling seed of another law, and one that is the other again.
    better = row(lambda prompts: prompts.assign(emitted=prompts.emitted + 30 * (prompts.sampling_seed == 1)))
    assert better[-1] == "NO" and "; 0 of 8" in better[4] and better[4].startswith("-1.")
    first = ["cell", "prompt"]
    again = row(lambda prompts: prompts.assign(emitted=prompts.groupby(first).emitted.transform("first")))
    assert again[4:] == ["the same outputs", "two sets of outputs", "NO"]


def test_power_says_how_wide_intervals_are(newer: Path) -> None:
    study = report.load_study(newer, "made")
    table = power_table(study)
    assert table is not None and len(table.rows) == len(study.comparisons) == 8
    for row, item in zip(table.rows, study.comparisons, strict=True):
        width = item.difference.high - item.difference.low
        assert row[5] == "-", "arms of other seeds have no seed in common"
        assert row[6:9] == [f"{width:.2f}", "yes" if width < 0.15 else "no", f"{2.8 / 3.92 * width:.2f}"]
        assert row[9] == "2 / 1"


def test_a_newer_page_has_every_section(newer: Path) -> None:
    page = (newer / "made.md").read_text()
    for text in ("## Slot by slot", "made-slots.png", "made-calibration.png", "made-outputs.png", "## Controls", "## Power", "of rounds off it"):
        assert text in page
    assert "ot recorded in these" not in page and "nan" not in page and page.count("| NO |") == 0
    assert report.stale_files(newer, "made") == []


@pytest.mark.parametrize("name", ["README.md", "ablations/README.md"])
def test_documents_hold_the_tables_of_the_committed_results(name: str) -> None:
    assert filled(ROOT / name, ROOT / "ablations" / "results") == (ROOT / name).read_text(encoding="utf-8")
