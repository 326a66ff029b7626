"""`python -m treedraft.bench tree|train|vocabulary`: one thing against another, measured in one run.

tree        builds a conditional 255-node tree with the heap and with the batched builder, at the shapes of a target
train       one optimiser step: blocks a second, and the share of the machine's own matrix-product rate
vocabulary  what a reduced draft vocabulary costs in tau: the same drafter restricted to it and unrestricted
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treedraft.cli import parse_arguments, run_cli

if TYPE_CHECKING:
    from treedraft.drafter import Drafter
    from treedraft.targets.hf import Target
    from treedraft.trees.tree import DraftTree


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeArguments:
    """Flags of `bench tree`."""

    correction: str = "attention"
    budget: int = 255
    width: int = 7
    depth: int = 15
    repeats: int = 15
    draft_vocab_size: int = 8192
    output: Path | None = None
    """Also write the numbers to this JSON file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainArguments:
    """Flags of `bench train`."""

    correction: str = "attention"
    backbone: str = "causal"
    layers: int = 2
    sequences: int = 16
    anchors: int = 16
    length: int = 320
    repeats: int = 5
    draft_vocab_size: int = 8192
    output: Path | None = None
    """Also write the numbers to this JSON file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyArguments:
    """Flags of `bench vocabulary`."""

    target: str = "smollm2-135m"
    drafter: str | None = None
    """A shipped name or a folder (default: the target's default drafter)."""
    count: int = 10
    """Prompts of each set of the target's evaluation prompts."""
    max_new_tokens: int = 96
    depth: int = 15
    output: Path | None = None
    """Also write the numbers to this JSON file."""


def main() -> int:
    commands: dict[str, Callable[[], int]] = {"tree": _tree, "train": _train, "vocabulary": _vocabulary}
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__)
        return 0
    name = sys.argv.pop(1)
    if name not in commands:
        from treedraft.registry import unknown

        raise ValueError(unknown("benchmark", name, list(commands)))
    return commands[name]()


def _tree() -> int:
    arguments = parse_arguments(TreeArguments, program="python -m treedraft.bench tree", description=__doc__ or "")
    import torch

    from treedraft.trees.best_first import BestFirst
    from treedraft.trees.naive import heap_build

    target, drafter = _smollm2_shaped(arguments.correction, arguments.draft_vocab_size, num_layers=1)
    size: dict[str, Any] = {"budget": arguments.budget, "width": arguments.width, "depth": arguments.depth}
    builder = BestFirst(**size)
    hidden = torch.randn((1, arguments.depth, target.hidden_size), generator=torch.Generator().manual_seed(0))
    anchor = torch.tensor([5])
    with torch.no_grad():
        scorer: Any = _Counting(drafter.scorer(hidden, anchor))
        heap_tree = heap_build(5, scorer, **size)
        heap_calls, heap_lanes = scorer.calls, scorer.lanes
        scorer.calls = scorer.lanes = 0
        fast_tree = builder.build(anchor, scorer).tree(0)
        fast_calls, fast_lanes = scorer.calls, scorer.lanes
        heap, fast = _interleaved(
            lambda: heap_build(5, drafter.scorer(hidden, anchor), **size),
            lambda: builder.build(anchor, drafter.scorer(hidden, anchor)),
            repeats=arguments.repeats,
        )
    record = {
        "benchmark": "tree", "correction": arguments.correction, **size,
        "identical": _same(heap_tree, fast_tree),
        "heap_ms": heap * 1e3, "batched_ms": fast * 1e3, "ratio": heap / fast,
        "heap_calls": heap_calls, "heap_corrections": heap_lanes,
        "batched_calls": fast_calls, "batched_corrections": fast_lanes,
    }  # fmt: skip
    print(f"conditional tree, {arguments.correction} correction, smollm2-135m shapes: {size}")
    print(f"  heap     {heap * 1e3:7.1f} ms   {heap_calls} calls, {heap_lanes} corrections")
    print(f"  batched  {fast * 1e3:7.1f} ms   {fast_calls} calls, {fast_lanes} corrections")
    print(f"  ratio    {heap / fast:7.2f} x   same tree: {record['identical']}")
    return _finish(record, arguments.output) if record["identical"] else 1


