"""`python -m treedraft.bench context`: what a context costs behind prefixes of growing length, full against longspark.

Three numbers a length: the seconds of one draft forward, the seconds of taking a round's accepted rows in, and the bytes
that one request holds. Weights and states are random: none of the three depends on their values. The prefix goes in
chunk by chunk, as a long prompt does.

With --prefill prompts of random tokens go through the target itself, a LongSpark drafter attached, and a few tokens are
decoded behind them: seconds, and the most memory that was in use beside the target's cache and the drafter's state.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
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
_WARM_UP, _ANSWER = 16, 8  # tokens of a prompt that loads what is loaded once, and of every answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Flags of `bench context`."""

    target: str = "tiny"
    """Whose sizes and rotary angles are used; its weights are not."""
    tokens: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
    """Lengths of the prefix."""
    layers: int = 5
    """Of the drafter; no more than the target has."""
    depth: int = 7
    window: int = 256
    summary: int = 16
    accepted: int = 8
    """Rows that a round takes in."""
    repeats: int = 41
    prefill: bool = False
    """Measure prompts on their way through the target instead."""
    rope_scaling: str | None = None
    """ntk:FACTOR: rotary angles for a context that many times longer; prompts longer than the target's window need it."""
    dtype: str | None = None
    device: str | None = None
    output: Path | None = None
    """Also write the numbers to this JSON file, and without --prefill beside it a CSV and a figure of the same name."""

    def __post_init__(self) -> None:
        for name, value in (("layers", self.layers), ("depth", self.depth), ("accepted", self.accepted),
                            ("repeats", self.repeats), ("tokens", min(self.tokens, default=0))):  # fmt: skip
            if value < 1:
                raise ValueError(f"--{name} is {value}; at least 1")


def main() -> int:
    arguments = parse_arguments(Arguments, program="python -m treedraft.bench context", description=__doc__ or "")
    if arguments.prefill:
        return _prefill(arguments)
    rows = measure(arguments)
    print(f"{'tokens':>8}" + "".join(f"{name + ' ' + what:>22}" for name in CONTEXTS for what in ("draft ms", "update ms", "MiB")))
    for tokens in arguments.tokens:
        own = {row["context"]: row for row in rows if row["tokens"] == tokens}
        print(f"{tokens:>8}" + "".join(
            f"{own[name]['draft_ms']:22.2f}{own[name]['update_ms']:22.3f}{own[name]['bytes'] / 2**20:22.3f}" for name in CONTEXTS
        ))  # fmt: skip
    if len(arguments.tokens) > 1:
        shortest, longest = min(arguments.tokens), max(arguments.tokens)
        grown = ", ".join(f"{name} {more:+.1%}" for name, more in growth(rows).items())
        print(f"drafting takes longer behind {longest} tokens than behind {shortest}: {grown}")
    if arguments.output is not None:
        _write(arguments, rows)
    return 0


def measure(arguments: Arguments) -> list[dict[str, Any]]:
    """A row a context and length: draft_ms, update_ms, bytes, and shared_bytes beside a target's cache that is at hand.

    A context's lengths take turns, in another order every time, so that a machine that slows down does so for all of them.
    """
    target = _target(arguments)
    found = []
    for name in CONTEXTS:
        drafter = _drafter(target, name, arguments)
        rows = [_Row(target, drafter, tokens, arguments) for tokens in arguments.tokens]
        times = {what: _in_turns([getattr(row, what) for row in rows], arguments.repeats, target.device) for what in ("draft", "update")}
        found += [
            {"context": name, "tokens": row.tokens, "draft_ms": draft * 1e3, "update_ms": update * 1e3, "bytes": row.bytes, "shared_bytes": row.shared_bytes}
            for row, draft, update in zip(rows, times["draft"], times["update"], strict=True)
        ]
    return found


