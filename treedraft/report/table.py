"""Text in rows, as Markdown, LaTeX, or tables of a screen."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table as RichTable

WIDTH = 120  # columns of a printed table


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Text in rows. A column is (group, name); `names` counts the leading columns that are read, not compared."""

    caption: str
    columns: Sequence[tuple[str, str]]
    rows: Sequence[Sequence[str]]
    names: int = 1

    def markdown(self) -> str:
        header = [" ".join(filter(None, column)) for column in self.columns]
        rule = ["---" if place < self.names else "---:" for place in range(len(header))]
        lines = ["| " + " | ".join(cells) + " |" for cells in (header, rule, *self.rows)]
        return "\n".join(lines) + f"\n\n*{self.caption}*\n"

    def latex(self) -> str:
        groups = _runs([group for group, _ in self.columns])
        top = " & ".join(
            rf"\multicolumn{{{size}}}{{c}}{{{_tex(group)}}}" if group else "&".join([""] * size)
            for group, _, size in groups
        )
        rules = " ".join(rf"\cmidrule(lr){{{start + 1}-{start + size}}}" for group, start, size in groups if group)
        names = " & ".join(_tex(name) for _, name in self.columns)
        body = [" & ".join(map(_tex, row)) + r" \\" for row in self.rows]
        lines = [
            r"\begin{table}",
            r"  \centering",
            rf"  \caption{{{_tex(self.caption)}}}",
            rf"  \begin{{tabular}}{{{'l' * self.names}{'r' * (len(self.columns) - self.names)}}}",
            r"    \toprule",
            rf"    {top} \\",
            f"    {rules}",
            rf"    {names} \\",
            r"    \midrule",
            *(f"    {line}" for line in body),
            r"    \bottomrule",
            r"  \end{tabular}",
            r"\end{table}",
        ]
        return "\n".join(lines) + "\n"

    def rich(self, *, title: str, width: int = WIDTH) -> list[RichTable]:
        """As many tables as the width needs, each with the naming columns; the last one carries the caption."""
        from rich import box
        from rich.table import Table as RichTable

        sizes = [
            max(len(text) for text in (*column, *(row[place] for row in self.rows))) + 2
            for place, column in enumerate(self.columns)
        ]
        parts = _split(sizes, self.names, width - 1)
        tables = []
        for number, part in enumerate(parts):
            last = number == len(parts) - 1
            table = RichTable(
                title=title if not number else None, caption=self.caption if last else None,
                title_justify="left", caption_justify="left",
                box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0),
            )  # fmt: skip
            shown: str | None = None
            for place in part:
                group, name = self.columns[place]
                heading = f"{group if group != shown else ''}\n{name}"
                shown = group
                table.add_column(heading, justify="left" if place < self.names else "right", no_wrap=True)
            for row in self.rows:
                table.add_row(*(row[place] for place in part))
            tables.append(table)
        return tables


def _tex(text: str) -> str:
    escaped = re.sub(r"([&%$#_{}])", r"\\\1", text)
    return escaped.replace("±", r"$\pm$").replace("~", r"\textasciitilde{}")


def _runs(groups: Sequence[str]) -> list[tuple[str, int, int]]:
    """(group, start, size) of neighbours that share a group."""
    runs: list[tuple[str, int, int]] = []
    for place, group in enumerate(groups):
        if runs and runs[-1][0] == group:
            runs[-1] = (group, runs[-1][1], runs[-1][2] + 1)
        else:
            runs.append((group, place, 1))
    return runs


def _split(sizes: Sequence[int], names: int, width: int) -> list[list[int]]:
    """Columns of each part so that none is wider than `width`, in equal shares; naming columns come first in each."""
    fixed, rest = list(range(names)), list(range(names, len(sizes)))
    room = max(width - sum(sizes[:names]), max(sizes[names:], default=1))
    for parts in range(1, len(rest) + 1):
        share = -(-len(rest) // parts)
        chunks = [rest[start : start + share] for start in range(0, len(rest), share)]
        if all(sum(sizes[place] for place in chunk) <= room for chunk in chunks):
            return [fixed + chunk for chunk in chunks]
    return [fixed]


