"""`python -m treedraft.bench context`: what a context costs behind prefixes of growing length, full against longspark.

Three numbers a length: the seconds of one draft forward, the seconds of taking a round's accepted rows in, and the bytes
that one request holds. Weights and states are random: none of the three depends on their values. The prefix goes in
chunk by chunk, as a long prompt does.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treedraft.cli import parse_arguments

if TYPE_CHECKING:
    import torch

    from treedraft.drafter import Drafter
    from treedraft.targets.hf import Target

CONTEXTS = ("full", "longspark")
CHUNK = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Flags of `bench context`."""

    target: str = "tiny"
    """Whose sizes and rotary angles are used; its weights are not."""
    tokens: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
    """Lengths of the prefix."""
    layers: int = 5
    depth: int = 7
    window: int = 256
    summary: int = 16
    accepted: int = 8
    """Rows that a round takes in."""
    repeats: int = 15
    dtype: str | None = None
    device: str | None = None
    output: Path | None = None
    """Also write the numbers to this JSON file, and beside it a CSV and a figure of the same name."""

    def __post_init__(self) -> None:
        for name, value in (("layers", self.layers), ("depth", self.depth), ("accepted", self.accepted),
                            ("repeats", self.repeats), ("tokens", min(self.tokens, default=0))):  # fmt: skip
            if value < 1:
                raise ValueError(f"--{name} is {value}; at least 1")


def main() -> int:
    arguments = parse_arguments(Arguments, program="python -m treedraft.bench context", description=__doc__ or "")
    rows = measure(arguments)
    print(f"{'tokens':>8}" + "".join(f"{name + ' ' + what:>22}" for name in CONTEXTS for what in ("draft ms", "update ms", "MiB")))
    for tokens in arguments.tokens:
        own = {row["context"]: row for row in rows if row["tokens"] == tokens}
        print(f"{tokens:>8}" + "".join(
            f"{own[name]['draft_ms']:22.2f}{own[name]['update_ms']:22.3f}{own[name]['bytes'] / 2**20:22.3f}" for name in CONTEXTS
        ))  # fmt: skip
    if arguments.output is not None:
        _write(arguments, rows)
    return 0


def measure(arguments: Arguments) -> list[dict[str, Any]]:
    """A row a context and length: draft_ms, update_ms, bytes, and shared_bytes beside a target's cache that is at hand."""
    target = _target(arguments)
    rows = []
    for name in CONTEXTS:
        drafter = _drafter(target, name, arguments)
        rows += [{"context": name, "tokens": tokens, **_behind(target, drafter, tokens, arguments)} for tokens in arguments.tokens]
    return rows


def _target(arguments: Arguments) -> Target:
    from treedraft.targets import load_target, parse_dtype, tiny

    if arguments.target == "tiny":
        return tiny.load(num_layers=arguments.layers + 2, dtype=parse_dtype(arguments.dtype), device=arguments.device)
    return load_target(arguments.target, dtype=parse_dtype(arguments.dtype), device=arguments.device)


def _drafter(target: Target, context: str, arguments: Arguments) -> Drafter:
    import torch

    from treedraft.config import DrafterConfig
    from treedraft.drafter import Drafter, shape_for

    options = {"window": arguments.window, "summary": arguments.summary} if context == "longspark" else {}
    config = DrafterConfig(
        backbone={"name": "bidirectional", "num_layers": arguments.layers}, context={"name": context, **options},
        layout="anchor-first", block_size=max(2, arguments.depth),
    )  # fmt: skip
    torch.manual_seed(0)
    drafter = Drafter(config, shape_for(target, config)).requires_grad_(False).eval()
    return drafter.to(device=target.device, dtype=target.dtype).attach(target)


def _behind(target: Target, drafter: Drafter, tokens: int, arguments: Arguments) -> dict[str, Any]:
    import torch

    device, rounds = target.device, arguments.repeats + 1
    generator = torch.Generator(device).manual_seed(0)

    def taps(number: int) -> torch.Tensor:
        return torch.randn((1, number, target.tap_size), generator=generator, device=device, dtype=target.dtype)

    state = drafter.open(1, capacity=tokens + rounds * arguments.accepted)
    for first in range(0, tokens, CHUNK):
        number = min(CHUNK, tokens - first)
        state.append(taps(number), [number], [0])
    anchor, end = torch.zeros((1, 1), dtype=torch.int64, device=device), torch.full((1, 1), tokens, device=device)

    @torch.no_grad()
    def draft() -> None:
        drafter.hidden(state.memory, anchor, end, arguments.depth)

    drafted = _median(draft, arguments.repeats, device)
    accepted = taps(arguments.accepted)
    updated = _median(lambda: state.append(accepted, [arguments.accepted], [0]), arguments.repeats, device)
    shared = drafter.open(1, capacity=tokens, cache=target.cache).num_bytes
    return {"draft_ms": drafted * 1e3, "update_ms": updated * 1e3,
            "bytes": drafter.open(1, capacity=tokens).num_bytes, "shared_bytes": shared}  # fmt: skip


def _median(call: Callable[[], Any], repeats: int, device: torch.device) -> float:
    """Seconds, after a warm-up."""
    import torch

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    times = []
    for _ in range(repeats + 1):
        begin = now()
        call()
        times.append(now() - begin)
    return statistics.median(times[1:])


def _write(arguments: Arguments, rows: list[dict[str, Any]]) -> None:
    import csv

    from treedraft.files import replacing, write_json
    from treedraft.run import commit, hardware

    output = arguments.output
    assert output is not None
    record: dict[str, Any] = {name: getattr(arguments, name) for name in ("target", "layers", "depth", "window", "summary", "accepted", "repeats")}
    for row in rows:
        numbers = {f"{row['context']} {name}": row[name] for name in ("draft_ms", "update_ms", "bytes", "shared_bytes")}
        record.setdefault(f"{row['tokens']} tokens", {}).update(numbers)
    write_json(output, {"benchmark": "context", **record, "hardware": hardware(), "commit": commit()})
    with replacing(output.with_suffix(".csv")) as path, path.open("w", newline="", encoding="utf-8") as stream:
        table = csv.DictWriter(stream, fieldnames=list(rows[0]))
        table.writeheader()
        table.writerows(rows)
    with replacing(output.with_suffix(".png")) as path:
        _draw(rows, path)


def _draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draft time and bytes by length, both axes logarithmic."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    panels = figure.subplots(1, 2)
    for axes, column, title in zip(panels, ("draft_ms", "bytes"), ("one draft forward, ms", "bytes a request"), strict=True):
        for marker, name in zip("os", CONTEXTS, strict=True):
            own = [row for row in rows if row["context"] == name]
            axes.plot([row["tokens"] for row in own], [row[column] for row in own], marker=marker, label=name)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("tokens of the prefix")
        axes.set_title(title)
        axes.grid(alpha=0.3)
    panels[0].legend()
    figure.savefig(path, format="png", dpi=120, metadata={"Software": None})
