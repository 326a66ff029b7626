"""Tree attention without a GPU: words, the two merged parts, operators, models of transformers, targets."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import inspect
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter

from tests.tiny_drafters import make_drafter, random_prompts
from tests.tolerances import assert_close
from tests.tree_cases import (
    PARENTS,
    PROMPT,
    TOKENS,
    Problem,
    assert_paths_and_order,
    largest_made,
    logits_with_transformers_cache,
    problem,
    problems,
    sizes,
    tree,
)
from treedraft import bench_gpu, decode, registry
from treedraft.config import DecodeConfig
from treedraft.ops.tree_attention import dispatch, hf, hybrid, naive
from treedraft.ops.tree_attention.dispatch import (
    BackendUnavailable,
    choose,
    full_mask,
    tree_attention,
    tree_attention_lse,
)
from treedraft.ops.tree_attention.mask import TreeRows, ancestors, check_parents, pack, tree_rows, unpack
from treedraft.speculate import generate, generate_plain
from treedraft.targets import load_target, target_names
from treedraft.targets import tiny as tiny_module
from treedraft.targets.cache import RowCache
from treedraft.targets.graphs import GraphedVerify, graphable
from treedraft.targets.hf import Target
from treedraft.trees.mask import ancestor_mask, depths_of

ON_CPU = ("hybrid", "sdpa", "reference")
every_backend = pytest.mark.parametrize("backend", ON_CPU)
ROOT = Path(__file__).parents[1]


# -- masks ------------------------------------------------------------------------------------------------------------


def test_words_by_eye() -> None:
    parents = torch.tensor([-1, 0, 0, 1, 1, 2])  # root; a b; c d under a; e under b
    rows = tree_rows(parents, 10)
    assert rows.words[0, :, 0].tolist() == [0b1, 0b11, 0b101, 0b1011, 0b10011, 0b100101]
    assert rows.positions.tolist() == [[10, 11, 11, 12, 12, 12]]


def test_bit_63_is_the_sign() -> None:
    words = tree_rows(torch.arange(65) - 1, 0).words[0]
    assert words[63].tolist() == [-1, 0] and words[64].tolist() == [-1, 1]
    assert words[62, 0] == 2**63 - 1


@given(sizes, st.integers(0, 999), st.integers(1, 3))
@settings(derandomize=True, max_examples=60, deadline=None)
def test_words_are_the_ancestor_mask(num_nodes: int, seed: int, batch: int) -> None:
    parents = torch.tensor([tree("random", num_nodes, seed + b) for b in range(batch)])
    seen = ancestors(parents)
    assert torch.equal(seen, torch.stack([ancestor_mask(row) for row in parents]))
    assert torch.equal(unpack(pack(seen)), seen)
    rows = tree_rows(parents, tuple(range(batch)))
    assert torch.equal(rows.positions, torch.stack([depths_of(row) for row in parents]) + torch.arange(batch)[:, None])
    assert torch.equal(dataclasses.replace(rows, seen=rows.words).visible, seen), "words say the same"


@pytest.mark.parametrize(
    ("parents", "words"),
    [([-1, 1], "parent 1 of node 1"), ([-1, 0, 5], "parent 5 of node 2"), ([-1, -2], "parent -2 of node 1"),
     ([], "a tree of 0 nodes"), ([-1] * 1025, "1025 nodes")],
)  # fmt: skip
def test_parents_that_are_no_tree_are_refused(parents: list[int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_parents(torch.tensor(parents, dtype=torch.int64))


def test_the_full_mask_by_eye() -> None:
    T, F = True, False
    rows = tree_rows(torch.tensor([[-1, 0, 0], [-1, 0, 1]]), (2, 1))
    assert full_mask(rows, 5)[:, 0].tolist() == [
        [[T, T, T, F, F], [T, T, T, T, F], [T, T, T, F, T]],
        [[T, T, F, F, F], [T, T, T, F, F], [T, T, T, T, F]],
    ]


# -- values -----------------------------------------------------------------------------------------------------------


def assert_right(found: Problem, backend: str, **options: Any) -> None:
    out, lse = tree_attention_lse(found.q, found.k, found.v, found.rows, backend=backend, **options)
    expected, expected_lse = found.expected()
    assert_close(out, expected.to(out.dtype))
    assert_close(lse, expected_lse.to(lse.dtype))
    assert_close(tree_attention(found.q, found.k, found.v, found.rows, backend=backend, **options), out)
    assert out.transpose(1, 2).is_contiguous(), "as a model wants it next"


@every_backend
@given(found=problems())
@settings(derandomize=True, max_examples=40, deadline=None)
def test_a_backend_is_the_definition(backend: str, found: Problem) -> None:
    assert_right(found, backend)


@every_backend
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("prefixes", [(0,), (1000,), (9, 9), (5, 0, 140)], ids=str)
@pytest.mark.parametrize("num_nodes", [1, 255])
def test_at_the_sizes_of_decoding(backend: str, dtype: torch.dtype, prefixes: tuple[int, ...], num_nodes: int) -> None:
    assert_right(problem(prefixes=prefixes, num_nodes=num_nodes, kv_heads=2, group=3, dim=48, dtype=dtype), backend)


@every_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(backend: str, dtype: torch.dtype) -> None:
    found = problem(prefixes=(200,), num_nodes=65, group=4, dim=64, dtype=dtype)
    out = tree_attention(found.q, found.k, found.v, found.rows, backend=backend)
    expected, _ = found.expected()
    error = float((out.double() - expected).norm() / expected.norm())
    assert error < {torch.bfloat16: 5e-3, torch.float16: 1e-3}[dtype]


def test_stacking_heads_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for start in (0, 2**40):
        monkeypatch.setattr(hybrid, "_ONE_READ", start)
        assert_right(problem(prefixes=(33,), group=4), "hybrid")


# The ways in which `hybrid` deals the columns, whatever the sizes would choose.
FORMS: dict[str, dict[str, Any]] = {
    "two parts": {"_DIVIDE_FROM": 2**60},
    "blocks": {"_DIVIDE_FROM": 0, "_BLOCK": 8},
    "chunks": {"_DIVIDE_FROM": 2**60, "_flash": lambda device: None, "_CHUNK": 32},
}
every_form = pytest.mark.parametrize("form", FORMS)


@contextlib.contextmanager
def dealt_as(form: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in FORMS[form].items():
            patch.setattr(hybrid, name, value)
        yield


@every_form
@given(found=problems())
@settings(derandomize=True, max_examples=40, deadline=None)
def test_every_form_is_the_definition(form: str, found: Problem) -> None:
    with dealt_as(form):
        assert_right(found, "hybrid")


@every_form
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("prefixes", [(0,), (15,), (1000,), (40, 40), (5, 0, 140)], ids=str)
def test_every_form_at_the_sizes_of_decoding(form: str, dtype: torch.dtype, prefixes: tuple[int, ...]) -> None:
    with dealt_as(form):
        for shape in ("chain", "star", "random"):
            assert_right(problem(prefixes=prefixes, num_nodes=75, kv_heads=2, group=3, dim=48, dtype=dtype, shape=shape), "hybrid")


@every_form
def test_one_mask_for_a_batch(form: str) -> None:
    """One tree for all requests, and a mask made by hand, with nodes that see later ones and a row that sees none."""
    found = problem(prefixes=(21, 21), num_nodes=20, dtype=torch.float64)
    seen = torch.rand((1, 20, 20), generator=torch.Generator().manual_seed(0)) < 0.2
    seen[:, 3] = False
    rows = dataclasses.replace(found.rows, seen=seen, sees_itself=False)
    expected, expected_lse = naive.from_visible(found.q, found.k, found.v, seen, (21, 21))
    with dealt_as(form):
        out, lse = tree_attention_lse(found.q, found.k, found.v, rows, backend="hybrid")
        assert_close(out, expected)
        assert_close(lse, expected_lse)
        assert_close(tree_attention(found.q, found.k, found.v, rows.fresh(), backend="hybrid"), expected)


def test_blocks_by_eye() -> None:
    T, F = True, False
    parents = torch.tensor([-1, 0, 0, 1, 1, 2])  # root; a b; c d under a; e under b
    rows = tree_rows(parents, 10)
    (whole,) = rows.blocks(1, 6, torch.float32)
    assert whole.columns is None and (whole.bias[0, 0] == 0).tolist() == [
        [T, T, F, F, F, F, F], [T, T, T, F, F, F, F], [T, T, F, T, F, F, F],
        [T, T, T, F, T, F, F], [T, T, T, F, F, T, F], [T, T, F, T, F, F, T],
    ]  # fmt: skip
    first, second = rows.blocks(1, 4, torch.float32)
    # A column of the prefix; root, a, b, c; and, as columns come sixteen at a time, what nobody sees.
    assert first.rows == slice(0, 4) and second.rows == slice(4, 6)
    assert first.columns is not None and first.columns.tolist() == [[0, 1, 2, 3, 4, 5, 6]]
    assert second.columns is not None and second.columns.tolist() == [[0, 1, 2, 3, 5, 6, 4]]
    assert (second.bias[0, 0] == 0).tolist() == [[T, T, T, F, T, F, F], [T, T, F, T, F, T, F]]


def test_a_block_reads_what_it_sees() -> None:
    parents = torch.tensor([-1, *[0] * 127])  # a star: root and itself
    blocks = tree_rows(parents, 9).blocks(9, 16, torch.float32)
    assert [block.columns.shape[1] for block in blocks if block.columns is not None] == [32] * 8
    assert tree_rows(parents, 9).blocks(9, 128, torch.float32)[0].columns is None


@pytest.mark.parametrize(
    ("shape", "prefix", "num_nodes", "expected"),
    [((4, 48), 250, 64, (250, 64)), ((32, 128), 1000, 16, (1000, 16)),  # two parts
     ((32, 128), 256, 255, (256, 32)), ((9, 64), 250, 255, (240, 32))],  # blocks
)  # fmt: skip
def test_the_sizes_choose(shape: tuple[int, int], prefix: int, num_nodes: int, expected: tuple[int, int]) -> None:
    heads, dim = shape
    rows = tree_rows(torch.tensor(tree("random", num_nodes)), prefix)
    assert hybrid.deal(torch.empty((1, heads, num_nodes, dim)), rows) == expected


@pytest.mark.parametrize("missing", ["operator", "groups"])
def test_without_torchs_private_operators(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    if missing == "operator":
        monkeypatch.setattr(hybrid, "_flash", lambda device: None)
    else:
        monkeypatch.setattr(hybrid, "_groups_heads", lambda: False)
    for prefixes in ((0,), (70,), (5, 40)):
        for form in FORMS:
            with dealt_as(form):
                assert_right(problem(prefixes=prefixes, group=3, dtype=torch.float64), "hybrid")


@every_backend
def test_a_row_that_sees_nothing_is_zero(backend: str) -> None:
    found = problem(prefixes=(0,), num_nodes=5)
    rows = dataclasses.replace(found.rows, seen=torch.zeros((1, 5, 1), dtype=torch.int64), sees_itself=False)
    out, lse = tree_attention_lse(found.q, found.k, found.v, rows, backend=backend)
    assert not out.any() and bool(torch.isneginf(lse).all())


def test_a_row_that_sees_the_prefix_alone() -> None:
    found = problem(prefixes=(12,), num_nodes=5, dtype=torch.float64)
    rows = dataclasses.replace(found.rows, seen=torch.zeros((1, 5, 1), dtype=torch.int64), sees_itself=False)
    expected, _ = naive.from_visible(found.q, found.k, found.v, rows.visible, (12,))
    assert_close(tree_attention(found.q, found.k, found.v, rows, backend="hybrid"), expected)


@every_backend
def test_padded_trees_are_their_trees(backend: str) -> None:
    """Rows past the last node may hold anything, NaN too."""
    found = problem(prefixes=(40, 7), num_nodes=20, dtype=torch.float64, slack=20)
    rows = found.rows
    padded = TreeRows(
        seen=pack(torch.nn.functional.pad(rows.visible, (0, 12, 0, 12))), prefix_lens=rows.prefix_lens, prefixes=None,
        max_prefix=44, num_nodes=torch.tensor([20, 20], dtype=torch.int32),
    )  # fmt: skip
    q = torch.nn.functional.pad(found.q, (0, 0, 0, 12))
    out = tree_attention(q, found.k, found.v, padded, backend=backend)
    assert_close(out[:, :, :20], found.expected()[0])
    assert torch.isfinite(out).all()


def test_a_path_is_plain_attention_and_order_does_not_matter() -> None:
    assert_paths_and_order(problem(prefixes=(30,), num_nodes=24, dtype=torch.float64), "hybrid")


@pytest.mark.parametrize("low", [-1e4, 0.0, -torch.inf])
@pytest.mark.parametrize("high", [1e4, 0.0, -torch.inf])
def test_merging_is_one_softmax(low: float, high: float) -> None:
    generator = torch.Generator().manual_seed(0)
    parts = []
    for level in (low, high, 3.0):
        values = torch.randn((2, 5, 4), generator=generator, dtype=torch.float64)
        empty = level == -torch.inf
        parts.append((torch.zeros_like(values) if empty else values, torch.full((2, 5), level, dtype=torch.float64)))
    left = hybrid.merge(hybrid.merge(parts[0], parts[1]), parts[2])
    right = hybrid.merge(parts[0], hybrid.merge(parts[1], parts[2]))
    weights = torch.stack([lse for _, lse in parts]).softmax(0)[..., None]
    expected = (weights * torch.stack([out for out, _ in parts])).sum(0)
    for out, lse in (left, right):
        assert_close(out, expected)
        assert_close(lse, torch.stack([lse for _, lse in parts]).logsumexp(0))


# -- choice and errors ------------------------------------------------------------------------------------------------


def test_auto_on_a_cpu_is_hybrid_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    where: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32, "head_dim": 64}
    found = choose("auto", **where)
    assert found.name == "hybrid" and "triton is out" in found.reason and "a mask-free prefix" in found.reason
    assert choose("sdpa", **where).name == "sdpa"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose("auto", **where).name == "hybrid", "the interpreter is never chosen"


def test_a_named_backend_is_never_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(BackendUnavailable, match="attention 'triton' cannot run"):
        choose("triton", device=cpu, dtype=torch.bfloat16, head_dim=128)
    monkeypatch.setattr(dispatch.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BackendUnavailable, match="triton is not installed"):
        choose("triton", device=cuda, dtype=torch.bfloat16, head_dim=128)
    monkeypatch.setattr(dispatch.importlib.util, "find_spec", lambda name: object())
    for capability, dtype, head_dim, words in (
        ((9, 0), torch.float64, 128, "not float64"), ((7, 5), torch.float16, 64, "not 7.5"), ((9, 0), torch.bfloat16, 512, "512 is outside"),
        ((9, 0), torch.float32, 256, "head sizes up to 128, not 256"),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None, capability=capability: capability)
        with pytest.raises(BackendUnavailable, match=words):
            choose("triton", device=cuda, dtype=dtype, head_dim=head_dim)
        assert choose("auto", device=cuda, dtype=dtype, head_dim=head_dim).name == "hybrid"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    assert choose("auto", device=cuda, dtype=torch.bfloat16, head_dim=128).name == "triton"
    assert choose("triton", device=cuda, dtype=torch.float32, head_dim=128).name == "triton"
    exact = choose("auto", device=cuda, dtype=torch.float32, head_dim=128)
    assert exact.name == "hybrid" and "float32 cannot use the tensor cores" in exact.reason
    with pytest.raises(ValueError, match="unknown attention 'tritom' .did you mean 'triton'"):
        choose("tritom", device=cpu, dtype=torch.float32, head_dim=64)


def test_an_interpreter_that_cannot_run_is_refused() -> None:
    assert dispatch.uninterpretable("3.6.0", "2.5.2") == "triton 3.6.0 cannot interpret with numpy 2.5.2: it needs numpy below 2.4, or triton 3.7"
    for triton, numpy in (("3.6.0", "2.3.5"), ("3.7.1", "2.5.2"), ("3.10.0", "2.4.6")):
        assert dispatch.uninterpretable(triton, numpy) is None


def test_verbose_says_what_auto_chose_and_why(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("treedraft.drafter.load_drafter", lambda *_, **__: None)
    decode._load(decode.Arguments(target="tiny", device="cpu"))
    assert capsys.readouterr().err == ""
    decode._load(decode.Arguments(target="tiny", device="cpu", verbose=True))
    said = capsys.readouterr().err
    assert said.startswith("attention: hybrid (a mask-free prefix and the tree, merged)") and "triton is out, " in said


def test_a_target_is_loaded_with_the_attention_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto`, whose self test launches the kernel on a GPU, is not tried before."""
    tried: list[str] = []
    real = Target.use_attention
    monkeypatch.setattr(Target, "use_attention", lambda self, name, **options: (tried.append(name), real(self, name, **options)))
    assert load_target("tiny", attention="sdpa").attention.name == "sdpa" and tried == ["sdpa"]
    for name in target_names():
        assert "attention" in inspect.signature(registry.load("targets", name).load).parameters


