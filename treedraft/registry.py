"""A component is a file: `corrections/markov.py` is the correction "markov". Names are listed without importing any."""

from __future__ import annotations

import difflib
import importlib
from pathlib import Path
from types import ModuleType

_ROOT = Path(__file__).parent


def names(seam: str, *, exclude: frozenset[str] = frozenset()) -> list[str]:
    """Component names of a folder, sorted; files starting with "_" are helpers, "_" inside a name reads as "-"."""
    files = (path.stem for path in (_ROOT / seam).glob("*.py") if not path.stem.startswith("_"))
    return sorted(name.replace("_", "-") for name in files if name not in exclude)


def load(seam: str, name: str) -> ModuleType:
    """The module of a component: a file of the folder, or a dotted path. ValueError with a suggestion if not."""
    if "." in name:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise ValueError(f"no module {name!r} for {seam}: {error}") from error
    known = names(seam)
    if name not in known:
        raise ValueError(unknown(seam.removesuffix("s"), name, known))
    return importlib.import_module(f"treedraft.{seam}.{name.replace('-', '_')}")


def unknown(kind: str, name: str, known: list[str]) -> str:
    """One sentence for a name that does not exist, with the nearest one that does."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    return f"unknown {kind} {name!r}{hint}; known: {', '.join(known)}"