def _in_turns(calls: list[Callable[[], Any]], repeats: int, device: torch.device) -> list[float]:
    """Seconds of every call, after a warm-up the least of its repeats: what is beyond that others took from the processor."""
    times: list[list[float]] = [[] for _ in calls]
    for turn in range(repeats + 1):
        for place in random.Random(turn).sample(range(len(calls)), len(calls)):
            times[place].append(_seconds(calls[place], device))
    return [min(own[1:]) for own in times]


def growth(rows: list[dict[str, Any]]) -> dict[str, float]:
    """By how much drafting takes longer behind the longest prefix than behind the shortest, of each context."""
    found = {}
    for name in CONTEXTS:
        own = sorted((row for row in rows if row["context"] == name), key=lambda row: row["tokens"])
        found[name] = own[-1]["draft_ms"] / own[0]["draft_ms"] - 1
    return found


def _target(arguments: Arguments) -> Target:
    from treedraft.targets import parse_dtype, tiny

    if arguments.target != "tiny":
        return _loaded(arguments)
    target = tiny.load(num_layers=arguments.layers + 2, dtype=parse_dtype(arguments.dtype), device=arguments.device)
    if arguments.rope_scaling is not None:
        target.scale_rotary(arguments.rope_scaling)
    return target


def _loaded(arguments: Arguments) -> Target:
    from treedraft.targets import load_target, parse_dtype

    return load_target(
        arguments.target, dtype=parse_dtype(arguments.dtype), device=arguments.device, rope_scaling=arguments.rope_scaling
    )


def _drafter(target: Target, context: str, arguments: Arguments) -> Drafter:
    import torch

    from treedraft.config import DrafterConfig
    from treedraft.drafter import Drafter, shape_for

    options = {"window": arguments.window, "summary": arguments.summary} if context == "longspark" else {}
    config = DrafterConfig(
        backbone={"name": "bidirectional", "num_layers": min(arguments.layers, target.num_layers)}, context={"name": context, **options},
        layout="anchor-first", block_size=max(2, arguments.depth),
    )  # fmt: skip
    torch.manual_seed(0)
    drafter = Drafter(config, shape_for(target, config)).requires_grad_(False).eval()
    return drafter.to(device=target.device, dtype=target.dtype).attach(target)


class _Row:
    """One drafter behind random taps of `tokens` rows."""

    def __init__(self, target: Target, drafter: Drafter, tokens: int, arguments: Arguments) -> None:
        import torch

        device, self.tokens, self.drafter, self.depth = target.device, tokens, drafter, arguments.depth
        generator = torch.Generator(device).manual_seed(0)

        def taps(number: int) -> torch.Tensor:
            return torch.randn((1, number, target.tap_size), generator=generator, device=device, dtype=target.dtype)

        self.state = drafter.open(1, capacity=tokens)
        for first in range(0, tokens, CHUNK):
            number = min(CHUNK, tokens - first)
            self.state.append(taps(number), [number], [0])
        self.bytes = self.state.num_bytes
        self.shared_bytes = drafter.open(1, capacity=tokens, cache=target.cache).num_bytes
        self.accepted = taps(arguments.accepted)
        self.anchor, self.end = torch.zeros((1, 1), dtype=torch.int64, device=device), torch.full((1, 1), tokens, device=device)

    def draft(self) -> None:
        import torch

        with torch.no_grad():
            self.drafter.hidden(self.state.memory, self.anchor, self.end, self.depth)

    def update(self) -> None:
        self.state.append(self.accepted, [self.accepted.shape[1]], [0])