def test_the_command_says_it_in_one_sentence() -> None:
    command = [sys.executable, "-m", "treedraft.decode", "--target", "pocket", "--attention", "triton", "Hello"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith("error: attention 'triton' cannot run: ")


def test_what_does_not_fit_is_refused() -> None:
    good = problem()
    shorter = good.k[:, :, :10]
    for q, k, v, words in (
        (good.q[..., :8], good.k, good.v, "same D"), (good.q[:, :, :, ::2], good.k[..., ::2], good.v[..., ::2], "last strides"),
        (good.q.double(), good.k, good.v, "torch.float64"), (good.q, shorter, shorter, "20 nodes in 10 columns"),
        (good.q, good.k[:, :, :85], good.v[:, :, :85], "70 and 20 nodes do not fit 85"), (good.q[:, :, :19], good.k, good.v, "the mask is"),
        (good.q[0], good.k, good.v, "expected .B, H, N, D."),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            tree_attention(q, k, v, good.rows, backend="hybrid")
    odd = problem(kv_heads=2)
    with pytest.raises(ValueError, match="HK divides H"):
        tree_attention(odd.q[:, :3], odd.k, odd.v, odd.rows)
    with pytest.raises(ValueError, match="prefix_lens are torch.int64"):
        tree_attention(good.q, good.k, good.v, dataclasses.replace(good.rows, prefix_lens=torch.tensor([70])))


def test_what_is_read_by_place_has_to_lie_so() -> None:
    good = problem(prefixes=(9, 9), num_nodes=5)
    rows = good.rows
    wide = torch.zeros((2, 5, 2), dtype=torch.int64)
    wide[..., 0] = rows.words[..., 0]
    twice = rows.prefix_lens.repeat_interleave(2)
    for what, changed in (
        ("words", {"seen": wide[..., :1]}), ("words", {"seen": rows.words[:, 0:1].expand(-1, 5, -1)}), ("prefix_lens", {"prefix_lens": twice[::2]}),
        ("num_nodes", {"num_nodes": torch.full((4,), 5, dtype=torch.int32)[::2]}),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"strides .* of {what}"):
            tree_attention(good.q, good.k, good.v, dataclasses.replace(rows, **changed), backend="hybrid")
    expanded = dataclasses.replace(rows, seen=rows.words[:1].expand(2, -1, -1))
    assert torch.isfinite(tree_attention(good.q, good.k, good.v, expanded, backend="hybrid")).all()
    assert pack(ancestors(torch.arange(70)[None] - 1).transpose(1, 2)).is_contiguous()


def test_checks_that_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    good = problem()
    monkeypatch.setenv("TREEDRAFT_CHECK", "1")
    tree_attention(good.q, good.k, good.v, good.rows)
    words = good.rows.words.clone()
    words[0, 3] ^= 1 << 3
    with pytest.raises(ValueError, match="does not see itself"):
        tree_attention(good.q, good.k, good.v, dataclasses.replace(good.rows, seen=words))
    with pytest.raises(ValueError, match="bit at or past node 20"):
        tree_attention(good.q, good.k, good.v, dataclasses.replace(good.rows, seen=good.rows.words | 1 << 20))
    with pytest.raises(ValueError, match="prefix of 70"):
        tree_attention(good.q, good.k, good.v, dataclasses.replace(good.rows, max_prefix=69))


@pytest.mark.parametrize("backend", ["hybrid", "sdpa"])
def test_a_compiled_function_passes_through(backend: str) -> None:
    found = problem(prefixes=(11, 4))
    rows = found.rows
    compiled = torch.compile(lambda q, k, v: tree_attention(q, k, v, rows, backend=backend) * 2, fullgraph=True, backend="aot_eager")
    assert_close(compiled(found.q, found.k, found.v), tree_attention(found.q, found.k, found.v, rows, backend=backend) * 2)
    arguments = (found.q, found.k, found.v, rows.words, rows.prefix_lens, [11, 4], 11, None, 0.25, backend, 0, None)
    torch.library.opcheck(torch.ops.treedraft.tree_attention.default, arguments, test_utils=("test_schema", "test_faketensor"))


# -- inside transformers ----------------------------------------------------------------------------------------------

FAMILIES = ("qwen3", "llama")

@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_own_caches(family: str, kind: str) -> None:
    """A static cache is used whole."""
    target = tiny_module.load(dtype=torch.float64, family=family)
    assert_close(*logits_with_transformers_cache(target, kind, "hybrid"))


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_tree_a_model_is_as_it_was(family: str) -> None:
    target = tiny_module.load(dtype=torch.float64, family=family)
    model: Any = target.model
    ids = torch.tensor([[*PROMPT, 7, 8], [0, 0, *PROMPT]])
    mask = torch.tensor([[1] * 7, [0, 0, 1, 1, 1, 1, 1]])
    assert model.config._attn_implementation == hf.NAME
    ours = [model(input_ids=ids).logits, model(input_ids=ids, attention_mask=mask).logits[:, 2:]]
    model.set_attn_implementation("sdpa")
    theirs = [model(input_ids=ids).logits, model(input_ids=ids, attention_mask=mask).logits[:, 2:]]
    assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])
    assert not torch.equal(ours[0][:, 2:], ours[1])
    model.set_attn_implementation(hf.NAME)
    # A left-padded row at its own positions is its solo run.
    placed = model(input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0)).logits
    assert_close(placed[1, 2:], model(input_ids=torch.tensor([PROMPT])).logits[0])


