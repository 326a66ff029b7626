"""Speculative decoding writes what plain decoding writes, id for id, whatever the drafter, the tree and where a block is cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.kit import Stub
from tests.tiny_drafters import BACKBONES, make_drafter, make_features, make_sequences, name_of, random_prompts
from treedraft.config import DecodeConfig, TrainConfig
from treedraft.drafter import Drafter
from treedraft.evaluate import Replay, Trajectory
from treedraft.metrics import tau
from treedraft.speculate import Generation, generate, generate_plain, report
from treedraft.targets import tiny as tiny_module
from treedraft.targets.generate import generate as generate_batch
from treedraft.targets.hf import Target
from treedraft.trainer import Trainer

CORRECTIONS = [{"name": "none"}, {"name": "markov", "variant": "rnn", "rank": 6}, {"name": "attention", "inputs": "fused"}]
DECODES = [
    DecodeConfig(mode="chain", depth=3),
    DecodeConfig(mode="tree", depth=5, width=3, budget=16),
    DecodeConfig(mode="tree", depth=7, width=7, budget=64),
    DecodeConfig(mode="tree", depth=1, width=70, budget=64),  # wider than the vocabulary
    DecodeConfig(mode="tree", depth=15, width=1, budget=64),
    DecodeConfig(mode="tree", depth=5, width=2, budget=2),
    DecodeConfig(mode="tree", depth=5, width=2, budget=1),
    DecodeConfig(mode="chain", depth=1),
    DecodeConfig(mode="tree", depth=9, width=4, budget=16, scorer="marginal"),
]


def sampled(config: DecodeConfig, temperature: float) -> DecodeConfig:
    return DecodeConfig(**{**{name: getattr(config, name) for name in config.__dataclass_fields__}, "temperature": temperature})


@pytest.fixture(scope="session")
def trained(tiny: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Folders of briefly trained drafters, one a backbone and correction."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("trained")
    tiny.tap(tiny.default_tap_layers)  # it is shared with tests of drafters that read others
    features = make_features(tiny, folder / "features", make_sequences(tiny, 24, new_tokens=40))
    config = TrainConfig(steps=40, sequences=8, anchors=4, learning_rate=1e-2)
    found = {}
    for backbone in BACKBONES:
        for correction in CORRECTIONS:
            drafter = make_drafter(tiny, backbone=backbone, correction=correction, random=False).requires_grad_(True)
            name = f"{backbone}-{correction['name']}"
            Trainer(drafter=drafter, target=tiny, features=features, config=config, folder=folder / name).run()
            found[name] = folder / name / "drafter"
    return found


def load(trained: dict[str, Any], target: Target, backbone: str, correction: dict) -> Drafter:
    drafter = Drafter.from_pretrained(trained[f"{backbone}-{correction['name']}"])
    return drafter.to(target.dtype).attach(target)


def check_same(target: Target, drafters: list[Drafter], prompts: list[list[int]], new_tokens: int = 24) -> list[Generation]:
    """Prompt i under setting i, greedy and sampled in turn; the reference is decoded plainly in one batch."""
    decodes = [sampled(DECODES[i % len(DECODES)], float(i // len(DECODES) % 2)) for i in range(len(prompts))]
    expected = generate_batch(
        target, prompts, max_new_tokens=new_tokens, temperature=[item.temperature for item in decodes], seeds=list(range(len(prompts))),
        batch_size=64,
    )  # fmt: skip
    results = []
    for i, (prompt, decode) in enumerate(zip(prompts, decodes, strict=True)):
        found = generate(target, drafters[i % len(drafters)], prompt, config=decode, max_new_tokens=new_tokens, seed=i)
        assert found.ids == expected[i], (i, decode, prompt)
        assert 1 + sum(item.emitted for item in found.rounds) == len(found.ids)
        results.append(found)
    return results


@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("correction", CORRECTIONS, ids=name_of)
def test_output_is_plain_decoding_in_fp64(tiny64: Target, trained: dict[str, Any], backbone: str, correction: dict) -> None:
    """Both backbones, three corrections: 204 prompts in all, lengths 1 to 40."""
    untrained = make_drafter(tiny64, backbone=backbone, correction=correction)
    drafters = [load(trained, tiny64, backbone, correction), untrained]
    prompts = random_prompts(tiny64, 34, seed=3 * BACKBONES.index(backbone) + CORRECTIONS.index(correction))
    results = check_same(tiny64, drafters, prompts)
    assert max(item.tau for item in results if item.rounds) > 1.2, "drafts are accepted somewhere"


@pytest.mark.parametrize("mode", ["chain", "tree"])
def test_greedy_output_is_plain_decoding_on_200_prompts(tiny64: Target, trained: dict[str, Any], mode: Any) -> None:
    drafters = [load(trained, tiny64, backbone, correction) for backbone in BACKBONES for correction in CORRECTIONS]
    prompts = random_prompts(tiny64, 200, seed=11)
    plain = generate_batch(tiny64, prompts, max_new_tokens=16, temperature=0.0, seeds=[0] * 200, batch_size=64)
    for i, (prompt, expected) in enumerate(zip(prompts, plain, strict=True)):
        config = DecodeConfig(mode=mode, depth=(5, 9)[i % 2], width=3, budget=24)
        found = generate(tiny64, drafters[i % len(drafters)], prompt, config=config, max_new_tokens=16)
        assert found.ids == expected, (i, prompt)


@pytest.mark.parametrize("backbone", BACKBONES)
def test_output_is_plain_decoding_in_fp32(tiny: Target, trained: dict[str, Any], backbone: str) -> None:
    drafters = [load(trained, tiny, backbone, correction) for correction in CORRECTIONS]
    check_same(tiny, drafters, random_prompts(tiny, 18, seed=5))


def test_other_targets_and_vocabularies(tmp_path) -> None:
    """Padded, untied, one key-value head; a reduced draft vocabulary narrower than the width."""
    target = tiny_module.load(dtype=torch.float64, padded_vocab_size=80, tied=False, kv_heads=1, family="llama")
    d2t = torch.tensor([1, 5, 8, 20, 40])
    drafters = [make_drafter(target, correction=correction, d2t=d2t) for correction in CORRECTIONS]
    for found in check_same(target, drafters, random_prompts(target, 10)):
        for item in found.rounds:
            assert set(item.tree.tokens[1:].tolist()) <= set(d2t.tolist())


def test_ties_go_to_the_lowest_id_in_both_decoders() -> None:
    target = tiny_module.load(dtype=torch.float64)
    target.model.get_input_embeddings().weight.data[9] = target.embedding[7]  # the two always tie
    drafter = make_drafter(target, correction="attention")
    found = check_same(target, [drafter], random_prompts(target, 9))
    assert all(9 not in item.ids for item in found)


# -- stubs that pin tau ----------------------------------------------------------------------------------------------


def stubbed(target: Target, prompt: list[int], shift: int, max_new_tokens: int, **fields: Any) -> tuple[Generation, Generation]:
    """(speculative, plain) of a stub that knows the plain answer."""
    temperature = fields.get("temperature", 0.0)
    further = generate_plain(target, prompt, max_new_tokens=max_new_tokens + 20, temperature=temperature, seed=3)
    plain = generate_plain(target, prompt, max_new_tokens=max_new_tokens, temperature=temperature, seed=3)
    drafter: Any = Stub(target, [*prompt, *further.ids], shift)
    return generate(target, drafter, prompt, config=DecodeConfig(**fields), max_new_tokens=max_new_tokens, seed=3), plain


@pytest.fixture(scope="module")
def endless() -> Target:
    """Writes until the cap."""
    target = tiny_module.load(dtype=torch.float64)
    target.eos_token_ids = ()
    return target


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("mode", ["chain", "tree"])
@pytest.mark.parametrize("depth", [1, 4, 15])
def test_oracle_and_adversary_pin_tau(endless: Target, temperature: float, mode: str, depth: int) -> None:
    fields = {"mode": mode, "depth": depth, "width": 2, "budget": 64, "temperature": temperature}
    found, plain = stubbed(endless, [5, 9], 0, 1 + 3 * (depth + 1), **fields)
    assert found.ids == plain.ids and found.tau == depth + 1 and len(found.rounds) == 3
    assert report(found, plain)["survival"] == [1.0] * depth
    found, plain = stubbed(endless, [5, 9], 1, 9, **fields)
    assert found.ids == plain.ids and found.tau == 1 and len(found.rounds) == 8


# -- where a block is cut ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cap", [0, 1, 2, 3, 7, 8])
def test_the_cap_cuts_inside_a_block(endless: Target, cap: int) -> None:
    found, plain = stubbed(endless, [5, 9], 0, cap, depth=4)
    assert found.ids == plain.ids and len(found.ids) == cap
    assert found.finish_reason == plain.finish_reason == "length" and found.text == plain.text


@pytest.mark.parametrize("place", range(7))
def test_end_of_text_cuts_inside_a_block(place: int) -> None:
    target = tiny_module.load(dtype=torch.float64)
    target.eos_token_ids = ()
    answer = generate_plain(target, [5, 9], max_new_tokens=12, temperature=1.0, seed=3).ids
    target.eos_token_ids = (answer[place],)
    found, plain = stubbed(target, [5, 9], 0, 12, depth=4, temperature=1.0)
    assert found.ids == plain.ids == answer[: answer.index(answer[place]) + 1]
    assert found.finish_reason == plain.finish_reason == "end of text"


@pytest.mark.parametrize(("place", "size"), [(0, 1), (1, 2), (3, 3), (4, 2), (6, 1)])
def test_a_stop_string_cuts_inside_a_block(endless: Target, place: int, size: int) -> None:
    answer = generate_plain(endless, [5, 9], max_new_tokens=12, temperature=1.0, seed=3)
    stop = endless.decode(answer.ids[place : place + size])
    drafter: Any = Stub(endless, [5, 9, *answer.ids], 0)
    config = DecodeConfig(depth=4, temperature=1.0)
    found = generate(endless, drafter, [5, 9], config=config, max_new_tokens=12, seed=3, stop=[stop, "never"])
    plain = generate_plain(endless, [5, 9], max_new_tokens=12, temperature=1.0, seed=3, stop=[stop, "never"])
    assert (found.ids, found.text, found.finish_reason) == (plain.ids, plain.text, "stop string")
    assert stop and stop not in found.text and answer.text.startswith(found.text + stop)


@pytest.mark.parametrize("shift", [0, 1], ids=["oracle", "adversary"])
@pytest.mark.parametrize("depth", [1, 4])
@pytest.mark.parametrize("length", [20, 21, 22, 23, 24, 25])
def test_the_window_edge(length: int, depth: int, shift: int) -> None:
    target = tiny_module.load(dtype=torch.float64, max_length=24)
    target.eos_token_ids = ()
    prompt = list(range(length))
    if length >= 24:
        for decode in (generate_plain, lambda *args, **_: stubbed(*args, shift, 9, depth=depth)):
            with pytest.raises(ValueError, match=f"prompt of {length} tokens .* 24 tokens"):
                decode(target, prompt)
        return
    found, plain = stubbed(target, prompt, shift, 30, depth=depth)
    assert found.ids == plain.ids and len(plain.ids) == 24 - length
    assert found.finish_reason == plain.finish_reason == "context window"


def test_a_prompt_of_one_token_and_one_of_none(tiny64: Target) -> None:
    drafter = make_drafter(tiny64, correction="attention")
    for token in (0, 5, 61):
        found = generate(tiny64, drafter, [token], config=DECODES[1], max_new_tokens=12)
        assert found.ids == generate_plain(tiny64, [token], max_new_tokens=12).ids
    with pytest.raises(ValueError, match="empty prompt"):
        generate(tiny64, drafter, [], config=DECODES[1])
    with pytest.raises(ValueError, match="max_new_tokens is -1"):
        generate(tiny64, drafter, [5], config=DECODES[1], max_new_tokens=-1)


def test_rejected_tails_leave_no_trace(tiny64: Target) -> None:
    """A request decoded after another one, whose rounds drafted other trees, drafts what it drafts alone."""
    drafter = make_drafter(tiny64, correction="attention")
    alone = generate(tiny64, drafter, [5, 9], config=DECODES[1], max_new_tokens=12)
    generate(tiny64, drafter, list(range(30)), config=DECODES[2], max_new_tokens=20)
    again = generate(tiny64, drafter, [5, 9], config=DECODES[1], max_new_tokens=12)
    for one, other in zip(alone.rounds, again.rounds, strict=True):
        assert torch.equal(one.tree.tokens, other.tree.tokens) and torch.equal(one.tree.scores, other.tree.scores)


# -- replay ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("correction", CORRECTIONS, ids=name_of)
@pytest.mark.parametrize(("mode", "temperature"), [("chain", 0.0), ("tree", 1.0), ("tree", 0.0), ("chain", 1.0)])
def test_replay_is_live_round_by_round(
    tiny64: Target, trained: dict[str, Any], backbone: str, correction: dict, mode: Any, temperature: float
) -> None:
    drafter = load(trained, tiny64, backbone, correction)
    config = DecodeConfig(mode=mode, depth=7, width=3, budget=20, temperature=temperature)
    prompts = random_prompts(tiny64, 5, longest=12, seed=8)
    answers = generate_batch(tiny64, prompts, max_new_tokens=16, temperature=temperature, seeds=list(range(5)), batch_size=5)
    trajectories = [
        Trajectory(prompt=str(i), domain="", seed=i, ids=np.array([*prompt, *answer]), prompt_length=len(prompt))
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]
    replayed = {item.seed: item for item in Replay(tiny64, trajectories, at_once=3).run(drafter, config)}
    live = [generate(tiny64, drafter, prompt, config=config, max_new_tokens=16, seed=i).counts() for i, prompt in enumerate(prompts)]
    for i, rounds in enumerate(live):
        assert replayed[i].emitted.tolist() == rounds.emitted.tolist()
        assert replayed[i].nodes.tolist() == rounds.nodes.tolist()
        # The record ends with the answer; a live round may accept more than is emitted of it.
        whole = rounds.emitted > rounds.accepted
        assert whole[:-1].all()
        assert replayed[i].accepted[whole].tolist() == rounds.accepted[whole].tolist()
        assert (replayed[i].accepted <= rounds.accepted).all()
    assert tau(list(replayed.values())) == tau(live)


def test_batched_decoding_is_plain_decoding(tiny64: Target) -> None:
    prompts = random_prompts(tiny64, 9)
    for temperature in (0.0, 1.0):
        batched = generate_batch(tiny64, prompts, max_new_tokens=20, temperature=temperature, seeds=list(range(9)), batch_size=4)
        for seed, prompt in enumerate(prompts):
            assert batched[seed] == generate_plain(tiny64, prompt, max_new_tokens=20, temperature=temperature, seed=seed).ids
