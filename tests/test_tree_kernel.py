"""The Triton kernel in Triton's interpreter, against the definition in float64; and compiled for GPUs that are not here.

In the interpreter a tile costs about 10 ms whatever its size, so problems are small and tiles large.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import platform
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tolerances import assert_close
from tests.tree_cases import (
    SHAPES,
    TOKENS,
    Problem,
    assert_paths_and_order,
    largest_made,
    logits_with_transformers_cache,
    problem,
    problems,
    tree,
)
from treedraft.ops.tree_attention import aot
from treedraft.ops.tree_attention.dispatch import choose, tree_attention, tree_attention_lse
from treedraft.ops.tree_attention.launch import (
    A100,
    H200,
    Device,
    Plan,
    Tile,
    block_dim,
    choose_splits,
    launch,
    on_device,
    plan,
    shared_bytes,
    through_parts,
    tile_for,
)
from treedraft.ops.tree_attention.mask import TreeRows, pack
from treedraft.targets import tiny as tiny_module
from treedraft.targets.graphs import GraphedVerify

ROOT = Path(__file__).parents[1]
HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="triton cannot be imported")
GROUPS, DIMS = (1, 2, 3, 4, 8), (64, 80, 96, 128, 256)


@pytest.fixture(autouse=True, scope="module")
def interpreter() -> Iterator[None]:
    """Interpreted kernels, and whatever memory they are given is full of NaN."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        was = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = True  # pyright: ignore
        yield
        torch.use_deterministic_algorithms(was[0])
        torch.utils.deterministic.fill_uninitialized_memory = was[1]  # pyright: ignore


def kernel(found: Problem, rows: TreeRows | None = None, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = launch(found.q, found.k, found.v, rows or found.rows, scale=found.q.shape[-1] ** -0.5, **options)
    assert lse is not None
    return out, lse


def assert_right(found: Problem, **options: Any) -> None:
    out, lse = kernel(found, **options)
    expected, expected_lse = found.expected()
    assert_close(out, expected.to(out.dtype))
    assert_close(lse, expected_lse.to(lse.dtype))
    assert out.transpose(1, 2).is_contiguous()


def error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected).norm() / expected.norm())


def test_ci_on_linux_has_triton() -> None:
    """Elsewhere tests of the kernel may be skipped."""
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["test"]
    assert any(re.match(r"triton\b.*linux", requirement) for requirement in extra)
    assert re.search(r"^export CI=", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    if os.environ.get("CI") and sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64"):
        assert HAS_TRITON


# -- values -----------------------------------------------------------------------------------------------------------


@needs_triton
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("group", GROUPS)
def test_head_sizes_and_groups(dim: int, group: int) -> None:
    tma = (dim + group) % 2 == 0
    assert_right(problem(prefixes=(70,), num_nodes=20, group=group, dim=dim, seed=dim + group), tma=tma)


@needs_triton
@pytest.mark.parametrize("group", [5, 6, 7])
def test_groups_that_are_no_power_of_two(group: int) -> None:
    assert_right(problem(prefixes=(70,), num_nodes=20, group=group, kv_heads=2, seed=group), tma=group == 6)


@needs_triton
@given(found=problems(dims=(64, 80)), splits=st.sampled_from((None, 1, 2, 3, 7, 40)), tma=st.booleans())
@settings(derandomize=True, max_examples=25, deadline=None)
def test_the_kernel_is_the_definition(found: Problem, splits: int | None, tma: bool) -> None:
    assert_right(found, splits=splits, tma=tma)


@needs_triton
@pytest.mark.parametrize("shape", SHAPES)
def test_at_the_size_of_decoding(shape: str) -> None:
    assert_right(problem(prefixes=(1000,), num_nodes=256, group=4, dim=128, shape=shape), splits=2, tma=shape == "comb")


@needs_triton
@pytest.mark.parametrize("num_nodes", [1, 16, 63, 64, 65])
@pytest.mark.parametrize("prefixes", [(0,), (1,), (64,), (129, 0, 63)], ids=str)
def test_edges_of_tiles(num_nodes: int, prefixes: tuple[int, ...]) -> None:
    assert_right(problem(prefixes=prefixes, num_nodes=num_nodes, dim=16, group=3))


@needs_triton
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float16, 1e-3), (torch.bfloat16, 1e-2)], ids=["float16", "bfloat16"]
)
def test_half_precision(dtype: torch.dtype, bound: float) -> None:
    """The interpreter truncates to bfloat16 where a GPU rounds, hence the wider bound."""
    found = problem(prefixes=(200,), num_nodes=65, group=4, dim=64, dtype=dtype)
    for tma in (False, True):
        out, _ = kernel(found, splits=3, tma=tma)
        assert out.dtype == dtype
        assert error(out, found.expected()[0]) < bound


