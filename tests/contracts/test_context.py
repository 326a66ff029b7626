"""The law of a context: appending in any chunks equals remembering the whole prefix, and rejected rows leave no trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.tiny_drafters import CONTEXTS, make_drafter, name_of, randomise
from tests.tolerances import assert_close
from treedraft import registry
from treedraft.drafter import Drafter, Prefix
from treedraft.ops.memory import Memory
from treedraft.targets import tiny as tiny_module
from treedraft.targets.batch import Requests
from treedraft.targets.hf import Target
from treedraft.trees.mask import depths_of
from treedraft.trees.tree import DraftTree, TreeBatch

every_context = pytest.mark.parametrize("context", CONTEXTS, ids=name_of)
PARENTS = [-1, 0, 0, 1, 2]  # root; a b; c under a; d under b
PATHS = [[0, 2, 4], [0], [0, 1, 3], [0, 1]]


def drafter_with(target: Target, context: dict[str, Any], *, num_layers: int = 2, **fields: Any) -> Drafter:
    """One whose every weight counts."""
    drafter = make_drafter(target, context=context, num_layers=num_layers, **fields)
    randomise(drafter.context)
    return drafter


def random_taps(target: Target, *sizes: int, seed: int = 0) -> Tensor:
    return torch.randn((*sizes, target.tap_size), generator=torch.Generator().manual_seed(seed), dtype=target.dtype)


@torch.no_grad()
def drafted(drafter: Drafter, memory: Memory, ends: Sequence[int], depth: int = 5) -> Tensor:
    """Hidden states [S, D, H] of blocks that start at the ends of S prefixes."""
    anchors = torch.tensor(ends)[:, None]
    return drafter.hidden(memory, torch.full_like(anchors, 7), anchors, depth)[:, 0]


@torch.no_grad()
def remembered(drafter: Drafter, taps: Tensor) -> Memory:
    return drafter.remember(taps, torch.arange(taps.shape[1]))


def test_every_context_is_tested() -> None:
    assert {context["name"] for context in CONTEXTS} == set(registry.names("contexts"))


@every_context
@settings(max_examples=12, deadline=None)
@given(chunks=st.lists(st.integers(1, 9), min_size=1, max_size=8), capacity=st.integers(1, 40), seed=st.integers(0, 1000))
def test_any_chunks_equal_the_whole_prefix(tiny64: Target, context: dict, chunks: list[int], capacity: int, seed: int) -> None:
    drafter = drafter_with(tiny64, context)
    taps = random_taps(tiny64, sum(chunks), seed=seed)
    prefix = Prefix(drafter, capacity=capacity)
    for chunk in taps.split(chunks):
        prefix.append(chunk)
        whole = remembered(drafter, taps[None, : prefix.length])
        assert_close(drafted(drafter, prefix.memory, [prefix.length]), drafted(drafter, whole, [prefix.length]))
    assert prefix.length == len(taps)
    later = remembered(drafter, taps[None])
    assert_close(drafted(drafter, later, [chunks[0]]), drafted(drafter, remembered(drafter, taps[None, : chunks[0]]), [chunks[0]]))


@every_context
def test_every_anchor_is_its_own_prefix(tiny64: Target, context: dict) -> None:
    """Blocks of one sequence, in any order and twice, equal each block behind its prefix alone; so does a choice of sequences."""
    drafter = drafter_with(tiny64, context)
    taps, anchors = random_taps(tiny64, 3, 23), torch.tensor([[4, 23, 1, 9, 9], [22, 2, 3, 4, 0], [5, 5, 5, 5, 12]])
    memory = remembered(drafter, taps)
    with torch.no_grad():
        together = drafter.hidden(memory, torch.full_like(anchors, 7), anchors, 5)
        chosen = drafter.hidden(memory.rows(torch.tensor([2, 0])), torch.full((2, 5), 7), anchors[[2, 0]], 5)
    assert_close(chosen, together[[2, 0]])
    for s in range(3):
        for a, anchor in enumerate(anchors[s].tolist()):
            if anchor > 0:
                alone = remembered(drafter, taps[s : s + 1, :anchor])
                assert_close(drafted(drafter, alone, [anchor])[0], together[s, a])


@every_context
def test_nothing_at_or_after_an_anchor_is_seen(tiny64: Target, context: dict) -> None:
    drafter = drafter_with(tiny64, context)
    taps = random_taps(tiny64, 1, 12)
    before = drafted(drafter, remembered(drafter, taps), [7])
    changed = taps.clone()
    changed[:, 7:] = 1e3
    assert_close(drafted(drafter, remembered(drafter, changed), [7]), before)
    changed[:, 6] += 1
    moved = drafted(drafter, remembered(drafter, changed), [7])
    nothing = not any(context.get(part, True) for part in ("window", "summary", "boundary"))
    assert torch.allclose(moved, before) == nothing
    empty = drafted(drafter, remembered(drafter, taps), [0])
    assert bool(empty.isfinite().all()) and torch.equal(drafted(drafter, remembered(drafter, changed + 1), [0]), empty)


@every_context
@pytest.mark.parametrize("own_copy", [True, False])
def test_rounds_leave_what_a_plain_forward_makes(tiny64: Target, context: dict, own_copy: bool) -> None:
    """Verify and commit with rejected siblings; rows of the target's cache are read there, or copied."""
    drafter = drafter_with(tiny64, context)
    committed = [3, 9, 1]
    prefix = Prefix(drafter, capacity=2, cache=None if own_copy else tiny64.cache)
    tiny64.prefill(committed, take=prefix.append, rows=2)
    for turn, path in enumerate(PATHS):
        tokens = torch.arange(5) + 5 * turn
        verified = tiny64.verify(tokens, torch.tensor(PARENTS))
        tiny64.commit(path)
        prefix.append(verified.taps[path])
        committed += tokens[path].tolist()
        with torch.no_grad():
            fresh = remembered(drafter, tiny64.trace(torch.tensor([committed])).taps)
        assert_close(drafted(drafter, prefix.memory, [len(committed)]), drafted(drafter, fresh, [len(committed)]))


