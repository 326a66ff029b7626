"""Kernels of `pytest --nbmake notebooks` import treedraft from this checkout, installed or not, as the tests do, and take a minute each."""

from __future__ import annotations

import os
import resource
from collections.abc import Generator
from pathlib import Path

import pytest

_ROOT = str(Path(__file__).resolve().parents[1])
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_ROOT, os.environ.get("PYTHONPATH", "")]))

LIMIT = 120  # seconds of processor time, twice the aim of render.py: machines differ


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """A notebook that passes and takes too long fails."""
    before = _spent()
    found = yield
    seconds = _spent() - before
    if seconds > LIMIT:
        pytest.fail(f"{item.name}: {seconds:.0f} s of processor time; at most {LIMIT}")
    return found


def _spent() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
