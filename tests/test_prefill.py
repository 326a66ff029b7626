"""Prompts on their way through a target: attention without a mask as long as they are, in chunks, at any length."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.tiny_drafters import LONGSPARK, make_drafter, randomise
from tests.tolerances import assert_close
from treedraft.config import DecodeConfig
from treedraft.drafter import Drafter, Prefix
from treedraft.ops import prefill
from treedraft.speculate import generate, generate_plain
from treedraft.targets import cache as cache_module
from treedraft.targets import tiny as tiny_module
from treedraft.targets.hf import Target


def random_ids(target: Target, length: int) -> list[int]:
    return torch.randint(target.vocab_size - 2, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def drafter_for(target: Target, **fields: Any) -> Drafter:
    drafter = make_drafter(target, context=LONGSPARK, num_layers=2, **fields)
    randomise(drafter.context)
    return drafter


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 2), (5, 1), (8, 1)])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (7, 7), (1, 40), (7, 40), (33, 600)])
def test_a_chunk_sees_what_is_before_each_row(
    monkeypatch: pytest.MonkeyPatch, rows: int, columns: int, heads: int, kv_heads: int, dtype: torch.dtype
) -> None:
    """In two parts, and a few rows at a time under masks of a bounded size, as on other devices."""
    generator = torch.Generator().manual_seed(rows)
    q, k, v = (torch.randn((2, *shape, 8), generator=generator, dtype=dtype) for shape in ((heads, rows), (kv_heads, columns), (kv_heads, columns)))
    expected = prefill.naive(q, k, v, scale=0.4)
    assert_close(prefill.causal(q, k, v, scale=0.4), expected)
    assert_close(prefill.attention(torch.nn.Module(), q, k, v, None, 0.4)[0], expected.transpose(1, 2))
    monkeypatch.setattr(prefill, "MASKED", 3 * columns)
    module: Any = torch.nn.Module()
    module.num_key_value_groups = heads // kv_heads
    assert_close(prefill._few_rows_at_a_time(module, q, k, v, 0.4), expected.transpose(1, 2))
    assert max(number * columns for _, number in prefill._dealt(columns - rows, columns)) <= 3 * columns


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that an operator made, those of one storage apart."""

    def __init__(self, store: torch.Tensor) -> None:
        super().__init__()
        self.own, self.bytes = store.untyped_storage().data_ptr(), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for made in tree_leaves(out):
            if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() != self.own:
                self.bytes = max(self.bytes, made.untyped_storage().nbytes())
        return out


def test_nothing_as_long_as_the_prompt_is_made_but_its_cache() -> None:
    """A drafter attached that takes every chunk in: the same largest tensor behind 500 tokens as behind 2,000."""
    target = tiny_module.load(max_length=5000)
    drafter, sizes = drafter_for(target), []
    for length in (500, 2000):
        ids, prefix = torch.tensor(random_ids(target, length), dtype=torch.int32), Prefix(drafter, cache=target.cache)
        target.cache.reserve(4096)
        with Largest(target.cache.store) as largest:
            for chunk in ids.split(128):  # int64 copies of the ids are as long as the prompt, 8 bytes a token
                for _, taps in target.fill(target.cache, chunk.long(), start=prefix.length, rows=128):
                    prefix.append(taps[0])
        sizes.append(largest.bytes)
        assert prefix.length == length and target.cache.capacity == 4096
    assert sizes[0] == sizes[1] < 128 * 500 * 4


def test_a_prompt_takes_its_room_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache of a long prompt is neither copied on the way nor doubled by the first trees behind it."""
    monkeypatch.setattr(cache_module, "MOST_ROOM", 512)
    target = tiny_module.load(max_length=4000)
    drafter, stores = drafter_for(target), set()
    forward = target.forward

    def watched(*args: Any, **kwargs: Any) -> Any:
        stores.add(target.cache.store.data_ptr())
        return forward(*args, **kwargs)

    monkeypatch.setattr(target, "forward", watched)
    ids = random_ids(target, 3000)
    found = generate(target, drafter, ids, config=DecodeConfig(depth=5, budget=64), max_new_tokens=12)
    assert len(stores) == 1 and target.cache.capacity < 3000 + 2000
    assert found.ids == generate_plain(target, ids, max_new_tokens=12).ids
    target.cache.reserve(target.cache.capacity + 1)
    assert target.cache.capacity < 6000, "a large cache does not double"


def test_a_window_of_8192_tokens_is_filled() -> None:
    """Heads as SmolLM2 has them, 9 and 3: keys, values and a drafted answer are those of one forward over all of it."""
    target = tiny_module.load(
        family="llama", num_heads=9, kv_heads=3, max_length=8192, rope={"rope_type": "default", "rope_theta": 100_000.0}, dtype=torch.float64
    )
    target.eos_token_ids = ()
    ids = random_ids(target, 8000)
    drafter = drafter_for(target, correction={"name": "markov", "rank": 6})
    found = generate(target, drafter, ids, config=DecodeConfig(depth=5, width=3, budget=24), max_new_tokens=10)
    kept = target.cache.store[:, :, 0, :, :8000]
    whole = target.trace(torch.tensor([[*ids, *found.ids]]))
    rows = whole.taps[0, :8000, 2 * target.hidden_size :].unflatten(1, (2, 2, 3, 8))  # layers, keys and values, heads
    assert_close(kept, rows.permute(2, 1, 3, 0, 4))
    assert target.head(whole.last[0, 7999:-1]).argmax(-1).tolist() == found.ids and len(found.ids) == 10
