"""Information floors as a table: a row a slot, of what `python -m treedraft.floors` wrote."""

from __future__ import annotations

from pathlib import Path

from treedraft.files import read_json
from treedraft.report.table import Table

_GROUPS = {"order 0": "floor of order 0", "order 1": "floor of order 1"}


def floor_table(path: Path) -> Table:
    import pandas as pd

    rows, about = pd.read_csv(path), read_json(path.with_name(f"{path.stem}.json"))
    found = {
        (row["slot"], row["quantity"]): f"{row['value']:.2f} [{row['low']:.2f}, {row['high']:.2f}]"
        for row in rows.to_dict("records")
    }
    # Drafter by drafter, where the file goes slot by slot and gaps come last.
    names = list(dict.fromkeys(rows.quantity))
    owners = list(dict.fromkeys(name.rpartition(", ")[0] for name in names))
    quantities = sorted(names, key=lambda name: owners.index(name.rpartition(", ")[0]))
    slots = sorted(set(rows.slot))
    table = [[str(slot), *(found.get((slot, name), "-") for name in quantities)] for slot in slots]
    heads = [(name.rpartition(", ")[0], name.rpartition(", ")[2]) for name in quantities]
    caption = (
        "Rejection (total variation to the target's law, temperature 1) by draft position. Floor: the least that any proposal can reach which sees the prefix "
        "(order 0), and the realised token before the slot as well (order 1); in expectation it lies between the two estimates, and a proposal that sees the whole path has none. Drafters: the backbone "
        "alone; corrected along the recorded tokens (true path); along the drafter's own greedy path. Gap: true path minus the order-1 floor at most; exposure: own "
        f"path minus true path. 95 % bootstrap intervals over prompts; {about['anchors']} anchors of {about['prompts']} prompts x {about['samples']} "
        f"continuations, fewer in slots behind the end of an answer; target {about['target']}; {about['hardware']}; commit {about['commit']}."
    )
    columns = [("", "slot"), *((_GROUPS.get(group, group), name) for group, name in heads)]
    return Table(caption=caption, columns=columns, rows=table)
