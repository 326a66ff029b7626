"""`python -m treedraft.report`: regenerate every report of a folder, and the tables in the documents above it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from treedraft.cli import parse_arguments, run_cli
from treedraft.figures import draw_context_bench, drawn_from
from treedraft.report.pages import fill_markers, filled, stale_files, write_report
from treedraft.report.study import known_grids


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Regenerate tables and figures."""

    folder: Path = Path("ablations/results")
    """Where the CSV files are; README.md one and two folders up are filled too."""
    grid: str | None = None
    """One grid; None means all in the folder."""
    check: bool = False
    """Write nothing; exit 1 with the files that differ from what would be generated."""


def main() -> int:
    arguments = parse_arguments(
        Arguments,
        program="python -m treedraft.report",
        description="Generate the tables and figures of measured grids.",
    )
    folder = arguments.folder
    grids = [arguments.grid] if arguments.grid else known_grids(folder)
    if not grids:
        raise ValueError(f"no *.cells.csv in {str(folder)!r}; run python -m treedraft.ablate first")
    documents = [path for path in _documents(folder) if path.is_file()]
    bench = folder / "bench-context.csv"
    if arguments.check:
        stale = [path for grid in grids for path in stale_files(folder, grid)]
        if bench.is_file() and not drawn_from(bench.with_suffix(".png"), [bench]):
            stale.append(bench.with_suffix(".png"))
        stale += [path for path in documents if filled(path, folder) != path.read_text(encoding="utf-8")]
        for path in stale:
            print(path)
        return 1 if stale else 0
    for grid in grids:
        write_report(folder, grid)
    if bench.is_file():
        draw_context_bench(bench)
    for path in documents:
        fill_markers(path, folder)
    return 0


def _documents(folder: Path) -> list[Path]:
    home = folder.resolve().parent
    return [home.parent / "README.md", home / "README.md"]


if __name__ == "__main__":
    run_cli(main)
