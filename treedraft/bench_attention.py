"""`bench attention`: tree attention as a CPU computes it against one masked softmax, as models and as torch would run it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treedraft.cli import parse_arguments

if TYPE_CHECKING:
    from torch import Tensor

    from treedraft.ops.tree_attention.mask import TreeRows

BARS = {"sdpa": 1.0, "repeat_kv": 1.5}  # times faster that `hybrid` has to be


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Flags of `bench attention`."""

    nodes: int = 255
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    prefixes: tuple[int, ...] = (256, 2048, 8192)
    """Tokens that the tree stands behind."""
    repeats: int = 9
    output: Path | None = None
    """Also write the numbers to this JSON file."""


def main() -> int:
    import torch

    from treedraft.files import write_json
    from treedraft.ops.tree_attention.dispatch import tree_attention
    from treedraft.run import commit, hardware

    arguments = parse_arguments(Arguments, program="python -m treedraft.bench attention", description=__doc__ or "")
    if arguments.repeats < 1 or arguments.heads % arguments.kv_heads:
        raise ValueError(f"--repeats {arguments.repeats} (at least 1), --heads {arguments.heads} (a multiple of --kv-heads)")
    record: dict[str, Any] = {"benchmark": "attention", "nodes": arguments.nodes, "heads": arguments.heads,
                              "kv_heads": arguments.kv_heads, "head_dim": arguments.head_dim}  # fmt: skip
    print(f"{arguments.nodes} nodes, {arguments.heads}/{arguments.kv_heads} heads of {arguments.head_dim}, float32, {hardware()}")
    right = True
    for prefix in arguments.prefixes:
        q, k, v, rows = inputs(arguments, prefix)
        mask = one_mask(rows, prefix)
        contenders: dict[str, Callable[[], Tensor]] = {
            "hybrid": lambda q=q, k=k, v=v, rows=rows: tree_attention(q, k, v, rows, backend="hybrid"),
            "sdpa": lambda q=q, k=k, v=v, mask=mask: torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, enable_gqa=True
            ),
            "repeat_kv": lambda q=q, k=k, v=v, mask=mask: repeated(q, k, v, mask),
        }
        found = {name: call() for name, call in contenders.items()}
        error = max(float((found[name] - found["hybrid"]).abs().max()) for name in BARS)
        right &= error < 1e-4
        seconds = medians(contenders, arguments.repeats)
        ratios = {name: seconds[name] / seconds["hybrid"] for name in BARS}
        record[f"behind_{prefix}"] = {
            "hybrid_ms": seconds["hybrid"] * 1e3, **{f"times_{name}": ratio for name, ratio in ratios.items()}, "largest_difference": error,
        }  # fmt: skip
        words = "   ".join(
            f"{ratio:.2f} x {name} (bar {BARS[name]}: {'met' if ratio >= BARS[name] else 'missed'})" for name, ratio in ratios.items()
        )
        print(f"  behind {prefix:>5}: hybrid {seconds['hybrid'] * 1e3:7.2f} ms   {words}   largest difference {error:.0e}")
    if arguments.output is not None:
        write_json(arguments.output, {**record, "hardware": hardware(), "commit": commit()})
    return int(not right)


def inputs(arguments: Arguments, prefix: int) -> tuple[Tensor, Tensor, Tensor, TreeRows]:
    """Random queries as a model has them, a cache with some room left, and a random tree."""
    import torch

    from treedraft.ops.tree_attention.mask import tree_rows

    generator = torch.Generator().manual_seed(0)
    nodes, columns = arguments.nodes, prefix + arguments.nodes
    q = torch.randn((1, nodes, arguments.heads, arguments.head_dim), generator=generator).transpose(1, 2)
    k, v = (torch.randn((1, arguments.kv_heads, columns + 64, arguments.head_dim), generator=generator)[:, :, :columns] for _ in range(2))
    parents = [-1] + [int(torch.randint(max(0, i - 20), i, (1,), generator=generator)) for i in range(1, nodes)]
    return q, k, v, tree_rows(torch.tensor(parents), prefix)


def one_mask(rows: TreeRows, prefix: int) -> Tensor:
    from treedraft.ops.tree_attention.dispatch import full_mask

    return full_mask(rows, prefix + rows.size)


def repeated(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """What transformers' models do under a mask: keys and values copied once a query head."""
    import torch

    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def medians(contenders: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median seconds of each, measured in turn, every round in the other direction."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for repeat in range(repeats):
        for name in list(contenders)[:: 1 if repeat % 2 else -1]:
            begin = time.perf_counter()
            contenders[name]()
            times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values) for name, values in times.items()}
