"""The embedded target: a Qwen3 chat model of 3.5 M parameters that ships with the package; it knows only our world."""

from __future__ import annotations

from typing import Any

import torch

from treedraft.pocket import ASSETS
from treedraft.targets import hf


def load(*, device: str | torch.device | None = None, dtype: torch.dtype | None = None) -> hf.Target:
    """The shipped model; its float16 weights are the target in any dtype (float32 on the CPU unless asked).

    ValueError if the model is missing or damaged.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not (ASSETS / "model.safetensors").is_file():
        raise ValueError(
            f"the target 'pocket' is not in {ASSETS}: run `python -m treedraft.pocket train` (half an hour on one core)"
        )
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(ASSETS)
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(ASSETS, dtype=dtype, attn_implementation="sdpa")
    except Exception as error:  # safetensors raises a type of its own for a damaged file
        if type(error).__name__ != "SafetensorError":
            raise
        raise ValueError(f"cannot read the target 'pocket' in {ASSETS}: {error}") from error
    mask = tokenizer.convert_tokens_to_ids("<|mask|>")
    return hf.Target(name="pocket", model=model.to(device), tokenizer=tokenizer, mask_token_id=mask)
