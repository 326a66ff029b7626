"""LongSpark drafters of the shipped target in float32: what is written is what plain decoding writes, across the window's edge."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.tiny_drafters import make_drafter
from treedraft.config import DecodeConfig
from treedraft.data.prompts import prompt_set
from treedraft.drafter import Drafter
from treedraft.run import assets_folder
from treedraft.speculate import generate, generate_plain
from treedraft.targets import load_target
from treedraft.targets.hf import Target

WINDOW = 16
CONTEXT = {"name": "longspark", "window": WINDOW, "summary": 4}


@pytest.fixture(scope="module")
def pocket() -> Target:
    return load_target("pocket", dtype=torch.float32)


def with_shipped_head(pocket: Target) -> Drafter:
    """Untrained but for the Markov head of a drafter that ships, so that drafts are accepted."""
    shipped = Drafter.from_pretrained(assets_folder() / "drafters" / "pocket" / "bidirectional-markov")
    drafter = make_drafter(
        pocket, backbone="bidirectional", correction=shipped.config.correction, context=CONTEXT, num_layers=2, layout="anchor-first", block_size=7, random=False
    )
    drafter.correction.load_state_dict(shipped.correction.state_dict())
    norm = drafter.backbone.norm
    assert norm is not None
    torch.nn.init.constant_(norm.weight, 0.02)  # or the logits of its own random slots would drown the head's
    return drafter


def untrained(pocket: Target) -> Drafter:
    return make_drafter(pocket, backbone="causal", correction="attention", context=CONTEXT, num_layers=2, layout="anchor-first", block_size=7)


@pytest.mark.parametrize("make", [with_shipped_head, untrained])
def test_output_is_plain_decoding(pocket: Target, make) -> None:
    """Greedy and sampled trees, and chains: prompts of 1, W - 1, W and W + 1 tokens, and of the world."""
    drafter = make(pocket)
    chats = [pocket.encode_chat(prompt.turns) for prompt in prompt_set("world", count=2)]
    taus = []
    for place, prompt in enumerate([*(chats[0][:length] for length in (1, WINDOW - 1, WINDOW, WINDOW + 1)), *chats]):
        for mode, temperature in (("tree", 0.0), ("tree", 1.0), ("chain", 0.0))[: 2 if make is untrained else 3]:
            config = DecodeConfig(mode=mode, depth=7, width=4, budget=24, temperature=temperature)
            found = generate(pocket, drafter, prompt, config=config, max_new_tokens=12, seed=place)
            assert found.ids == generate_plain(pocket, prompt, temperature=temperature, max_new_tokens=12, seed=place).ids, (place, config)
            taus += [found.tau] if found.rounds else []
    assert len(taus) >= 10 and (make is untrained or np.mean(taus) > 1.2), "drafts are accepted"
