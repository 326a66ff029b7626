"""What ships decodes exactly: the drafters of `pocket` against plain decoding, greedy and sampled, in float32."""

from __future__ import annotations

import pytest

from tests.readme import run_decode_commands
from tests.shipped import check_replay_is_live
from treedraft.bench import calls_when_decoding
from treedraft.config import DecodeConfig
from treedraft.data.prompts import prompt_set
from treedraft.drafter import load_drafter, shipped_drafters
from treedraft.metrics import Rounds, tau
from treedraft.speculate import generate, generate_plain
from treedraft.targets import load_target, target_names
from treedraft.targets.hf import Target

LARGEST_DRAFTER = 16e6  # bytes


@pytest.fixture(scope="module")
def pocket() -> Target:
    return load_target("pocket")


def test_greedy_output_equals_plain_decoding_on_200_prompts(pocket: Target) -> None:
    drafters = [load_drafter(name, target=pocket) for name in shipped_drafters("pocket")]
    assert drafters
    counts: dict[str, list[Rounds]] = {"chain": [], "tree": []}
    for number, prompt in enumerate(prompt_set("world", count=200)):
        ids = pocket.encode_chat(prompt.turns)
        plain = generate_plain(pocket, ids, max_new_tokens=24).ids
        for mode, own in counts.items():
            drafter, config = drafters[number % len(drafters)], DecodeConfig(mode=mode, depth=(15, 23, 7)[number % 3])
            result = generate(pocket, drafter, ids, config=config, max_new_tokens=24)
            assert result.ids == plain, (prompt.id, mode)
            own.append(result.counts(prompt=prompt.id))
    assert 1.5 < tau(counts["chain"]) < tau(counts["tree"])


def test_seeded_samples_equal_plain_decoding(pocket: Target) -> None:
    drafter = load_drafter(None, target=pocket)
    for seed, prompt in enumerate(prompt_set("world", count=20)):
        ids = pocket.encode_chat(prompt.turns)
        config = DecodeConfig(mode="tree", depth=23, temperature=1.0)
        result = generate(pocket, drafter, ids, config=config, max_new_tokens=40, seed=seed)
        assert result.ids == generate_plain(pocket, ids, temperature=1.0, max_new_tokens=40, seed=seed).ids, prompt.id


def test_replay_is_live_round_by_round(pocket: Target) -> None:
    check_replay_is_live(pocket, prompt_set("world", count=6), depth=23, max_new_tokens=40)


def test_a_tree_takes_hardly_more_calls_than_levels() -> None:
    for found in calls_when_decoding("pocket", {"budget": 255, "width": 7, "depth": 15}, count=2).values():
        assert found["levels"] <= found["calls"] <= found["levels"] + 1


def test_readme_commands_decode() -> None:
    run_decode_commands(target="pocket", least_tau=5)


def test_shipped_drafters_are_small_and_say_how_they_were_trained() -> None:
    import json

    from treedraft.run import assets_folder

    configs = [path for name in target_names() for path in (assets_folder() / "drafters" / name).glob("*/config.json")]
    assert configs
    for path in configs:
        record = json.loads(path.read_text())
        assert (path.parent / "model.safetensors").stat().st_size <= LARGEST_DRAFTER
        assert record["training"]["steps"] > 0 and record["training"]["data"] and record["target"]["fingerprint"]