@needs_triton
def test_the_interpreter_still_cannot_multiply_bfloat16() -> None:
    """The day this fails, the kernel no longer needs UPCAST."""
    import triton
    import triton.language as tl

    @triton.jit
    def product(a, b, c):
        places = tl.arange(0, 16)
        square = places[:, None] * 16 + places[None, :]
        tl.store(c + square, tl.dot(tl.load(a + square), tl.load(b + square)))

    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn((16, 16), generator=generator).bfloat16() for _ in range(2))
    c = torch.zeros((16, 16))
    product[(1,)](a, b, c)
    assert error(c, a.double() @ b.double()) > 1


# -- splits -----------------------------------------------------------------------------------------------------------


@needs_triton
def test_splits_agree() -> None:
    found = problem(prefixes=(300,), num_nodes=33, group=4, dim=64)
    whole, lse = kernel(found, splits=1)
    for splits in (2, 3, 4, 5, 6, 7, 20):
        out, found_lse = kernel(found, splits=splits)
        torch.testing.assert_close(out, whole, rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(found_lse, lse, rtol=2e-6, atol=2e-6)


def test_the_number_of_splits_fills_one_wave() -> None:
    """The shapes of an 8B model on 132 multiprocessors."""
    shape: dict[str, Any] = {"kv_heads": 8, "group": 4, "num_nodes": 256, "head_dim": 128, "tile": tile_for(1024, 128)}
    for prefix in (1024, 8192, 32768, 131072):
        assert choose_splits(batch=1, max_columns=prefix + 256, **shape) == 2
        assert all(choose_splits(batch=batch, max_columns=prefix + 256, **shape) == 1 for batch in (2, 4, 8))
    shard = {**shape, "kv_heads": 2}
    assert choose_splits(batch=1, max_columns=32768 + 256, **shard) == 8
    small = {**shape, "num_nodes": 16, "tile": tile_for(64, 128)}
    assert choose_splits(batch=1, max_columns=32768 + 16, **small) == 16
    assert choose_splits(batch=1, max_columns=64, **small) <= 2
    half = Device(multiprocessors=66)
    assert choose_splits(batch=1, max_columns=8192, device=half, **shape) == 1


# -- who sees what ----------------------------------------------------------------------------------------------------


@needs_triton
@given(st.integers(0, 99), st.integers(0, 39))
@settings(derandomize=True, max_examples=8, deadline=None)
def test_poison_reaches_exactly_the_rows_that_see_it(seed: int, node: int) -> None:
    found = problem(prefixes=(67,), num_nodes=40, dim=16, group=2, seed=seed)
    out, _ = kernel(found)
    sees = found.rows.visible[0, :, node]
    k = found.k.clone()
    k[:, :, 67 + node] = torch.nan
    poisoned, _ = kernel(dataclasses.replace(found, k=k))
    assert torch.equal(torch.isnan(poisoned).any(-1), sees.expand(1, 2, -1))
    k[:, :, 67 + node] = 0.0
    k[:, :, 67 + node, 0] = torch.inf  # scores of either sign
    endless, _ = kernel(dataclasses.replace(found, k=k))
    assert torch.equal((endless != out).any(-1), sees.expand(1, 2, -1))
    v = found.v.clone()
    v[:, :, 67 + node] += 1e6
    moved, _ = kernel(dataclasses.replace(found, v=v))
    assert torch.equal((moved != out).any(-1), sees.expand(1, 2, -1)), "and all others bit for bit"


@needs_triton
def test_a_flipped_bit_moves_its_row_alone() -> None:
    found = problem(prefixes=(10,), num_nodes=70, dim=16, group=2)
    out, _ = kernel(found)
    for row, column in ((5, 69), (69, 64), (64, 63), (3, 3)):
        words = found.rows.words.clone()
        words[0, row, column // 64] ^= torch.ones((), dtype=torch.int64) << column % 64
        changed, _ = kernel(found, dataclasses.replace(found.rows, seen=words))
        moved = (changed != out).any(-1)[0].any(0)
        assert moved.nonzero().flatten().tolist() == [row]


@needs_triton
def test_rows_that_see_nothing() -> None:
    found = problem(prefixes=(0, 9), num_nodes=5, dim=16)
    rows = dataclasses.replace(found.rows, seen=torch.zeros((1, 5, 1), dtype=torch.int64))
    for splits in (1, 3):
        out, lse = kernel(found, rows, splits=splits)
        assert not out[0].any() and bool(torch.isneginf(lse[0]).all())
        assert torch.isfinite(out[1]).all() and torch.isfinite(lse[1]).all()


@needs_triton
def test_a_path_is_plain_attention_and_order_does_not_matter() -> None:
    assert_paths_and_order(problem(prefixes=(30,), num_nodes=24), "triton")


@needs_triton
@pytest.mark.parametrize("tma", [False, True])
def test_padded_trees_are_their_trees(tma: bool) -> None:
    found = problem(prefixes=(40, 7), num_nodes=20, dim=16, slack=20)
    rows = found.rows
    padded = TreeRows(
        seen=pack(torch.nn.functional.pad(rows.visible, (0, 12, 0, 12))), prefix_lens=rows.prefix_lens, prefixes=None,
        max_prefix=44, num_nodes=torch.tensor([20, 20], dtype=torch.int32),
    )  # fmt: skip
    q = torch.nn.functional.pad(found.q, (0, 0, 0, 12))
    out, _ = kernel(dataclasses.replace(found, q=q), padded, tma=tma)
    assert_close(out[:, :, :20], found.expected()[0].float())
    assert torch.isfinite(out).all()


@needs_triton
@pytest.mark.parametrize(("scale", "shift"), [(1e4, 0.0), (0.0, 0.0), (1.0, 1e4), (1e-40, 0.0)])
def test_extreme_scores(scale: float, shift: float) -> None:
    found = problem(prefixes=(80,), num_nodes=12, dim=16)
    k = found.k * scale
    k[:, :, 3] += shift
    extreme = dataclasses.replace(found, k=k)
    out, _ = kernel(extreme, splits=2)
    torch.testing.assert_close(out.double(), extreme.expected()[0], rtol=1e-4, atol=1e-4)


# -- layouts ----------------------------------------------------------------------------------------------------------


@needs_triton
def test_views_without_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    found = problem(prefixes=(50,), num_nodes=20, kv_heads=2, group=2, dim=16)
    expected, _ = kernel(found)
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda self, **_: pytest.fail("copied"))
    batch, heads, columns, dim = found.k.shape
    for layout in ("heads first", "sliced heads", "offset", "inside a wider row", "static buffer"):
        wide = torch.full((batch, heads + 3, columns + 99, 2 * dim), torch.nan)
        if layout == "heads first":
            k, v = (x.clone(memory_format=torch.contiguous_format) for x in (found.k, found.v))
        elif layout == "sliced heads":
            k, v = wide.clone()[:, 1 : 1 + heads, :columns, :dim], wide[:, 2 : 2 + heads, :columns, :dim]
        elif layout == "offset":
            flat = torch.full((2, found.k.numel() + 3), torch.nan)
            k, v = (row[3:].view(found.k.shape) for row in flat)
        elif layout == "inside a wider row":
            k, v = wide[:, :heads, :columns, :dim], wide[:, :heads, :columns, dim:]
        else:
            k, v = wide.clone()[:, :heads, :, :dim], wide[:, :heads, :, :dim]
        k[:, :, :columns], v[:, :, :columns] = found.k, found.v
        out, _ = kernel(dataclasses.replace(found, k=k, v=v))
        assert torch.equal(out, expected), layout


@needs_triton
@pytest.mark.parametrize("page", [64, 128])
def test_pages_are_the_cache(page: int) -> None:
    """Pages of two requests, shuffled; the tree straddles a border, slack and other pages are NaN."""
    found = problem(prefixes=(120, 60), num_nodes=40, kv_heads=2, group=2, dim=16, slack=96)
    each = -(-found.k.shape[2] // page)
    table = torch.randperm(3 * each, generator=torch.Generator().manual_seed(0))[: 2 * each].view(2, each).int()
    pools = torch.full((2, 3 * each, page, 2, 16), torch.nan)
    for pool, x in zip(pools, (found.k, found.v), strict=True):
        padded = torch.nn.functional.pad(x, (0, 0, 0, each * page - x.shape[2]), value=torch.nan)
        pool[table.long()] = padded.transpose(1, 2).reshape(2, each, page, 2, 16)
    expected, _ = found.expected()
    for backend in ("triton", "hybrid"):
        out = tree_attention(found.q, pools[0], pools[1], found.rows, backend=backend, block_table=table)
        assert_close(out, expected.float())
    with pytest.raises(ValueError, match="a multiple of 64"):
        tree_attention(found.q, pools[0][:, :48], pools[1][:, :48], found.rows, backend="triton", block_table=table)


@needs_triton
def test_a_mask_shared_by_all_requests() -> None:
    found = problem(prefixes=(9, 70), num_nodes=12, dim=16)
    shared = dataclasses.replace(found, parents=[found.parents[0]] * 2)
    rows = dataclasses.replace(shared.rows, seen=shared.rows.words[:1])
    assert_close(kernel(shared, rows)[0], shared.expected()[0].float())


@needs_triton
def test_places_past_two_billion() -> None:
    """A batch stride of 2^30 elements over memory that is never touched; an int32 offset would be a segmentation fault."""
    code = """
import torch
from tests.tree_cases import problem
from treedraft.ops.tree_attention.launch import launch
found = problem(prefixes=(20, 33, 64), num_nodes=9, dim=16, dtype=torch.float16)
stores = [torch.empty(2**30 * 2 + found.k[0].numel(), dtype=torch.float16) for _ in range(2)]
shape = found.k.shape
views = [store.as_strided(shape, (2**30, shape[2] * 16, 16, 1)) for store in stores]
for view, x in zip(views, (found.k, found.v)):
    view.copy_(x)
out, _ = launch(found.q, *views, found.rows, scale=0.25)
expected, _ = found.expected()
assert (out.double() - expected).norm() / expected.norm() < 1e-3
"""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True, timeout=300)


def test_offsets_are_wide_before_they_are_multiplied() -> None:
    """Batch, head, page and first column are int64 wherever a stride is taken times them."""
    source = (ROOT / "treedraft" / "ops" / "tree_attention" / "kernels.py").read_text()
    assert re.search(r"batch = \(.*\)\.to\(tl\.int64\)", source) and re.search(r"kv_head = .*\.to\(tl\.int64\)", source)
    narrow = [line for line in source.splitlines() if re.search(r"\b(tile|start|page|offset)\b[^,=]*\* [kv]_(row|batch)", line)]
    wide = ("tl.cast(", "page * ", "page[:, None] * ", "+ offset * ")
    assert narrow and all(any(mark in line for mark in wide) for line in narrow)
    for name in ("page", "offset", "row"):
        assert all("int64" in line for line in re.findall(rf"^\s+{name} = .*", source, re.MULTILINE))


@needs_triton
def test_columns_too_far_apart_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = problem(num_nodes=2, prefixes=(1,), dim=16)
    monkeypatch.setattr("treedraft.ops.tree_attention.launch._MOST_STRIDE", 16)
    with pytest.raises(ValueError, match="16 and 16 elements apart; below 16"):
        kernel(found)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="splits is 0"):
        kernel(found, splits=0)


