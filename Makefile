# `make test` and `make ablate` work on a fresh clone: they make .venv with the python3 on PATH and install into it.
PYTHON ?= python3
WORKERS ?= 2

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# An active conda environment, virtualenv or user site must not leak into .venv.
unexport PYTHONHOME PYTHONPATH VIRTUAL_ENV
export PIP_USER := 0
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: env test lint ablate notebooks clean

env: $(STAMP)  ## create .venv and install the package, once and whenever pyproject.toml changes

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "treedraft needs Python 3.11 or newer: make PYTHON=python3.11")'
	@# Some systems ship venv without the pip that it wants to bundle; their own pip can put one there.
	$(PYTHON) -m venv $(VENV) || { $(PYTHON) -m venv --without-pip $(VENV) && $(PYTHON) -m pip --python $(BIN)/python install pip; }
	$(BIN)/python -m pip install --progress-bar off --editable ".[test]"
	@touch $@

test: lint  ## the whole test suite and the notebooks, WORKERS processes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --nbmake $(ARGS)

lint: env  ## style, types and who may import whom
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

ablate: env  ## train what is missing, measure every cell, write tables and figures
	$(BIN)/python -m treedraft.ablate --grid full $(ARGS)

notebooks: env  ## run the notebooks' sources and write them with their outputs
	OMP_NUM_THREADS=1 $(BIN)/python notebooks/render.py $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
