"""`bench gpu`: everything that needs a CUDA machine, in one command: is it right, and how fast is it.

1. the kernel against float64, in half precision, over head sizes, groups, edges of tiles, splits, TMA, pages and graphs
2. the kernel's memory accesses on two shapes under compute-sanitizer, where that is installed
3. attention of a 256-node tree, seven ways, at the shapes of an 8B model
4. tree building on Qwen3-8B shapes with random weights: heap against batched, and the time of reading the weights
5. whole rounds of a random-weight pair of that shape, by stages, with CUDA graphs and without, whose logits are compared;
   before them, trees of a small random pair in float32 against plain decoding, id for id, with the kernel too

Needs Python, torch, triton and transformers, nothing else. --dry-run runs the same code on a CPU at tiny shapes. Exits with
1 if a result is wrong, or if the kernel is below 0.45 of the floor (the roofline as measured in the same run) behind 32K
tokens. Bars that are aims (2 x SDPA with a mask from 8K on, 0.55 of the floor) are printed as met or missed.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from treedraft.ops.tree_attention.mask import TreeRows

HALF_BOUND = 5e-3  # relative error against float64
LOGITS_BOUND = {"float32": 1e-4, "bfloat16": 0.05}  # of two right ways: rounding is carried on through 36 layers (0.02; a parent that is wrong: 0.2)
LEAST_FRACTION = 0.45
AIM_FRACTION, AIM_TIMES_SDPA = 0.55, 2.0
PARTS = ("checks", "sanitizer", "attention", "builder", "rounds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How large everything is."""

    device: str
    dtype: str
    shapes: tuple[tuple[int, int, int], ...]  # requests, prefix, nodes
    long_prefix: int = 32768  # behind which a share of the floor is asked for
    medium_prefix: int = 8192  # from which on many times SDPA's speed is
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    cold_bytes: float = 240e6  # of inputs that are gone through between two uses: several times the second-level cache
    repeats: int = 20
    matrix: int = 8192
    hidden: int = 4096
    intermediate: int = 12288
    layers: int = 36
    vocabulary: int = 151_936
    draft_vocabulary: int = 32_000
    budget: int = 255
    depth: int = 15
    prompt: int = 1024
    rounds: int = 12
    sanitizer_seconds: int = 60
    sanitized: tuple[tuple[tuple[int, ...], int], ...] = (((1000,), 65), ((1024, 65, 0, 333), 256))  # prefixes, nodes
    check_dims: tuple[int, ...] = (64, 80, 96, 128, 256)
    check_groups: tuple[int, ...] = (1, 2, 3, 8, 4)
    check_dtypes: tuple[str, ...] = ("bfloat16", "float16")
    check_nodes: tuple[int, ...] = (1, 4, 64, 255, 65, 256)
    check_prefixes: tuple[tuple[int, ...], ...] = ((0,), (1,), (64,), (1000,), (1024, 65, 0, 333))


_LARGE = ((1, 1024, 256), (1, 8192, 256), (1, 32768, 256))
_MORE = ((1, 131072, 256), (4, 1024, 256), (4, 8192, 256), (4, 32768, 256), (8, 8192, 256), (1, 32768, 64), (1, 32768, 16))
FULL = Scale(device="cuda", dtype="bfloat16", shapes=_LARGE + _MORE)
# A kernel takes seconds to compile, so a quick run checks the forms that it also times.
QUICK = Scale(
    device="cuda", dtype="bfloat16", shapes=_LARGE, repeats=20, rounds=6, sanitizer_seconds=0, check_dims=(128,), check_groups=(4,),
    check_dtypes=("bfloat16",), check_nodes=(4, 65, 256), check_prefixes=((0,), (1000,), (1024, 65, 0, 333)),
)  # fmt: skip
DRY = Scale(
    device="cpu", dtype="float32", shapes=((1, 70, 20), (2, 30, 5)), long_prefix=70, medium_prefix=70, heads=4, kv_heads=2, head_dim=16, cold_bytes=1e4, repeats=3,
    matrix=64, hidden=64, intermediate=96, layers=4, vocabulary=200, draft_vocabulary=90, budget=20, depth=4, prompt=12, rounds=3,
    sanitized=(((65,), 20), ((5, 64), 5)), check_dims=(16, 48), check_groups=(1, 2), check_nodes=(1, 20), check_prefixes=((0,), (5, 64)),
)  # fmt: skip


