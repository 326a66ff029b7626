"""What is counted, once: tau, survival by depth, and paired intervals that resample prompts.

A round accepts r drafted tokens and emits e of the r + 1 it commits (fewer only where end-of-text or the cap cuts it).
tau = sum of e / number of rounds, the bonus token counted; 1 <= tau <= depth + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from treedraft.config import LEAST_SHARE
from treedraft.files import read_json

BOOTSTRAP_DRAWS = 10_000
# An answer ends in a loop if its last tokens are one n-gram of at most so many tokens, so often at least, and so long in all.
LOOP_PERIOD, LOOP_REPEATS, LOOP_TOKENS = 64, 4, 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """The rounds of one decoded prompt: accepted [R] drafted tokens, emitted [R] tokens, nodes [R] with the root.

    ranks [R, A] has of every accepted draft how many of its siblings are better (of a drawn tree: were drawn before), -1
    beyond. Replay adds spine [R], the accepted drafts before the path leaves the greedy spine, and tallies [bins, 3] of
    drafts by probability (number, summed probability, accepted): `steps` of those below accepted nodes, by q under their
    parent; `paths` of all drafts of a tree, by q of their path. With restricted scoring `among` [R, D] says of every slot
    on the path, the one after the last draft included, whether the target's token was a candidate there (1, 0, and -1
    where nobody asked).
    """

    prompt: str
    domain: str
    seed: int
    accepted: np.ndarray
    emitted: np.ndarray
    nodes: np.ndarray
    ranks: np.ndarray | None = None
    among: np.ndarray | None = None
    spine: np.ndarray | None = None
    steps: np.ndarray | None = None
    paths: np.ndarray | None = None

    @property
    def num_rounds(self) -> int:
        return len(self.emitted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean and its 95 % bounds."""

    value: float
    low: float
    high: float

    @property
    def detectable(self) -> float:
        """The true value that so many prompts would tell from 0 in four of five repetitions (2.8 standard errors)."""
        return 2.8 / 3.92 * (self.high - self.low)

    def __str__(self) -> str:
        return f"{self.value:+.2f} [{self.low:+.2f}, {self.high:+.2f}]"


def tau(rounds: Sequence[Rounds]) -> float:
    """Emitted tokens a round, pooled over all rounds; nan without rounds."""
    num_rounds = sum(item.num_rounds for item in rounds)
    return sum(int(item.emitted.sum()) for item in rounds) / num_rounds if num_rounds else float("nan")


def tau_macro(rounds: Sequence[Rounds]) -> float:
    """Mean of the tau of every decoded prompt."""
    each = [item.emitted.mean() for item in rounds if item.num_rounds]
    return float(np.mean(each)) if each else float("nan")


def survival(rounds: Sequence[Rounds], depth: int) -> np.ndarray:
    """S_1..S_depth: share of the rounds that accepted at least d tokens."""
    accepted = np.concatenate([item.accepted for item in rounds]) if rounds else np.zeros(0)
    return (accepted[:, None] >= np.arange(1, depth + 1)).mean(0) if len(accepted) else np.full(depth, np.nan)


def conditional(survived: np.ndarray) -> np.ndarray:
    """S_d / S_{d-1}: acceptance at depth d of the rounds that got there; nan where none did."""
    before = np.concatenate([[1.0], survived[:-1]])
    return np.divide(survived, before, out=np.full_like(survived, np.nan), where=before > 0)


def spine_counts(rounds: Sequence[Rounds], depth: int) -> dict[str, list[int]] | None:
    """By depth d = 1..depth, the rounds whose accepted path at d is still on the greedy spine ("kept"), left it with the
    draft at d ("left"), or is off it, having left at d or before ("off"); None where spines were not followed."""
    if not rounds or any(item.spine is None for item in rounds):
        return None
    accepted = np.concatenate([item.accepted for item in rounds])[:, None]
    spine = np.concatenate([item.spine for item in rounds if item.spine is not None])[:, None]
    place = np.arange(1, depth + 1)
    found = {
        "kept": spine >= place,
        "left": (spine == place - 1) & (accepted >= place),
        "off": (spine < place) & (accepted >= place),
    }
    return {name: where.sum(0).tolist() for name, where in found.items()}


