"""Measure drafters by replay: the target decodes once, then every drafter is judged along that recorded trajectory.

The target's output does not depend on the drafter (greedy, or seeded sampling with one draw a position), so the
accepted length of a round is the longest path of the draft tree that the recorded continuation follows. No target
forward is needed, and the rounds of many prompts run side by side. Exact in float32 and float64: live decoding accepts
the same lengths, round by round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from treedraft.config import DecodeConfig
from treedraft.data.prompts import Prompt
from treedraft.drafter import Drafter
from treedraft.metrics import Rounds, ends_in_loop
from treedraft.ops.memory import Taps
from treedraft.targets.generate import generate
from treedraft.targets.hf import Target
from treedraft.trees.best_first import BestFirst
from treedraft.trees.builder import TreeBuilder
from treedraft.trees.chain import Chain
from treedraft.trees.limits import Caps, Cost, DepthCaps, GapCap
from treedraft.trees.scorers import Scorer


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One decoding by the target: ids [T] of prompt and response, the prompt's length, and the seed of its noise."""

    prompt: str
    domain: str
    seed: int
    ids: np.ndarray
    prompt_length: int


def record(
    target: Target,
    prompts: Sequence[Prompt],
    *,
    temperature: float,
    seeds: Sequence[int],
    max_new_tokens: int,
    batch_size: int = 64,
) -> list[Trajectory]:
    """Decode every prompt once a seed (greedy: once), as plain decoding does, in batches of `batch_size` or as many as fit."""
    seeds = list(seeds) if temperature > 0 else [0]
    requests = [(prompt, seed, target.encode_chat(prompt.turns)) for prompt in prompts for seed in seeds]
    longest = max((len(ids) for _, _, ids in requests), default=0) + max_new_tokens
    responses = generate(
        target,
        [ids for _, _, ids in requests],
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seeds=[seed for _, seed, _ in requests],
        batch_size=min(batch_size, rows_that_fit(target, longest)),
    )
    return [
        Trajectory(
            prompt=prompt.id,
            domain=prompt.domain,
            seed=seed,
            ids=np.array([*ids, *response]),
            prompt_length=len(ids),
        )
        for (prompt, seed, ids), response in zip(requests, responses, strict=True)
    ]


