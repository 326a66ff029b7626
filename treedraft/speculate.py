"""Live speculative decoding, and plain decoding to hold it against.

A round drafts a block, grows a tree, verifies it in one target forward, accepts a path and commits it. With sampler match
the output is the target's own, token for token: greedy, or sampled with noise keyed by seed and position.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from treedraft.apart import Link, begin
from treedraft.config import Acceptance, DecodeConfig, Sampling
from treedraft.costs import Profile
from treedraft.drafter import Drafter
from treedraft.drafting import Crossed, Drafting, Ledger, Together
from treedraft.metrics import Rounds, tau
from treedraft.targets.generate import plain
from treedraft.targets.hf import Target
from treedraft.targets.sampling import Sampler
from treedraft.trees import rules
from treedraft.trees.accept import accept, ranks_of
from treedraft.trees.drawn import DrawnTree, draw_tree
from treedraft.trees.tree import DraftTree, TreeBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One round: its tree, the accepted path (node indices, root first) and how many of its tokens were emitted.

    With restricted scoring, for every slot on the path whether the target's token was among the candidates there. With a
    drafter on another device, the bytes that crossed.
    """

    tree: DraftTree
    path: list[int]
    emitted: int
    among_candidates: list[bool] | None = None
    crossed: Crossed | None = None


@dataclass(slots=True, kw_only=True)
class Generation:
    """What was emitted: ids (with the completing token of a stop), text (cut before a stop string) and how it went.

    `crossed` are the bytes of the prompt's share, where the drafter is on another device.
    """

    ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = "length"
    finished: bool = False
    rounds: list[Round] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    crossed: Crossed | None = None

    def counts(self, *, prompt: str = "", domain: str = "", seed: int = 0) -> Rounds:
        among = [torch.tensor(item.among_candidates) for item in self.rounds if item.among_candidates is not None]
        return Rounds(
            prompt=prompt,
            domain=domain,
            seed=seed,
            accepted=np.array([len(item.path) - 1 for item in self.rounds], dtype=np.int64),
            emitted=np.array([item.emitted for item in self.rounds], dtype=np.int64),
            nodes=np.array([len(item.tree) for item in self.rounds], dtype=np.int64),
            ranks=self._ranks(),
            among=pad_sequence([part.long() for part in among], True, -1).numpy() if among else None,
        )

    def _ranks(self) -> np.ndarray:
        if not self.rounds:
            return np.zeros((0, 0), dtype=np.int64)
        paths = pad_sequence([torch.tensor(item.path) for item in self.rounds], True, -1)
        return ranks_of(TreeBatch.of([item.tree for item in self.rounds]), paths.to(self.rounds[0].tree.tokens.device)).numpy(force=True)

    @property
    def tau(self) -> float:
        return tau([self.counts()])


_BLUR = 8  # characters at most that text has otherwise where decoding begins or ends between tokens
_MARK = "\ufffd"  # stands for bytes that are no character yet


class Stopper:
    """Takes tokens one by one and says when to stop: end-of-text, the earliest completed stop string, or the cap.

    They are tried in this order. The same object cuts plain and speculative decoding, so a block is cut anywhere
    exactly as single tokens are. A stop string that a token completes lies in the tail of the text, so that a token costs
    the decoding of a few, however many came before.
    """

    def __init__(self, target: Target, *, max_new_tokens: int, stop: Sequence[str] = ()) -> None:
        if max_new_tokens < 0:
            raise ValueError(f"max_new_tokens is {max_new_tokens}; at least 0")
        self.target, self.max_new_tokens = target, max_new_tokens
        self.stop = [text for text in stop if text]
        self.ids: list[int] = []
        self.reason: str | None = "length" if max_new_tokens == 0 else None
        self._reach = max(map(len, self.stop), default=0) + _BLUR
        self._start, self._long = 0, 4 * self._reach  # where the tail begins, and the length from which it is cut

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
        """Decoded so far, cut before the stop string that was complete first (of those that end together, the longest)."""
        text = self.target.decode(self.ids)
        found = [(place + len(stop), place) for stop in self.stop if (place := text.find(stop)) >= 0]
        return text[: min(found)[1]] if found else text

    def _why(self) -> str | None:
        if self.ids[-1] in self.target.eos_token_ids:
            return "end of text"
        if self.stop and self._has_stop(self._tail()) and self._has_stop(self.target.decode(self.ids)):
            return "stop string"
        return "length" if len(self.ids) >= self.max_new_tokens else None

    def _has_stop(self, text: str) -> bool:
        return any(stop in text for stop in self.stop)

    def _tail(self) -> str:
        """The end of the text, with at least `_reach` characters where there are so many; begins later as it gets long."""
        tail = self.target.decode(self.ids[self._start :])
        if len(tail) > self._long and not tail.endswith(_MARK) and not any(_MARK in stop for stop in self.stop):
            middle = (self._start + len(self.ids)) // 2
            cut = next((place for place in range(middle, self._start, -1) if self._begins(place)), self._start)
            enough = len(self.target.decode(self.ids[cut:]).replace(_MARK, "")) >= self._reach
            # Where no token begins a text of its own the next look has to wait: it would cost as much again.
            self._long = 4 * self._reach if enough and cut > self._start else 2 * len(tail)
            self._start = cut if enough else self._start
        return tail

    def _begins(self, place: int) -> bool:
        """Whether a character begins with a token: it, or it and some of the next three, are text without bytes left over."""
        texts = (self.target.decode(self.ids[place : place + count]) for count in range(1, 5))
        return any(text and _MARK not in text for text in texts)


