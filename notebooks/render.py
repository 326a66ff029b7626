"""`python notebooks/render.py [NAME ...]`: run NAME.py, all by default, and write NAME.ipynb with its outputs.

The same as opening the pair in Jupyter and running every cell, but without times and with fixed cell ids. A notebook that takes more
than a minute of a processor is not written: a reader waits for it.
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent
LIMIT = 60  # seconds of processor time: unlike the wall clock, it does not count what runs beside it
KERNEL = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}


def sources() -> list[Path]:
    return [path for path in sorted(HERE.glob("*.py")) if path.read_text(encoding="utf-8").startswith("# %%")]


def render(path: Path) -> float:
    """Seconds of processor time that the kernel took; SystemExit if it was more than LIMIT, and nothing is written."""
    before = _spent()
    notebook = jupytext.read(path, fmt="py:percent")
    notebook.metadata = nbformat.from_dict({"kernelspec": KERNEL, "language_info": {"name": "python"}})
    for number, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{number:02d}", nbformat.from_dict({})
    NotebookClient(notebook, timeout=300, record_timing=False).execute(cwd=HERE)
    seconds = _spent() - before
    if seconds > LIMIT:
        raise SystemExit(f"{path.stem}: {seconds:.0f} s of processor time; at most {LIMIT}")
    notebook.metadata.language_info = nbformat.from_dict({"name": "python"})  # without this machine's version of it
    nbformat.write(notebook, path.with_suffix(".ipynb"))
    return seconds


def _spent() -> float:
    """Of kernels that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH", "")]))
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    wanted = set(sys.argv[1:])
    for path in sources():
        if not wanted or path.stem in wanted:
            print(f"{path.stem}: {render(path):.0f} s of processor time")


if __name__ == "__main__":
    main()
