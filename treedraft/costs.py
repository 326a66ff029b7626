"""What the parts of a round cost on this machine, measured once: verification by number of nodes, drafting, corrections.

`python -m treedraft.bench profile` measures and prints; `decode --budget auto` measures when nothing is stored. A
profile belongs to a target, how it attends to trees and whether its weights are packed, a drafter, how it scores nodes, a
dtype, a device and a number of threads, and lies in the user's cache folder.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from treedraft import files
from treedraft.config import MOST_NODES, Rung, canonical, short_hash
from treedraft.drafter import Drafter, Prefix
from treedraft.run import cache_folder, hardware
from treedraft.targets.batch import Requests
from treedraft.targets.hf import Target
from treedraft.trees.best_first import BestFirst
from treedraft.trees.limits import Cost
from treedraft.trees.tree import DraftTree, TreeBatch

NODES = (1, 2, 4, 8, 16, 32, 64, 128, MOST_NODES)
CONTEXTS = (64, 512, 2048, 8192)
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

        Of several requests side by side, which then have trees of one size: R trees of n nodes are taken for one of R n
        nodes, beyond the largest measured one along its last slope, and a call of the drafter costs its weights once,
        its nodes each. `verify_several` measures what that leaves out: each request reads a prefix of its own.
        """
        return _cost(self, length - length % _STEP, requests)


@cache
def _cost(profile: Profile, length: int, requests: int) -> Cost:
    curves = fit(NODES, profile.verify, requests * MOST_NODES)[:, requests - 1 :: requests]
    curve = [float(np.interp(length, profile.contexts, column)) for column in curves.T]
    return Cost(draft=profile.draft, level=profile.level, correction=requests * profile.correction, verify=tuple(curve))


def fit(nodes: Sequence[int], seconds: Sequence[Sequence[float]], most: int) -> np.ndarray:
    """Seconds [C, most] of 1 .. most nodes behind each of C rising contexts, from those [C, len(nodes)] measured: the
    nearest curves that are convex and rise, with the nodes as with the context.

    Least squares of relative errors. The first context has a + b n + sum c_k (n - n_k)+ with a, b, c_k >= 0, and every
    other one adds such a curve to that before. None is below the least that was measured.
    """
    from scipy.optimize import nnls

    def basis(n: np.ndarray) -> np.ndarray:
        knots = np.array(nodes[1:-1])
        return np.column_stack([np.ones(len(n)), n, np.clip(n[:, None] - knots, 0, None)])

    took, added = np.array(seconds), np.tril(np.ones((len(seconds), len(seconds))))
    weights, _ = nnls(np.kron(added, basis(np.array(nodes, dtype=float))) / took.reshape(-1, 1), np.ones(took.size))
    return np.maximum(added @ weights.reshape(len(seconds), -1) @ basis(np.arange(1, most + 1, dtype=float)).T, took.min())


def profile_of(
    target: Target, drafter: Drafter, depth: int, *, scorer: Rung = "conditional", candidates: int | None = None, refresh: bool = False
) -> Profile:
    """The stored profile, measured first where there is none (about a minute for smollm2-135m on two cores)."""
    path = _path(target, drafter, depth, scorer, candidates)
    if refresh or not path.is_file():
        files.write_json(path, asdict(measure(target, drafter, depth, scorer=scorer, candidates=candidates)))
    stored = files.read_json(path)
    return Profile(**{**stored, "contexts": tuple(stored["contexts"]), "verify": tuple(map(tuple, stored["verify"]))})


def _path(target: Target, drafter: Drafter, depth: int, scorer: Rung, candidates: int | None) -> Path:
    identity = {
        "target": target.fingerprint(), "drafter": canonical(drafter.config), "depth": depth, "dtype": str(target.dtype),
        "hardware": hardware(), "device": str(target.device), "threads": torch.get_num_threads(), "torch": torch.__version__, "grid": [NODES, contexts_of(target), _WIDE],
        "attention": target.attention.name, "packed": target.packed, "scorer": scorer, "candidates": candidates,
        "drafter_device": None if drafter.device == target.device else str(drafter.device),
    }  # fmt: skip
    return cache_folder() / "profiles" / f"{target.name.replace('/', '--')}-{short_hash(identity)}.json"


def contexts_of(target: Target) -> list[int]:
    """Lengths of prefixes to measure behind: CONTEXTS, the last as far as the window allows."""
    room = target.max_length - MOST_NODES - 1
    return sorted({min(length, room) for length in CONTEXTS}) if room > 0 else [target.max_length // 2]


@torch.inference_mode()
def measure(
    target: Target, drafter: Drafter, depth: int, *, scorer: Rung = "conditional", candidates: int | None = None, repeats: int = 3
) -> Profile:
    """Time the parts of a round behind prefixes of several lengths. The target's request is replaced."""
    contexts = contexts_of(target)
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
            score = partial(drafter.scorer, hidden, anchor, scorer, candidates=candidates)
            return _seconds(lambda: builder.build(anchor, score()).tree(0), repeats, drafter.device)

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


@torch.inference_mode()
def verify_several(target: Target, requests: int, length: int, nodes: Sequence[int], *, repeats: int = 3) -> list[float]:
    """Seconds of one forward over `requests` trees of so many nodes each, behind prefixes of `length` tokens."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(target.vocab_size, (requests, length), generator=generator).tolist()
    rows = Requests(target, prompts, capacity=length + max(nodes))
    for row in range(requests):
        rows.prefill(row)
    took = []
    for count in nodes:
        tree = DraftTree(tokens=torch.zeros(count, dtype=torch.int64), parents=_star(count), depths=_star(count) + 1, scores=torch.zeros(count))
        trees = TreeBatch.of([tree] * requests)
        took.append(_seconds(lambda trees=trees: rows.verify(trees), repeats, target.device))
    return took


def _star(nodes: int) -> torch.Tensor:
    """Parents of a root and its children."""
    return torch.zeros(nodes, dtype=torch.int64).index_fill_(0, torch.tensor([0]), -1)


def _verification(target: Target, nodes: int) -> Callable[[], Any]:
    tokens, parents = torch.zeros(nodes, dtype=torch.int64), _star(nodes)
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
