"""What the tests of shipped drafters share."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from treedraft.config import DecodeConfig
from treedraft.data.prompts import Prompt
from treedraft.drafter import load_drafter, shipped_drafters
from treedraft.evaluate import Replay, Trajectory
from treedraft.speculate import generate
from treedraft.targets.hf import Target


def check_replay_is_live(
    target: Target, prompts: Sequence[Prompt], *, depth: int, max_new_tokens: int, budget: int = 255
) -> None:
    """Every shipped drafter, chain and tree, greedy and sampled: the same emitted and accepted counts round by round.

    What is replayed is the live output itself, so that this does not hang on the last bit of a target's logits.
    """
    requests = [target.encode_chat(prompt.turns) for prompt in prompts]
    for name, mode, temperature in itertools.product(shipped_drafters(target.name), ("chain", "tree"), (0.0, 1.0)):
        drafter = load_drafter(name, target=target)
        config = DecodeConfig(mode=mode, depth=depth, temperature=temperature, budget=budget)
        results = [
            generate(target, drafter, ids, config=config, max_new_tokens=max_new_tokens, seed=seed)
            for seed, ids in enumerate(requests)
        ]
        trajectories = [
            Trajectory(prompt=str(i), domain="", seed=i, ids=np.array([*ids, *result.ids]), prompt_length=len(ids))
            for i, (ids, result) in enumerate(zip(requests, results, strict=True))
        ]
        replayed = {item.seed: item for item in Replay(target, trajectories).run(drafter, config)}
        for i, result in enumerate(results):
            live = result.counts()
            assert replayed[i].emitted.tolist() == live.emitted.tolist(), (name, mode, temperature, i)
            whole = live.emitted > live.accepted  # a last round may accept more than it emits
            assert replayed[i].accepted[whole].tolist() == live.accepted[whole].tolist()
