"""Live speculative decoding of several prompts side by side: ragged prefixes, a tree of its own for every row.

Every row draws with its own seed and history, so it writes what it writes alone; only the time is shared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from treedraft.apart import Link, begin
from treedraft.config import DecodeConfig, Sampling
from treedraft.costs import Profile
from treedraft.drafter import Drafter
from treedraft.drafting import Crossed, Ledger
from treedraft.speculate import Generation, Round, Stopper
from treedraft.targets.batch import Requests
from treedraft.targets.hf import Target
from treedraft.targets.sampling import Sampler
from treedraft.trees.accept import accept


@torch.inference_mode()
def generate_many(
    target: Target,
    drafter: Drafter | Link,
    prompts: Sequence[Sequence[int]],
    *,
    config: DecodeConfig,
    batch_size: int,
    sampling: Sampling | None = None,
    profile: Profile | None = None,
    max_new_tokens: int = 256,
    seeds: Sequence[int] | None = None,
    stop: Sequence[str] = (),
    on_done: Callable[[int, Generation], None] | None = None,
) -> list[Generation]:
    """Answers of all prompts, `batch_size` at a time; `on_done(index, answer)` is called as they end.

    `seeds` are one a prompt (all 0). The seconds of an answer are its rows' share of the batch, and so are the bytes that
    crossed to a drafter on another device. ValueError as `generate`.
    """
    if batch_size < 1:
        raise ValueError(f"batch size is {batch_size}; at least 1")
    for prompt in prompts:
        target.check_prompt(prompt)
    seeds = list(seeds) if seeds is not None else [0] * len(prompts)
    answers: list[Generation | None] = [None] * len(prompts)

    def done(index: int, answer: Generation) -> None:
        answers[index] = answer
        if on_done:
            on_done(index, answer)

    for first in range(0, len(prompts), batch_size):
        indices = range(first, min(first + batch_size, len(prompts)))
        rows = [
            _Row(
                index=index,
                sampler=Sampler(
                    sampling or Sampling(temperature=config.temperature),
                    prompts[index],
                    seed=seeds[index],
                    vocab_size=target.vocab_size,
                ),
                stopper=Stopper(target, max_new_tokens=max_new_tokens, stop=stop),
                answer=Generation(),
            )
            for index in indices
        ]
        _Group(target, drafter, [prompts[index] for index in indices], rows, config, profile, max_new_tokens, done).run()
    return [answer for answer in answers if answer is not None]


@dataclass(slots=True, kw_only=True)
class _Row:
    """A request: what it emits and how it draws. `index` is its prompt's."""

    index: int
    sampler: Sampler
    stopper: Stopper
    answer: Generation


