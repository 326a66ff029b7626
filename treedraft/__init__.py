"""Draft trees with causal corrections for lossless speculative decoding.

What users import, loaded at first use: `import treedraft` does not import torch, so `--help` and `--list` answer at
once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treedraft.drafter import Drafter, load_drafter
    from treedraft.speculate import generate
    from treedraft.targets import load_target
    from treedraft.trees.tree import DraftTree

__version__ = "0.1.0"
__all__ = ["DraftTree", "Drafter", "generate", "load_drafter", "load_target"]

_HOMES = {
    "DraftTree": "treedraft.trees.tree",
    "Drafter": "treedraft.drafter",
    "generate": "treedraft.speculate",
    "load_drafter": "treedraft.drafter",
    "load_target": "treedraft.targets",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
