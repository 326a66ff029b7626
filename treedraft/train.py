"""`python -m treedraft.train --config FILE.toml --set train.steps=2000`: train one drafter.

The file has tables [drafter], [train] and [data] and a key `target`; without one the defaults train a causal backbone
with an attention correction. Under torchrun the same command trains on all its processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treedraft.cli import Repeated, parse_arguments, run_cli
from treedraft.config import DataConfig, DrafterConfig, TrainConfig, override, parse, parse_settings, read_toml
from treedraft.grid import Arm, label_of

_DEFAULTS: dict[str, Any] = {
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
    export: Path | None = None
    """Also write the finished drafter here, in float16."""


def main() -> int:
    arguments = parse_arguments(Arguments, program="python -m treedraft.train", description=__doc__ or "")
    arm = _arm(arguments)

    from treedraft import cells

    bench = cells.Workbench(arm.target, cache_gb=arguments.cache_gb, data_folder=arguments.data, dtype=arguments.dtype)
    bench.check(arm)
    result = bench.train(arm)
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


def _arm(arguments: Arguments) -> Arm:
    values = read_toml(arguments.config) if arguments.config else _DEFAULTS
    values = override(values, parse_settings(arguments.set))
    where = str(arguments.config or "the defaults")
    wrong = sorted(set(values) - {"target", "drafter", "train", "data"})
    if wrong:
        from treedraft.registry import unknown

        raise ValueError(f"{where}: " + unknown("table", wrong[0], ["target", "drafter", "train", "data"]))
    drafter = parse(DrafterConfig, values.get("drafter", {}), where=f"{where} [drafter]")
    return Arm(
        label=label_of(drafter),
        target=arguments.target or values.get("target", "pocket"),
        data=parse(DataConfig, values.get("data", {}), where=f"{where} [data]"),
        drafter=drafter,
        train=parse(TrainConfig, values.get("train", {}), where=f"{where} [train]"),
    )


if __name__ == "__main__":
    run_cli(main)
