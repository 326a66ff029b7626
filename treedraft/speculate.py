"""Live speculative decoding, and plain decoding to hold it against.

A round drafts a block, grows a tree, verifies it in one target forward, accepts a path and commits it. With sampler match
the output is the target's own, token for token: greedy, or sampled with noise keyed by seed and position.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from treedraft.config import Acceptance, DecodeConfig, Sampling
from treedraft.costs import Profile
from treedraft.drafter import Drafter, Prefix
from treedraft.evaluate import builder_for
from treedraft.metrics import Rounds, tau
from treedraft.targets.generate import plain
from treedraft.targets.hf import Target
from treedraft.targets.sampling import Sampler
from treedraft.trees import rules
from treedraft.trees.accept import accept
from treedraft.trees.drawn import DrawnTree, draw_tree
from treedraft.trees.scorers import CandidateScorer, Scorer
from treedraft.trees.tree import DraftTree

STAGES = ("prefill", "draft", "build", "verify", "commit")


class Ledger:
    """Seconds spent by stage; waits for the device before each reading of the clock."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, float] = dict.fromkeys(STAGES, 0.0)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        begin = self._now()
        yield
        self.seconds[name] += self._now() - begin

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One round: its tree, the accepted path (node indices, root first) and how many of its tokens were emitted.

    With restricted scoring, for every slot on the path whether the target's token was among the candidates there.
    """

    tree: DraftTree
    path: list[int]
    emitted: int
    among_candidates: list[bool] | None = None


@dataclass(slots=True, kw_only=True)
class Generation:
    """What was emitted: ids (with the completing token of a stop), text (cut before a stop string) and how it went."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = "length"
    finished: bool = False
    rounds: list[Round] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def counts(self, *, prompt: str = "", domain: str = "", seed: int = 0) -> Rounds:
        return Rounds(
            prompt=prompt,
            domain=domain,
            seed=seed,
            accepted=np.array([len(item.path) - 1 for item in self.rounds], dtype=np.int64),
            emitted=np.array([item.emitted for item in self.rounds], dtype=np.int64),
            nodes=np.array([len(item.tree) for item in self.rounds], dtype=np.int64),
        )

    @property
    def tau(self) -> float:
        return tau([self.counts()])


class Stopper:
    """Takes tokens one by one and says when to stop: end-of-text, the earliest completed stop string, or the cap.

    They are tried in this order. The same object cuts plain and speculative decoding, so a block is cut anywhere
    exactly as single tokens are.
    """

    def __init__(self, target: Target, *, max_new_tokens: int, stop: Sequence[str] = ()) -> None:
        if max_new_tokens < 0:
            raise ValueError(f"max_new_tokens is {max_new_tokens}; at least 0")
        self.target, self.max_new_tokens = target, max_new_tokens
        self.stop = [text for text in stop if text]
        self.ids: list[int] = []
        self.reason: str | None = "length" if max_new_tokens == 0 else None

    def take(self, tokens: Sequence[int]) -> int:
        """Emit tokens until something stops; returns how many were emitted."""
        for count, token in enumerate(tokens):
            if self.reason is not None:
                return count
            self.ids.append(token)
            self.reason = self._why()
        return len(tokens)

    @property
    def text(self) -> str:
        """Decoded so far, cut before the earliest stop string."""
        text = self.target.decode(self.ids)
        places = [place for place in (text.find(stop) for stop in self.stop) if place >= 0]
        return text[: min(places)] if places else text

    def _why(self) -> str | None:
        if self.ids[-1] in self.target.eos_token_ids:
            return "end of text"
        if self.stop:
            text = self.target.decode(self.ids)
            if any(stop in text for stop in self.stop):
                return "stop string"
        return "length" if len(self.ids) >= self.max_new_tokens else None


@torch.no_grad()
def generate(
    target: Target,
    drafter: Drafter,
    prompt: Sequence[int],
    *,
    config: DecodeConfig,
    sampling: Sampling | None = None,
    acceptance: Acceptance | None = None,
    profile: Profile | None = None,
    max_new_tokens: int = 256,
    seed: int = 0,
    stop: Sequence[str] = (),
    on_tokens: Callable[[Generation], None] | None = None,
) -> Generation:
    """Decode one prompt speculatively. `on_tokens` is called whenever text was added.

    `sampling` says more than the config's temperature, in whose place it stands. With a `profile` a tree ends where
    another node would cost more time than it saves (the config then admits by pop). ValueError if the prompt is empty or
    does not fit the target's context window; FloatingPointError with round and position if the target's logits are
    not finite.
    """
    sampling = sampling or Sampling(temperature=config.temperature)
    sampler = Sampler(sampling, prompt, seed=seed, vocab_size=target.vocab_size)
    stopper = Stopper(target, max_new_tokens=max_new_tokens, stop=stop)
    ledger = Ledger(target.device)
    result = Generation(seconds=ledger.seconds)
    with ledger.stage("prefill"):
        capacity = min(len(prompt) + max_new_tokens, target.max_length)
        prefix = Prefix(drafter, capacity=capacity, cache=target.cache)
        start = target.prefill(prompt, take=prefix.append)
        stopper.take([sampler.draw(start.logits[-1], [])])
    step = _Step(target, drafter, prefix, config, acceptance or Acceptance(), profile, sampler, stopper, ledger)
    while stopper.reason is None and target.length + 1 < target.max_length:
        result.ids = stopper.ids
        if on_tokens:
            on_tokens(result)
        result.rounds.append(step.round())
    result.ids, result.text, result.finished = stopper.ids, stopper.text, True
    result.finish_reason = stopper.reason or "context window"
    if on_tokens:
        on_tokens(result)
    return result