def _same(first: DraftTree, second: DraftTree) -> bool:
    fields = ("tokens", "parents", "depths")
    return all(getattr(first, name).tolist() == getattr(second, name).tolist() for name in fields)


class _Counting:
    """A scorer that counts its calls and lanes."""

    def __init__(self, scorer: Any) -> None:
        self.scorer, self.calls, self.lanes = scorer, 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scorer, name)

    def expand(self, lanes: Any) -> Any:
        self.calls, self.lanes = self.calls + 1, self.lanes + len(lanes.slot)
        return self.scorer.expand(lanes)

    def children(self, lanes: Any, width: int) -> Any:
        self.calls, self.lanes = self.calls + 1, self.lanes + len(lanes.slot)
        return self.scorer.children(lanes, width)


def _train() -> int:
    arguments = parse_arguments(TrainArguments, program="python -m treedraft.bench train", description=__doc__ or "")
    import tempfile

    import numpy as np
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from treedraft.config import TrainConfig
    from treedraft.data.features import FeatureCache, Sequences
    from treedraft.trainer import Trainer

    target, drafter = _smollm2_shaped(
        arguments.correction, arguments.draft_vocab_size, num_layers=arguments.layers, backbone=arguments.backbone
    )
    rng = np.random.default_rng(0)
    size, length = arguments.draft_vocab_size, arguments.length
    ids = [rng.integers(0, size, length).astype(np.uint16) for _ in range(2 * arguments.sequences)]
    sequences = Sequences(ids=ids, prompt_lengths=np.full(len(ids), 32), digest="random")
    config = TrainConfig(steps=1000, sequences=arguments.sequences, anchors=arguments.anchors)
    with tempfile.TemporaryDirectory() as folder:
        features = FeatureCache(Path(folder), target, sequences, limit_gb=4)
        features.fill()
        drafter.requires_grad_(True)
        trainer = Trainer(drafter=drafter, target=target, features=features, config=config, folder=Path(folder))
        with FlopCounterMode(display=False) as counter:
            trainer._advance()
        flops = counter.get_total_flops()
        step = _median(trainer._advance, arguments.repeats)
    rate = _matmul_rate()
    blocks = arguments.sequences * arguments.anchors
    share = flops / step / rate
    print(f"train, {arguments.backbone}/{arguments.correction}, smollm2-135m shapes, "
          f"{arguments.layers} layers, {blocks} blocks of 16 a step")  # fmt: skip
    print(f"  {blocks / step:8.1f} blocks/s   {step * 1e3:.0f} ms a step, {flops / 1e9:.1f} GFLOP")
    threads = torch.get_num_threads()
    print(f"  {share:8.1%} of this machine's {rate / 1e9:.0f} GFLOP/s (float32 products, {threads} threads)")
    record = {"benchmark": "train", "backbone": arguments.backbone, "correction": arguments.correction,
              "blocks_per_second": blocks / step, "gflop_per_step": flops / 1e9, "matmul_gflops": rate / 1e9,
              "share": share}  # fmt: skip
    return _finish(record, arguments.output)