def rows_that_fit(target: Target, length: int) -> int:
    """Sequences of `length` tokens whose keys and values take 2 GiB, on a GPU a quarter of its free memory; at least one."""
    row = 2 * target.num_layers * target.kv_heads * target.head_dim * target.dtype.itemsize * max(1, length)
    room = torch.cuda.mem_get_info(target.device)[0] // 4 if target.device.type == "cuda" else 2**31
    return max(1, room // row)


def builder_for(config: DecodeConfig, *, depth: int | None = None, cost: Cost | None = None) -> TreeBuilder:
    """The builder a decode config names, at its depth or a smaller one; with a cost a tree ends where it stops paying."""
    depth = config.depth if depth is None else depth
    if config.mode == "chain":
        return Chain(depth=depth)
    caps: Caps | None = None
    if config.caps is not None:
        caps = DepthCaps(caps=config.caps)
    elif config.gap_cap is not None:
        caps = GapCap(beta=config.gap_cap[0], g0=config.gap_cap[1])
    return BestFirst(
        budget=config.budget, width=config.width, depth=depth, admit=config.admit, count_root=config.count_root,
        caps=caps, frontier=config.frontier, cost=cost,
    )  # fmt: skip


class Replay:
    """Trajectories and their tapped features, ready to judge any drafter of this target."""

    def __init__(self, target: Target, trajectories: Sequence[Trajectory], *, at_once: int = 128) -> None:
        if not trajectories:
            raise ValueError("no trajectories to replay: there are no prompts")
        self.target = target
        # Neighbours in length share a batch, so that little is padded.
        self.trajectories = sorted(trajectories, key=lambda item: len(item.ids))
        at_once = min(at_once, rows_that_fit(target, len(self.trajectories[-1].ids)))
        self.groups = [self.trajectories[i : i + at_once] for i in range(0, len(self.trajectories), at_once)]
        self.taps: dict[Taps, list[Tensor]] = {}

    def run(self, drafter: Drafter, config: DecodeConfig) -> list[Rounds]:
        """The rounds of every trajectory, in order of length. The drafter must be attached to this target."""
        return self.judge(drafter, config, self._taps())

    @torch.inference_mode()
    def judge(self, drafter: Drafter, config: DecodeConfig, features: Sequence[Tensor]) -> list[Rounds]:
        """The same of a drafter that remembers other features than the target's: [S, T, C] of every group."""
        pairs = zip(self.groups, features, strict=True)
        return [rounds for group, own in pairs for rounds in _replay_group(drafter, config, group, own)]

    def padded_ids(self) -> list[Tensor]:
        """Token ids [S, T] of every group."""
        return [_padded_ids(group).to(self.target.device) for group in self.groups]

    @cached_property
    def looped(self) -> dict[tuple[str, int], bool]:
        """Of every prompt and seed, whether the answer ended in a repetition loop; end-of-text does not count."""
        stops = list(self.target.eos_token_ids)
        answers = {(item.prompt, item.seed): item.ids[item.prompt_length :] for item in self.trajectories}
        return {key: ends_in_loop(ids[: -1 if ids[-1] in stops else None]) for key, ids in answers.items()}

    def _taps(self) -> list[Tensor]:
        """Features [S, T, C] of every group under what the target taps now."""
        key = self.target.taps
        if key not in self.taps:
            self.taps[key] = [self._trace(ids) for ids in self.padded_ids()]
        return self.taps[key]

    def _trace(self, ids: Tensor, tokens_at_once: int = 2**15) -> Tensor:
        return torch.cat([self.target.trace(part).taps for part in ids.split(max(1, min(16, tokens_at_once // ids.shape[1])))])


def _padded_ids(group: Sequence[Trajectory]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.from_numpy(item.ids) for item in group], batch_first=True)


def _replay_group(drafter: Drafter, config: DecodeConfig, group: Sequence[Trajectory], taps: Tensor) -> list[Rounds]:
    device = taps.device
    builder, depth = builder_for(config), config.depth
    ids = torch.nn.functional.pad(_padded_ids(group), (0, depth + 1), value=-1).to(device)
    lengths = torch.tensor([len(item.ids) for item in group], device=device)
    ids[torch.arange(ids.shape[1], device=device) >= lengths[:, None]] = -1
    memory = drafter.remember(taps, torch.arange(taps.shape[1], device=device))
    anchors = torch.tensor([item.prompt_length for item in group], device=device)
    log: list[tuple[Tensor, ...]] = []
    tallies: dict[str, Tensor] = {}
    active = (anchors < lengths - 1).nonzero().squeeze(1)
    memory = memory.rows(active)
    while len(active):
        at = anchors[active]
        hidden = drafter.hidden(memory, ids[active, at, None], at[:, None], depth)[:, 0]
        scorer = drafter.scorer(hidden, ids[active, at], config.scorer, candidates=config.candidates)
        continuation = ids[active].gather(1, at[:, None] + 1 + torch.arange(depth, device=device))
        found = builder.replay(ids[active, at], scorer, continuation)
        emitted = torch.minimum(found.accepted + 1, lengths[active] - 1 - at)
        ranks = torch.nn.functional.pad(found.ranks, (0, depth - found.ranks.shape[1]), value=-1)
        log.append((active, found.accepted, emitted, found.nodes, found.spine, ranks, _among(scorer, continuation, found.accepted)))
        for name, counted in (("steps", found.steps), ("paths", found.paths)):
            if counted is not None:
                whole = tallies.setdefault(name, counted.new_zeros((len(group), *counted.shape[1:])))
                whole.index_add_(0, active, counted)
        anchors[active] = at + found.accepted + 1
        alive = anchors[active] < lengths[active] - 1
        if not bool(alive.all()):
            active, memory = active[alive], memory.rows(alive.nonzero().squeeze(1))
    return _collect(group, log, {name: whole.cpu().numpy() for name, whole in tallies.items()})


def _among(scorer: Scorer, continuation: Tensor, accepted: Tensor) -> Tensor:
    """Whether recorded tokens [R, D] were candidates of their slots, up to the first that was not drafted: 1 or 0, and
    -1 beyond; [R, 0] where all tokens are scored."""
    if scorer.candidates is None:
        return continuation[:, :0]
    asked = (torch.arange(continuation.shape[1], device=continuation.device) <= accepted[:, None]) & (continuation >= 0)
    return torch.where(asked, (scorer.candidates == continuation[..., None]).any(-1), -1)


def _collect(
    group: Sequence[Trajectory], log: Sequence[tuple[Tensor, ...]], tallies: Mapping[str, np.ndarray]
) -> list[Rounds]:
    if log:
        owner, accepted, emitted, nodes, spine, ranks, among = (torch.cat(parts).cpu().numpy() for parts in zip(*log, strict=True))
    else:
        owner = accepted = emitted = nodes = spine = np.zeros(0, dtype=np.int64)
        ranks = among = np.zeros((0, 0), dtype=np.int64)
    return [
        Rounds(
            prompt=item.prompt, domain=item.domain, seed=item.seed,
            accepted=accepted[owner == i], emitted=emitted[owner == i], nodes=nodes[owner == i],
            spine=spine[owner == i], ranks=ranks[owner == i], among=among[owner == i] if among.size else None, **{name: whole[i] for name, whole in tallies.items()},
        )
        for i, item in enumerate(group)
    ]  # fmt: skip