def rank_counts(rounds: Sequence[Rounds]) -> list[list[int]] | None:
    """counts[d][r]: rounds whose accepted path goes from its node at depth d to the child of rank r, 0 for the best one.

    Ends with the deepest node that was left so; None where ranks were not followed.
    """
    parts = [item.ranks for item in rounds if item.ranks is not None]
    if not parts or len(parts) < len(rounds):
        return None
    size = max(part.shape[1] for part in parts), 1 + max(int(part.max(initial=0)) for part in parts)
    counts = np.zeros(size, dtype=np.int64)
    for part in parts:
        which, depth = (part >= 0).nonzero()
        np.add.at(counts, (depth, part[which, depth]), 1)
    return counts[counts.any(1)].tolist()


def histogram_caps(counts: Sequence[Sequence[float]], *, least: float = LEAST_SHARE) -> tuple[int, ...]:
    """The most children of a node at each depth, so that no rank is lost which `least` of the accepted drafts there have.

    `counts` are those of `rank_counts`; a depth that was never left has no cap. JetSpec counts the ranks with that share;
    here they are counted up to the last one, which is the same where likelier ranks are better ranks.
    """
    caps = []
    for row in counts:
        total = sum(row)
        if not total:
            break
        caps.append(1 + max((rank for rank, count in enumerate(row) if count >= least * total), default=0))
    return tuple(caps)


def measured_caps(path: Path) -> tuple[int, ...]:
    """Caps from a JSON file with `ranks`: what `python -m treedraft.bench ranks` wrote, or the result.json of a cell.

    ValueError names the file and what it lacks.
    """
    if not path.is_file():
        raise ValueError(f"caps {str(path)!r}: neither numbers, as in 3,2,1, nor a file of measured ranks")
    record = read_json(path)
    if not isinstance(record, dict) or not record.get("ranks"):
        raise ValueError(f"{path} has no ranks of accepted drafts to make caps from: python -m treedraft.bench ranks writes them")
    return histogram_caps(record["ranks"], least=record.get("least", LEAST_SHARE))


def candidate_recall(rounds: Sequence[Rounds]) -> float | None:
    """Share of the slots asked about whose token was a candidate; None where scoring was not restricted."""
    parts = [item.among for item in rounds if item.among is not None]
    asked = sum(int((part >= 0).sum()) for part in parts)
    return sum(int((part == 1).sum()) for part in parts) / asked if asked else None


def tallied(parts: Sequence[np.ndarray | None]) -> dict[str, list[float]] | None:
    """Tallies [bins, 3] of probabilities added up, by name; None unless every part has one."""
    known = [part for part in parts if part is not None]
    if not known or len(known) < len(parts):
        return None
    drafts, expected, accepted = np.sum(known, axis=0).T
    return {"drafts": drafts.tolist(), "expected": expected.round(4).tolist(), "accepted": accepted.tolist()}


def summary(rounds: Sequence[Rounds], depth: int) -> dict[str, object]:
    """Everything that is said of one cell, as plain values."""
    cut = sum(int((item.emitted <= item.accepted).sum()) for item in rounds)
    num_rounds = sum(item.num_rounds for item in rounds)
    domains = sorted({item.domain for item in rounds})
    return {
        "tau": tau(rounds),
        "tau_macro": tau_macro(rounds),
        "tau_by_domain": {domain: tau([item for item in rounds if item.domain == domain]) for domain in domains},
        "survival": survival(rounds, depth).round(6).tolist(),
        "spine": spine_counts(rounds, depth),
        "ranks": rank_counts(rounds),
        "candidate_recall": candidate_recall(rounds),
        "steps": tallied([item.steps for item in rounds if item.num_rounds]),
        "paths": tallied([item.paths for item in rounds if item.num_rounds]),
        "prompts": len({item.prompt for item in rounds}),
        "decodings": len(rounds),
        "rounds": num_rounds,
        "rounds_cut": cut,
        "emitted": sum(int(item.emitted.sum()) for item in rounds),
        "mean_nodes": float(np.concatenate([item.nodes for item in rounds]).mean()) if num_rounds else float("nan"),
    }


