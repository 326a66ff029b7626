"""What the tests of shipped drafters share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from treedraft.config import DecodeConfig
from treedraft.data.prompts import Prompt
from treedraft.drafter import load_drafter, shipped_drafters
from treedraft.evaluate import Replay, Trajectory
from treedraft.speculate import generate, generate_plain
from treedraft.targets.hf import Target


def check_replay_is_live(
    target: Target, prompts: Sequence[Prompt], *, depth: int, max_new_tokens: int, budget: int = 255
) -> None:
    """Every shipped drafter, chain and tree, greedy and sampled: the same emitted and accepted counts round by round."""
    requests = [target.encode_chat(prompt.turns) for prompt in prompts]
    for temperature in (0.0, 1.0):
        plain = [
            generate_plain(target, ids, temperature=temperature, max_new_tokens=max_new_tokens, seed=seed).ids
            for seed, ids in enumerate(requests)
        ]
        trajectories = [
            Trajectory(prompt=str(i), domain="", seed=i, ids=np.array([*ids, *answer]), prompt_length=len(ids))
            for i, (ids, answer) in enumerate(zip(requests, plain, strict=True))
        ]
        for name in shipped_drafters(target.name):
            drafter = load_drafter(name, target=target)
            for mode in ("chain", "tree"):
                config = DecodeConfig(mode=mode, depth=depth, temperature=temperature, budget=budget)
                replayed = {item.seed: item for item in Replay(target, trajectories).run(drafter, config)}
                for i, ids in enumerate(requests):
                    result = generate(target, drafter, ids, config=config, max_new_tokens=max_new_tokens, seed=i)
                    live = result.counts()
                    assert result.ids == plain[i]
                    assert replayed[i].emitted.tolist() == live.emitted.tolist(), (name, mode, temperature, i)
                    whole = live.emitted > live.accepted  # a last round may accept more than it emits
                    assert replayed[i].accepted[whole].tolist() == live.accepted[whole].tolist()