@dataclass(slots=True)
class _Step:
    """All that a round needs. The anchor is the last id of `stopper.ids`, which the cache does not hold yet."""

    target: Target
    drafter: Drafter
    prefix: Prefix
    config: DecodeConfig
    acceptance: Acceptance
    profile: Profile | None
    sampler: Sampler
    stopper: Stopper
    ledger: Ledger
    num_rounds: int = 0

    def round(self) -> Round:
        """Draft, build, verify, accept, commit."""
        target, ledger, length, emitted = self.target, self.ledger, self.target.length, list(self.stopper.ids)
        self.num_rounds += 1
        anchor = torch.tensor(emitted[-1:], device=target.device)
        # The deepest node sits at length + depth, which has to be inside the window.
        depth = min(self.config.depth, target.max_length - 1 - length)
        with ledger.stage("draft"):
            position = torch.tensor([[length]], device=target.device)
            hidden = self.drafter.hidden(self.prefix.memory, anchor[None], position, depth)[:, 0]
            candidates = self.config.candidates
            scorer = self.drafter.scorer(hidden, anchor, self.config.scorer, candidates=candidates)
        with ledger.stage("build"):
            drawn = None
            if self.acceptance.rule == "sampler_match":
                cost = self.profile.at(length) if self.profile is not None else None
                tree = builder_for(self.config, depth=depth, cost=cost).build(anchor, scorer).tree(0)
            else:
                drawn = self._draw(anchor, scorer, depth, length)
                tree = drawn.tree
        with ledger.stage("verify"):
            verified = target.verify(tree.tokens, tree.parents)
            tokens = tree.tokens.tolist()

            def history(path: list[int]) -> list[int]:
                return [*emitted, *(tokens[node] for node in path[1:])]

            try:
                if drawn is None:
                    path, bonus = accept(
                        tree, lambda path: self.sampler.draw(verified.logits[path[-1]], history(path))
                    )
                else:
                    path, bonus = self._weigh(
                        drawn, lambda node: self.sampler.law(verified.logits[node], history(tree.path_to(node))), length
                    )
            except FloatingPointError as error:
                raise FloatingPointError(f"round {self.num_rounds} of {target.name}: {error}") from error
        with ledger.stage("commit"):
            rows = torch.tensor(path, device=target.device)
            target.commit(rows)
            self.prefix.append(verified.taps[rows])
            # The bonus token of a path that fills the window has no position left.
            room = target.max_length - 1 - length
            chosen = [*(tokens[node] for node in path[1:]), bonus]
            count = self.stopper.take(chosen[:room])
        found = None
        if isinstance(scorer, CandidateScorer):
            among = scorer.tokens()[0, : len(chosen)] == torch.tensor(chosen, device=target.device)[:depth, None]
            found = among.any(1).tolist()
        return Round(tree=tree, path=path, emitted=count, among_candidates=found)

    def _draw(self, anchor: Tensor, scorer: Scorer, depth: int, length: int) -> DrawnTree:
        return draw_tree(
            int(anchor),
            scorer,
            widths=self.acceptance.levels(depth),
            replacement=self.acceptance.rule != "sequoia",
            temperature=self.sampler.temperature,
            vocab_size=self.target.vocab_size,
            seed=self.sampler.seed,
            position=length,
            device=anchor.device,
        )

    def _weigh(self, drawn: DrawnTree, law: Callable[[int], Tensor], length: int) -> tuple[list[int], int]:
        dice = rules.KeyedDice(self.sampler.seed, length)
        if self.acceptance.rule == "block":
            return rules.block(drawn, law, dice)
        return rules.walk(drawn, law, rules.RULES[self.acceptance.rule], dice)