# -- through the front door, a target and a graph's forward -----------------------------------------------------------


@needs_triton
def test_by_name_and_as_an_operator() -> None:
    found = problem(prefixes=(11, 4), dim=16)
    assert choose("triton", device=torch.device("cpu"), dtype=torch.float32, head_dim=16).name == "triton"
    out, lse = tree_attention_lse(found.q, found.k, found.v, found.rows, backend="triton")
    assert_close(out, found.expected()[0].float())
    assert_close(lse, found.expected()[1].float())
    compiled = torch.compile(lambda q: tree_attention(q, found.k, found.v, rows, backend="triton"), fullgraph=True, backend="aot_eager")
    rows = found.rows
    assert_close(compiled(found.q), out)


@needs_triton
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_a_target_verifies_with_the_kernel(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """Head size 8 of the tiny target is padded; the fixed-shape forward of CUDA graphs goes through the kernel too."""
    monkeypatch.setattr("treedraft.ops.tree_attention.dispatch.SMALLEST_HEAD", 8)
    target = tiny_module.load(dtype=torch.float32, family=family)
    prompt, parents = [5, 40, 17, 2, 33], torch.tensor(tree("random", 9))
    tokens = torch.arange(9) + 3
    target.prefill(prompt)
    expected = target.verify(tokens, parents)
    target.use_attention("triton")
    target.prefill(prompt)
    found = target.verify(tokens, parents)
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-4)
    last, taps = GraphedVerify(target).run(tokens, parents)
    torch.testing.assert_close(target.head(last), expected.logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(taps, expected.taps, rtol=1e-4, atol=1e-4)


@needs_triton
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_transformers_own_caches(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr("treedraft.ops.tree_attention.dispatch.SMALLEST_HEAD", 8)
    monkeypatch.setattr(torch.Tensor, "contiguous", _refuse_caches(torch.Tensor.contiguous))
    found, expected = logits_with_transformers_cache(tiny_module.load(dtype=torch.float32), kind, "triton")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def _refuse_caches(contiguous: Any) -> Any:
    def checked(self: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        assert self.ndim != 4 or self.shape[2] <= len(TOKENS), "keys and values are copied"
        return contiguous(self, *arguments, **options)

    return checked


@needs_triton
def test_nothing_of_the_size_of_prefix_times_tree_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treedraft.ops.tree_attention.dispatch.SMALLEST_HEAD", 8)
    target = tiny_module.load(dtype=torch.float32, attention="triton")
    assert largest_made(target, 180, 64) < 64 * (180 + 64)


@needs_triton
def test_the_kernel_goes_where_its_tensors_are(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[torch.device] = []

    @contextlib.contextmanager
    def noted(device: torch.device) -> Iterator[None]:
        entered.append(device)
        yield

    found = problem(num_nodes=2, prefixes=(1,), dim=16)
    monkeypatch.setattr("treedraft.ops.tree_attention.launch.on_device", noted)
    kernel(found)
    assert entered == [found.q.device]
    monkeypatch.undo()
    assert isinstance(on_device(torch.device("cpu")), contextlib.nullcontext)
    assert isinstance(on_device(torch.device("cuda:1")), torch.cuda.device)


# -- compiled ---------------------------------------------------------------------------------------------------------


def test_tiles_fit_their_rows() -> None:
    with pytest.raises(ValueError, match="splits is 0"):
        plan(**_EIGHT_B, num_nodes=4, splits=0)
    assert [tile_for(rows, 128).rows for rows in (4, 16, 17, 64, 65, 1024)] == [16, 16, 32, 64, 128, 128]
    assert tile_for(1024, 128, capability=8, paged=True).stages == 2
    assert through_parts(1, 128, capability=8) and not through_parts(1, 128) and through_parts(1, 256) and through_parts(2, 64)
    assert tile_for(64, 128, capability=8).rows == 128 and tile_for(1024, 256).rows == 64
    assert through_parts(1, 128, rows=64) and not through_parts(1, 64, rows=64), "64 rows of four warps"
    assert [block_dim(dim) for dim in (8, 48, 64, 80, 96, 128, 256)] == [16, 64, 64, 128, 128, 128, 256]


_EIGHT_B: dict[str, Any] = {
    "batch": 1, "kv_heads": 8, "group": 4, "head_dim": 128, "max_prefix": 1024, "dtype": torch.bfloat16, "device": H200,
}  # fmt: skip


def test_what_runs_on_a_gpu() -> None:
    large = plan(**_EIGHT_B, num_nodes=256)
    assert large == Plan(tile=Tile(rows=128, warps=8, stages=3), splits=2, parts=True, tma=True)
    assert not plan(**_EIGHT_B, num_nodes=256, aligned=False).tma and not plan(**_EIGHT_B, num_nodes=256, paged=True).tma
    assert not plan(**{**_EIGHT_B, "device": A100}, num_nodes=256).tma
    assert plan(**{**_EIGHT_B, "batch": 8}, num_nodes=256).splits == 1
    exact = plan(**{**_EIGHT_B, "dtype": torch.float32}, num_nodes=256)
    assert exact.tile == Tile(rows=16, warps=8, stages=2) and not exact.tma


def test_tiles_fit_a_hundred_kilobytes() -> None:
    """What 8.6, 8.9 and 12.x give a program; the last has the instructions of 8.x."""
    small = Device(multiprocessors=84, capability=12, shared=101_376)
    assert small.generation == 8 and Device(multiprocessors=1, capability=10).generation == 10
    for dim in (16, *DIMS):
        for nodes in (1, 8, 16, 256):
            for capability in (8, 9):
                tile = tile_for(4 * nodes, dim, capability=capability, shared=small.shared)
                assert shared_bytes(tile, dim) <= small.shared
    assert tile_for(1024, 128, capability=8, shared=small.shared).stages == 2 < tile_for(1024, 128, capability=8).stages
    assert not plan(**{**_EIGHT_B, "device": small}, num_nodes=256).tma


@needs_triton
def test_compiled_ahead_of_time_nothing_spills() -> None:
    """A fifth of what the command compiles: every head size on both; on Hopper with wgmma. It fails where a number is wrong."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "treedraft.ops.tree_attention.aot", "--short"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("sm_")]
    assert len(lines) == len(aot.short_variants()) + 2
    for dim in DIMS:
        assert any(f"sm_80 bf16 D={dim} " in line for line in lines) and any(f"sm_90 bf16 D={dim} " in line for line in lines)


def test_the_report_holds_what_is_launched() -> None:
    """Every form that sizes, heads, pages or padding make of the kernel."""
    variants = aot.main_variants()
    names = [variant.name for variant in variants]
    assert set(aot.short_variants()) <= set(variants) and len(set(names)) == len(names)
    for form in (
        "sm_90 bf16 D=128 G=4 128x64 w8 s3 tma unsplit", "sm_90 bf16 D=128 G=4 32x64 w4 s2 tma", "sm_90 bf16 D=128 G=4 16x64 w4 s3 tma",
        "sm_90 bf16 D=128 G=4 128x64 w8 s3 tma unpadded", "sm_90 bf16 D=128 G=4 128x64 w8 s3 paged unsplit",
        "sm_90 bf16 D=80 G=4 128x64 w8 s3 tma unsplit", "sm_90 bf16 D=96 G=4 128x64 w8 s3 tma unsplit", "sm_90 fp32 D=16 G=4 16x64 w8 s2",
    ):  # fmt: skip
        assert form in names, form
    assert {variant.group for variant in variants} == set(range(1, 9))


@needs_triton
def test_the_report_sees_spills_and_missing_wgmma() -> None:
    code = """
from treedraft.ops.tree_attention.aot import *
few = compile_attend(Variant(capability=90, head_dim=128, tile=Tile(rows=128, warps=4, stages=2)))
assert few.spill > 0 and few.wgmma > 0 and "spills" in problems(few)[0], few
small = compile_attend(Variant(capability=90, head_dim=128, tile=Tile(rows=16, warps=4, stages=3)))
assert small.wgmma == 0 and small.mma > 0 and not problems(small), small
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True, timeout=300)
    assert Tile(rows=16, warps=4, stages=3) == tile_for(16, 128), "which is what a small tree gets"