def _prefill(arguments: Arguments) -> int:
    from treedraft.files import write_json
    from treedraft.run import commit, hardware

    target = _loaded(arguments)
    drafter = _drafter(target, "longspark", arguments)
    drafter_layers = drafter.backbone.config.num_layers
    record: dict[str, Any] = {
        "benchmark": "context --prefill", "target": target.name, "rope_scaling": target.rope_scaling or "none", "target_layers": target.num_layers,
        "draft_layers": drafter_layers, "window": arguments.window, "summary": arguments.summary,
    }  # fmt: skip
    _through(target, drafter, _WARM_UP, arguments)
    print(f"{'tokens':>8}{'seconds':>10}{'cache MiB':>12}{'state MiB':>12}{'beside both MiB':>18}")
    for tokens in arguments.tokens:
        record[f"{tokens} tokens"] = found = _through(target, drafter, tokens, arguments)
        sizes = (found[name] / 2**20 for name in ("cache_bytes", "state_bytes", "transient_bytes"))
        print(f"{tokens:>8}{found['seconds']:10.1f}" + "{:12.2f}{:12.3f}{:18.2f}".format(*sizes))
    if arguments.output is not None:
        write_json(arguments.output, {**record, "hardware": hardware(), "commit": commit()})
    return 0


def _through(target: Target, drafter: Drafter, tokens: int, arguments: Arguments) -> dict[str, Any]:
    """One prompt of random ids and a short answer behind it: seconds of the prompt, processor seconds and bytes of all."""
    import torch

    from treedraft.config import DecodeConfig
    from treedraft.speculate import generate

    target.cache = target.new_cache(batch=1, capacity=1)
    ids = torch.randint(target.vocab_size, (tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    config = DecodeConfig(mode="tree", depth=arguments.depth, budget=64)
    peak, begin = _Peak(target.device), time.process_time()
    found = generate(target, drafter, ids, config=config, max_new_tokens=_ANSWER)
    grown, busy = peak.grown(), time.process_time() - begin
    state = drafter.open(1, capacity=tokens, cache=target.cache).num_bytes
    cache = target.cache.store.nbytes
    return {
        "seconds": found.seconds["prefill"], "processor_seconds": busy, "cache_bytes": cache, "state_bytes": state,
        "transient_bytes": grown - cache - state,
    }  # fmt: skip


class _Peak:
    """The most memory in use since it was made, beyond what was in use then. On a CPU as Linux counts pages.

    ValueError on a CPU of another system.
    """

    def __init__(self, device: torch.device) -> None:
        import torch

        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.start = torch.cuda.memory_allocated(device)
            return
        with contextlib.suppress(OSError, AttributeError):  # what was freed before is not counted as free room: glibc
            ctypes.CDLL(None).malloc_trim(0)
        try:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        except OSError as error:
            raise ValueError(f"--prefill cannot measure memory here: {error}") from error
        self.start = _resident("VmRSS")

    def grown(self) -> int:
        import torch

        most = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else _resident("VmHWM")
        return most - self.start


def _resident(name: str) -> int:
    """Bytes of a line of this process's status."""
    with Path("/proc/self/status").open(encoding="ascii") as lines:
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    import torch

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    begin = now()
    call()
    return now() - begin


def _write(arguments: Arguments, rows: list[dict[str, Any]]) -> None:
    import csv

    from treedraft.figures import draw_context_bench
    from treedraft.files import replacing, write_json
    from treedraft.run import commit, hardware

    output = arguments.output
    assert output is not None
    record: dict[str, Any] = {name: getattr(arguments, name) for name in ("target", "layers", "depth", "window", "summary", "accepted", "repeats")}
    if arguments.rope_scaling is not None:
        record["rope_scaling"] = arguments.rope_scaling
    if len(arguments.tokens) > 1:
        record |= {f"{name} draft growth": f"{more:+.1%}" for name, more in growth(rows).items()}
    for row in rows:
        numbers = {f"{row['context']} {name}": row[name] for name in ("draft_ms", "update_ms", "bytes", "shared_bytes")}
        record.setdefault(f"{row['tokens']} tokens", {}).update(numbers)
    write_json(output, {"benchmark": "context", **record, "hardware": hardware(), "commit": commit()})
    with replacing(output.with_suffix(".csv")) as path, path.open("w", newline="", encoding="utf-8") as stream:
        table = csv.DictWriter(stream, fieldnames=list(rows[0]))
        table.writeheader()
        table.writerows(rows)
    draw_context_bench(output.with_suffix(".csv"))
