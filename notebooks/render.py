"""`python notebooks/render.py [NAME ...]`: run NAME.py, all by default, and write NAME.ipynb with its outputs.

The same as opening the pair in Jupyter and running every cell, but without times and with fixed cell ids.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent
KERNEL = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}


def sources() -> list[Path]:
    return [path for path in sorted(HERE.glob("*.py")) if path.read_text(encoding="utf-8").startswith("# %%")]


def render(path: Path) -> None:
    notebook = jupytext.read(path, fmt="py:percent")
    notebook.metadata = nbformat.from_dict({"kernelspec": KERNEL, "language_info": {"name": "python"}})
    for number, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{number:02d}", nbformat.from_dict({})
    NotebookClient(notebook, timeout=300, record_timing=False).execute(cwd=HERE)
    notebook.metadata.language_info = nbformat.from_dict({"name": "python"})  # without this machine's version of it
    nbformat.write(notebook, path.with_suffix(".ipynb"))


def main() -> None:
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH", "")]))
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    wanted = set(sys.argv[1:])
    for path in sources():
        if not wanted or path.stem in wanted:
            begin = time.perf_counter()
            render(path)
            print(f"{path.stem}: {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
