"""`python -m treedraft.train --config FILE.toml --set train.steps=2000`: train one drafter.

The file has tables [drafter], [train] and [data] and a key `target`; without one the defaults train a causal backbone
with an attention correction. Under torchrun the same command trains on all its processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treedraft.cli import Repeated, parse_arguments, run_cli
from treedraft.config import override, parse_settings, read_toml
from treedraft.grid import Arm, single_arm

_DEFAULTS: dict[str, Any] = {
    "data": {"tokens": 300_000},
    "target": "pocket",
    "drafter": {"backbone": {"name": "causal", "num_layers": 2}, "correction": {"name": "attention"}},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Flags of the command."""

    config: Path | None = None
    """TOML file with target, [drafter], [train] and [data]."""
    set: Repeated = ()
    """KEY=VALUE over the file, as in drafter.correction.rank=128."""
    target: str | None = None
    """Another target than the file's: a name, a folder or a hub id."""
    data: str | None = None
    """A folder of training tokens made by `python -m treedraft.data regenerate` (default: the target's own)."""
    cache_gb: float = 12.0
    """The largest feature cache to fill."""
    dtype: str | None = None
    """Type the target computes features in: float32, bfloat16, ... (default: bfloat16 on CUDA, float32 elsewhere)."""
    rope_scaling: str | None = None
    """ntk:FACTOR: rotary angles of target and drafter for a context that many times longer (train.rope_scaling)."""
    export: Path | None = None
    """Also write the finished drafter here, in float16."""


def main() -> int:
    arguments = parse_arguments(Arguments, program="python -m treedraft.train", description=__doc__ or "")
    arm = _arm(arguments)
    rank = _use_own_gpu()

    from treedraft import cells

    bench = cells.Workbench(
        arm.target, cache_gb=arguments.cache_gb, dtype=arguments.dtype, rope_scaling=arm.train.rope_scaling
    )
    bench.check(arm)
    result = bench.train(arm)
    if rank != 0:
        return 0
    folder = cells.train_folder(arm)
    counts = "  ".join(f"{part} {count:,}" for part, count in result["parameters"].items())
    print(f"parameters: {counts}")
    print(f"{result['steps']} steps, {result['blocks']:,} blocks, {result['seconds']:.0f} s: "
          f"loss {result['loss']:.3f}, agreement {result['agreement']:.3f}, "
          f"expected tau {result['expected_tau']:.2f}")  # fmt: skip
    print(f"drafter: {folder / 'drafter'}")
    if arguments.export is not None:
        import torch

        bench.drafter(arm).save_pretrained(arguments.export, dtype=torch.float16)
        print(f"exported: {arguments.export}")
    return 0


def _use_own_gpu() -> int:
    """Under torchrun: this process's rank, its own GPU made the current one; else 0."""
    import os

    import torch

    from treedraft.run import rank_and_world

    if "LOCAL_RANK" in os.environ and torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return rank_and_world()[0]


def _arm(arguments: Arguments) -> Arm:
    values = override(read_toml(arguments.config) if arguments.config else _DEFAULTS, parse_settings(arguments.set))
    if arguments.data is not None:
        values.setdefault("data", {})["folder"] = arguments.data
    if arguments.rope_scaling is not None:
        values.setdefault("train", {})["rope_scaling"] = arguments.rope_scaling
    return single_arm(values, target=arguments.target, where=str(arguments.config or "the defaults"))


if __name__ == "__main__":
    run_cli(main)
