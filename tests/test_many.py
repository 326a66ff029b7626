"""Several requests at once write what each writes alone, whatever its neighbours and where they end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.tiny_drafters import make_drafter, random_prompts
from treedraft.config import DecodeConfig, Sampling
from treedraft.speculate import generate, generate_plain
from treedraft.speculate_many import generate_many
from treedraft.targets import tiny as tiny_module
from treedraft.targets.batch import Requests
from treedraft.targets.hf import Target
from treedraft.trees.mask import depths_of
from treedraft.trees.tree import DraftTree, TreeBatch

TREE = DecodeConfig(mode="tree", depth=5, width=3, budget=24)


@pytest.mark.parametrize("config", [TREE, DecodeConfig(mode="chain", depth=4), DecodeConfig(mode="tree", depth=3, budget=9, admit="pop"), replace(TREE, candidates=6)], ids=["tree", "chain", "pop", "candidates"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.9, top_p=0.9, repetition_penalty=1.2)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("backbone", ["causal", "bidirectional"])
def test_a_batch_is_its_rows(tiny64: Target, config: DecodeConfig, sampling: Sampling, backbone: str) -> None:
    """Ids, rounds and trees; prompts of 1 to 40 tokens, in batches of one, three and all, and in another order."""
    drafter = make_drafter(tiny64, backbone=backbone, correction="attention")
    prompts = random_prompts(tiny64, 7, seed=5)
    options: dict[str, Any] = {"config": config, "sampling": sampling, "max_new_tokens": 18}
    alone = [generate(tiny64, drafter, prompt, seed=seed, **options) for seed, prompt in enumerate(prompts)]
    for seed, (prompt, found) in enumerate(zip(prompts, alone, strict=True)):
        assert found.ids == generate_plain(tiny64, prompt, sampling=sampling, max_new_tokens=18, seed=seed).ids
    for size, order in ((1, range(7)), (3, range(7)), (7, reversed(range(7)))):
        order = list(order)
        ended: list[int] = []
        many = generate_many(
            tiny64, drafter, [prompts[i] for i in order], batch_size=size, seeds=order, on_done=lambda i, _, ended=ended: ended.append(i), **options
        )
        assert sorted(ended) == list(range(7))
        for index, found in zip(order, many, strict=True):
            assert (found.ids, found.text, found.finish_reason) == (alone[index].ids, alone[index].text, alone[index].finish_reason)
            for one, other in zip(found.rounds, alone[index].rounds, strict=True):
                assert one.path == other.path and torch.equal(one.tree.tokens, other.tree.tokens) and one.emitted == other.emitted
                assert one.among_candidates == other.among_candidates and (one.among_candidates is None) == (config.candidates is None)
            assert found.seconds.keys() == alone[index].seconds.keys()


@pytest.mark.parametrize("length", [20, 22, 23])
def test_the_window_edge(length: int) -> None:
    target = tiny_module.load(dtype=torch.float64, max_length=24)
    target.eos_token_ids = ()
    prompts = [list(range(length)), [5, 9]]
    found = generate_many(target, make_drafter(target), prompts, config=TREE, batch_size=2, max_new_tokens=30)
    for prompt, answer in zip(prompts, found, strict=True):
        plain = generate_plain(target, prompt, max_new_tokens=30)
        assert answer.ids == plain.ids and answer.finish_reason == plain.finish_reason
    with pytest.raises(ValueError, match="prompt of 24 tokens"):
        generate_many(target, make_drafter(target), [[5], list(range(24))], config=TREE, batch_size=2)


@pytest.mark.parametrize("caps", [0, 1, 2])
def test_caps_and_bad_sizes(tiny64: Target, caps: int) -> None:
    drafter = make_drafter(tiny64)
    assert [len(item.ids) for item in generate_many(tiny64, drafter, [[5], [9, 3]], config=TREE, batch_size=2, max_new_tokens=caps)] == [caps] * 2
    assert generate_many(tiny64, drafter, [], config=TREE, batch_size=2) == []
    with pytest.raises(ValueError, match="batch size is 0"):
        generate_many(tiny64, drafter, [[5]], config=TREE, batch_size=0)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_ragged_trees_equal_solo_verification(family: str) -> None:
    """Prefixes of 2, 17 and 40 tokens, trees of 1, 6 and 9 nodes; then commits of different paths, and again."""
    target = tiny_module.load(dtype=torch.float64, family=family)
    prompts = [list(range(length)) for length in (2, 17, 40)]
    shapes = [[-1], [-1, 0, 0, 1, 1, 2], [-1, 0, 0, 0, 1, 1, 2, 5, 7]]
    paths = [[0], [0, 2, 5], [0, 1, 5, 7, 8]]
    requests = Requests(target, prompts, capacity=60)
    for row in range(3):
        requests.prefill(row)
    solo = [list(prompt) for prompt in prompts]
    for turn in range(3):
        trees = [_tree(shape, seed=10 * turn + row) for row, shape in enumerate(shapes)]
        verified = requests.verify(TreeBatch.of(trees))
        for row, tree in enumerate(trees):
            target.prefill(solo[row])
            alone = target.verify(tree.tokens, tree.parents)
            torch.testing.assert_close(verified.logits[row, : len(tree)], alone.logits, rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(verified.taps[row, : len(tree)], alone.taps, rtol=1e-10, atol=1e-10)
            solo[row] += tree.tokens[paths[row]].tolist()
        padded = torch.tensor([path + [0] * (5 - len(path)) for path in paths])
        requests.commit(padded, torch.tensor([len(path) for path in paths]))
        assert requests.lengths.tolist() == [len(ids) for ids in solo]
    assert bool(torch.isfinite(verified.logits).all())


def _tree(parents: list[int], seed: int) -> DraftTree:
    tokens = torch.randperm(60, generator=torch.Generator().manual_seed(seed))[: len(parents)]
    depths = depths_of(torch.tensor(parents))
    return DraftTree(tokens=tokens, parents=torch.tensor(parents), depths=depths, scores=-depths.double())