def test_a_sliding_window_is_refused() -> None:
    found = problem()

    class Layer(torch.nn.Module):
        sliding_window = 128

    with pytest.raises(ValueError, match="sliding window of 128"):
        hf.attention(Layer(), found.q, found.k, found.v, None, tree=found.rows)


@pytest.mark.parametrize("form", ["sdpa", *FORMS])
def test_nothing_of_the_size_of_prefix_times_tree_is_built(form: str) -> None:
    """But by the one that is a pass under one mask."""
    target = tiny_module.load(dtype=torch.float32)
    target.use_attention("sdpa" if form == "sdpa" else "hybrid")
    prefix, num_nodes = 400, 64
    with dealt_as("two parts" if form == "sdpa" else form):
        built = largest_made(target, prefix, num_nodes) >= num_nodes * (prefix + num_nodes)
    assert built == (form == "sdpa")


# -- targets ----------------------------------------------------------------------------------------------------------


@every_backend
@pytest.mark.parametrize("family", FAMILIES)
def test_a_target_verifies_alike_with_every_backend(family: str, backend: str) -> None:
    target = tiny_module.load(dtype=torch.float64, family=family, kv_heads=1)
    assert target.attention.name == "hybrid"
    expected = []
    for name in ("sdpa", backend):
        target.use_attention(name)
        assert target.attention.name == name
        target.prefill(PROMPT)
        first = target.verify(TOKENS, PARENTS)
        target.commit([0, 1, 5])
        expected.append((first.logits, first.taps, target.verify(TOKENS, PARENTS).logits))
    for one, other in zip(*expected, strict=True):
        assert_close(one, other)