def ends_in_loop(ids: np.ndarray) -> bool:
    """Whether token ids [T] end in a repetition loop (LOOP_PERIOD, LOOP_REPEATS, LOOP_TOKENS)."""
    periods = np.arange(1, min(LOOP_PERIOD, len(ids) // LOOP_REPEATS) + 1)[:, None]
    before = np.arange(len(ids))[::-1] - periods
    repeats = (ids[::-1] == ids[before]) & (before >= 0)  # [P, T], from the end
    run = np.logical_and.accumulate(repeats, axis=1).sum(1) + periods[:, 0]
    return bool((run >= np.maximum(LOOP_REPEATS * periods[:, 0], LOOP_TOKENS)).any())


def _by_prompt(
    emitted: Sequence[float], rounds: Sequence[float], prompts: Sequence[str], order: Sequence[str]
) -> np.ndarray:
    """[P, 2] sums of emitted tokens and rounds of every prompt, all its seeds together."""
    index = {prompt: place for place, prompt in enumerate(order)}
    sums = np.zeros((len(order), 2))
    np.add.at(sums, [index[prompt] for prompt in prompts], np.stack([emitted, rounds], axis=1))
    return sums


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Per decoding of one arm: prompt names, emitted tokens and rounds, and the prompts' domains if they have any, all [n]."""

    prompts: Sequence[str]
    emitted: Sequence[float]
    rounds: Sequence[float]
    domains: Sequence[str] | None = None


def counts_of(rounds: Sequence[Rounds]) -> Counts:
    return Counts(
        prompts=[item.prompt for item in rounds],
        emitted=[float(item.emitted.sum()) for item in rounds],
        rounds=[float(item.num_rounds) for item in rounds],
        domains=[item.domain for item in rounds],
    )


def draw_prompts(rng: np.random.Generator, domains: Sequence[str] | np.ndarray, draws: int) -> np.ndarray:
    """How often each of P prompts is drawn, [draws, P]: with replacement within its domain.

    A set has as many prompts of every domain as it was asked for, so that which domain a prompt is of is not left to chance.
    """
    domains = np.asarray(domains)
    weights = np.zeros((draws, len(domains)))
    for name in np.unique(domains):
        own = np.flatnonzero(domains == name)
        chosen = own[rng.integers(len(own), size=(draws, len(own)))]
        np.add.at(weights, (np.arange(draws)[:, None], chosen), 1.0)
    return weights


def draw_seeds(rng: np.random.Generator, num_seeds: int, draws: int) -> np.ndarray:
    """Which of K training seeds are drawn, [draws, K - 1] (one seed: itself).

    One fewer than there are: K draws of K would have a variance smaller by (K - 1) / K than the mean of K seeds has
    (Rao and Wu 1988, the rescaled bootstrap), a third too small for three.
    """
    return rng.integers(num_seeds, size=(draws, max(1, num_seeds - 1)))


def paired_difference(first: Counts, second: Counts, *, draws: int = BOOTSTRAP_DRAWS, seed: int = 0) -> Interval:
    """tau(first) - tau(second) with a paired percentile bootstrap over prompts (both arms resampled alike)."""
    return seeded_difference([first], [second], draws=draws, seed=seed)


def seeded_difference(
    first: Sequence[Counts], second: Sequence[Counts], *, together: bool = False, draws: int = BOOTSTRAP_DRAWS, seed: int = 0
) -> Interval:
    """The same for arms trained with several seeds: prompts, and with them training seeds, are resampled.

    `together` are arms that were trained with the same seeds, in order: a seed draws the first weights and the order of the
    training text of both, so that it is drawn for both. ValueError if the arms were not decoded on the same prompts.
    """
    order = sorted(set(first[0].prompts))
    if any(set(counts.prompts) != set(order) for counts in (*first, *second)):
        raise ValueError("a paired comparison needs both arms on the same prompts")
    if together and len(first) != len(second):
        raise ValueError(f"{len(first)} and {len(second)} training seeds cannot be drawn together")
    rng = np.random.default_rng(seed)
    domain_of = dict(zip(first[0].prompts, first[0].domains or [""] * len(first[0].prompts), strict=True))
    weights = draw_prompts(rng, [domain_of[prompt] for prompt in order], draws)
    drawn, value, picks = np.zeros(draws), 0.0, None
    for sign, arm in ((1, first), (-1, second)):
        by_seed = [_by_prompt(counts.emitted, counts.rounds, counts.prompts, order) for counts in arm]
        sums = np.stack(by_seed)  # [K, P, 2]
        value += sign * float(np.mean(sums[..., 0].sum(1) / sums[..., 1].sum(1)))
        resampled = np.einsum("bp,kpc->bkc", weights, sums)
        ratios = resampled[..., 0] / resampled[..., 1]
        if picks is None or not together:
            picks = draw_seeds(rng, len(arm), draws)
        drawn += sign * np.take_along_axis(ratios, picks, axis=1).mean(1)
    low, high = np.percentile(drawn, [2.5, 97.5])
    return Interval(value=value, low=float(low), high=float(high))
