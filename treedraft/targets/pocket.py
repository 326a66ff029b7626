"""The embedded target: a Qwen3 chat model of 3.5 M parameters that ships with the package; it knows only our world."""

from __future__ import annotations

import torch

from treedraft.pocket import ASSETS
from treedraft.targets import hf


def load(*, device: str | torch.device | None = None, dtype: torch.dtype | None = None, attention: str = "auto") -> hf.Target:
    """The shipped model; its float16 weights are the target in any dtype (float32 on the CPU unless asked).

    ValueError if the model is missing or damaged.
    """
    if not (ASSETS / "model.safetensors").is_file():
        raise ValueError(
            f"the target 'pocket' is not in {ASSETS}: run `python -m treedraft.pocket train` (half an hour on one core)"
        )
    target = hf.load(str(ASSETS), device=device, dtype=dtype, attention=attention)
    target.name = "pocket"
    return target