@pytest.mark.parametrize(("backend", "dtype"), [
    *((backend, torch.float64) for backend in ON_CPU), ("hybrid", torch.float32), ("sdpa", torch.float32),
])  # fmt: skip
def test_decoding_is_plain_decoding_with_every_backend(backend: str, dtype: torch.dtype) -> None:
    target = tiny_module.load(dtype=dtype)
    target.use_attention(backend)
    drafter = make_drafter(target, correction="attention")
    (prompt,) = random_prompts(target, 1, seed=3)
    found = generate(target, drafter, prompt, config=DecodeConfig(depth=4, width=3, budget=12), max_new_tokens=64)
    assert found.ids == generate_plain(target, prompt, max_new_tokens=64).ids


# -- fixed shapes, as CUDA graphs need them ---------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_the_forward_of_a_graph_is_the_forward(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """Every bucket, prefixes that grow, a cache that moves; nothing asks the host for a length."""
    target = tiny_module.load(dtype=torch.float64, family=family, max_length=2048)
    monkeypatch.setattr(RowCache, "get_seq_length", lambda *_: pytest.fail("asks for a length"))
    graphs = GraphedVerify(target, buckets=(4, 8, 32))
    target.cache = target.new_cache(batch=1, capacity=40)
    target.prefill(PROMPT)
    moves = 0
    for turn, size in enumerate((1, 3, 8, 20, 8, 2, 32)):
        parents = torch.tensor(tree("random", size, turn))
        tokens = torch.randint(0, 60, (size,), generator=torch.Generator().manual_seed(turn))
        before, place = set(graphs._captured), graphs._storage[:2]
        last, taps = graphs.run(tokens, parents)
        bucket, moved = next(one for one in graphs.buckets if one >= size), graphs._storage[:2] != place
        assert place == () or moved == (target.cache.capacity != place[1])
        assert set(graphs._captured) == ({bucket} if moved else before | {bucket})
        moves += moved
        expected = target.verify(tokens, parents)
        assert_close(target.head(last), expected.logits)
        assert_close(taps, expected.taps)
        graphs.run(tokens, parents)
        target._pending = size
        target.commit(list(range(min(size, 7))))
        assert target.verify(TOKENS, PARENTS).logits.isfinite().all()
    assert moves > 1, "the cache grew on the way"


