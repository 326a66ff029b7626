"""Random problems of tree attention, with the slack of the cache full of NaN, for tests of every way to compute it."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.tolerances import assert_close
from treedraft.ops.tree_attention import hf, naive
from treedraft.ops.tree_attention.dispatch import tree_attention
from treedraft.ops.tree_attention.mask import TreeRows, ancestors, tree_rows
from treedraft.targets.hf import Target
from treedraft.trees.mask import ancestor_mask, depths_of

SHAPES = ("chain", "star", "comb", "random")


def tree(shape: str, num_nodes: int, seed: int = 0) -> list[int]:
    """Parents of a tree: a path, a root with leaves, a spine with a leaf at each joint, or anything."""
    dice = random.Random(seed)
    parent = {
        "chain": lambda i: i - 1, "star": lambda i: 0, "comb": lambda i: i - 1 - (i % 2 == 0), "random": lambda i: dice.randrange(max(0, i - 9), i),
    }[shape]  # fmt: skip
    return [-1] + [max(0, parent(i)) for i in range(1, num_nodes)]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Queries [B, H, N, D] as a model has them (transposed), a cache [B, HK, S, D] likewise, and the trees."""

    q: Tensor
    k: Tensor
    v: Tensor
    parents: list[list[int]]
    prefixes: tuple[int, ...]

    @property
    def rows(self) -> TreeRows:
        return tree_rows(torch.tensor(self.parents), self.prefixes)

    def expected(self) -> tuple[Tensor, Tensor]:
        return naive.from_parents(self.q, self.k, self.v, self.parents, self.prefixes)


def problem(
    *, prefixes: tuple[int, ...] = (70,), num_nodes: int = 20, kv_heads: int = 1, group: int = 2, dim: int = 16,
    shape: str = "random", dtype: torch.dtype = torch.float32, seed: int = 0, slack: int = 5,
) -> Problem:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    batch, columns = len(prefixes), max(prefixes) + num_nodes + slack

    def noise(rows: int, heads: int) -> Tensor:
        return torch.randn((batch, rows, heads, dim), generator=generator).to(dtype).transpose(1, 2)

    q, k, v = noise(num_nodes, kv_heads * group), noise(columns, kv_heads), noise(columns, kv_heads)
    for request, prefix in enumerate(prefixes):
        k[request, :, prefix + num_nodes :] = torch.nan
        v[request, :, prefix + num_nodes :] = torch.nan
    parents = [tree(shape, num_nodes, seed + request) for request in range(batch)]
    return Problem(q=q, k=k, v=v, parents=parents, prefixes=prefixes)


lengths = st.sampled_from((0, 1, 2, 63, 64, 65, 127, 128, 200)) | st.integers(0, 300)
sizes = st.sampled_from((1, 2, 63, 64, 65)) | st.integers(1, 80)


@st.composite
def problems(draw: st.DrawFn, dims: tuple[int, ...] = (16, 64, 80)) -> Problem:
    batch = draw(st.integers(1, 2))
    return problem(
        prefixes=tuple(draw(lengths) for _ in range(batch)), num_nodes=draw(sizes), kv_heads=draw(st.integers(1, 2)),
        group=draw(st.sampled_from((1, 2, 3, 4, 8))), dim=draw(st.sampled_from(dims)), shape=draw(st.sampled_from(SHAPES)),
        seed=draw(st.integers(0, 999)),
    )  # fmt: skip


# -- what holds for every way to compute it ---------------------------------------------------------------------------


def assert_paths_and_order(found: Problem, backend: str) -> None:
    """A row is plain attention over prefix and path, alone; nodes in another order give the same rows in that order."""
    (prefix,), expected = found.prefixes, torch.nn.functional.scaled_dot_product_attention
    out = tree_attention(found.q, found.k, found.v, found.rows, backend=backend)
    for node in (0, 5, 23):
        path = ancestors(torch.tensor(found.parents))[0, node].nonzero().flatten()
        columns = torch.cat([torch.arange(prefix), prefix + path])
        alone = expected(found.q[:, :, node : node + 1], found.k[:, :, columns], found.v[:, :, columns], enable_gqa=True)
        assert_close(out[:, :, node], alone[:, :, 0])
    parents = torch.tensor(found.parents[0])
    order = torch.argsort(depths_of(parents), stable=True)
    assert not torch.equal(order, torch.arange(len(order)))
    moved = torch.where(parents[order] < 0, -1, torch.argsort(order)[parents[order].clamp(min=0)])
    columns = torch.cat([torch.arange(prefix), prefix + order])
    again = tree_attention(found.q[:, :, order], found.k[:, :, columns], found.v[:, :, columns], tree_rows(moved, prefix), backend=backend)
    assert_close(again, out[:, :, order])


PROMPT = [5, 40, 17, 2, 33]
PARENTS = torch.tensor([-1, 0, 0, 0, 1, 1, 2, 5])  # root; a b c; d e under a; f under b; g under e
TOKENS = torch.tensor([9, 11, 12, 13, 20, 21, 20, 3])


@torch.no_grad()
def logits_with_transformers_cache(target: Target, kind: str, backend: str) -> tuple[Tensor, Tensor]:
    """Logits of a tree behind a prefix in a cache of transformers' own, and those of each path fed alone."""
    from transformers import DynamicCache, StaticCache

    model: Any = target.model
    cache = DynamicCache(config=model.config) if kind == "dynamic" else StaticCache(config=model.config, max_cache_len=64)
    argument = {target.cache_argument: cache}
    model(input_ids=torch.tensor([PROMPT]), use_cache=True, **argument)
    rows = tree_rows(PARENTS, len(PROMPT))
    logits = model(
        input_ids=TOKENS[None], position_ids=rows.positions, attention_mask=hf.no_mask(TOKENS.device), use_cache=True,
        tree=rows, tree_backend=backend, **argument,
    ).logits[0]  # fmt: skip
    paths = [torch.tensor([PROMPT + TOKENS[seen].tolist()]) for seen in ancestor_mask(PARENTS)]
    return logits, torch.stack([model(input_ids=path).logits[0, -1] for path in paths])


class Made(TorchDispatchMode):
    """How many numbers the largest tensor has that was made: neither a view of another nor bytes, which an interpreter copies."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        held = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
        found = func(*args, **(kwargs or {}))
        for x in found if isinstance(found, (tuple, list)) else [found]:
            if isinstance(x, Tensor) and x.dtype != torch.uint8 and x.untyped_storage().data_ptr() not in held:
                self.largest = max(self.largest, x.numel())
        return found


def largest_made(target: Target, prefix: int, num_nodes: int) -> int:
    """Of one verification of a tree of so many nodes behind so many tokens."""
    target.prefill([token % 60 for token in range(prefix)])
    tokens, parents = torch.arange(num_nodes) % 60, torch.tensor(tree("random", num_nodes))
    with Made() as made:
        target.verify(tokens, parents)
    return made.largest