@dataclass(slots=True, kw_only=True)
class Report:
    """What is printed, stored and decided."""

    record: dict[str, Any] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def check(self, what: str, error: float, bound: float) -> None:
        good = error < bound
        print(f"  {'ok   ' if good else 'WRONG'} {what:<58} {error:.1e} (bound {bound:.0e})", flush=True)
        self.record.setdefault("checks", {})[what] = error
        if not good:
            self.wrong.append(f"{what}: {error:.1e}")

    def aim(self, what: str, value: float, bar: float) -> None:
        """A bar of speed, which is met or missed; a missed one is not wrong."""
        self.record.setdefault("aims", {})[what] = {"value": value, "bar": bar, "met": value >= bar}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m treedraft.bench gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three shapes of attention, fewer checks and rounds, no sanitizer")
    parser.add_argument("--dry-run", action="store_true", help="the same on a CPU, at tiny shapes")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--output", type=Path, help="also write the numbers to this JSON file")
    arguments = parser.parse_args()
    import torch

    scale = DRY if arguments.dry_run else QUICK if arguments.quick else FULL
    if scale.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("bench gpu needs a CUDA device; --dry-run goes through the same code on a CPU")
    report = Report(record={"benchmark": "gpu", "torch": torch.__version__, "triton": _version("triton"), "dry_run": arguments.dry_run})
    parts: dict[str, Callable[[Scale, Report], None]] = {
        "checks": checks, "sanitizer": sanitizer, "attention": attention, "builder": builder, "rounds": rounds,
    }  # fmt: skip
    require_kernel(scale, report)
    print(f"torch {torch.__version__}, triton {report.record['triton']}, transformers {_version('transformers')}, {_hardware()}")
    with torch.no_grad():
        for name, part in parts.items():
            if name in arguments.only:
                begin = time.perf_counter()
                print(f"\n{name}", flush=True)
                try:
                    part(scale, report)
                except Exception as error:  # time on a GPU is dear: one part that fails does not cost the others
                    traceback.print_exc()
                    report.wrong.append(f"{name} failed: {type(error).__name__}")
                print(f"  [{time.perf_counter() - begin:.0f} s]", flush=True)
                _write(arguments.output, report)
    for what, aim in () if arguments.dry_run else report.record.get("aims", {}).items():
        print(f"{'met   ' if aim['met'] else 'MISSED'} {what}: {aim['value']:.2f} (bar {aim['bar']})")
    print("\n" + ("WRONG: " + "; ".join(report.wrong) if report.wrong else "everything is right"))
    return int(bool(report.wrong))


def _write(output: Path | None, report: Report) -> None:
    from treedraft.files import write_json
    from treedraft.run import commit

    if output is not None:
        write_json(output, {**report.record, "wrong": report.wrong, "hardware": _hardware(), "commit": commit()})


def _hardware() -> str:
    from treedraft.run import hardware

    return hardware()


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def obstacle(scale: Scale) -> str | None:
    """What keeps the kernel from running here, compiled on a GPU or interpreted on a CPU, or None."""
    import torch

    from treedraft.ops.tree_attention.dispatch import why_not_triton

    return why_not_triton(torch.device(scale.device), getattr(torch, scale.dtype), scale.head_dim)


def require_kernel(scale: Scale, report: Report) -> None:
    """On a GPU there is nothing to be right about without the kernel."""
    if scale.device == "cuda" and (why := obstacle(scale)) is not None:
        report.wrong.append(f"the kernel cannot run: {why}")


def has_kernel(scale: Scale) -> bool:
    """Whether the kernel can run here; says why not."""
    why = obstacle(scale)
    if why is not None:
        print(f"  without the kernel: {why}")
    return why is None


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """New tensors are full of NaN, so what a kernel fails to write shows."""
    import torch
    deterministic: Any = torch.utils.deterministic
    filled = deterministic.fill_uninitialized_memory
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        deterministic.fill_uninitialized_memory = filled


# -- problems ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Queries [B, H, N, D], keys and values [B, HK, S, D] whose slack is NaN, and who sees whom."""

    q: Tensor
    k: Tensor
    v: Tensor
    rows: TreeRows

    @property
    def columns(self) -> int:
        return max(self.rows.lengths) + self.rows.size


def make_case(
    scale: Scale, prefixes: tuple[int, ...], nodes: int, *, seed: int = 0, heads: int | None = None, kv_heads: int | None = None,
    head_dim: int | None = None, dtype: torch.dtype | None = None, slack: int = 64,
) -> Case:  # fmt: skip
    """Random values and random trees, at most 7 children a node and 23 levels."""
    import torch

    from treedraft.ops.tree_attention.mask import tree_rows

    device = torch.device(scale.device)
    dtype = dtype or getattr(torch, scale.dtype)
    heads, kv_heads, dim = heads or scale.heads, kv_heads or scale.kv_heads, head_dim or scale.head_dim
    generator = torch.Generator(device=device).manual_seed(seed)
    columns = max(prefixes) + nodes + slack
    q = torch.randn((len(prefixes), nodes, heads, dim), generator=generator, device=device, dtype=dtype).transpose(1, 2)
    k, v = (torch.randn((len(prefixes), kv_heads, columns, dim), generator=generator, device=device, dtype=dtype) for _ in range(2))
    for request, prefix in enumerate(prefixes):
        k[request, :, prefix + nodes :] = torch.nan
        v[request, :, prefix + nodes :] = torch.nan
    parents = torch.tensor([random_tree(nodes, seed + request) for request in range(len(prefixes))], device=device)
    return Case(q=q, k=k, v=v, rows=tree_rows(parents, prefixes))


def random_tree(nodes: int, seed: int, *, width: int = 7, depth: int = 23) -> list[int]:
    """Parents of a tree that prefers its latest nodes, as trees of a sure drafter do."""
    import random

    dice, parents, children, depths = random.Random(seed), [-1], [0], [0]
    while len(parents) < nodes:
        open_nodes = [i for i in range(max(0, len(parents) - 12), len(parents)) if children[i] < width and depths[i] < depth]
        parent = dice.choice(open_nodes or [i for i in range(len(parents)) if children[i] < width and depths[i] < depth])
        parents.append(parent)
        children[parent] += 1
        children.append(0)
        depths.append(depths[parent] + 1)
    return parents


