"""Random problems of tree attention, with the slack of the cache full of NaN, for tests of every way to compute it."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from treedraft.ops.tree_attention import naive
from treedraft.ops.tree_attention.mask import TreeRows, tree_rows

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