def test_a_target_with_graphs_decodes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_module.load(dtype=torch.float64)
    drafter = make_drafter(target, correction="attention")
    (prompt,) = random_prompts(target, 1, seed=4)
    config = DecodeConfig(depth=4, width=3, budget=20)
    plain = generate_plain(target, prompt, max_new_tokens=40)
    target.graphs = GraphedVerify(target)
    assert generate(target, drafter, prompt, config=config, max_new_tokens=40).ids == plain.ids
    target.self_test()
    assert target.graphs is not None and set(target.graphs._captured) == {32}, "every round went through a graph"


def test_rotary_scalings_that_read_positions_are_not_captured() -> None:
    for kind, expected in (("default", True), ("yarn", True), ("dynamic", False), ("longrope", False)):
        assert graphable(type("Config", (), {"rope_parameters": {"rope_type": kind}})) == expected


def test_accepted_rows_move_in_one_gather(tiny64: Target) -> None:
    cache = tiny64.new_cache(batch=2, capacity=12)
    cache.store.copy_(torch.randn(cache.store.shape, generator=torch.Generator().manual_seed(0)))
    before = cache.store.clone()
    cache.move(torch.tensor([4, 6, 9]), 4)
    assert torch.equal(cache.store[..., 4:7, :], before[..., [4, 6, 9], :])
    assert torch.equal(cache.store[..., 7:, :], before[..., 7:, :]) and torch.equal(cache.store[..., :4, :], before[..., :4, :])
    cache.store.copy_(before)
    cache.move_rows(torch.tensor([[2, 5], [3, 4]]), torch.tensor([[2, 3], [1, 2]]))
    assert torch.equal(cache.store[:, :, 0, :, 2:4], before[:, :, 0, :, [2, 5]])
    assert torch.equal(cache.store[:, :, 1, :, 1:3], before[:, :, 1, :, [3, 4]])
    source = inspect.getsource(RowCache.move)
    assert "for " not in source, "no loop over layers"