@every_context
@pytest.mark.parametrize("own_copy", [True, False])
def test_requests_side_by_side_are_their_rows(tiny64: Target, context: dict, own_copy: bool) -> None:
    """Ragged prompts, paths of different lengths in one round, and a request that leaves."""
    drafter = drafter_with(tiny64, context)
    prompts = [[3], [9, 1, 4, 4, 5, 17, 2, 8, 6], [11, 12]]
    requests = Requests(tiny64, prompts, capacity=40)
    state = drafter.open(3, capacity=4, cache=None if own_copy else requests.cache)
    for place in range(3):
        requests.prefill(place, take=lambda taps, place=place: state.append(taps[None], [len(taps)], [place]))
    committed = [list(prompt) for prompt in prompts]
    for turn in range(3):
        tokens = torch.arange(5) + 5 * turn
        tree = DraftTree(tokens=tokens, parents=torch.tensor(PARENTS), depths=depths_of(torch.tensor(PARENTS)), scores=-torch.arange(5.0))
        verified = requests.verify(TreeBatch.of([tree] * len(committed)))
        paths = [PATHS[(place + turn) % 4] for place in range(len(committed))]
        counts, padded = [len(path) for path in paths], torch.tensor([path + [0] * (3 - len(path)) for path in paths])
        requests.commit(padded, torch.tensor(counts))
        state.append(verified.taps.gather(1, padded[:, :, None].expand(-1, -1, tiny64.tap_size)), counts, range(len(counts)))
        for ids, path in zip(committed, paths, strict=True):
            ids += tokens[path].tolist()
        assert state.lengths == [len(ids) for ids in committed]
        live = drafted(drafter, state.memory, state.lengths)
        for place, ids in enumerate(committed):
            with torch.no_grad():
                fresh = remembered(drafter, tiny64.trace(torch.tensor([ids])).taps)
            assert_close(live[place], drafted(drafter, fresh, [len(ids)])[0])
        if turn == 0:
            kept = torch.tensor([2, 1])
            requests.keep(kept)
            state.keep(kept)
            committed = [committed[2], committed[1]]


@every_context
def test_padding_is_never_seen(tiny64: Target, context: dict) -> None:
    """Not even where it is no number; and a request that is given no row stays as it is."""
    drafter = drafter_with(tiny64, context)
    taps = random_taps(tiny64, 2, 9)
    state = drafter.open(2, capacity=1)
    state.append(taps[:, :4], [4, 4], [0, 1])
    before = drafted(drafter, state.memory, state.lengths)
    padded = taps[:, 4:].clone()
    padded[0, 2:], padded[1] = torch.nan, torch.nan
    state.append(padded, [2, 0], [0, 1])
    assert state.lengths == [6, 4]
    after = drafted(drafter, state.memory, state.lengths)
    assert_close(after[1], before[1])
    assert_close(after[0], drafted(drafter, remembered(drafter, taps[:1, :6]), [6])[0])


@every_context
def test_the_size_of_a_state(tiny64: Target, context: dict) -> None:
    """Rows are counted in bytes by what allocates them: the full context grows with the prefix, a fixed one never."""
    drafter = drafter_with(tiny64, context)
    prefix = Prefix(drafter, capacity=1)
    sizes = []
    for _ in range(4):
        prefix.append(random_taps(tiny64, 9))
        sizes.append(prefix.state.num_bytes)
    if context["name"] == "full":
        row = 2 * 2 * drafter.shape.kv_heads * drafter.shape.head_dim * 8
        assert all(size >= row * 9 * (turn + 1) for turn, size in enumerate(sizes)) and sizes[-1] > sizes[0]
    else:
        assert len(set(sizes)) == 1


@every_context
@pytest.mark.parametrize("backbone", registry.names("backbones"))
@pytest.mark.parametrize("norm", ["own", "target"])
def test_every_weight_is_trained(tiny64: Target, context: dict, backbone: str, norm: str) -> None:
    drafter = drafter_with(tiny64, context, backbone=backbone, norm=norm)
    memory = drafter.remember(random_taps(tiny64, 1, 17), torch.arange(17))
    drafter.hidden(memory, torch.tensor([[1, 2]]), torch.tensor([[5, 9]]), drafter.depth)[..., 0].sum().backward()
    for name, weight in [*drafter.backbone.named_parameters(), *drafter.context.named_parameters()]:
        assert weight.grad is not None and bool(weight.grad.isfinite().all()) and bool(weight.grad.abs().sum() > 0), name


@every_context
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_other_heads_and_targets_without_head_norms(context: dict, kv_heads: int, family: str) -> None:
    target = tiny_module.load(dtype=torch.float64, kv_heads=kv_heads, family=family)
    drafter = drafter_with(target, context)
    prefix = Prefix(drafter, cache=target.cache)
    target.prefill([3, 9, 1, 4], take=prefix.append)
    with torch.no_grad():
        whole = remembered(drafter, target.trace(torch.tensor([[3, 9, 1, 4]])).taps)
    assert_close(drafted(drafter, prefix.memory, [4]), drafted(drafter, whole, [4]))
