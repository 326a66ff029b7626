"""Notebooks are what their sources say, were run from top to bottom without an error, and name no machine."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import jupytext
import nbformat
import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "notebooks"
NAMES = ["add_your_own_correction", "anatomy_of_a_round", "corrections_compared", "depth_extrapolation"]
# Joined here, so that this file does not hold what it looks for.
PLACES = "|".join(["root", "work", "home", "Users", "opt", "mnt", "tmp", "var", "usr", "private"])
ABSOLUTE = re.compile(rf"(?<![\w.~<*/-])/(?:{PLACES})/\w|[A-Z]:\\\w")

every_notebook = pytest.mark.parametrize("name", NAMES)


def read(name: str) -> Any:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def texts_of(outputs: list[Any]) -> list[str]:
    """All that is not a picture."""
    found = [output.get("text", "") for output in outputs]
    for output in outputs:
        found += [str(value) for kind, value in output.get("data", {}).items() if not kind.startswith("image/")]
    return found


def test_every_source_has_its_notebook() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == NAMES
    sources = [path.stem for path in FOLDER.glob("*.py") if path.read_text().startswith("# %%")]
    assert sorted(sources) == NAMES


@every_notebook
def test_a_notebook_is_its_source(name: str) -> None:
    source = jupytext.read(FOLDER / f"{name}.py", fmt="py:percent")
    assert [(cell.cell_type, cell.source) for cell in source.cells] == [(cell.cell_type, cell.source) for cell in read(name).cells]


@every_notebook
def test_a_notebook_was_run_from_top_to_bottom(name: str) -> None:
    notebook = read(name)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert len(outputs) >= 5
    assert not [output for output in outputs if output.output_type == "error"]
    assert not [output.text for output in outputs if output.get("name") == "stderr"]


@every_notebook
def test_no_output_names_a_machine(name: str) -> None:
    host = socket.gethostname()
    texts = [text for cell in read(name).cells for text in texts_of(cell.get("outputs", []))]
    assert not [match[0] for text in texts for match in ABSOLUTE.finditer(text)]
    assert not (len(host) > 3 and any(host in text for text in texts))


def test_the_pattern_sees_what_it_should() -> None:
    assert ABSOLUTE.search("in " + "/".join(["", "tmp", "x1y2"]))
    assert not ABSOLUTE.search("tokens/s, ../tmp/x, and </var> or a/home/b")


def test_a_depth_has_a_picture_where_nothing_runs() -> None:
    """The slider's output holds an image beside the widget."""
    kinds = [set(output.get("data", {})) for cell in read("depth_extrapolation").cells for output in cell.get("outputs", [])]
    sliders = [kind for kind in kinds if "application/vnd.jupyter.widget-view+json" in kind]
    assert len(sliders) == 1 and "image/png" in sliders[0]


def test_a_new_correction_has_about_25_lines() -> None:
    cells = [cell.source for cell in read("add_your_own_correction").cells if "class Component" in cell.source]
    assert len(cells) == 1
    assert len([line for line in cells[0].splitlines() if line.strip()]) <= 25


def test_the_test_command_runs_the_notebooks() -> None:
    """`make test`, which CI runs: pytest over its testpaths, with the plug-in that executes notebooks."""
    (recipe,) = [line for line in (ROOT / "Makefile").read_text().splitlines() if "-m pytest" in line]
    assert "--nbmake" in recipe.split() and "tests" not in recipe.split()
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert options["testpaths"] == ["tests", "notebooks"]


def test_a_kernel_imports_this_checkout() -> None:
    code = "import os, runpy; runpy.run_path('notebooks/conftest.py'); print(os.environ['PYTHONPATH'].split(os.pathsep)[0])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()) == ROOT


def minute_of(name: str, folder: Path, limit: str) -> Path:
    """A copy of a file of notebooks/ with another limit, beside a notebook of one line."""
    text = (FOLDER / name).read_text()
    (known,) = re.findall(r"^LIMIT = \d+", text, re.MULTILINE)
    (folder / name).write_text(text.replace(known, f"LIMIT = {limit}"))
    source = "# %%\nprint(sum(range(100)))\n"
    (folder / "short.py").write_text(source)
    nbformat.write(jupytext.reads(source, fmt="py:percent"), folder / "short.ipynb")
    return folder / name


@pytest.mark.parametrize(("limit", "written"), [("60", True), ("0", False)])
def test_a_notebook_that_takes_too_long_is_not_written(tmp_path: Path, limit: str, written: bool) -> None:
    script = minute_of("render.py", tmp_path, limit)
    before = (tmp_path / "short.ipynb").read_text()
    done = subprocess.run([sys.executable, str(script), "short"], capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == written == ((tmp_path / "short.ipynb").read_text() != before), done.stderr
    assert written or re.search(r"short: \d+ s of processor time; at most 0", done.stderr)


@pytest.mark.parametrize(("limit", "passed"), [("120", True), ("0", False)])
def test_a_notebook_that_takes_too_long_fails(tmp_path: Path, limit: str, passed: bool) -> None:
    minute_of("conftest.py", tmp_path, limit)
    command = [sys.executable, "-m", "pytest", "--nbmake", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == passed, done.stdout
    assert passed or re.search(r"short.ipynb: \d+ s of processor time; at most 0", done.stdout)


MINE = """
question = "?"
target = "tiny"
compare = [["*/nudge", "*/none"]]
data = { tokens = 200, max_new_tokens = 8 }
drafter = { block_size = 4, tap_layers = [0, 1], backbone = { name = "causal", num_layers = 1 } }
train = { steps = 2, sequences = 4, anchors = 2 }
decode = { mode = "tree", depth = 3, budget = 8, temperature = 0.0 }
evaluate = { count = 3, seeds = [0], max_new_tokens = 8 }
[[arms]]
correction = ["none", { name = "my_package.nudge", rank = 4 }]
"""


def test_the_correction_of_the_notebook_works_from_a_file(tmp_path: Path) -> None:
    """Its cell, saved under the dotted path, is an arm that processes of their own train and measure."""
    (code,) = [cell.source for cell in jupytext.read(FOLDER / "add_your_own_correction.py").cells if "class Component" in cell.source]
    imports = ["from dataclasses import dataclass", "import torch", "from torch import nn", "from treedraft.ops.layers import rms_norm",
               "from treedraft.corrections._seam import Correction, State, select"]  # fmt: skip
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "nudge.py").write_text("\n".join([*imports, code]))
    (tmp_path / "mine.toml").write_text(MINE)
    command = [sys.executable, "-m", "treedraft.ablate", "--grid", "mine.toml", "--jobs", "2", "--output", "out"]
    places = os.pathsep.join([str(ROOT), str(tmp_path)])
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": places}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = (tmp_path / "out" / "mine.cells.csv").read_text().splitlines()[1:]
    assert [row.split(",")[2] for row in rows] == ["causal/none", "causal/nudge"] and all(",ok" in row for row in rows)
