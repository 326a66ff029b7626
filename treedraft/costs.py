"""What the parts of a round cost on this machine, measured once: verification by number of nodes, drafting, corrections.

`python -m treedraft.bench profile` measures and prints; `decode --budget auto` measures when nothing is stored. A
profile belongs to a target, a drafter, a dtype, a device and a number of threads, and lies in the user's cache folder.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from treedraft import files
from treedraft.config import MOST_NODES, canonical, short_hash
from treedraft.drafter import Drafter, Prefix
from treedraft.run import cache_folder, hardware
from treedraft.targets.hf import Target
from treedraft.trees.best_first import BestFirst
from treedraft.trees.limits import Cost

NODES = (1, 2, 4, 8, 16, 32, 64, 128, MOST_NODES)
CONTEXTS = (64, 512, 2048)
_STEP = 64  # tokens after which a round's cost is computed anew
_WIDE = 8  # nodes a level of the wider of the trees whose building is timed


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Seconds of one round's parts: `verify[c][i]` of NODES[i] nodes behind contexts[c] tokens."""

    contexts: tuple[int, ...]
    verify: tuple[tuple[float, ...], ...]
    draft: float
    level: float
    correction: float
    hardware: str

    def at(self, length: int, requests: int = 1) -> Cost:
        """The cost of a round behind `length` tokens, linear between the measured contexts and flat outside them.

        Of several requests side by side, which then have trees of one size.
        """
        return _cost(self, length - length % _STEP, requests)


@cache
def _cost(profile: Profile, length: int, requests: int) -> Cost:
    curves = np.array([fit(NODES, seconds, requests * MOST_NODES)[requests - 1 :: requests] for seconds in profile.verify])
    curve = [float(np.interp(length, profile.contexts, column)) for column in curves.T]
    return Cost(draft=profile.draft, level=profile.level, correction=requests * profile.correction, verify=tuple(curve))


def fit(nodes: Sequence[int], seconds: Sequence[float], most: int) -> list[float]:
    """Seconds of 1 .. most nodes: the rising convex piecewise-linear curve nearest to what was measured.

    Least squares of relative errors over a + b n + sum c_k (n - n_k)+ with a, b, c_k >= 0.
    """
    from scipy.optimize import nnls

    def basis(n: np.ndarray) -> np.ndarray:
        knots = np.array(nodes[1:-1])
        return np.column_stack([np.ones(len(n)), n, np.clip(n[:, None] - knots, 0, None)])

    at, took = np.array(nodes, dtype=float), np.array(seconds)
    weights, _ = nnls(basis(at) / took[:, None], np.ones(len(at)))
    return (basis(np.arange(1, most + 1, dtype=float)) @ weights).tolist()


def profile_of(target: Target, drafter: Drafter, depth: int, *, refresh: bool = False) -> Profile:
    """The stored profile, measured first where there is none (about a minute for smollm2-135m on two cores)."""
    path = _path(target, drafter, depth)
    if refresh or not path.is_file():
        files.write_json(path, asdict(measure(target, drafter, depth)))
    stored = files.read_json(path)
    return Profile(**{**stored, "contexts": tuple(stored["contexts"]), "verify": tuple(map(tuple, stored["verify"]))})


def _path(target: Target, drafter: Drafter, depth: int) -> Path:
    identity = {
        "target": target.fingerprint(), "drafter": canonical(drafter.config), "depth": depth, "dtype": str(target.dtype),
        "hardware": hardware(), "device": str(target.device), "threads": torch.get_num_threads(), "torch": torch.__version__, "grid": [NODES, CONTEXTS, _WIDE],
        "drafter_device": None if drafter.device == target.device else str(drafter.device),
    }  # fmt: skip
    return cache_folder() / "profiles" / f"{target.name.replace('/', '--')}-{short_hash(identity)}.json"


@torch.inference_mode()
def measure(target: Target, drafter: Drafter, depth: int, *, repeats: int = 3) -> Profile:
    """Time the parts of a round behind prefixes of several lengths. The target's request is replaced."""
    contexts = [length for length in CONTEXTS if length + MOST_NODES < target.max_length] or [target.max_length // 2]
    generator = torch.Generator().manual_seed(0)
    verify, drafts, levels, corrections = [], [], [], []
    for length in contexts:
        prompt = torch.randint(target.vocab_size, (length,), generator=generator)
        start = target.prefill(prompt)
        prefix = Prefix(drafter, capacity=length + depth)
        prefix.append(start.taps.to(drafter.device))
        anchor, end = prompt[-1:].to(drafter.device), torch.tensor([[length]], device=drafter.device)
        hidden = drafter.hidden(prefix.memory, anchor[None], end, depth)[:, 0]

        def draft(prefix: Prefix = prefix, anchor: torch.Tensor = anchor, end: torch.Tensor = end) -> None:
            drafter.hidden(prefix.memory, anchor[None], end, depth)

        def seconds_to_build(width: int, levels: int, hidden: torch.Tensor = hidden, anchor: torch.Tensor = anchor) -> float:
            """Of a tree with `width` nodes at every depth, whose levels are a call of the scorer each."""
            builder = BestFirst(budget=1 + width * levels, width=width, depth=levels, admit="pop", frontier=width)
            return _seconds(lambda: builder.build(anchor, drafter.scorer(hidden, anchor)).tree(0), repeats, drafter.device)

        once, narrow, wide = (seconds_to_build(*size) for size in ((1, 1), (1, depth), (_WIDE, depth)))
        correction = max(0.0, wide - narrow) / max(1, (_WIDE - 1) * (depth - 1))
        level = max(0.0, (narrow - once) / max(1, depth - 1) - correction)
        corrections.append(correction)
        levels.append(level)
        # What every tree costs belongs to the draft.
        drafts.append(_seconds(draft, repeats, drafter.device) + max(0.0, once - level - correction))
        verify.append(tuple(_seconds(_verification(target, nodes), repeats, target.device) for nodes in NODES))
    return Profile(
        contexts=tuple(contexts),
        verify=tuple(verify),
        draft=statistics.mean(drafts),
        level=statistics.mean(levels),
        correction=statistics.mean(corrections),
        hardware=hardware(),
    )


def _verification(target: Target, nodes: int) -> Callable[[], Any]:
    tokens = torch.zeros(nodes, dtype=torch.int64)
    parents = torch.arange(-1, nodes - 1).clamp(max=0) if nodes > 1 else torch.tensor([-1])
    return lambda: target.verify(tokens, parents)


def _seconds(call: Callable[[], Any], repeats: int, device: torch.device) -> float:
    """Median of several, after a warm-up."""
    times = []
    for repeat in range(repeats + 1):
        _wait(device)
        begin = time.perf_counter()
        call()
        _wait(device)
        if repeat:
            times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
