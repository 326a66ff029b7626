"""The law of a context: committing in any chunks equals remembering the whole prefix, and rejected rows leave no trace."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiny_drafters import make_drafter
from tests.tolerances import assert_close
from treedraft import registry
from treedraft.backbones._block import Memory
from treedraft.drafter import Prefix
from treedraft.targets.hf import Target

every_context = pytest.mark.parametrize("context", registry.names("contexts"))


def assert_same_memory(actual: Memory, expected: Memory) -> None:
    for one, other in zip([*actual.keys, *actual.values], [*expected.keys, *expected.values], strict=True):
        assert_close(one, other)


@every_context
@settings(max_examples=15, deadline=None)
@given(chunks=st.lists(st.integers(1, 9), min_size=1, max_size=8), capacity=st.integers(1, 40), seed=st.integers(0, 1000))
def test_any_chunks_equal_the_whole_prefix(tiny64: Target, context: str, chunks: list[int], capacity: int, seed: int) -> None:
    drafter = make_drafter(tiny64, context={"name": context}, num_layers=2)
    taps = torch.randn((sum(chunks), tiny64.tap_size), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    prefix = Prefix(drafter, capacity=capacity)
    for chunk in taps.split(chunks):
        prefix.append(chunk)
    assert prefix.length == len(taps)
    with torch.no_grad():
        whole = drafter.remember(taps[None], torch.arange(len(taps)))
    assert_same_memory(prefix.memory, whole)
    anchor = torch.tensor([[7]])
    with torch.no_grad():
        live, again = (drafter.hidden(memory, anchor, torch.tensor([[len(taps)]]), 5) for memory in (prefix.memory, whole))
    assert_close(live, again)


@every_context
def test_the_prefix_holds_what_a_plain_forward_taps(tiny64: Target, context: str) -> None:
    """Rounds of verify and commit with rejected siblings leave the drafter's prefix as a fresh pass would make it."""
    drafter = make_drafter(tiny64, context={"name": context})
    prompt = [3, 9, 1]
    prefix = Prefix(drafter, capacity=2)
    prefix.append(tiny64.prefill(prompt).taps)
    committed = list(prompt)
    parents = torch.tensor([-1, 0, 0, 1, 2])  # root; a b; c under a; d under b
    for turn, path in enumerate(([0, 2, 4], [0], [0, 1, 3])):
        tokens = torch.arange(5) + 5 * turn
        verified = tiny64.verify(tokens, parents)
        tiny64.commit(path)
        prefix.append(verified.taps[path])
        committed += tokens[path].tolist()
    with torch.no_grad():
        taps = tiny64.trace(torch.tensor([committed])).taps
        assert_same_memory(prefix.memory, drafter.remember(taps, torch.arange(len(committed))))


@every_context
def test_what_is_visible_is_what_lies_before_the_anchor(tiny64: Target, context: str) -> None:
    drafter = make_drafter(tiny64, context={"name": context})
    visible = drafter.context.visible(torch.tensor([[0, 2], [4, 9]]), 4)
    T, F = True, False
    assert not bool((visible & ~torch.tensor([[[F] * 4, [T, T, F, F]], [[T] * 4, [T] * 4]])).any())