@torch.inference_mode()
def generate(
    target: Target,
    drafter: Drafter | Link,
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
    another node would cost more time than it saves (the config then admits by pop). A drafter on another device is
    reached through a `Link`. ValueError if the prompt is empty or does not fit the target's context window, and for a
    drawn tree through a link; FloatingPointError with round and position if the target's logits are not finite.
    """
    acceptance = acceptance or Acceptance()
    if isinstance(drafter, Link) and acceptance.rule != "sampler_match":
        raise ValueError(f"a drafter on another device goes with sampler_match alone, not with {acceptance.rule}")
    sampling = sampling or Sampling(temperature=config.temperature)
    sampler = Sampler(sampling, prompt, seed=seed, vocab_size=target.vocab_size)
    stopper = Stopper(target, max_new_tokens=max_new_tokens, stop=stop)
    ledger = Ledger(*(drafter.devices if isinstance(drafter, Link) else [target.device]))
    result = Generation(seconds=ledger.seconds)
    with ledger.stage("prefill"):
        capacity = min(len(prompt) + max_new_tokens, target.max_length)
        drafting = begin(drafter, 1, target.cache, capacity=capacity, config=config, profile=profile, ledger=ledger)
        start = target.prefill(prompt, take=lambda taps: drafting.append(taps[None], [len(taps)], [0]))
        drafting.settle()
        stopper.take([sampler.draw(start.logits[-1], [])])
    result.crossed = drafting.crossed()
    step = _Step(target, drafting, config, acceptance, sampler, stopper, ledger)
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
    drafting: Drafting
    config: DecodeConfig
    acceptance: Acceptance
    sampler: Sampler
    stopper: Stopper
    ledger: Ledger
    num_rounds: int = 0

    def round(self) -> Round:
        """Draft, build, verify, accept, commit."""
        target, ledger, length, emitted = self.target, self.ledger, self.target.length, list(self.stopper.ids)
        self.num_rounds += 1
        # The deepest node sits at length + depth, which has to be inside the window.
        depth = min(self.config.depth, target.max_length - 1 - length)
        with ledger.stage("draft"):
            if self.acceptance.rule == "sampler_match":
                drawn, tree = None, self.drafting.draft(emitted[-1:], [length], depth).tree(0)
            else:
                drawn = self._draw(emitted[-1], depth, length)
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
            self.drafting.append(verified.taps[rows][None], [len(path)], [0])
            # The bonus token of a path that fills the window has no position left.
            room = target.max_length - 1 - length
            chosen = [*(tokens[node] for node in path[1:]), bonus]
            count = self.stopper.take(chosen[:room])
        found = self.drafting.among(chosen)
        return Round(tree=tree.lasting(), path=path, emitted=count, among_candidates=found, crossed=self.drafting.crossed())

    def _draw(self, anchor: int, depth: int, length: int) -> DrawnTree:
        assert isinstance(self.drafting, Together), "drawn trees do not cross"
        scorer = self.drafting.score([anchor], [length], depth)
        with self.ledger.stage("build"):
            return draw_tree(
                anchor,
                scorer,
                widths=self.acceptance.levels(depth),
                replacement=self.acceptance.rule != "sequoia",
                temperature=self.sampler.temperature,
                vocab_size=self.target.vocab_size,
                seed=self.sampler.seed,
                position=length,
                device=self.target.device,
            )

    def _weigh(self, drawn: DrawnTree, law: Callable[[int], Tensor], length: int) -> tuple[list[int], int]:
        dice = rules.KeyedDice(self.sampler.seed, length)
        if self.acceptance.rule == "block":
            return rules.block(drawn, law, dice)
        return rules.walk(drawn, law, rules.RULES[self.acceptance.rule], dice)


@torch.inference_mode()
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
    clocks = {"draft_ms": 1e3 * float(np.median(draft)), "update_ms": 1e3 * float(np.median(update))} if draft else {}
    return {
        **clocks,
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
    rounds = [item.crossed for item in speculative.rounds if item.crossed is not None]
    if speculative.crossed is not None:
        record["crossed"] = {"prompt": asdict(speculative.crossed), "rounds": [asdict(item) for item in rounds]}
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
    """Where two answers part, and if they are greedy how near a tie that is: the two logits and their gap, in units of the
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
    return {"place": place, "tokens": tokens, "logits": [one, other], "gap": gap, "units": gap / unit, "near_tie": gap <= 2 * unit}


def _rate(generation: Generation, decoding: float) -> float:
    """Tokens a second after the first."""
    return (len(generation.ids) - 1) / decoding if decoding > 0 else float("nan")