def exact(case: Case) -> Tensor:
    """[B, H, N, D] in float64, a key head at a time."""
    import torch

    from treedraft.ops.tree_attention.dispatch import full_mask

    q, k, v, end = case.q, case.k, case.v, case.columns
    mask, group = full_mask(case.rows, end)[:, 0], q.shape[1] // k.shape[1]
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    for request, prefix in enumerate(case.rows.lengths):
        live = prefix + case.rows.size
        seen = mask[request, :, :live].repeat(group, 1)
        for head in range(k.shape[1]):
            queries = q[request, head * group : (head + 1) * group].double().flatten(0, 1)
            scores = queries @ k[request, head, :live].double().T * q.shape[3] ** -0.5
            weights = scores.masked_fill_(~seen, -torch.inf).softmax(-1)
            out[request, head * group : (head + 1) * group] = (weights @ v[request, head, :live].double()).view(group, -1, q.shape[3])
    return out


def relative(found: Tensor, expected: Tensor) -> float:
    """NaN counts as infinitely wrong."""
    error = float((found.double() - expected).norm() / expected.norm())
    return error if math.isfinite(error) else math.inf


def worst_row(found: Tensor, expected: Tensor) -> float:
    """The largest relative error of a row [..., V]: one wrong row is little of the whole."""
    error = float(((found - expected).double().norm(dim=-1) / expected.double().norm(dim=-1)).max())
    return error if math.isfinite(error) else math.inf


# -- 1. checks --------------------------------------------------------------------------------------------------------


def checks(scale: Scale, report: Report) -> None:
    """The kernel and the hybrid against float64."""
    import torch

    from treedraft.ops.tree_attention.dispatch import run

    kernel = has_kernel(scale)
    # The interpreter truncates to bfloat16 where a GPU rounds.
    bound = HALF_BOUND if scale.device != "cpu" else 2e-2
    widest = scale.check_dims[-1] if 128 not in scale.check_dims else 128
    # A kernel is compiled for every head size, group and type, seconds each: they vary one at a time, and all but the main form
    # meet the larger trees alone, so that a run stays within three minutes.
    first, *others = (getattr(torch, name) for name in scale.check_dtypes)
    forms = [(dim, scale.check_groups[-1], first) for dim in scale.check_dims]
    forms += [(widest, group, first) for group in scale.check_groups[:-1]]
    forms += [(widest, scale.check_groups[-1], dtype) for dtype in others]
    for name in (["triton"] if kernel else []) + ["hybrid"]:
        for dim, group, dtype in forms:
            worst = 0.0
            main_form = (dim, group, dtype) == (widest, scale.check_groups[-1], first)
            for seed, nodes in enumerate(scale.check_nodes if main_form else scale.check_nodes[-2:]):
                for prefix in scale.check_prefixes if main_form else scale.check_prefixes[-2:]:
                    case = make_case(scale, prefix, nodes, heads=scale.kv_heads * group, head_dim=dim, dtype=dtype, seed=seed)
                    with poisoned():
                        out, _ = run(case.q, case.k, case.v, case.rows, scale=dim**-0.5, backend=name)
                    worst = max(worst, relative(out, exact(case)))
            report.check(f"{name}, {str(dtype).removeprefix('torch.')}, head size {dim}, {group} heads a key head", worst, bound)
    if kernel:
        with poisoned():
            _check_forms(scale, report)


