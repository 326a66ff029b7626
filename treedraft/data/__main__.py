"""python -m treedraft.data regenerate | show: make a token store with a target's own answers, and look into one."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from treedraft.cli import parse_arguments, run_cli
from treedraft.run import runs_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Regenerate:
    """Let a target answer prompts, until there are enough response tokens. A killed run goes on where it stopped."""

    target: str
    """Name, model folder or hub id."""
    prompts: str
    """world, world-long (a quarter of them long), magpie (the model writes the messages too), or FILE.jsonl with one {"turns": [...]} a line."""
    tokens: int
    """Response tokens to make, at least."""
    temperature: str = "1"
    """One number, or several with commas, which take turns over the prompts (0.6,0.6,0: a third greedy)."""
    seed: int = 0
    max_new_tokens: int = 320
    """Longest answer, in tokens."""
    batch_size: int = 128
    """Requests decoded at once."""
    prompts_per_shard: int = 512
    """Prompts between two checkpoints."""
    output: Path | None = None
    """Folder of the store; runs/data/TARGET unless given."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type the target computes in; auto is bfloat16 on a GPU and float32 on a CPU."""
    rope_scaling: str | None = None
    """ntk:FACTOR: rotary angles for a context that many times longer; what is trained on the answers needs the same."""
    threads: int | None = None
    """CPU threads; all cores unless given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Show:
    """Print counts, provenance and a few decoded samples of a token store."""

    folder: tyro.conf.Positional[Path]
    samples: int = 3
    """Conversations to decode, spread over the store; this loads the target."""


def main() -> None:
    kind = Annotated[Regenerate, tyro.conf.subcommand("regenerate")] | Annotated[Show, tyro.conf.subcommand("show")]
    command: Any = parse_arguments(kind, program="python -m treedraft.data", description=__doc__ or "")  # pyright: ignore
    _regenerate(command) if isinstance(command, Regenerate) else _show(command)


def _regenerate(options: Regenerate) -> None:
    import logging

    import torch
    from tqdm import tqdm
    from tqdm.contrib.logging import logging_redirect_tqdm

    from treedraft.data.regenerate import Settings, regenerate
    from treedraft.targets import load_target

    try:
        temperatures = tuple(float(part) for part in options.temperature.split(","))
    except ValueError as error:
        raise ValueError(f"--temperature {options.temperature!r} is not a number or several with commas") from error
    settings = Settings(
        prompts=options.prompts,
        tokens=options.tokens,
        temperatures=temperatures,
        seed=options.seed,
        max_new_tokens=options.max_new_tokens,
        batch_size=options.batch_size,
        prompts_per_shard=options.prompts_per_shard,
    )
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    dtype = None if options.dtype == "auto" else getattr(torch, options.dtype)
    target = load_target(options.target, dtype=dtype, rope_scaling=options.rope_scaling)
    folder = options.output or runs_folder() / "data" / Path(options.target).name
    command = f"python -m treedraft.data {shlex.join(sys.argv[1:])}"
    with logging_redirect_tqdm(), tqdm(total=settings.tokens, unit=" tokens", disable=None, smoothing=0.02) as bar:
        store = regenerate(target, settings, folder, command=command, bar=bar)
    print(f"{folder}: {_summary(store.counts)}")


def _show(options: Show) -> None:
    from treedraft.data.tokens import TokenStore

    store = TokenStore.open(options.folder)
    print(f"{options.folder}: {_summary(store.counts)}")
    domains = [conversation.domain for conversation in store]
    print("domains: " + ", ".join(f"{domain} {domains.count(domain)}" for domain in store.provenance.domains))
    for name in store.provenance.__slots__:
        print(f"{name}: {getattr(store.provenance, name)}")
    print(f"hardware: {store.manifest['hardware']}\ncommand: {store.manifest['command']}")
    if options.samples < 1 or len(store) == 0:
        return
    from treedraft.targets import load_target

    target = load_target(store.provenance.target)
    for number in range(min(options.samples, len(store))):
        index = number * len(store) // min(options.samples, len(store))
        conversation = store[index]
        text = target.tokenizer.decode(conversation.ids)
        prompt, response = conversation.prompt_length, len(conversation.ids) - conversation.prompt_length
        print(f"\n--- {index}: {conversation.domain}, {prompt} + {response} tokens\n{text}")


def _summary(counts: dict[str, int]) -> str:
    dropped = ", ".join(
        f"{name.removeprefix('dropped_')} {count}" for name, count in counts.items() if name.startswith("dropped_")
    )
    return (
        f"{counts['sequences']:,} conversations, {counts['prompt_tokens']:,} prompt "
        f"and {counts['response_tokens']:,} response tokens; dropped: {dropped}"
    )


if __name__ == "__main__":
    run_cli(main)
