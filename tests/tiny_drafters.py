"""Small drafters and training sets for the tiny target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from treedraft import registry
from treedraft.config import DrafterConfig
from treedraft.data.features import FeatureCache, Sequences
from treedraft.drafter import Drafter, shape_for
from treedraft.targets.generate import generate
from treedraft.targets.hf import Target

# The options of each correction that change what it computes; a correction that is not listed is tested as it is.
_OPTIONS: dict[str, list[dict[str, Any]]] = {
    "markov": [{"variant": variant, "rank": 6} for variant in ("vanilla", "gated", "rnn")],
    "attention": [{"inputs": inputs, "mlp": mlp} for inputs in ("hidden", "parent", "sum", "fused") for mlp in (False, True)],
}
CORRECTIONS = [{"name": name, **options} for name in registry.names("corrections") for options in _OPTIONS.get(name, [{}])]
BACKBONES = registry.names("backbones")
CONTEXTS: list[dict[str, Any]] = [
    {"name": "full"},
    {"name": "longspark", "window": 6, "summary": 3},
    {"name": "longspark", "window": 6, "summary": 0},
    {"name": "longspark", "window": 0, "summary": 3},
    {"name": "longspark", "window": 4, "summary": 2, "boundary": False, "slots": "rotary"},
    {"name": "longspark", "window": 0, "summary": 0, "slots": "interpolate"},
]
LONGSPARK = CONTEXTS[1]


def name_of(component: dict[str, Any]) -> str:
    return "-".join(f"{key}{value}" if isinstance(value, int) else str(value) for key, value in component.items() if key != "rank")


def randomise(module: nn.Module, seed: int = 0, scale: float = 0.2) -> None:
    """Move every weight, so that what starts at zero has an effect."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in module.parameters():
            weight += scale * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)


def make_drafter(
    target: Target,
    *,
    backbone: str = "causal",
    correction: dict[str, Any] | str = "none",
    seed: int = 0,
    random: bool = True,
    num_layers: int = 1,
    norm: str = "own",
    d2t: torch.Tensor | None = None,
    **fields: Any,
) -> Drafter:
    """An attached drafter in the target's dtype; `random` moves it away from its start, where corrections do nothing."""
    correction = {"name": correction} if isinstance(correction, str) else correction
    draft_vocab_size = None if d2t is None else len(d2t)
    config = DrafterConfig(
        backbone={"name": backbone, "num_layers": num_layers, "norm": norm}, correction=correction, draft_vocab_size=draft_vocab_size,
        **{"block_size": 6, **fields},
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        drafter = Drafter(config, shape_for(target, config), d2t)
    if random:
        randomise(drafter.correction, seed)
    return drafter.eval().to(target.dtype).attach(target)


def random_prompts(target: Target, count: int, *, longest: int = 40, seed: int = 0) -> list[list[int]]:
    """Prompts of 1 .. `longest` ordinary tokens."""
    rng = np.random.default_rng(seed)
    lengths = [1, *rng.integers(1, longest + 1, size=count - 1)] if count else []
    return [rng.integers(0, target.vocab_size - 2, size=length).tolist() for length in lengths]


def make_sequences(target: Target, count: int = 12, *, new_tokens: int = 24, seed: int = 0, digest: str = "tests") -> Sequences:
    """The target's own sampled answers to random prompts."""
    prompts = random_prompts(target, count, longest=9, seed=seed)
    answers = generate(target, prompts, max_new_tokens=new_tokens, temperature=1.0, seeds=list(range(count)), batch_size=8, stop=())
    ids = [np.array([*prompt, *answer]) for prompt, answer in zip(prompts, answers, strict=True)]
    return Sequences(ids=ids, prompt_lengths=np.array([len(prompt) for prompt in prompts]), digest=digest)


def make_features(target: Target, folder: Path, sequences: Sequences | None = None) -> FeatureCache:
    """Of the layers that the target taps now."""
    cache = FeatureCache(folder, target, sequences or make_sequences(target), limit_gb=1.0)
    cache.fill()
    return cache