def _check_forms(scale: Scale, report: Report) -> None:
    """Splits, TMA, pages, two runs bit for bit, padded trees, and a graph replayed for a smaller tree behind another prefix."""
    import torch

    from treedraft.ops.tree_attention.dispatch import run
    from treedraft.ops.tree_attention.launch import launch

    prefix, nodes = (70, 20) if scale.device == "cpu" else (1024, 256)
    bound = HALF_BOUND if scale.device != "cpu" else 1e-4
    case = make_case(scale, (prefix,), nodes)
    expected, factor = exact(case), scale.head_dim**-0.5
    for splits in (1, 2, 3, 8):
        for tma in (False, True):
            out, _ = launch(case.q, case.k, case.v, case.rows, scale=factor, splits=splits, tma=tma)
            report.check(f"{splits} splits{', TMA' if tma else ''}", relative(out, expected), bound)
    page = 64
    pages = -(-case.k.shape[2] // page)
    table = torch.randperm(pages, device=case.q.device).int()[None]
    pools = []
    for x in (case.k, case.v):
        pool = torch.full((pages, page, x.shape[1], x.shape[3]), torch.nan, device=x.device, dtype=x.dtype)
        padded = torch.nn.functional.pad(x[0].transpose(0, 1), (0, 0, 0, 0, 0, pages * page - x.shape[2]), value=torch.nan)
        pool[table[0].long()] = padded.unflatten(0, (pages, page))
        pools.append(pool)
    out, _ = run(case.q, pools[0], pools[1], case.rows, scale=factor, backend="triton", block_table=table)
    report.check("pages", relative(out, expected), bound)
    again = [launch(case.q, case.k, case.v, case.rows, scale=factor)[0] for _ in range(2)]
    report.check("two runs, bit for bit", float(not torch.equal(*again)), 0.5)
    # Nodes come after their parents, so the first of a tree are a tree; the others are padding and may hold anything.
    live, shorter = nodes - nodes // 4, prefix // 2
    static = replace(
        case.rows, seen=case.rows.words, prefixes=None, prefix_lens=case.rows.prefix_lens.clone(),
        num_nodes=torch.tensor([live], dtype=torch.int32, device=case.q.device),
    )  # fmt: skip
    k, v = case.k.clone(), case.v.clone()
    for x in (k, v):
        x[:, :, prefix + live :] = torch.nan
    out, _ = launch(case.q, k, v, static, scale=factor)
    report.check("a padded tree", relative(out[:, :, :live], expected[:, :, :live]), bound)
    report.check("rows of padding are finite", float(not torch.isfinite(out).all()), 0.5)
    call = lambda: launch(case.q, case.k, case.v, static, scale=factor)[0]  # noqa: E731
    assert static.num_nodes is not None
    static.num_nodes.fill_(nodes)
    replay, held = _captured(call, scale)
    static.num_nodes.fill_(live)
    static.prefix_lens.fill_(shorter)
    replay()
    moved = Case(q=case.q, k=case.k, v=case.v, rows=replace(case.rows, prefixes=(shorter,), prefix_lens=static.prefix_lens))
    report.check("a graph replayed for fewer nodes behind a shorter prefix", relative(held()[:, :, :live], exact(moved)[:, :, :live]), bound)


def _captured(call: Callable[[], Tensor], scale: Scale) -> tuple[Callable[[], None], Callable[[], Tensor]]:
    """(run again, what it gave): a CUDA graph, or the call itself on a CPU."""
    import torch

    if scale.device == "cpu":
        results: list[Tensor] = []
        return lambda: results.append(call()), lambda: results[-1]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    return graph.replay, lambda: out


# -- 2. sanitizer -----------------------------------------------------------------------------------------------------


def sanitizer(scale: Scale, report: Report) -> None:
    """The kernel on two shapes in a process of its own, whose every memory access compute-sanitizer checks."""
    tool, found = _sanitizer(), "absent"
    if scale.sanitizer_seconds == 0:
        found = "not in a quick run"
    elif tool is not None:
        code = f"from treedraft.bench_gpu import DRY, FULL, sanitized; sanitized({'DRY' if scale.device == 'cpu' else 'FULL'})"
        command = [tool, "--tool", "memcheck", "--require-cuda-init", "no", "--error-exitcode", "9", sys.executable, "-c", code]
        # Without torch's pool of memory every tensor is an allocation of its own, so that reading past it is seen.
        code, said = _within(command, scale.sanitizer_seconds, {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
        if code is None:
            found = f"not finished in {scale.sanitizer_seconds} s"
        else:
            found = "no error" if code == 0 else f"exit code {code}"
            if code:
                print(said[-4000:])
                report.wrong.append(f"compute-sanitizer: {found}")
    report.record["sanitizer"] = found
    print(f"  compute-sanitizer: {found}", flush=True)


def _within(command: list[str], seconds: float, environment: dict[str, str]) -> tuple[int | None, str]:
    """Exit code and output of a command; None after so many seconds, when it and all that it started are killed."""
    import signal
    import subprocess

    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env=environment, start_new_session=True, **pipes) as child:
        try:
            said, _ = child.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            # The tool runs Python as a child of its own, which would go on using the GPU.
            os.killpg(child.pid, signal.SIGKILL)
            said, _ = child.communicate()
            return None, said
    return child.returncode, said


def _sanitizer() -> str | None:
    """Path of compute-sanitizer: on PATH, or in CUDA's folder."""
    import shutil

    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")] + ["/usr/local/cuda"]
    folders = [os.environ.get("PATH", ""), *(str(Path(home, "bin")) for home in homes if home)]
    return shutil.which("compute-sanitizer", path=os.pathsep.join(folders))


def sanitized(scale: Scale) -> None:
    """What runs under compute-sanitizer: the kernel with and without TMA, on keys that end where the tree does.

    Raises:
        ValueError: a result is wrong.
    """
    from treedraft.ops.tree_attention.launch import launch

    for prefixes, nodes in scale.sanitized if has_kernel(scale) else ():
        case = make_case(scale, prefixes, nodes, slack=0)
        expected, bound = exact(case), HALF_BOUND
        for tma in (False, True):
            with poisoned():
                error = relative(launch(case.q, case.k, case.v, case.rows, scale=scale.head_dim**-0.5, tma=tma)[0], expected)
            if error >= bound:
                raise ValueError(f"the kernel is {error:.1e} off float64 behind {prefixes} tokens, {nodes} nodes, TMA {tma} (bound {bound:.0e})")


# -- 3. attention -----------------------------------------------------------------------------------------------------


def attention(scale: Scale, report: Report) -> None:
    """One table: microseconds of every contender, TFLOP/s, fraction of the floor, and how many times ours each takes."""
    copy_rate, matrix_rate = ceilings(scale)
    print(f"  copies {copy_rate / 1e12:.2f} TB/s, {scale.matrix}^3 products {matrix_rate / 1e12:.0f} TFLOP/s")
    report.record |= {"copy_tb_per_second": copy_rate / 1e12, "matrix_tflops": matrix_rate / 1e12}
    kernel, flex = has_kernel(scale), Flex(scale)
    ratios = {"sdpa_mask": "sdpa", "flex": "flex", "naive": "naive", "sdpa_nomask": "nomask"}
    names = ["ours", "tma", "hybrid", "sdpa_mask", "flex", "naive", "sdpa_nomask"]
    print("  requests prefix nodes " + "".join(f"{name:>12}" for name in names) + f"{'flex mask':>12}   TFLOP/s  floor us fraction  noise"
          + "".join(f"{f'{name}/ours':>13}" for name in ratios.values()))  # fmt: skip
    for batch, prefix, nodes in scale.shapes:
        case = make_case(scale, (prefix,) * batch, nodes, slack=0)
        copies = max(1, math.ceil(scale.cold_bytes / (2 * case.k.numel() * case.k.element_size())))
        cases = [case] + [make_case(scale, (prefix,) * batch, nodes, slack=0, seed=1 + copy) for copy in range(copies - 1)]
        expected = exact(case)
        micros: dict[str, float] = {}
        noise = mask_seconds = math.nan
        for name in names:
            if name in ("ours", "tma", "naive") and not kernel:
                continue
            try:
                made = _contender(name, cases, flex=flex)
                # Not around what torch compiles: it would compile anew for another setting.
                with poisoned() if name in ("ours", "tma", "hybrid", "naive") else contextlib.nullcontext():
                    out = made(0)
                if name == "flex":
                    mask_seconds = _best(partial(flex.mask, case), scale, 3)
                if name != "sdpa_nomask":
                    report.check(f"{name} behind {batch} x {prefix}, {nodes} nodes", relative(out, expected), 1e-2)
                micros[name] = _microseconds(made, copies, scale)
                if name == "ours":
                    again = _microseconds(made, copies, scale)
                    noise = abs(again - micros[name]) / micros[name]
            except Exception as error:  # a contender that fails on this torch must not end the run
                if name in ("ours", "hybrid"):
                    raise
                print(f"  {name} fails here: {type(error).__name__}: {str(error).splitlines()[0][:120]}")
        flops = 4 * scale.heads * scale.head_dim * nodes * (prefix + nodes) * batch
        traffic = 2 * batch * scale.head_dim * (scale.kv_heads * (prefix + nodes) + scale.heads * nodes) * case.q.element_size()
        floor = max(flops / matrix_rate, traffic / copy_rate) * 1e6
        best = min((micros[name] for name in ("ours", "tma") if name in micros), default=None)
        found: dict[str, Any] = {"microseconds": micros, "floor_us": floor, "flex_mask_us": mask_seconds * 1e6}
        line = f"  {batch:>8} {prefix:>6} {nodes:>5} " + "".join(f"{micros[name]:>12.1f}" if name in micros else f"{'-':>12}" for name in names)
        line += f"{mask_seconds * 1e6:>12.1f}"
        if best is not None:
            found |= {
                "tflops": flops / best / 1e6, "fraction": floor / best, "noise": noise,
                "times_ours": {name: value / best for name, value in micros.items()},
            }  # fmt: skip
            line += f"   {flops / best / 1e6:>7.1f} {floor:>9.1f} {floor / best:>8.2f} {noise:>6.1%}"
            line += "".join(f"{micros[name] / best:>13.2f}" if name in micros else f"{'-':>13}" for name in ratios)
            if scale.device == "cuda" and (batch, prefix, nodes) == (1, scale.long_prefix, 256) and floor / best < LEAST_FRACTION:
                report.wrong.append(f"{floor / best:.2f} of the floor behind 32K tokens, below {LEAST_FRACTION}")
            if prefix == scale.long_prefix and nodes == max(shape[2] for shape in scale.shapes):
                report.aim(f"share of the floor behind {batch} x {prefix}", floor / best, AIM_FRACTION)
            if prefix >= scale.medium_prefix and "sdpa_mask" in micros:
                report.aim(f"times SDPA with a mask behind {batch} x {prefix}, {nodes} nodes", micros["sdpa_mask"] / best, AIM_TIMES_SDPA)
        print(line, flush=True)
        report.record[f"attention_{batch}x{prefix}_{nodes}"] = found
        del cases, case, expected


def _contender(name: str, cases: list[Case], *, flex: Flex) -> Callable[[int], Tensor]:
    """Runs it on copy i of the inputs; masks, and whatever else depends on the tree alone, are made before."""
    import torch

    from treedraft.ops.tree_attention.dispatch import full_mask, interpreting
    from treedraft.ops.tree_attention.hybrid import hybrid
    from treedraft.ops.tree_attention.launch import launch

    def on(i: int) -> tuple[Tensor, Tensor, Tensor, TreeRows]:
        case = cases[i]
        return case.q, case.k, case.v, case.rows

    scale, group = cases[0].q.shape[3] ** -0.5, cases[0].q.shape[1] // cases[0].k.shape[1]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    if name in ("ours", "tma"):
        return lambda i: launch(*on(i), scale=scale, tma=name == "tma", need_lse=False)[0]
    if name == "hybrid":
        return lambda i: hybrid(*on(i), scale=scale, need_lse=False)[0]
    if name == "flex":
        blocks = [flex.mask(case) for case in cases]
        return lambda i: flex.attend(cases[i], blocks[i])
    if name == "sdpa_nomask":
        return lambda i: sdpa(cases[i].q, cases[i].k, cases[i].v, enable_gqa=True)
    masks = [full_mask(case.rows, case.columns) for case in cases]
    if name == "naive":
        from treedraft.ops.tree_attention.onepass import onepass

        upcast = interpreting() and cases[0].q.dtype == torch.bfloat16
        return lambda i: onepass(cases[i].q, cases[i].k, cases[i].v, masks[i], upcast=upcast)
    assert name == "sdpa_mask", name

    def as_transformers(i: int) -> Tensor:
        k, v = (x[:, :, None].expand(-1, -1, group, -1, -1).reshape(x.shape[0], -1, *x.shape[2:]) for x in (cases[i].k, cases[i].v))
        return sdpa(cases[i].q, k, v, attn_mask=masks[i])

    return as_transformers


class Flex:
    """FlexAttention, compiled on a GPU, once: what differs from case to case is in tensors or a size."""

    def __init__(self, scale: Scale, **options: Any) -> None:
        import torch
        from torch.nn.attention.flex_attention import flex_attention

        compiled = scale.device == "cuda" or bool(options)
        self.function: Any = torch.compile(flex_attention, dynamic=True, **options) if compiled else flex_attention

    def mask(self, case: Case) -> Any:
        """The block mask of a tree, which every tree needs anew; how long it takes is told apart."""
        import torch
        from torch.nn.attention.flex_attention import create_block_mask

        prefix, visible = case.rows.prefix_lens, case.rows.visible

        def seen(b: Tensor, h: Tensor, row: Tensor, column: Tensor) -> Tensor:
            return (column < prefix[b]) | visible[b, row, (column - prefix[b]).clamp(min=0)]

        found = create_block_mask(seen, len(case.q), None, case.rows.size, case.columns, device=str(case.q.device))
        for part in found.as_tuple():
            if isinstance(part, torch.Tensor):
                for axis in range(2, part.ndim):  # torch takes numbers of blocks for constants otherwise
                    torch._dynamo.maybe_mark_dynamic(part, axis)
        return found

    def attend(self, case: Case, blocks: Any) -> Tensor:
        return self.function(case.q, case.k, case.v, block_mask=blocks, enable_gqa=True)


def _microseconds(call: Callable[[int], Any], copies: int, scale: Scale) -> float:
    """Median microseconds of a call whose inputs are not in the cache: all copies once, as a replayed graph, over and over."""
    import torch

    def everything() -> None:
        for copy in range(copies):
            call(copy)

    if scale.device == "cpu":
        times = []
        for _ in range(scale.repeats):
            begin = time.perf_counter()
            everything()
            times.append((time.perf_counter() - begin) / copies * 1e6)
        return statistics.median(times)
    everything()
    torch.cuda.synchronize()
    replay: Callable[[], Any] = everything
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            everything()
        replay = graph.replay
    except RuntimeError as error:
        print(f"  (not captured, so launches count: {str(error).splitlines()[0][:80]})")
        torch.cuda.synchronize()
    for _ in range(3):
        replay()
    times = []
    for _ in range(scale.repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / copies * 1e3)
    return statistics.median(times)


def ceilings(scale: Scale) -> tuple[float, float]:
    """Bytes a second of a large copy (read and written), FLOP/s of a large matrix product, as measured here and now."""
    import torch

    dtype, device = getattr(torch, scale.dtype), scale.device
    source = torch.ones(max(1024, scale.matrix**2 * 16), dtype=dtype, device=device)
    target = torch.empty_like(source)
    a, b = (torch.randn((scale.matrix, scale.matrix), dtype=dtype, device=device) for _ in range(2))
    copying = _best(lambda: target.copy_(source), scale)
    product = _best(lambda: a @ b, scale)
    return 2 * source.numel() * source.element_size() / copying, 2 * scale.matrix**3 / product


def _best(call: Callable[[], Any], scale: Scale, repeats: int = 10) -> float:
    return min(_seconds(call, scale) for _ in range(repeats))


def _seconds(call: Callable[[], Any], scale: Scale) -> float:
    import torch

    wait = torch.cuda.synchronize if scale.device == "cuda" else lambda: None
    wait()
    begin = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - begin


# -- 4. tree building -------------------------------------------------------------------------------------------------


def random_target(scale: Scale, layers: int) -> Any:
    """A Qwen3 of these widths with random weights; its tokenizer knows bytes."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from treedraft.targets.hf import Target
    from treedraft.targets.tiny import byte_tokenizer

    config = Qwen3Config(
        vocab_size=scale.vocabulary, hidden_size=scale.hidden, intermediate_size=scale.intermediate, num_hidden_layers=layers,
        num_attention_heads=scale.heads, num_key_value_heads=scale.kv_heads, head_dim=scale.head_dim, tie_word_embeddings=False,
        max_position_embeddings=40_960, bos_token_id=None, eos_token_id=scale.vocabulary - 2, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, scale.dtype))
    try:
        with torch.device(scale.device):
            model = Qwen3ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    # Logits of a few nats' spread grow trees of a realistic depth.
    model.lm_head.weight.normal_(std=3 * scale.hidden**-0.5)
    tokenizer = byte_tokenizer(scale.vocabulary)
    return Target(name="random", model=model, tokenizer=tokenizer, mask_token_id=scale.vocabulary - 1, tap_layers=_taps(layers))


def _taps(layers: int) -> tuple[int, ...]:
    from treedraft.targets.hf import default_tap_layers

    return default_tap_layers(layers)


def random_drafter(scale: Scale, target: Any, correction: str) -> Any:
    from treedraft.config import DrafterConfig
    from treedraft.drafter import Drafter, shape_for

    config = DrafterConfig(
        backbone={"name": "causal", "num_layers": 1}, correction={"name": correction}, block_size=scale.depth + 1,
        draft_vocab_size=scale.draft_vocabulary,
    )  # fmt: skip
    drafter = Drafter(config, shape_for(target, config)).to(device=target.device, dtype=target.dtype).attach(target)
    for weight in drafter.correction.parameters():
        if weight.ndim == 2:
            weight.normal_(std=weight.shape[-1] ** -0.5)
    return drafter


def builder(scale: Scale, report: Report) -> None:
    """Heap against batched on conditional scorers; the floor is the time in which the weights of all scoring calls are read."""
    import torch

    from treedraft.trees.best_first import BestFirst
    from treedraft.trees.naive import heap_build

    copy_rate, _ = ceilings(scale)
    target = random_target(scale, layers=4)
    size: dict[str, Any] = {"budget": scale.budget, "width": 7, "depth": scale.depth}
    best_first = BestFirst(**size)
    for correction in ("attention", "markov"):
        drafter = random_drafter(scale, target, correction)
        hidden = torch.randn((1, scale.depth, scale.hidden), device=target.device, dtype=target.dtype)
        anchor = torch.tensor([5], device=target.device)
        counted: Any = _Counting(drafter.scorer(hidden, anchor), target.device)
        batched_tree = best_first.build(anchor, counted).tree(0)
        slow: Any = _Counting(drafter.scorer(hidden, anchor), target.device)
        heap_tree = heap_build(5, slow, **size)
        same = batched_tree.tokens.tolist() == heap_tree.tokens.tolist()
        batched = statistics.median(
            _seconds(lambda: best_first.build(anchor, drafter.scorer(hidden, anchor)), scale) for _ in range(scale.repeats)  # noqa: B023
        )
        heap = statistics.median(
            _seconds(lambda: heap_build(5, slow, **size), scale) for _ in range(3)  # noqa: B023
        )
        matrices = [weight for name, weight in drafter.correction.named_parameters() if weight.ndim == 2 and "w1" not in name.lower()]
        # The attention layer has the head behind it; a Markov bias is added to logits that were made once for all slots.
        head_reads = counted.calls if correction == "attention" else 1
        values = counted.calls * sum(weight.numel() for weight in matrices) + head_reads * scale.draft_vocabulary * scale.hidden
        # Weights are read and nothing is written. `copy_rate` counts both directions of a copy, which share the memory's
        # lanes, so it is also what reading alone can reach.
        floor = values * target.dtype.itemsize / copy_rate
        report.record[f"builder_{correction}"] = {
            "heap_ms": heap * 1e3, "batched_ms": batched * 1e3, "ratio": heap / batched, "calls": counted.calls,
            "floor_ms": floor * 1e3, "floor_share": floor / batched, "same_tree": same, "nodes": len(batched_tree),
        }  # fmt: skip
        print(f"  {correction:<9} heap {heap * 1e3:8.2f} ms   batched {batched * 1e3:7.2f} ms ({heap / batched:.1f} x, {counted.calls} calls)"
              f"   weights alone {floor * 1e3:.2f} ms, {floor / batched:.0%} of it   same tree: {same}", flush=True)  # fmt: skip


class _Counting:
    """A scorer that counts its calls, and takes lanes from the host, where the heap makes them."""

    def __init__(self, scorer: Any, device: torch.device) -> None:
        self.scorer, self.device, self.calls = scorer, device, 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.scorer, name)
        if name not in ("expand", "children"):
            return found

        def counted(lanes: Any, *arguments: Any) -> Any:
            self.calls += 1
            values = {item.name: getattr(lanes, item.name) for item in fields(lanes)}
            moved = {name: value.to(self.device) for name, value in values.items() if hasattr(value, "to")}
            return found(replace(lanes, **moved), *arguments)

        return counted


# -- 5. rounds --------------------------------------------------------------------------------------------------------


def identity(scale: Scale, report: Report) -> None:
    """Greedy trees of a small random pair in float32 against plain decoding, by what `auto` chooses and with the kernel."""
    import torch

    from treedraft.config import DecodeConfig
    from treedraft.speculate import generate, generate_plain
    from treedraft.targets.graphs import GraphedVerify

    small = replace(DRY, device=scale.device, vocabulary=32, draft_vocabulary=32)  # of which half are children: random drafts get accepted
    target = random_target(small, layers=small.layers)
    target.eos_token_ids = ()
    prompts = torch.randint(0, small.vocabulary - 2, (4, small.prompt), generator=torch.Generator().manual_seed(0)).tolist()
    plain = [generate_plain(target, prompt, max_new_tokens=24).ids for prompt in prompts]
    config = DecodeConfig(mode="tree", depth=small.depth, budget=small.budget, width=16)
    drafters = [(correction, random_drafter(small, target, correction)) for correction in ("attention", "markov")]
    for way in ("auto", "triton, graphs", "triton, eager") if has_kernel(small) else ("auto",):
        target.use_attention(way.split(",")[0])
        target.graphs = GraphedVerify(target) if way == "triton, graphs" else None
        # The interpreter takes tenths of a second for a tree.
        few = scale.device == "cpu" and way != "auto"
        for correction, drafter in drafters[:1] if few else drafters:
            asked, tokens = (prompts[:1], 8) if few else (prompts, 24)
            found = [generate(target, drafter, prompt, config=config, max_new_tokens=tokens) for prompt in asked]
            same = all(one.ids == ids[:tokens] for one, ids in zip(found, plain, strict=False))
            name, tau = f"{correction}, {way}", statistics.mean(one.tau for one in found)
            report.record[f"identity_{correction}_{way.replace(', ', '_')}"] = {
                "same_as_plain": same, "tokens": sum(len(one.ids) for one in found), "tau": tau, "attention": target.attention.name,
            }  # fmt: skip
            print(f"  small pair, float32, {name}: the ids of plain decoding: {same} (tau {tau:.2f})", flush=True)
            if not same:
                report.wrong.append(f"float32 trees, {name}: not the ids of plain decoding")
        if target.graphs is not None:
            compare_graphs(small, report, target, target.graphs, prompts[0], "small pair, float32: ")


def compare_graphs(scale: Scale, report: Report, target: Any, graphs: Any, prompt: list[int], what: str = "") -> None:
    """Logits of one tree through the graphs and without: behind a prompt, behind more of it, and in a cache that has moved."""
    import torch

    nodes, bound = scale.budget, LOGITS_BOUND[scale.dtype]
    tokens = torch.randint(0, scale.vocabulary - 2, (nodes,), generator=torch.Generator().manual_seed(1))
    parents, before = torch.tensor(random_tree(nodes, 1)), target.graphs

    def difference() -> float:
        target.graphs = graphs
        found = target.verify(tokens, parents).logits
        target.graphs = None
        return worst_row(found, target.verify(tokens, parents).logits)

    target.prefill(prompt)
    report.check(f"{what}logits of graphs against eager ones", difference(), bound)
    target.commit([0])
    report.check(f"{what}the same behind one token more", difference(), bound)
    target.cache.reserve(target.cache.capacity + 1)
    report.check(f"{what}the same in a cache that has moved", difference(), bound)
    target.graphs = before


def rounds(scale: Scale, report: Report) -> None:
    """Milliseconds a round by stage. With random weights nothing is accepted: a round's time is what is measured here."""
    import torch

    from treedraft.config import DecodeConfig
    from treedraft.drafting import STAGES
    from treedraft.speculate import generate, generate_plain
    from treedraft.targets.graphs import GraphedVerify

    identity(scale, report)
    target = random_target(scale, layers=scale.layers)
    drafter = random_drafter(scale, target, "attention")
    print(f"  attention: {target.attention.reason}")
    config = DecodeConfig(mode="tree", depth=scale.depth, budget=scale.budget, width=7)
    prompt = torch.randint(0, scale.vocabulary - 2, (scale.prompt,), generator=torch.Generator().manual_seed(0)).tolist()
    target.eos_token_ids = ()
    generate_plain(target, prompt, max_new_tokens=4)  # compiles and captures
    plain = generate_plain(target, prompt, max_new_tokens=scale.rounds)
    report.record["plain_ms_a_token"] = plain.seconds["verify"] / max(1, scale.rounds - 1) * 1e3
    graphs = target.graphs or (GraphedVerify(target) if scale.device == "cpu" else None)
    for name, used in (("graphs", graphs), ("eager", None)):
        if name == "graphs" and used is None:
            print("  no graphs: they go with the kernel")
            continue
        target.graphs = used
        generate(target, drafter, prompt, config=config, max_new_tokens=4)  # compiles and captures
        found = generate(target, drafter, prompt, config=config, max_new_tokens=scale.rounds)
        milliseconds = {stage: found.seconds[stage] / max(1, len(found.rounds)) * 1e3 for stage in STAGES if stage != "prefill"}
        milliseconds["round"] = sum(milliseconds.values())
        report.record[f"round_{name}"] = {f"{stage}_ms": value for stage, value in milliseconds.items()} | {
            "prefill_ms": found.seconds["prefill"] * 1e3, "tau": found.tau, "same_as_plain": found.ids == plain.ids,
        }  # fmt: skip
        stages = "   ".join(f"{stage} {value:.2f}" for stage, value in milliseconds.items())
        print(f"  {name:<7} ms a round: {stages}   tau {found.tau:.2f}, same ids as plain decoding: {found.ids == plain.ids}", flush=True)
        if scale.dtype == "float32" and found.ids != plain.ids:
            report.wrong.append(f"{name}: not the ids of plain decoding")
    print(f"  plain   {report.record['plain_ms_a_token']:.2f} ms a token")
    if graphs is not None:
        compare_graphs(scale, report, target, graphs, prompt)


if __name__ == "__main__":
    sys.exit(main())
