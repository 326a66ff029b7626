"""The drafter's side of live decoding: accepted rows in, draft trees out. Beside its target here, elsewhere in `apart`."""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from treedraft.config import DecodeConfig
from treedraft.contexts._seam import State
from treedraft.costs import Profile
from treedraft.drafter import Drafter
from treedraft.evaluate import builder_for
from treedraft.trees.scorers import Scorer
from treedraft.trees.tree import TreeBatch

STAGES = ("prefill", "draft", "build", "verify", "commit")


class Ledger:
    """Seconds spent by stage, those of a stage inside another once; waits for the devices before reading the clock."""

    def __init__(self, *devices: torch.device) -> None:
        self.devices = {device for device in devices if device.type == "cuda"}
        self.seconds: dict[str, float] = dict.fromkeys(STAGES, 0.0)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        begin, before = self._now(), sum(self.seconds.values())
        yield
        inner = sum(self.seconds.values()) - before
        self.seconds[name] += self._now() - begin - inner

    def _now(self) -> float:
        for device in self.devices:
            torch.cuda.synchronize(device)
        return time.perf_counter()


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossed:
    """Bytes that went from a target to its drafter and back; of one row of a batch, its share."""

    to_drafter: float = 0
    to_target: float = 0


class Drafting(ABC):
    """A drafter at work on R requests. Tensors that go in and out are on the target's device."""

    @abstractmethod
    def append(self, taps: Tensor, counts: Sequence[int], requests: Sequence[int]) -> None:
        """Rows of the prompts, then accepted ones: as `State.append`."""

    def settle(self) -> None:  # noqa: B027 (beside its target a drafter waits for nothing)
        """The prompts are in; drafting begins."""

    @abstractmethod
    def draft(self, anchors: Sequence[int], lengths: Sequence[int], depth: int) -> TreeBatch:
        """Trees below the anchor token of every request, which sits at position lengths[r]."""

    @abstractmethod
    def keep(self, requests: Tensor) -> None:
        """Go on with these requests alone, in this order."""

    def among(self, chosen: Sequence[int], request: int = 0) -> list[bool] | None:
        """Whether each of these tokens was a candidate of its slot in the last round; None where all tokens are scored."""
        return None

    def crossed(self) -> Crossed | None:
        """What crossed between devices since this was last asked; None where drafter and target share one."""
        return None


@final
@dataclass(slots=True, kw_only=True)
class Together(Drafting):
    """A drafter whose context's state is on the device where the rows are."""

    drafter: Drafter
    state: State
    config: DecodeConfig
    profile: Profile | None
    ledger: Ledger
    device: torch.device
    scorer: Scorer | None = None  # of the last round

    def append(self, taps: Tensor, counts: Sequence[int], requests: Sequence[int]) -> None:
        self.state.append(taps, counts, requests)

    def draft(self, anchors: Sequence[int], lengths: Sequence[int], depth: int) -> TreeBatch:
        scorer = self.score(anchors, lengths, depth)
        cost = self.profile.at(max(lengths), len(anchors)) if self.profile is not None else None
        with self.ledger.stage("build"):
            anchor = torch.tensor(anchors, device=self.device)
            return builder_for(self.config, depth=depth, cost=cost).build(anchor, scorer)

    def score(self, anchors: Sequence[int], lengths: Sequence[int], depth: int) -> Scorer:
        """The block behind every prefix, ready to be asked for log q."""
        anchor, position = (torch.tensor(values, device=self.device) for values in (anchors, lengths))
        hidden = self.drafter.hidden(self.state.memory, anchor[:, None], position[:, None], depth)[:, 0]
        self.scorer = self.drafter.scorer(hidden, anchor, self.config.scorer, candidates=self.config.candidates)
        return self.scorer

    def keep(self, requests: Tensor) -> None:
        self.state.keep(requests)

    def among(self, chosen: Sequence[int], request: int = 0) -> list[bool] | None:
        if self.scorer is None or self.scorer.candidates is None:
            return None
        candidates = self.scorer.candidates[request, : len(chosen)]
        tokens = torch.tensor(chosen, device=self.device)[: len(candidates), None]
        return (candidates == tokens).any(1).tolist()
