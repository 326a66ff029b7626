"""Tables and figures of a grid, generated from its CSV files alone: the same input gives the same bytes.

`python -m treedraft.report` regenerates every report of a folder and the tables between markers in README.md and
ablations/README.md, so that no number is typed by hand; `--check` only says what would change.

Read: <grid>.json, <grid>.cells.csv, <grid>.prompts.csv, <grid>.controls.csv. Written: <grid>.md, <grid>.tex, <grid>-tau.png,
<grid>-survival.png, <grid>-domains.png (of a grid that climbs the conditioning ladder <grid>-ladder.png in their place, of one
whose prompts have several lengths <grid>-context.png),
<grid>-slots.png, <grid>-calibration.png, <grid>-outputs.png; and of bench-context.csv bench-context.png. Results from before something was recorded say that it was not.

study.py reads, table.py prints, tables.py says what is in which table, slots.py and checks.py likewise, pages.py puts them together.
"""

from __future__ import annotations

from treedraft.metrics import Interval
from treedraft.report.pages import fill_markers, print_table, stale_files, write_report
from treedraft.report.study import (
    FEWEST_PROMPTS,
    MARGIN,
    RELATIVE_MARGIN,
    Arm,
    Bootstrap,
    Comparison,
    Setting,
    Study,
    compare,
    drawn_gap,
    interval_of,
    known_grids,
    load_study,
)
from treedraft.report.table import Table
from treedraft.report.tables import comparison_table, context_table, extrapolation_table, ladder_table, tau_table

__all__ = [
    "FEWEST_PROMPTS",
    "MARGIN",
    "RELATIVE_MARGIN",
    "Arm",
    "Bootstrap",
    "Comparison",
    "Interval",
    "Setting",
    "Study",
    "Table",
    "compare",
    "comparison_table",
    "context_table",
    "drawn_gap",
    "extrapolation_table",
    "fill_markers",
    "interval_of",
    "known_grids",
    "ladder_table",
    "load_study",
    "print_table",
    "stale_files",
    "tau_table",
    "write_report",
]
