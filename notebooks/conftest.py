"""Kernels of `pytest --nbmake notebooks` import treedraft from this checkout, installed or not, as the tests do."""

from __future__ import annotations

import os
from pathlib import Path

_ROOT = str(Path(__file__).resolve().parents[1])
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_ROOT, os.environ.get("PYTHONPATH", "")]))
