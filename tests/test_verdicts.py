"""Published claims against made-up grids: the interval alone decides, and every row can be traced to a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tests.test_report import ROOT, make_grid
from treedraft import report, verdicts
from treedraft.grid import load_grids
from treedraft.metrics import Interval
from treedraft.verdicts import Claim, load_claims, verdict_table

CLAIMS = """
[[claims]]
claim = "corrections help"
published = "+1"
grid = "made"
first = ["causal/attention", 15]
second = ["causal/none", 15]

[[claims]]
claim = "depth changes nothing"
published = "0"
grid = "made"
first = ["causal/none", 23]
second = ["causal/none", 23]
expect = "same"
within = 0.1
"""


COMMON: dict[str, Any] = {"claim": "c", "published": "p", "grid": "g", "first": ("a", 1), "second": ("b", 1)}


def spread(low: float, high: float) -> Interval:
    return Interval(value=(low + high) / 2, low=low, high=high)


@pytest.mark.parametrize(
    ("low", "high", "more", "same", "not_less"),
    [(0.2, 0.4, "reproduced", "refuted", "reproduced"), (-0.4, -0.2, "refuted", "refuted", "refuted"),
     (-0.04, 0.06, "not resolved", "reproduced", "reproduced"), (0.05, 0.2, "reproduced", "not resolved", "reproduced"),
     (0.02, 0.08, "reproduced", "reproduced", "reproduced"), (-0.3, 0.3, "not resolved", "not resolved", "not resolved"),
     (-0.02, 0.03, "refuted", "reproduced", "reproduced"), (-0.07, -0.01, "refuted", "reproduced", "not resolved")],
)  # fmt: skip
def test_the_interval_decides(low: float, high: float, more: str, same: str, not_less: str) -> None:
    claims = Claim(**COMMON), Claim(**COMMON, expect="same", within=0.1), Claim(**COMMON, expect="not less")  # pyright: ignore
    assert [claim.verdict([spread(low, high)]) for claim in claims] == [more, same, not_less]


@pytest.mark.parametrize(
    ("signs", "every", "most"),
    [("+++", "reproduced", "reproduced"), ("++-", "refuted", "reproduced"), ("++?", "not resolved", "reproduced"), ("+-?", "refuted", "not resolved"),
     ("+--", "refuted", "refuted"), ("???", "not resolved", "not resolved"), ("++--", "refuted", "refuted")],
)  # fmt: skip
def test_domains_are_counted(signs: str, every: str, most: str) -> None:
    intervals = [spread(*{"+": (0.2, 0.4), "-": (-0.4, -0.2), "?": (-0.3, 0.3)}[sign]) for sign in signs]
    assert [Claim(**COMMON, over=over).verdict(intervals) for over in ("all", "most")] == [every, most]  # pyright: ignore


def table_of(tmp_path: Path, text: str) -> list[list[str]]:
    (tmp_path / "claims.toml").write_text(text)
    return verdict_table(tmp_path / "claims.toml", tmp_path / "results").rows


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_grid(tmp_path / "results", labels=("causal/attention", "causal/none"))
    return tmp_path / "results"


def test_claims_become_rows(tmp_path: Path, folder: Path) -> None:
    rows = table_of(tmp_path, CLAIMS)
    assert [row[2] for row in rows] == ["tree", "chain"] * 2 and {row[-1] for row in rows} == {"made.cells.csv"}
    study = report.load_study(folder, "made")
    first, second = (study.arm(label, 0.0, "tree", 15) for label in ("causal/attention", "causal/none"))
    assert first and second and rows[0][4] == str(mean_gap(study, first, second))
    assert [row[5] for row in rows] == ["reproduced"] * 4 and rows[2][4] == "+0.00 [+0.00, +0.00]"
    assert [row[6] for row in rows] == ["3 of 3", "3 of 3", "0 of 3", "0 of 3"]
    # Depth 23 of drafters trained for 15: how many rounds accept 15.
    assert [row[8] for row in rows[2:]] == ["-", "-"] and float(rows[0][8]) >= 0.05, "what does not vary resolves nothing"
    assert rows[0][7] == "" and rows[2][7] == f"{study.arm('causal/none', 0.0, 'tree', 23).survival[14]:.1%}"  # pyright: ignore
    (tmp_path / "claims.toml").write_text(CLAIMS + '[[unasked]]\nclaim = "speed"\npublished = "2 x"\nwhy = "no such machine"\n')
    readme = tmp_path / "README.md"
    readme.write_text("<!-- table: claims verdicts -->\n<!-- end -->\n")
    report.fill_markers(readme, folder)
    assert "| corrections help | +1 | tree | 0 |" in readme.read_text() and "\nOf 4 rows: 4 reproduced.\n\n| claim |" in readme.read_text()
    assert "Not asked here:\n\n- speed (2 x): no such machine\n<!-- end -->" in readme.read_text()


def test_a_claim_has_a_temperature_and_modes(tmp_path: Path, folder: Path) -> None:
    rows = table_of(tmp_path, CLAIMS.replace("[[claims]]", '[[claims]]\ntemperature = 1.0\nmodes = ["chain"]', 1))
    assert [row[2:4] for row in rows] == [["chain", "1"], ["tree", "0"], ["chain", "0"]]
    study = report.load_study(folder, "made")
    first, second = (study.arm(label, 1.0, "chain", 15) for label in ("causal/attention", "causal/none"))
    assert first and second and rows[0][4] == str(mean_gap(study, first, second))


def mean_gap(study: report.Study, first: report.Arm, second: report.Arm) -> Interval:
    """Over domains that weigh the same however many rounds they have; of every resample likewise."""
    pairs = [(first.domain(name), second.domain(name)) for name in study.domains]
    gaps = sum(one.tau - other.tau for one, other in pairs) / 3
    return report.interval_of(gaps, sum(report.drawn_gap(*pair) for pair in pairs) / 3)  # pyright: ignore


def test_domains_weigh_the_same_in_a_mean(tmp_path: Path, folder: Path) -> None:
    """Ten times the rounds of one domain, its tau as it was: the pooled difference moves, the mean does not."""
    (before, _) = table_of(tmp_path, DEEPER.replace("23", "15", 1).replace('attention", 15]', 'none", 15]', 1))
    path = folder / "made.prompts.csv"
    rows = pd.read_csv(path)
    rows.loc[rows.domain == "chat", ["emitted", "rounds", "rounds_cut"]] *= 10
    rows.to_csv(path, index=False)
    (after, _) = table_of(tmp_path, DEEPER.replace("23", "15", 1).replace('attention", 15]', 'none", 15]', 1))
    assert after[4] == before[4] and after[4] != "+0.00 [+0.00, +0.00]"


def test_claims_about_domains_show_each(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = report.load_study(folder, "made")
    first, second = (study.arm(label, 0.0, "tree", 15) for label in ("causal/attention", "causal/none"))
    assert first and second
    rows = table_of(tmp_path, CLAIMS.replace("[[claims]]", '[[claims]]\nover = "all"', 1))
    each = {name: report.compare(first.domain(name), second.domain(name), []).difference for name in study.domains}
    assert rows[0][4] == "; ".join(f"{name} {gap}" for name, gap in each.items()) and len(each) == 3
    fewest = int(min((first.domains == name).sum() for name in study.domains))
    for needed, verdict in ((fewest, "reproduced"), (fewest + 1, f"fewer than {fewest + 1} prompts")):
        monkeypatch.setattr(verdicts, "FEWEST_PROMPTS", needed)
        rows = table_of(tmp_path, CLAIMS.replace("[[claims]]", '[[claims]]\nover = "all"', 1))
        assert rows[0][5] == verdict and min(gap.low for gap in each.values()) > 0
    rows = table_of(tmp_path, CLAIMS.replace("[[claims]]", '[[claims]]\nlargest = "math"', 1))
    assert rows[0][4].startswith("math - chat ") and "; math - code " in rows[0][4] and "math - math" not in rows[0][4]
    drawn = {name: report.drawn_gap(first.domain(name), second.domain(name)) for name in ("math", "code")}
    lead = report.interval_of(each["math"].value - each["code"].value, drawn["math"] - drawn["code"])
    assert rows[0][4].endswith(f"; math - code {lead}")
    with pytest.raises(ValueError, match="no prompt of grid 'made' is of domain 'law'; there are chat, code, math"):
        table_of(tmp_path, CLAIMS.replace("[[claims]]", '[[claims]]\nlargest = "law"', 1))


DEEPER = """
[[claims]]
claim = "deeper is better"
published = "+1"
grid = "made"
first = ["causal/attention", 23]
second = ["causal/attention", 15]
"""


def test_slots_that_nothing_reaches_say_nothing(tmp_path: Path, folder: Path) -> None:
    """Where so few rounds accept 15 drafts that eight more could not gain 0.05 tokens, no gain is refuted."""
    (row, _) = table_of(tmp_path, DEEPER)
    assert row[5] in ("reproduced", "refuted", "not resolved") and float(row[7].rstrip("%")) > 100 * 0.05 / 8
    cells = folder / "made.cells.csv"
    lines = [line.split(",") for line in cells.read_text().splitlines()]
    place = lines[0].index("survival")
    for line in lines[1:]:
        survived = line[place].split()
        line[place] = " ".join([*survived[:14], *["0.006"] * (len(survived) - 14)])
    cells.write_text("\n".join(",".join(line) for line in lines) + "\n")
    rows = table_of(tmp_path, DEEPER)
    assert [row[5] for row in rows] == ["not reached"] * 2 and [row[7] for row in rows] == ["0.6%"] * 2
    # Of another drafter, or of one depth, a difference is one: only drafts that are added have nobody to gain from.
    other = table_of(tmp_path, DEEPER.replace('second = ["causal/attention", 15]', 'second = ["causal/none", 23]'))
    assert other[0][5] == "reproduced" and other[0][7] == "0.6%"
    lost = table_of(tmp_path, DEEPER.replace('["causal/attention", 23]', '["causal/none", 15]').replace('["causal/attention", 15]', '["causal/none", 23]'))
    assert lost[0][5] != "not reached" and lost[0][7] == "0.6%", "a block that grows may lose in its first slots"


def test_what_gets_there_is_counted_at_the_shallower_depth(tmp_path: Path) -> None:
    """From 23 to 31 those rounds count that accept 23, whatever the drafter was trained for."""
    make_grid(tmp_path / "results", labels=("causal/none",), depths=(15, 23, 31), temperatures=(0.0,))
    deeper = DEEPER.replace("attention", "none").replace("23]", "31]").replace("15]", "23]")
    survival = report.load_study(tmp_path / "results", "made").arm("causal/none", 0.0, "tree", 31).survival  # pyright: ignore
    (row, _) = table_of(tmp_path, deeper)
    assert survival[22] < survival[14] and row[7] == f"{survival[22]:.1%}"


def test_no_difference_at_all_between_two_depths_is_not_reached(tmp_path: Path) -> None:
    make_grid(tmp_path / "results", labels=("causal/none",), depths=(15, 23), temperatures=(0.0,))
    rows = tmp_path / "results" / "made.prompts.csv"
    lines = [line.split(",") for line in rows.read_text().splitlines()]
    by_key = {(line[3], line[6], line[8]): line for line in lines[1:] if line[4] == "15"}
    assert lines[0][3:9] == ["mode", "depth", "temperature", "prompt", "domain", "sampling_seed"]
    for line in lines[1:]:
        line[9:] = by_key[line[3], line[6], line[8]][9:]
    rows.write_text("\n".join(",".join(line) for line in lines) + "\n")
    swapped = DEEPER.replace("attention", "none").replace("23", "0").replace("15", "23").replace("0]", "15]")
    found = table_of(tmp_path, swapped)
    assert [row[4:6] for row in found] == [["+0.00 [+0.00, +0.00]", "not reached"]] * 2


GRID = """
question = "?"
target = "tiny"
[[arms]]
correction = ["none", "attention"]
[decode]
mode = "tree"
depth = 15
temperature = [1.0, 0.0]
"""


def test_what_is_filed_and_has_no_results_is_not_run(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "other.toml").write_text(GRID)
    text = CLAIMS.replace('"made"', '"other"', 1).replace("[[claims]]", '[[claims]]\nmodes = ["tree"]', 1)
    rows = table_of(tmp_path, text)
    assert rows[0][3:] == ["0", "", "not run", "", "", "", "", "other.toml"] and [row[5] for row in rows[1:]] == ["reproduced"] * 2
    with pytest.raises(ValueError, match="grid 'other' has no chain of 'causal/attention' at depth 15 and temperature 0"):
        table_of(tmp_path, CLAIMS.replace('"made"', '"other"', 1))
    # Older results of a grid that has grown since.
    (tmp_path / "made.toml").write_text(GRID)
    grown = DEEPER.replace("[[claims]]", '[[claims]]\nmodes = ["tree"]').replace("23", "15").replace('attention", 15]', 'none", 15]', 1)
    make_grid(folder, labels=("causal/attention",), temperatures=(1.0,))
    assert table_of(tmp_path, grown)[0][5] == "not run"


@pytest.mark.parametrize(
    ("change", "words"),
    [(("causal/attention", "causal/attn"), "no tree of 'causal/attn' at depth 15"),
     (("within = 0.1", "within = 0"), "above 0 where"), (("expect", "expects"), "unknown key 'expects'"),
     (("expect", 'largest = "math"\nexpect'), "it goes with neither")],
)  # fmt: skip
def test_what_does_not_fit_is_one_sentence(tmp_path: Path, folder: Path, change: tuple[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        table_of(tmp_path, CLAIMS.replace(*change))


def test_every_claim_names_cells_of_its_grid() -> None:
    """And the post's are greedy, LongSpark's sampled chains."""
    for claim in load_claims(ROOT / "ablations/claims.toml"):
        (grid,) = load_grids(ROOT / f"ablations/{claim.grid}.toml")
        cells = {(cell.arm.label, cell.decode.depth, cell.decode.temperature, cell.decode.mode) for cell in grid.cells}
        named = {(*side, claim.temperature, mode) for side in (claim.first, claim.second) for mode in claim.modes}
        assert named <= cells, claim.claim
        assert (claim.temperature, claim.modes) == (1.0, ("chain",)) if claim.grid == "longspark" else claim.temperature == 0


def test_claims_of_published_methods_have_their_layouts() -> None:
    """Beyond depth 7 DSpark is the one that was trained for 15 drafts; at depth 7, where the post does not say, both are asked."""
    (grid,) = load_grids(ROOT / "ablations/methods.toml")
    drafters = {arm.label: arm.drafter for arm in grid.arms}
    assert {(label, drafter.layout, drafter.depth) for label, drafter in drafters.items()} >= {
        ("jetspec++", "fill-in", 15), ("dspark/b7", "anchor-first", 7), ("dspark/b15", "anchor-first", 15)}  # fmt: skip
    asked = set()
    for claim in load_claims(ROOT / "ablations/claims.toml"):
        for label, depth in (claim.first, claim.second) if claim.grid == "methods" else ():
            if label.startswith("dspark"):
                asked.add((drafters[label].depth, depth == 7))
    assert asked == {(7, True), (15, True), (15, False)}
