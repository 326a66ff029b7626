"""The law of a target: a chain is a plain forward, a node is its path, commit then verify is starting from the longer prefix."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from tests.tolerances import assert_close
from tests.tree_cases import PARENTS, PROMPT, TOKENS
from treedraft.ops.tree_attention.mask import TreeRows, tree_rows
from treedraft.targets import hf
from treedraft.targets import tiny as tiny_module
from treedraft.targets.cache import RowCache
from treedraft.targets.hf import Target, default_tap_layers, find_mask_token
from treedraft.trees.mask import depths_of

_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
VARIANTS = {
    "qwen3": {},
    "llama": {"family": "llama"},
    "untied": {"tied": False},
    "llama-untied": {"family": "llama", "tied": False, "kv_heads": 1},
    "gqa-1": {"kv_heads": 1},
    "gqa-4": {"kv_heads": 4},
    "padded": {"padded_vocab_size": 80},
    "padded-untied": {"padded_vocab_size": 80, "tied": False, "family": "llama"},
    "deep": {"num_layers": 6},
    "linear": {"rope": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    "dynamic": {"rope": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
    "yarn": {"rope": {**_YARN, "rope_theta": 10000.0}},
    "llama3": {"family": "llama", "rope": {**_LLAMA3, "rope_theta": 10000.0}},
}
every_variant = pytest.mark.parametrize("variant", VARIANTS)
PATHS = [[0], [0, 1], [0, 2], [0, 3], [0, 1, 4], [0, 1, 5], [0, 2, 6], [0, 1, 5, 7]]


@functools.cache
def target_of(variant: str) -> Target:
    return tiny_module.load(dtype=torch.float64, **VARIANTS[variant])


@torch.no_grad()
def plain_logits(target: Target, ids: list[int]) -> torch.Tensor:
    """Of the model as transformers runs it, without our cache, masks or positions; [T, V]."""
    return target.model(input_ids=torch.tensor([ids])).logits[0, :, : target.vocab_size]


@every_variant
def test_a_chain_is_a_plain_forward(variant: str) -> None:
    target = target_of(variant)
    start = target.prefill(PROMPT)
    chain = [9, 11, 21, 3]
    verified = target.verify(torch.tensor(chain), torch.arange(4) - 1)
    expected = plain_logits(target, PROMPT + chain)
    assert_close(start.logits[0], expected[len(PROMPT) - 1])
    assert_close(verified.logits, expected[len(PROMPT) :])
    assert verified.logits.shape[-1] == target.vocab_size == 64, "padded ids are nobody's"


@every_variant
def test_a_node_is_its_path_fed_alone(variant: str) -> None:
    target = target_of(variant)
    target.prefill(PROMPT)
    tree = target.verify(TOKENS, PARENTS)
    for node, path in enumerate(PATHS):
        target.prefill(PROMPT)
        alone = target.verify(TOKENS[path], torch.arange(len(path)) - 1)
        assert_close(tree.logits[node], alone.logits[-1])
        assert_close(tree.taps[node], alone.taps[-1])
        assert_close(tree.logits[node], plain_logits(target, PROMPT + TOKENS[path].tolist())[-1])
    assert [len(path) - 1 for path in PATHS] == depths_of(PARENTS).tolist()


@every_variant
def test_order_of_nodes_and_other_branches_do_not_matter(variant: str) -> None:
    target = target_of(variant)
    target.prefill(PROMPT)
    before = target.verify(TOKENS, PARENTS).logits
    order = torch.tensor([0, 2, 1, 6, 5, 7, 3, 4])
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    moved = torch.where(PARENTS[order] < 0, -1, place[PARENTS[order]])
    assert_close(target.verify(TOKENS[order], moved).logits, before[order])
    changed = TOKENS.clone()
    changed[1] = 50  # a: seen by d, e, g alone
    after = target.verify(changed, PARENTS).logits
    unseen = [0, 2, 3, 6]
    assert_close(after[unseen], before[unseen])
    assert all(not torch.allclose(after[node], before[node]) for node in (1, 4, 5, 7))


@every_variant
@pytest.mark.parametrize("path", [[0], [0, 1], [0, 3], [0, 2, 6], [0, 1, 5, 7]], ids=str)
def test_commit_then_verify_is_starting_from_the_longer_prefix(variant: str, path: list[int]) -> None:
    target = target_of(variant)
    target.prefill(PROMPT)
    for _ in range(2):  # the second round works on a cache that the first one compacted
        taps = target.verify(TOKENS, PARENTS).taps
        target.commit(path)
    committed = PROMPT + 2 * TOKENS[path].tolist()
    assert target.length == len(committed)
    kept = [store[:, :, : target.length].clone() for store in (*target.cache.keys, *target.cache.values)]
    again = target.verify(TOKENS, PARENTS).logits
    start = target.prefill(committed)
    for stale, fresh in zip(kept, (*target.cache.keys, *target.cache.values), strict=True):
        assert_close(stale, fresh[:, :, : target.length])
    assert_close(again, target.verify(TOKENS, PARENTS).logits)
    assert_close(taps[path], start.taps[-len(path) :])


@pytest.mark.parametrize("path", [[], [1], [-1], [0, 8], [0, 2, 1], [0, 0], [0, 7, 7], list(range(9))], ids=str)
def test_only_paths_of_verified_nodes_are_committed(path: list[int]) -> None:
    target = target_of("qwen3")
    target.prefill(PROMPT)
    target.verify(TOKENS, PARENTS)
    with pytest.raises(ValueError, match="commit of nodes"):
        target.commit(path)
    target.commit([0, 1])
    assert target.length == len(PROMPT) + 2
    with pytest.raises(ValueError, match="below the 0 nodes last verified"):
        target.commit([0])


@every_variant
def test_angles_that_are_looked_up_are_the_rotary_modules_own(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf, "TABLED", 24)
    target = tiny_module.load(dtype=torch.float64, **VARIANTS[variant])

    def computed(positions: torch.Tensor) -> list[torch.Tensor]:
        like = torch.empty(1, dtype=torch.float64)
        return [part.view(*positions.shape, -1) for part in target.model.model.rotary_emb(like, positions.view(1, -1))]

    for positions in (torch.tensor([[[0, 3, 3], [23, 7, 1]]]), torch.tensor([5, 24, 40])):
        for own, expected in zip(target.rotary(positions), computed(positions), strict=True):
            assert torch.equal(own, expected)
    if "rope" not in VARIANTS[variant]:
        target.scale_rotary("ntk:2")
        assert torch.equal(target.rotary(torch.arange(9))[0], computed(torch.arange(9))[0])


@every_variant
def test_taps_are_the_outputs_of_their_layers(variant: str) -> None:
    target = target_of(variant)
    ids = torch.tensor([PROMPT, PROMPT[::-1]])
    with torch.no_grad():
        output = target.model(input_ids=ids, output_hidden_states=True)
    trace = target.trace(ids)
    expected = torch.cat([output.hidden_states[layer + 1] for layer in target.tap_layers], -1)
    assert_close(trace.taps, expected)
    assert_close(target.head(trace.last), output.logits[..., : target.vocab_size])
    assert_close(target.prefill(PROMPT).taps, trace.taps[0])


def test_padding_does_not_reach_a_trace(tiny64: Target) -> None:
    longer, shorter = [*PROMPT, 9, 11], PROMPT[:3]
    ids = torch.tensor([longer, [*shorter, 0, 0, 0, 0]])
    assert_close(tiny64.trace(ids).taps[1, :3], tiny64.trace(torch.tensor([shorter])).taps[0])


@pytest.mark.parametrize("length", [1, 255, 256, 257, 300])
def test_the_cache_grows_where_it_has_to(tiny64: Target, length: int) -> None:
    ids = torch.randint(0, 62, (length,), generator=torch.Generator().manual_seed(0)).tolist()
    assert_close(tiny64.prefill(ids).logits[0], plain_logits(tiny64, ids)[-1])
    verified = tiny64.verify(TOKENS, PARENTS).logits[7]
    assert_close(verified, plain_logits(tiny64, ids + TOKENS[PATHS[7]].tolist())[-1])


@pytest.mark.parametrize("attention", ["sdpa", "hybrid", "reference"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_back_end_that_ignores_the_mask_is_refused(monkeypatch: pytest.MonkeyPatch, family: str, attention: str) -> None:
    target = tiny_module.load(dtype=torch.float64, family=family)
    target.use_attention(attention)
    forward = target.forward_tree

    def causal(ids: torch.Tensor, rows: TreeRows, cache: RowCache) -> tuple[torch.Tensor, torch.Tensor]:
        chain = tree_rows(torch.arange(rows.size) - 1, rows.prefixes or 0)
        return forward(ids, replace(rows, seen=chain.seen), cache)

    monkeypatch.setattr(target, "forward_tree", causal)
    with pytest.raises(ValueError, match=f"{attention}.*ignores the tree mask"):
        target.self_test()


def test_a_head_that_is_more_than_a_matrix_is_refused() -> None:
    target = tiny_module.load(dtype=torch.float64)
    target.head_weight = target.head_weight * 2
    with pytest.raises(ValueError, match="lm_head"):
        target.self_test()


def test_the_self_test_leaves_a_request_alone(tiny64: Target) -> None:
    tiny64.prefill(PROMPT)
    before = tiny64.verify(TOKENS, PARENTS).logits
    tiny64.self_test()
    assert torch.equal(tiny64.verify(TOKENS, PARENTS).logits, before)


@pytest.mark.parametrize(
    ("prompt", "words"), [([], "empty prompt"), ([1] * 512, "prompt of 512 tokens does not fit"), ([1] * 600, "600 .*512")]
)
def test_prompts_that_do_not_fit_are_refused(tiny64: Target, prompt: list[int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        tiny64.prefill(prompt)


def test_tap_layers() -> None:
    assert default_tap_layers(36) == (1, 9, 17, 25, 33)
    assert default_tap_layers(28) == (1, 7, 13, 19, 25)
    assert default_tap_layers(48) == (1, 12, 23, 34, 45)
    target = tiny_module.load(num_layers=3)
    for bad in ([], [3], [-1], [0, 5]):
        with pytest.raises(ValueError, match="choose from"):
            target.tap(bad)
    target.tap([1, 0])
    assert target.trace(torch.tensor([[1, 2]])).taps.shape == (1, 2, 64)


def test_the_mask_token_is_an_unused_id(tiny64: Target) -> None:
    assert tiny64.mask_token_id == 63
    assert find_mask_token("t", tiny64.tokenizer, 80, None) == 64, "the first padding row"
    assert find_mask_token("t", tiny64.tokenizer, 64, None) == 63, "a token that says so"
    for bad in (62, 64, -1):
        with pytest.raises(ValueError, match=f"mask token {bad}"):
            find_mask_token("t", tiny64.tokenizer, 64, bad)


@pytest.mark.parametrize(
    ("configured", "own", "expected"),
    [(None, None, ()), (None, "<|end|>", (62,)), (5, None, (5,)), (5, "<|end|>", (5, 62)), ([9, 5, 9], "<|end|>", (5, 9, 62)), ([0, 63], None, (0, 63))],
)
def test_ids_that_end_the_text(configured: int | list[int] | None, own: str | None, expected: tuple[int, ...]) -> None:
    """None, one or several, and the tokenizer's own."""
    target = tiny_module.load()
    target.model.config.eos_token_id = target.model.generation_config.eos_token_id = configured
    target.tokenizer.eos_token = own
    again = Target(name="t", model=target.model, tokenizer=target.tokenizer, mask_token_id=63 if 63 not in expected else 40)
    assert again.eos_token_ids == expected