class _Group:
    """Requests that go through rounds together; rows that end leave."""

    def __init__(
        self, target: Target, drafter: Drafter | Link, prompts: Sequence[Sequence[int]], rows: list[_Row],
        config: DecodeConfig, profile: Profile | None, max_new_tokens: int, done: Callable[[int, Generation], None],
    ) -> None:  # fmt: skip
        self.target, self.rows, self.config, self.done = target, rows, config, done
        self.ledger = Ledger(*(drafter.devices if isinstance(drafter, Link) else [target.device]))
        self.charged = dict.fromkeys(self.ledger.seconds, 0.0)
        self.longest = min(max(map(len, prompts)) + max_new_tokens, target.max_length)
        self.num_rounds = 0
        self.requests = Requests(target, prompts, capacity=self.longest + config.budget)
        self.drafting = begin(
            drafter, len(rows), self.requests.cache, capacity=self.longest + config.depth + 1,
            config=config, profile=profile, ledger=self.ledger,
        )  # fmt: skip

    def run(self) -> None:
        with self.ledger.stage("prefill"):
            for place, row in enumerate(self.rows):
                start = self.requests.prefill(place, take=partial(self._append, place))
                row.stopper.take([row.sampler.draw(start.logits[-1], [])])
            self.drafting.settle()
        share = self._share()
        for row in self.rows:
            row.answer.crossed = share
        self._charge()
        self._leave()
        while self.rows:
            self._round()
            self._charge()
            self._leave()

    def _round(self) -> None:
        self.num_rounds += 1
        device, lengths = self.target.device, self.requests.lengths.tolist()
        # The deepest node of the longest row has to be inside the window.
        depth = min(self.config.depth, self.target.max_length - 1 - max(lengths))
        with self.ledger.stage("draft"):
            trees = self.drafting.draft([row.stopper.ids[-1] for row in self.rows], lengths, depth)
        with self.ledger.stage("verify"):
            verified = self.requests.verify(trees)
            paths, bonuses = [], []
            for place, row in enumerate(self.rows):
                tree, emitted, logits = trees.tree(place), row.stopper.ids, verified.logits[place]
                tokens = tree.tokens.tolist()

                def choose(
                    path: list[int],
                    row: _Row = row,
                    emitted: list[int] = emitted,
                    logits: Tensor = logits,
                    tokens: list[int] = tokens,
                ) -> int:
                    return row.sampler.draw(logits[path[-1]], [*emitted, *(tokens[node] for node in path[1:])])

                try:
                    path, bonus = accept(tree, choose)
                except FloatingPointError as error:
                    raise FloatingPointError(f"prompt {row.index}, round {self.num_rounds}: {error}") from error
                paths.append(path)
                bonuses.append(bonus)
        with self.ledger.stage("commit"):
            counts = [len(path) for path in paths]
            padded = torch.tensor([path + [0] * (max(counts) - len(path)) for path in paths], device=device)
            self.requests.commit(padded, torch.tensor(counts, device=device))
            taps = verified.taps.gather(1, padded[:, :, None].expand(-1, -1, verified.taps.shape[2]))
            self.drafting.append(taps, counts, range(len(counts)))
        share = self._share()
        for place, (row, path, bonus) in enumerate(zip(self.rows, paths, bonuses, strict=True)):
            tree = trees.tree(place)
            room = self.target.max_length - 1 - lengths[place]
            chosen = [*tree.tokens[path[1:]].tolist(), bonus]
            count = row.stopper.take(chosen[:room])
            found = self.drafting.among(chosen, place)
            row.answer.rounds.append(
                Round(tree=tree.lasting(), path=path, emitted=count, among_candidates=found, crossed=share)
            )

    def _append(self, place: int, taps: Tensor) -> None:
        self.drafting.append(taps[None], [len(taps)], [place])

    def _share(self) -> Crossed | None:
        """A row's part of the bytes that crossed since the last call."""
        crossed, rows = self.drafting.crossed(), len(self.rows)
        return crossed and Crossed(to_drafter=crossed.to_drafter / rows, to_target=crossed.to_target / rows)

    def _charge(self) -> None:
        """Give every live row its share of the time since the last call."""
        for stage, total in self.ledger.seconds.items():
            for row in self.rows:
                row.answer.seconds[stage] = row.answer.seconds.get(stage, 0.0) + (total - self.charged[stage]) / len(self.rows)
            self.charged[stage] = total

    def _leave(self) -> None:
        """Hand over what has ended and close the ranks."""
        window = self.target.max_length
        going = [
            row.stopper.reason is None and int(length) + 1 < window
            for row, length in zip(self.rows, self.requests.lengths, strict=True)
        ]
        for row, goes_on in zip(self.rows, going, strict=True):
            if not goes_on:
                answer, stopper = row.answer, row.stopper
                answer.ids, answer.text, answer.finished = stopper.ids, stopper.text, True
                answer.finish_reason = stopper.reason or "context window"
                self.done(row.index, answer)
        if not all(going):
            kept = torch.tensor(going, device=self.target.device).nonzero().squeeze(1)
            self.rows = [row for row, goes_on in zip(self.rows, going, strict=True) if goes_on]
            self.requests.keep(kept)
            self.drafting.keep(kept)