@torch.no_grad()
def generate_plain(
    target: Target,
    prompt: Sequence[int],
    *,
    temperature: float = 0.0,
    sampling: Sampling | None = None,
    max_new_tokens: int = 256,
    seed: int = 0,
    stop: Sequence[str] = (),
) -> Generation:
    """One token a forward: what `generate` has to reproduce and what its speed is measured against.

    `temperature` is short for `Sampling(temperature=...)`.
    """
    ledger, stopper = Ledger(target.device), Stopper(target, max_new_tokens=max_new_tokens, stop=stop)
    sampling = sampling or Sampling(temperature=temperature)
    tokens = plain(target, prompt, max_new_tokens=max_new_tokens, sampling=sampling, seed=seed)
    with ledger.stage("prefill"):
        stopper.take([*itertools.islice(tokens, 1)])
    with ledger.stage("verify"):
        while stopper.reason is None and (token := next(tokens, None)) is not None:
            stopper.take([token])
    reason = stopper.reason or "context window"
    return Generation(ids=stopper.ids, text=stopper.text, finish_reason=reason, seconds=ledger.seconds)


def stage_costs(
    target: Target, drafter: Drafter, prompts: Sequence[Sequence[int]], *, config: DecodeConfig, max_new_tokens: int
) -> dict[str, float]:
    """What drafting costs behind these prompts: medians over live rounds in ms, means over prompts in bytes.

    `draft_ms` is the block's forward, `update_ms` taking a round's accepted rows in (and the target's commit);
    `state_bytes` is what the drafter keeps of a prompt, `state_shared_bytes` the same beside a target's cache at hand.
    """
    draft, update = [], []
    for prompt in prompts:
        readings: list[dict[str, float]] = []
        generate(
            target, drafter, prompt, config=config, max_new_tokens=max_new_tokens,
            on_tokens=lambda answer, readings=readings: readings.append(dict(answer.seconds)),
        )  # fmt: skip
        for before, after in itertools.pairwise(readings):
            draft.append(after["draft"] - before["draft"])
            update.append(after["commit"] - before["commit"])
    states = [(drafter.open(1, capacity=len(p)), drafter.open(1, capacity=len(p), cache=target.cache)) for p in prompts]
    return {
        "draft_ms": 1e3 * float(np.median(draft)),
        "update_ms": 1e3 * float(np.median(update)),
        "timed_rounds": len(draft),
        "state_bytes": round(np.mean([state.num_bytes for state, _ in states])),
        "state_shared_bytes": round(np.mean([state.num_bytes for _, state in states])),
    }


def report(speculative: Generation, plain: Generation | None) -> dict[str, Any]:
    """The numbers of one generation, and of its comparison with plain decoding, as plain values.

    Rates and speed-up are of decoding alone: the prompt, and the first token with it, costs both the same.
    """
    decoding = sum(speculative.seconds.values()) - speculative.seconds["prefill"]
    accepted = speculative.counts().accepted
    record: dict[str, Any] = {
        "tau": speculative.tau if speculative.rounds else None,
        "tokens": len(speculative.ids),
        "tokens_per_second": _rate(speculative, decoding),
        "rounds": len(speculative.rounds),
        "finish_reason": speculative.finish_reason,
        "seconds": {name: round(value, 4) for name, value in speculative.seconds.items()},
        "survival": [float((accepted >= d).mean()) for d in range(1, int(accepted.max(initial=0)) + 1)],
        "text": speculative.text,
    }
    looked_for = [found for item in speculative.rounds for found in item.among_candidates or ()]
    if looked_for:
        record["candidate_recall"] = sum(looked_for) / len(looked_for)
    if plain is not None:
        plain_decoding = plain.seconds["verify"]
        record |= {
            "identical": plain.ids == speculative.ids,
            "plain_tokens_per_second": _rate(plain, plain_decoding),
            "speedup": plain_decoding / decoding if decoding > 0 else float("nan"),
        }
    return record


@torch.no_grad()
def audit(
    target: Target, prompt: Sequence[int], speculative: Generation, plain: Generation, *, greedy: bool = True
) -> dict[str, Any]:
    """Where two answers part, and if they are greedy how near a tie that is: the gap of the two logits, in units of the
    last place.

    A forward over many rows and one over one row round differently, so half precision promises no identity. A first
    difference of at most 2 units is such a tie; a larger one is a mistake of ours. The logits are scored once more in
    the target's own type: a copy in a wider one may not fit beside it.
    """
    pairs = zip(speculative.ids, plain.ids, strict=False)
    place = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
    if place is None:  # one answer goes on where the other ends
        return {"place": min(len(speculative.ids), len(plain.ids)), "near_tie": False}
    tokens = [speculative.ids[place], plain.ids[place]]
    if not greedy:
        return {"place": place, "tokens": tokens, "near_tie": False}
    logits = target.prefill([*prompt, *plain.ids[:place]]).logits[-1].double()
    one, other = logits[tokens].tolist()
    unit = 2.0 ** math.floor(math.log2(max(abs(one), abs(other), 1e-30))) * torch.finfo(target.dtype).eps
    gap = abs(one - other)
    return {"place": place, "tokens": tokens, "gap": gap, "units": gap / unit, "near_tie": gap <= 2 * unit}


def _rate(generation: Generation, decoding: float) -> float:
    """Tokens a second after the first."""
    return (len(generation.ids) - 1) / decoding if decoding > 0 else float("nan")