# -- importing --------------------------------------------------------------------------------------------------------


def test_importing_needs_neither_triton_nor_a_driver() -> None:
    code = (
        "import sys; sys.modules['triton'] = None;"
        "import treedraft.ops.tree_attention.hf, treedraft.ops.tree_attention.launch, treedraft.targets.hf;"
        "assert not [m for m in sys.modules if m.startswith('triton') and sys.modules[m]]"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)


# -- benches ----------------------------------------------------------------------------------------------------------


def test_bench_attention_measures_and_checks(tmp_path: Path) -> None:
    flags = ["--nodes", "9", "--heads", "4", "--kv-heads", "2", "--head-dim", "16", "--prefixes", "30", "70", "--repeats", "1"]
    command = [sys.executable, "-m", "treedraft.bench", "attention", *flags, "--output", str(tmp_path / "out.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    record = json.loads((tmp_path / "out.json").read_text())
    assert record["benchmark"] == "attention" and record["behind_30"]["largest_difference"] < 1e-4
    assert {"hybrid_ms", "times_sdpa", "times_repeat_kv"} <= record["behind_70"].keys()


# What a GPU image need not have: all that this package depends on but Python, torch, numpy and transformers with its own needs.
ABSENT = "tyro pydantic platformdirs gguf scipy pandas matplotlib seaborn PIL rich jaxtyping beartype accelerate"


def fake_sanitizer(folder: Path, exit_code: int) -> Path:
    """Folder of a `compute-sanitizer` that runs what it is given, writes its own options down and finds what it is told to."""
    folder.mkdir()
    tool = folder / "compute-sanitizer"
    options = '"$1 $2 $3 $4 $5 $6"'
    tool.write_text(f"#!/bin/sh\necho {options} > {folder}/options\nshift 6\n\"$@\" || exit 1\nexit {exit_code}\n")
    tool.chmod(0o755)
    return folder


def test_bench_gpu_goes_through_on_a_bare_machine(tmp_path: Path) -> None:
    code = (
        "import runpy, sys, importlib.util\n"
        f"sys.modules.update(dict.fromkeys({ABSENT!r}.split()))\n"
        "found = importlib.util.find_spec\n"
        f"importlib.util.find_spec = lambda name, *a: None if name in {ABSENT!r}.split() else found(name, *a)\n"
        f"sys.argv = ['bench', 'gpu', '--output', {str(tmp_path / 'out.json')!r}, '--dry-run']\n"
        "runpy.run_module('treedraft.bench', run_name='__main__')"
    )
    tools = fake_sanitizer(tmp_path / "tools", exit_code=0)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "everything is right" in done.stdout
    record = json.loads((tmp_path / "out.json").read_text())
    assert record["wrong"] == [] and record["dry_run"]
    has_kernel = importlib.util.find_spec("triton") is not None
    assert any(name.startswith("triton") for name in record["checks"]) == has_kernel
    assert {"hybrid", "sdpa_mask", "flex", "sdpa_nomask"} <= record["attention_1x70_20"]["microseconds"].keys()
    assert ({"ours", "tma", "naive"} <= record["attention_1x70_20"]["microseconds"].keys()) == has_kernel
    assert set(record.get("aims", ())) == ({"share of the floor behind 1 x 70", "times SDPA with a mask behind 1 x 70, 20 nodes"} if has_kernel else set())
    assert record["sanitizer"] == "no error"
    assert (tools / "options").read_text().split() == "--tool memcheck --require-cuda-init no --error-exitcode 9".split()
    assert record["attention_1x70_20"]["flex_mask_us"] > 0 and "sdpa/ours" in done.stdout
    for correction in ("attention", "markov"):
        assert record[f"builder_{correction}"]["same_tree"]
        assert record[f"identity_{correction}_auto"]["same_as_plain"] and record[f"identity_{correction}_auto"]["tau"] > 1.1
    for way in ("graphs", "eager") if has_kernel else ():
        found = record[f"identity_attention_triton_{way}"]
        assert found["same_as_plain"] and found["attention"] == "triton"
    compared = [name for name in record["checks"] if "in a cache that has moved" in name]
    assert len(compared) == (2 if has_kernel else 1)
    for name in ("graphs", "eager"):
        assert record[f"round_{name}"]["same_as_plain"]
        assert {"draft_ms", "build_ms", "verify_ms", "commit_ms", "round_ms"} <= record[f"round_{name}"].keys()


def test_what_compute_sanitizer_finds_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("PATH", str(fake_sanitizer(tmp_path / "tools", exit_code=9)), prepend=os.pathsep)
    report = bench_gpu.Report()
    bench_gpu.sanitizer(bench_gpu.DRY, report)
    assert report.wrong == ["compute-sanitizer: exit code 9"] and report.record["sanitizer"] == "exit code 9"


def test_a_sanitizer_that_takes_too_long_is_ended_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note = tmp_path / "child"
    command = ["sh", "-c", f"sleep 600 & echo $! > {note}.new; mv {note}.new {note}; wait"]
    begin = time.monotonic()
    code, _ = bench_gpu._within(command, 1.0, dict(os.environ))
    assert code is None and time.monotonic() - begin < 300
    child = Path(f"/proc/{note.read_text().strip()}/stat")

    def ended() -> bool:
        return not child.exists() or child.read_text().split()[2] in "ZX"

    while not ended() and time.monotonic() - begin < 300:  # it was sent the signal, and ends when it next gets the processor
        time.sleep(0.05)
    assert ended()


def test_a_quick_run_says_that_it_has_no_sanitizer(capsys: pytest.CaptureFixture[str]) -> None:
    report = bench_gpu.Report()
    bench_gpu.sanitizer(bench_gpu.QUICK, report)
    assert report.record["sanitizer"] == "not in a quick run" and "not in a quick run" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="it could run")
def test_a_gpu_without_the_kernel_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    report = bench_gpu.Report()
    bench_gpu.require_kernel(bench_gpu.DRY, report)
    assert report.wrong == []
    monkeypatch.setattr(bench_gpu, "obstacle", lambda scale: "the package triton is not installed")
    bench_gpu.require_kernel(bench_gpu.QUICK, report)
    assert report.wrong == ["the kernel cannot run: the package triton is not installed"]


def test_poison_and_its_end() -> None:
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    with bench_gpu.poisoned():
        assert torch.empty(9).isnan().all() and torch.zeros(2).new_empty((3, 3)).isnan().all()
    assert before == (torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory)


def test_graphs_that_remember_a_prefix_are_wrong() -> None:
    """What compares logits sees a graph whose prefix length is not read anew."""
    target = tiny_module.load(dtype=torch.float32)
    scale = dataclasses.replace(bench_gpu.DRY, vocabulary=target.vocab_size)
    graphs, report = GraphedVerify(target), bench_gpu.Report()
    bench_gpu.compare_graphs(scale, report, target, graphs, PROMPT)
    assert report.wrong == [] and len(report.record["checks"]) == 3
    stale, report = GraphedVerify(target), bench_gpu.Report()
    forward = stale._forward

    def forgetful(bucket: Any) -> None:
        bucket.rows.prefix_lens.fill_(len(PROMPT))
        forward(bucket)

    stale._forward = forgetful
    bench_gpu.compare_graphs(scale, report, target, stale, PROMPT)
    assert len(report.wrong) == 2


def test_flex_attention_is_compiled_once() -> None:
    counter = CompileCounter()
    flex = bench_gpu.Flex(bench_gpu.DRY, backend=counter)
    for prefix, nodes in ((300, 200), (500, 140)):
        for seed in (0, 1):
            case = bench_gpu.make_case(bench_gpu.DRY, (prefix,), nodes, slack=0, seed=seed)
            assert bench_gpu.relative(flex.attend(case, flex.mask(case)), bench_gpu.exact(case)) < 1e-5
    assert counter.frame_count == 1


def test_a_missed_aim_of_speed_is_not_wrong() -> None:
    report = bench_gpu.Report()
    report.aim("share", 0.54, bench_gpu.AIM_FRACTION)
    report.aim("times", 2.0, bench_gpu.AIM_TIMES_SDPA)
    assert [found["met"] for found in report.record["aims"].values()] == [False, True] and not report.wrong


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would run")
def test_bench_gpu_says_what_it_needs() -> None:
    done = subprocess.run([sys.executable, "-m", "treedraft.bench", "gpu"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.startswith("error: bench gpu needs a CUDA device")