@pytest.mark.parametrize("bad", [64, -1, [5, 100]], ids=str)
def test_ids_that_are_nobodys_cannot_end_the_text(bad: int | list[int]) -> None:
    target = tiny_module.load()
    target.model.generation_config.eos_token_id = bad
    with pytest.raises(ValueError, match=r"end-of-text token (64|-1|100) of 't' is outside the embedding's 0..63"):
        Target(name="t", model=target.model, tokenizer=target.tokenizer, mask_token_id=63)


def test_other_families_and_sliding_layers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = tiny_module.load().model, tiny_module.load().tokenizer
    monkeypatch.setattr(model.config, "layer_types", ["full_attention", "sliding_attention"])
    with pytest.raises(ValueError, match="sliding_attention"):
        Target(name="t", model=model, tokenizer=tokenizer, mask_token_id=63)
    monkeypatch.setattr(model.config, "model_type", "gpt2")
    with pytest.raises(ValueError, match="'gpt2'; served: llama, qwen3"):
        Target(name="t", model=model, tokenizer=tokenizer, mask_token_id=63)


def test_fingerprints_tell_targets_apart() -> None:
    variants = [target_of(name).fingerprint() for name in ("qwen3", "llama", "untied", "gqa-1")] + [tiny_module.load(seed=1).fingerprint()]
    assert len(set(variants)) == len(variants)
    assert tiny_module.load(dtype=torch.float64).fingerprint() == target_of("qwen3").fingerprint()