def _vocabulary() -> int:
    arguments = parse_arguments(
        VocabularyArguments, program="python -m treedraft.bench vocabulary", description=__doc__ or ""
    )
    import numpy as np
    import torch

    from treedraft import metrics
    from treedraft.config import DecodeConfig
    from treedraft.data.prompts import SHIPPED, default_set, prompt_set
    from treedraft.drafter import load_drafter
    from treedraft.evaluate import Replay, record
    from treedraft.targets import load_target

    target = load_target(arguments.target)
    drafter = load_drafter(arguments.drafter, target=target)
    restricted = drafter.d2t
    if len(restricted) == target.vocab_size:
        raise ValueError(f"this drafter drafts all {target.vocab_size:,} tokens of {target.name}: nothing to compare")
    if drafter.config.correction["name"] == "markov":
        raise ValueError("a markov correction has weights for its draft vocabulary alone; choose another drafter")
    prompts = prompt_set(default_set(target.name), count=len(SHIPPED) * arguments.count)  # domains take turns
    texts = record(target, prompts, temperature=0.0, seeds=[0], max_new_tokens=arguments.max_new_tokens)
    replay, decodes = Replay(target, texts), {mode: DecodeConfig(mode=mode, depth=arguments.depth) for mode in ("chain", "tree")}
    drafted = np.zeros(target.vocab_size, dtype=bool)
    drafted[restricted.numpy(force=True)] = True
    answers = np.concatenate([text.ids[text.prompt_length :] for text in texts])
    result: dict[str, Any] = {
        "benchmark": "vocabulary", "target": target.name, "draft_vocab_size": len(restricted), "prompts": len(prompts),
        "depth": arguments.depth, "outside": float(1 - drafted[answers].mean()),
    }  # fmt: skip
    print(f"{target.name}, greedy, {len(prompts)} prompts x {arguments.max_new_tokens} tokens; outside the "
          f"{len(restricted):,} drafted tokens: {result['outside']:.2%} of the answers")  # fmt: skip
    rounds = {mode: [replay.run(drafter, config)] for mode, config in decodes.items()}
    drafter.d2t = torch.arange(target.vocab_size, device=restricted.device)
    drafter.attach(target)
    for mode, config in decodes.items():
        rounds[mode].append(replay.run(drafter, config))
        gap = metrics.paired_difference(*map(metrics.counts_of, rounds[mode]))
        taus = [metrics.tau(part) for part in rounds[mode]]
        result[mode] = {"tau_restricted": taus[0], "tau_unrestricted": taus[1],
                        "difference": [gap.value, gap.low, gap.high]}  # fmt: skip
        print(f"  {mode:<5}  tau restricted {taus[0]:.3f}, unrestricted {taus[1]:.3f}, difference {gap}")
    return _finish(result, arguments.output)


def _smollm2_shaped(
    correction: str, draft_vocab_size: int, *, num_layers: int, backbone: str = "causal"
) -> tuple[Target, Drafter]:
    """A shallow random model of SmolLM2-135M's widths and vocabulary, and a drafter whose correction does something."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from treedraft.config import DrafterConfig
    from treedraft.drafter import Drafter, shape_for
    from treedraft.targets.hf import Target
    from treedraft.targets.tiny import byte_tokenizer

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536,
        num_hidden_layers=7, num_attention_heads=9, num_key_value_heads=3,
        tie_word_embeddings=True, max_position_embeddings=8192,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    tokenizer = byte_tokenizer(49152)
    target = Target(
        name="smollm2-shaped", model=model, tokenizer=tokenizer, mask_token_id=49151, tap_layers=(1, 2, 3, 4, 5)
    )
    draft = DrafterConfig(
        backbone={"name": backbone, "num_layers": num_layers},
        correction={"name": correction},
        draft_vocab_size=draft_vocab_size,
    )
    drafter = Drafter(draft, shape_for(target, draft)).attach(target)
    with torch.no_grad():
        for weight in drafter.correction.parameters():
            if weight.ndim == 2:
                weight.normal_(std=weight.shape[-1] ** -0.5)
    # A trained drafter is sure of many tokens: logits of a few nats' spread grow trees of realistic depth.
    target.head_weight.mul_(3.0 / target.head_weight.std() / 576**0.5)
    return target, drafter.attach(target)


def _matmul_rate() -> float:
    """FLOP/s of float32 products at the sizes drafters use, best of several."""
    import torch

    rows, inner, columns = 2048, 576, 1536
    a, b = torch.randn(rows, inner), torch.randn(columns, inner)
    seconds = min(_timed(lambda: torch.nn.functional.linear(a, b)) for _ in range(30))
    return 2 * rows * inner * columns / seconds


def _interleaved(first: Callable[[], Any], second: Callable[[], Any], *, repeats: int) -> tuple[float, float]:
    """Median seconds of two things, measured in turn (A B B A)."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(3):
        first()  # warm-up
        second()
    for repeat in range(repeats):
        order = (0, 1) if repeat % 2 == 0 else (1, 0)
        for which in order:
            times[which].append(_timed((first, second)[which]))
    return statistics.median(times[0]), statistics.median(times[1])


def _median(call: Callable[[], Any], repeats: int) -> float:
    call()
    return statistics.median(_timed(call) for _ in range(repeats))


def _timed(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _finish(record: dict[str, Any], output: Path | None) -> int:
    from treedraft.files import write_json
    from treedraft.run import commit, hardware

    if output is not None:
        write_json(output, {**record, "hardware": hardware(), "commit": commit()})
    return 0


if __name__ == "__main__":
    run_cli(main)
