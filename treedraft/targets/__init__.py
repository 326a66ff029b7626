"""Models whose text is to be reproduced. `load_target` takes a name of this folder, a model folder or a hub id."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treedraft import registry

if TYPE_CHECKING:
    import torch

    from treedraft.targets.hf import Target

_HELPERS = frozenset({"hf", "cache", "batch", "generate", "graphs", "sampling"})


def target_names() -> list[str]:
    return registry.names("targets", exclude=_HELPERS)


def parse_dtype(name: str | None) -> torch.dtype | None:
    """A torch dtype by its name; ValueError with the choices if it is not a floating type."""
    import torch

    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
    if name is not None and name not in dtypes:
        raise ValueError(registry.unknown("dtype", name, list(dtypes)))
    return dtypes[name] if name is not None else None


def parse_device(name: str | None) -> torch.device | None:
    """The device of that name; ValueError with the choices if it is not one that this machine computes on."""
    import torch

    try:
        if name is not None:
            torch.zeros(1, device=name).item()
    except (RuntimeError, AssertionError):  # the latter where torch was built without it
        known = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
        raise ValueError(registry.unknown("device", name or "", known)) from None
    return torch.device(name) if name is not None else None


def load_target(
    name: str,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    rope_scaling: str | None = None,
    attention: str = "auto",
) -> Target:
    """The target called `name` (see `target_names`), or the Hugging Face model at that folder or hub id.

    `attention` is how it attends to trees (see `Target.use_attention`). With `rope_scaling` ("ntk:4") its rotary angles, which drafters borrow, are made for a longer context.
    """
    target = _load(name, device, dtype, attention)
    if rope_scaling is not None:
        target.scale_rotary(rope_scaling)
    return target


def window_of(name: str) -> int | None:
    """Tokens of a target's context window, as the config.json on this disk says; None where there is none to read."""
    from pathlib import Path

    from treedraft.files import read_json
    from treedraft.run import assets_folder, cache_folder

    for folder in (assets_folder() / name, cache_folder() / name, Path(name)):
        if (folder / "config.json").is_file():
            return read_json(folder / "config.json").get("max_position_embeddings")
    return None


def _load(name: str, device: str | torch.device | None, dtype: torch.dtype | None, attention: str) -> Target:
    if name in target_names():
        return registry.load("targets", name).load(device=device, dtype=dtype, attention=attention)
    from pathlib import Path

    from treedraft.targets import hf

    if "/" not in name and not Path(name).exists():
        known = registry.unknown("target", name, target_names())
        raise ValueError(f"{known}, a model folder, or a hub id like 'Qwen/Qwen3-0.6B'")
    return hf.load(name, device=device, dtype=dtype, attention=attention)
