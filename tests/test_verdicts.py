"""Published claims against made-up grids: the interval alone decides, and every row can be traced to a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.test_report import ROOT, make_grid
from treedraft import report
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


@pytest.mark.parametrize(
    ("low", "high", "more", "same"),
    [(0.2, 0.4, "reproduced", "refuted"), (-0.4, -0.2, "refuted", "refuted"), (-0.05, 0.05, "not resolved", "reproduced"),
     (0.05, 0.2, "reproduced", "not resolved"), (0.02, 0.08, "reproduced", "reproduced"), (-0.3, 0.3, "not resolved", "not resolved"),
     (-0.02, 0.03, "refuted", "reproduced")],
)  # fmt: skip
def test_the_interval_decides(low: float, high: float, more: str, same: str) -> None:
    interval = Interval(value=(low + high) / 2, low=low, high=high)
    common = {"claim": "c", "published": "p", "grid": "g", "first": ("a", 1), "second": ("b", 1)}
    assert Claim(**common).verdict(interval) == more  # pyright: ignore[reportArgumentType]
    assert Claim(**common, expect="same", within=0.1).verdict(interval) == same  # pyright: ignore[reportArgumentType]


def test_claims_become_rows(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    folder.mkdir()
    make_grid(folder)
    (tmp_path / "claims.toml").write_text(CLAIMS)
    table = verdict_table(tmp_path / "claims.toml", folder)
    assert [row[2] for row in table.rows] == ["tree", "chain"] * 2 and {row[-1] for row in table.rows} == {"made.cells.csv"}
    study = report.load_study(folder, "made")
    first, second = (study.arm(label, 0.0, "tree", 15) for label in ("causal/attention", "causal/none"))
    assert first and second and table.rows[0][3] == str(report.compare(first, second, study.domains).difference)
    assert [row[4] for row in table.rows] == ["reproduced"] * 4 and table.rows[2][3] == "+0.00 [+0.00, +0.00]"
    (tmp_path / "claims.toml").write_text(CLAIMS.replace('"made"', '"other"', 1))
    rows = verdict_table(tmp_path / "claims.toml", folder).rows
    assert rows[0][4] == "not run" and rows[0][-1] == "other.toml" and [row[4] for row in rows[1:]] == ["reproduced"] * 2
    (tmp_path / "claims.toml").write_text(CLAIMS)
    readme = tmp_path / "README.md"
    readme.write_text("<!-- table: claims verdicts -->\n<!-- end -->\n")
    report.fill_markers(readme, folder)
    assert "| corrections help | +1 | tree |" in readme.read_text()


@pytest.mark.parametrize(
    ("change", "words"),
    [(("causal/attention", "causal/attn"), "no tree of 'causal/attn' at depth 15"),
     (("within = 0.1", "within = 0"), "above 0 where"), (("expect", "expects"), "unknown key 'expects'")],
)  # fmt: skip
def test_what_does_not_fit_is_one_sentence(tmp_path: Path, change: tuple[str, str], words: str) -> None:
    make_grid(tmp_path)
    (tmp_path / "claims.toml").write_text(CLAIMS.replace(*change))
    with pytest.raises(ValueError, match=words):
        verdict_table(tmp_path / "claims.toml", tmp_path)


def test_every_claim_names_cells_of_its_grid() -> None:
    for claim in load_claims(ROOT / "ablations/claims.toml"):
        (grid,) = load_grids(ROOT / f"ablations/{claim.grid}.toml")
        cells = {(cell.arm.label, cell.decode.depth) for cell in grid.cells}
        assert {tuple(claim.first), tuple(claim.second)} <= cells, claim.claim
