"""`python -m treedraft.bench NAME`: one thing against another, measured in one run.

tree        builds 255-node trees with the heap and with the batched builder, and 16 at once, at the shapes of a target
train       one optimiser step: blocks a second, and the share of the machine's own matrix-product rate
vocabulary  what a reduced draft vocabulary costs in tau: the same drafter restricted to it and unrestricted
decode      whole answers against transformers' own `generate`, same target, prompts, threads and ids
replay      measuring tau along recorded answers against measuring it live
ranks       how often the accepted child of a node was its best, second best ...: how wide trees should be at each depth
profile     what verification, drafting and corrections cost on this machine; `decode --budget auto` uses it
context     drafting time and bytes of a fixed-size context against the full one's, from 1K to 128K tokens
attention   tree attention as a CPU computes it against one masked softmax
gpu         on a CUDA machine: attention checked and timed against five others, tree building, a whole round
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from treedraft.cli import Repeated, parse_arguments, run_cli
from treedraft.config import LEAST_SHARE, Rung

if TYPE_CHECKING:
    from treedraft.drafter import Drafter
    from treedraft.targets.hf import Target
    from treedraft.trees.tree import DraftTree


@dataclass(frozen=True, slots=True, kw_only=True)
class _Written:
    output: Path | None = None
    """Also write the numbers to this JSON file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scaled(_Written):
    rope_scaling: str | None = None
    """ntk:FACTOR: rotary angles of target and drafter for a context that many times longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeArguments(_Written):
    """Flags of `bench tree`."""

    budget: int = 255
    width: int = 7
    depth: int = 15
    requests: int = 16
    """Trees that are built at once, against as many one by one."""
    repeats: int = 15
    draft_vocab_size: int = 8192
    target: str | None = None
    """Also count calls with the drafters shipped for this target, along the first tokens of its answers."""
    count: int = 6
    """Prompts of the target's set, for that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainArguments(_Written):
    """Flags of `bench train`."""

    correction: str = "attention"
    backbone: str = "causal"
    layers: int = 2
    sequences: int = 16
    anchors: int = 16
    length: int = 320
    repeats: int = 5
    draft_vocab_size: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyArguments(_Scaled):
    """Flags of `bench vocabulary`."""

    target: str = "smollm2-135m"
    drafter: str | None = None
    """A shipped name or a folder (default: the target's default drafter)."""
    count: int = 10
    """Prompts of each set of the target's evaluation prompts."""
    max_new_tokens: int = 96
    depth: int = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeArguments(_Scaled):
    """Flags of `bench decode`."""

    target: str = "smollm2-135m"
    drafter: str | None = None
    """A shipped name or a folder (default: the target's default drafter)."""
    prompts: Repeated = ()
    """Sets of prompts (default: the target's own; several times for several)."""
    count: int = 8
    """Prompts of each set."""
    max_new_tokens: int = 128
    depth: int | None = None
    repeats: int = 3
    """Times that every answer is decoded by either; the medians are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayArguments(_Scaled):
    """Flags of `bench replay`."""

    target: str = "pocket"
    drafter: str | None = None
    prompts: str | None = None
    """A set of prompts (default: the target's own)."""
    count: int = 120
    """Prompts, by default as many as the grids evaluate."""
    max_new_tokens: int = 192
    budget: int = 255
    depth: int = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksArguments(_Scaled):
    """Flags of `bench ranks`."""

    target: str = "pocket"
    drafter: str | None = None
    """A shipped name or a folder (default: the target's default drafter)."""
    prompts: str | None = None
    """A set of prompts (default: the target's own)."""
    count: int = 120
    """Prompts; another set than the one that the caps are used on says more."""
    max_new_tokens: int = 192
    temperature: float = 0.0
    depth: int | None = None
    width: int = 7
    budget: int = 255
    least: float = LEAST_SHARE
    """Share of the accepted drafts at a depth that makes a rank worth its node."""
    output: Path | None = None
    """Also write the counts to this JSON file, for `decode --caps`, and for `caps` in a grid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileArguments(_Scaled):
    """Flags of `bench profile`, those of `decode` among them: what `decode` finds is what was measured with the same."""

    target: str = "smollm2-135m"
    drafter: str | None = None
    """A shipped name or a folder (default: the target's default drafter)."""
    depth: int | None = None
    scorer: Rung = "conditional"
    candidates: int | None = None
    device: str | None = None
    dtype: str | None = None
    attention: Literal["auto", "triton", "hybrid", "sdpa", "reference"] = "auto"
    requests: int = 4
    """Also verify so many trees at once, against what the profile says of them."""


def main() -> int:
    commands: dict[str, Callable[[], int]] = {
        "tree": _tree, "train": _train, "vocabulary": _vocabulary, "decode": _decode, "replay": _replay,
        "ranks": _ranks, "profile": _profile, "context": _context, "attention": _attention, "gpu": _gpu,
    }  # fmt: skip
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__)
        return 0
    name = sys.argv.pop(1)
    if name not in commands:
        from treedraft.registry import unknown

        raise ValueError(unknown("benchmark", name, list(commands)))
    return commands[name]()


def _attention() -> int:
    from treedraft import bench_attention

    return bench_attention.main()


def _gpu() -> int:
    from treedraft import bench_gpu

    return bench_gpu.main()


def _tree() -> int:
    arguments = parse_arguments(TreeArguments, program="python -m treedraft.bench tree", description=__doc__ or "")
    size: dict[str, Any] = {"budget": arguments.budget, "width": arguments.width, "depth": arguments.depth}
    bandwidth = _bandwidth()
    print(f"trees at smollm2-135m shapes: {size}; memory read at {bandwidth / 1e9:.1f} GB/s")
    record: dict[str, Any] = {"benchmark": "tree", **size, "requests": arguments.requests, "read_gb_per_second": bandwidth / 1e9}
    for correction in ("none", "markov", "attention"):
        record[correction] = found = _compare_builders(correction, size, arguments, bandwidth)
        print(f"{'marginal' if correction == 'none' else correction}")
        print(f"  heap     {found['heap_ms']:7.1f} ms   {found['heap_calls']} calls of the scorer")
        print(f"  batched  {found['batched_ms']:7.1f} ms   {found['calls']} calls, {found['scored']} nodes scored; "
              f"reading their weights takes {found['floor_ms']:.1f} ms, {found['reading_share']:.0%} of the time")  # fmt: skip
        print(f"  {arguments.requests} at once {found['together_ms']:5.1f} ms")
        print(f"  ratio    {found['ratio']:7.2f} x the heap, {found['together_ratio']:.2f} x one by one   "
              f"same tree: {found['identical']}")  # fmt: skip
    if arguments.target is not None:
        record |= calls_when_decoding(arguments.target, size, arguments.count)
    same = all(record[name]["identical"] for name in ("none", "markov", "attention"))
    return _finish(record, arguments) or int(not same)


def _compare_builders(correction: str, size: dict[str, Any], arguments: TreeArguments, bandwidth: float) -> dict[str, Any]:
    import torch

    from treedraft.ops.packed import DRAFTER, pack_linears
    from treedraft.trees.best_first import BestFirst
    from treedraft.trees.naive import heap_build

    target, drafter = _smollm2_shaped(correction, arguments.draft_vocab_size, num_layers=1)
    pack_linears(drafter, DRAFTER)
    builder = BestFirst(**size)
    generator = torch.Generator().manual_seed(0)
    several = torch.randn((arguments.requests, size["depth"], target.hidden_size), generator=generator)
    hidden, anchors = several[:1], torch.full((arguments.requests,), 5)
    anchor = anchors[:1]
    with torch.no_grad():
        scorer: Any = _Counting(drafter.scorer(hidden, anchor))
        heap_tree = heap_build(5, scorer, **size)
        heap_calls = scorer.calls
        scorer.calls = scorer.lanes = 0
        fast_tree = builder.build(anchor, scorer).tree(0)
        heap, fast = _interleaved(
            lambda: heap_build(5, drafter.scorer(hidden, anchor), **size),
            lambda: builder.build(anchor, drafter.scorer(hidden, anchor)),
            repeats=arguments.repeats,
        )
        singles, together = _interleaved(
            lambda: [builder.build(anchor, drafter.scorer(one[None], anchor)) for one in several],
            lambda: builder.build(anchors, drafter.scorer(several, anchors)),
            repeats=max(3, arguments.repeats // 3),
        )
    # What is read again in every call: the correction's matrices (tables are looked up), and the head behind the
    # attention layer. The other scorers read the head once for all slots.
    matrices = [weight for name, weight in drafter.correction.named_parameters() if weight.ndim == 2 and "w1" not in name.lower()]
    head_reads = scorer.calls if correction == "attention" else 1
    weights = 4 * (scorer.calls * sum(weight.numel() for weight in matrices) + head_reads * arguments.draft_vocab_size * target.hidden_size)
    return {
        "identical": _same(heap_tree, fast_tree), "heap_ms": heap * 1e3, "batched_ms": fast * 1e3, "ratio": heap / fast,
        "heap_calls": heap_calls, "calls": scorer.calls, "scored": scorer.lanes,
        "floor_ms": weights / bandwidth * 1e3, "reading_share": weights / bandwidth / fast,
        "together_ms": together * 1e3, "together_ratio": singles / together,
    }  # fmt: skip


def _bandwidth() -> float:
    """Bytes a second that are read from memory: the sum of more than any cache holds, best of several."""
    import torch

    values = torch.ones(64 * 2**20)
    return 4 * len(values) / min(_timed(values.sum) for _ in range(8))


def _decode() -> int:
    arguments = parse_arguments(DecodeArguments, program="python -m treedraft.bench decode", description=__doc__ or "")
    from treedraft.config import MOST_NODES, DecodeConfig
    from treedraft.costs import profile_of
    from treedraft.data.prompts import SHIPPED, default_set, prompt_set
    from treedraft.drafter import load_drafter, shipped_drafters
    from treedraft.targets import load_target

    if arguments.repeats < 1:
        raise ValueError(f"--repeats is {arguments.repeats}; at least 1")
    target = load_target(arguments.target, rope_scaling=arguments.rope_scaling)
    drafter = load_drafter(arguments.drafter, target=target)
    depth = drafter.depth if arguments.depth is None else arguments.depth
    config = DecodeConfig(mode="tree", depth=depth, budget=MOST_NODES, admit="pop")
    profile = profile_of(target, drafter, depth)
    own = [default_set(target.name)] if default_set(target.name) == "world" else list(SHIPPED)
    name = arguments.drafter or shipped_drafters(target.name)[0]
    record: dict[str, Any] = {"benchmark": "decode", "target": target.name, "drafter": name, "depth": depth, "max_new_tokens": arguments.max_new_tokens,
                              "prompts": arguments.count, "repeats": arguments.repeats}  # fmt: skip
    identical = True
    for name in arguments.prompts or own:
        prompts = [target.encode_chat(prompt.turns) for prompt in prompt_set(name, count=arguments.count)]
        found = _decode_set(target, drafter, config, profile, prompts, arguments)
        identical &= found["identical"]
        stages = "  ".join(f"{stage} {share:.0%}" for stage, share in found["shares"].items())
        print(f"{name:<6} {found['speedup']:.2f} x transformers' generate ({found['plain_tokens_per_second']:.1f} tokens/s); "
              f"tau {found['tau']:.2f}, {found['mean_nodes']:.1f} nodes a round; same ids: {found['identical']}\n"
              f"       time: {stages}; a free drafter would give {found['free_drafter_speedup']:.2f} x")  # fmt: skip
        record[name] = {key: value for key, value in found.items() if key != "shares"} | {f"share_{k}": v for k, v in found["shares"].items()}
    return _finish(record, arguments) or int(not identical)


def _decode_set(
    target: Target, drafter: Drafter, config: Any, profile: Any, prompts: list[list[int]], arguments: DecodeArguments
) -> dict[str, Any]:
    """Every prompt by both, in turn; seconds include prefill, as a user waits for it."""
    import numpy as np
    import torch

    from treedraft import metrics
    from treedraft.drafting import STAGES
    from treedraft.speculate import generate

    model: Any = target.model
    eos = list(target.eos_token_ids)
    seconds: tuple[list[float], list[float]] = ([], [])
    stages, rounds, tokens, identical = dict.fromkeys(STAGES, 0.0), [], 0, True
    for place, prompt in enumerate(prompts):
        ids = torch.tensor([prompt], device=target.device)
        mask = torch.ones_like(ids)

        def plain(ids: torch.Tensor = ids, mask: torch.Tensor = mask) -> Any:
            with torch.inference_mode():
                return model.generate(
                    ids, attention_mask=mask, max_new_tokens=arguments.max_new_tokens, do_sample=False,
                    eos_token_id=eos, pad_token_id=eos[0],
                )  # fmt: skip

        def draft(prompt: list[int] = prompt) -> Any:
            return generate(target, drafter, prompt, config=config, profile=profile, max_new_tokens=arguments.max_new_tokens)

        if place == 0:
            plain()
            draft()
        times: tuple[list[float], list[float]] = ([], [])
        for repeat in range(arguments.repeats):
            for which in ((0, 1), (1, 0))[repeat % 2]:
                begin = time.perf_counter()
                answer = (plain, draft)[which]()
                times[which].append(time.perf_counter() - begin)
                if which == 0:
                    expected = answer[0, len(prompt) :].tolist()
                else:
                    found = answer
        identical &= found.ids == expected
        tokens += len(expected)
        rounds.append(found.counts(prompt=str(place)))
        for part, own in zip(seconds, times, strict=True):
            part.append(statistics.median(own))
        for stage in STAGES:
            stages[stage] += found.seconds[stage]
    total, busy = [sum(part) for part in seconds], sum(stages.values())
    own_work = 1 - (stages["draft"] + stages["build"]) / busy
    return {
        "identical": identical, "speedup": total[0] / total[1], "tau": metrics.tau(rounds),
        "mean_nodes": float(np.concatenate([item.nodes for item in rounds]).mean()) if rounds else float("nan"),
        "plain_tokens_per_second": tokens / total[0], "tokens_per_second": tokens / total[1],
        "free_drafter_speedup": total[0] / (total[1] * own_work),
        "shares": {stage: value / busy for stage, value in stages.items()},
    }  # fmt: skip


def _replay() -> int:
    arguments = parse_arguments(ReplayArguments, program="python -m treedraft.bench replay", description=__doc__ or "")
    from treedraft import metrics
    from treedraft.config import DecodeConfig
    from treedraft.data.prompts import default_set, prompt_set
    from treedraft.drafter import load_drafter
    from treedraft.evaluate import Replay, record
    from treedraft.speculate import generate
    from treedraft.targets import load_target

    target = load_target(arguments.target, rope_scaling=arguments.rope_scaling)
    drafter = load_drafter(arguments.drafter, target=target)
    config = DecodeConfig(mode="tree", depth=arguments.depth, budget=arguments.budget)
    prompts = prompt_set(arguments.prompts or default_set(target.name), count=arguments.count)
    texts = record(target, prompts, temperature=0.0, seeds=[0], max_new_tokens=arguments.max_new_tokens)
    replay = Replay(target, texts)
    replay.run(drafter, config)
    replayed: list[metrics.Rounds] = []
    seconds = _median(lambda: replayed.__setitem__(slice(None), replay.run(drafter, config)), 3)
    begin = time.perf_counter()
    live = [
        generate(target, drafter, target.encode_chat(prompt.turns), config=config, max_new_tokens=arguments.max_new_tokens).counts()
        for prompt in prompts
    ]
    live_seconds = time.perf_counter() - begin
    taus = metrics.tau(replayed), metrics.tau(live)
    print(f"{target.name}, {len(prompts)} prompts, {arguments.budget} nodes: replay {seconds:.2f} s, live {live_seconds:.2f} s, "
          f"{live_seconds / seconds:.1f} x; tau {taus[0]:.4f} and {taus[1]:.4f}")  # fmt: skip
    result = {"benchmark": "replay", "target": target.name, "prompts": len(prompts), "depth": arguments.depth, "budget": arguments.budget,
              "replay_seconds": seconds, "live_seconds": live_seconds, "ratio": live_seconds / seconds,
              "tau_replay": taus[0], "tau_live": taus[1]}  # fmt: skip
    return _finish(result, arguments) or int(taus[0] != taus[1])


def _ranks() -> int:
    arguments = parse_arguments(RanksArguments, program="python -m treedraft.bench ranks", description=__doc__ or "")
    from treedraft import metrics
    from treedraft.config import DecodeConfig
    from treedraft.data.prompts import default_set, prompt_set
    from treedraft.drafter import load_drafter
    from treedraft.evaluate import Replay, record
    from treedraft.targets import load_target

    if not 0 < arguments.least <= 1:
        raise ValueError(f"--least is {arguments.least}; a share above 0, at most 1")
    target = load_target(arguments.target, rope_scaling=arguments.rope_scaling)
    drafter = load_drafter(arguments.drafter, target=target)
    config = DecodeConfig(
        depth=drafter.depth if arguments.depth is None else arguments.depth, width=arguments.width, budget=arguments.budget,
        temperature=arguments.temperature,
    )  # fmt: skip
    prompts = prompt_set(arguments.prompts or default_set(target.name), count=arguments.count)
    texts = record(target, prompts, temperature=config.temperature, seeds=[0], max_new_tokens=arguments.max_new_tokens)
    counts = metrics.rank_counts(Replay(target, texts).run(drafter, config))
    if not counts:
        raise ValueError(f"no draft was accepted on {len(prompts)} prompts: there are no ranks to count")
    caps = metrics.histogram_caps(counts, least=arguments.least)
    print(f"{target.name}, {len(prompts)} prompts: accepted drafts by depth of their parent and rank, the best one's first")
    for depth, (row, cap) in enumerate(zip(counts, caps, strict=True)):
        print(f"  {depth:>3}" + "".join(f"{count:>8}" for count in row) + f"   {cap} children at most")
    print(f"--caps {','.join(map(str, caps))}")
    result = {"benchmark": "ranks", "target": target.name, "prompts": len(prompts), "depth": config.depth, "width": config.width,
              "budget": config.budget, "temperature": config.temperature, "least": arguments.least, "ranks": counts, "caps": caps}  # fmt: skip
    return _finish(result, arguments)


def _profile() -> int:
    arguments = parse_arguments(ProfileArguments, program="python -m treedraft.bench profile", description=__doc__ or "")
    from treedraft.costs import NODES, profile_of, verify_several
    from treedraft.drafter import load_drafter
    from treedraft.targets import load_target, parse_device, parse_dtype

    if arguments.requests < 1:
        raise ValueError(f"--requests is {arguments.requests}; at least 1")
    target = load_target(
        arguments.target, device=parse_device(arguments.device), dtype=parse_dtype(arguments.dtype), attention=arguments.attention,
        rope_scaling=arguments.rope_scaling,
    )  # fmt: skip
    drafter = load_drafter(arguments.drafter, target=target)
    drafter.check_candidates(arguments.candidates, arguments.scorer)
    profile = profile_of(
        target, drafter, drafter.depth if arguments.depth is None else arguments.depth, scorer=arguments.scorer,
        candidates=arguments.candidates, refresh=True,
    )  # fmt: skip
    print(f"{target.name}: draft {profile.draft * 1e3:.1f} ms a round, {profile.level * 1e3:.2f} ms a level, "
          f"correction {profile.correction * 1e3:.2f} ms a node; "
          f"verification in ms, measured and as fitted")  # fmt: skip
    record: dict[str, Any] = {"benchmark": "profile", "target": target.name, "draft_ms": profile.draft * 1e3,
                              "level_ms": profile.level * 1e3, "correction_ms": profile.correction * 1e3}  # fmt: skip
    print("  nodes   " + "".join(f"{nodes:>8}" for nodes in NODES))
    for context, seconds in zip(profile.contexts, profile.verify, strict=True):
        fitted = profile.at(context).verify
        print(f"  {context:>5} ms" + "".join(f"{value * 1e3:8.1f}" for value in seconds))
        print("   fitted " + "".join(f"{fitted[nodes - 1] * 1e3:8.1f}" for nodes in NODES))
        record[f"verify_ms_behind_{context}"] = {str(nodes): value * 1e3 for nodes, value in zip(NODES, seconds, strict=True)}
    context, several = profile.contexts[0], [nodes for nodes in NODES if nodes <= 64]
    took, said = verify_several(target, arguments.requests, context, several), profile.at(context, arguments.requests).verify
    print(f"  {arguments.requests} trees at once behind {context}: measured, and what the profile says")
    print("          " + "".join(f"{value * 1e3:8.1f}" for value in took))
    print("          " + "".join(f"{said[nodes - 1] * 1e3:8.1f}" for nodes in several))
    record[f"verify_ms_of_{arguments.requests}_behind_{context}"] = {
        str(nodes): {"measured": value * 1e3, "profile": said[nodes - 1] * 1e3} for nodes, value in zip(several, took, strict=True)
    }
    return _finish(record, arguments)


def _context() -> int:
    from treedraft.bench_context import main as measure

    return measure()


def calls_when_decoding(name: str, size: dict[str, Any], count: int) -> dict[str, Any]:
    """Calls a tree where laws are a trained drafter's: with each shipped one, behind every fourth of 32 answered tokens."""
    import torch

    from treedraft.data.prompts import default_set, prompt_set
    from treedraft.drafter import load_drafter, shipped_drafters
    from treedraft.speculate import generate_plain
    from treedraft.targets import load_target
    from treedraft.trees.best_first import BestFirst

    target, found = load_target(name), {}
    asked = [target.encode_chat(prompt.turns) for prompt in prompt_set(default_set(name), count=count)]
    answered = [prompt + generate_plain(target, prompt, max_new_tokens=32).ids for prompt in asked]
    for shipped in shipped_drafters(name):
        drafter = load_drafter(shipped, target=target)
        calls, levels = [], []
        for prompt, ids in zip(asked, answered, strict=True):
            at, whole = torch.arange(len(prompt), len(ids), 4, device=target.device), torch.tensor(ids, device=target.device)
            with torch.inference_mode():
                memory = drafter.remember(target.trace(whole[None]).taps, torch.arange(len(ids), device=target.device))
                tokens = whole[at]
                for token, hidden in zip(tokens, drafter.hidden(memory, tokens[None], at[None], size["depth"])[0], strict=True):
                    scorer: Any = _Counting(drafter.scorer(hidden[None], token[None]))
                    tree = BestFirst(**size).build(token[None], scorer)
                    calls.append(scorer.calls)
                    levels.append(int(tree.depths.max()))
        found[f"{name}, {shipped}"] = {"prompts": count, "trees": len(calls), "calls": statistics.mean(calls), "most_calls": max(calls), "levels": statistics.mean(levels)}
        print(f"{shipped} of {name}: {statistics.mean(calls):.2f} calls a tree, at most {max(calls)}; "
              f"{statistics.mean(levels):.2f} levels, one of which a call can open (n = {len(calls)} trees)")  # fmt: skip
    return found


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

    def spine(self, anchor: Any, depth: int, width: int) -> None:
        """A call a level is what is counted here."""


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
        arguments.correction, arguments.draft_vocab_size, num_layers=arguments.layers, backbone=arguments.backbone, pack=False
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
    return _finish(record, arguments)


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

    target = load_target(arguments.target, rope_scaling=arguments.rope_scaling)
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
    return _finish(result, arguments)


def _smollm2_shaped(
    correction: str, draft_vocab_size: int, *, num_layers: int, backbone: str = "causal", pack: bool = True
) -> tuple[Target, Drafter]:
    """A shallow random model of SmolLM2-135M's widths and vocabulary, and a drafter whose correction does something.

    Operations on packed weights are not counted as floating-point operations.
    """
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
    with torch.no_grad():
        # A trained drafter is sure of many tokens: logits of a few nats' spread grow trees of realistic depth.
        model.lm_head.weight.mul_(3.0 / model.lm_head.weight.std() / 576**0.5)
    target = Target(
        name="smollm2-shaped", model=model, tokenizer=byte_tokenizer(49152), mask_token_id=49151,
        tap_layers=(1, 2, 3, 4, 5), pack=pack,
    )  # fmt: skip
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
    return target, drafter


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


def _finish(record: dict[str, Any], arguments: _Written) -> int:
    from treedraft.files import write_json
    from treedraft.run import commit, hardware

    if isinstance(arguments, _Scaled) and arguments.rope_scaling is not None:
        record = {**record, "rope_scaling": arguments.rope_scaling}
    if arguments.output is not None:
        write_json(arguments.output, {**record, "hardware": hardware(), "commit": commit()})
    return 0


if __name__ == "__main__":
    run_cli(main)
