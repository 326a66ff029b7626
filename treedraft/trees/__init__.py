"""Draft trees: what they are, how they grow from scored nodes, how the target's choices walk them. Needs only torch.

A builder is a file of this folder that holds a class `Builder`; its names are listed without importing torch.
"""

from __future__ import annotations

from treedraft import registry

_HELPERS = frozenset({"accept", "builder", "calibration", "drawn", "limits", "mask", "naive", "rules", "scorers", "tree"})


def builder_names() -> list[str]:
    """Names of the tree builders, sorted: "best-first", "chain" and whatever file is added to this folder."""
    return registry.names("trees", exclude=_HELPERS)


def load_builder(name: str) -> type:
    """The `Builder` class called `name`, or of the module at a dotted path. ValueError with the choices if unknown."""
    if "." not in name and name not in builder_names():
        raise ValueError(registry.unknown("tree builder", name, builder_names()))
    return registry.load("trees", name).Builder
