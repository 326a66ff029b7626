"""Acceptance rules for trees that were drawn from q: which path is committed, and the token after it.

p is the target's law after temperature, filters and penalties, q the law that a token was really drawn from. Every rule
but `typical` gives the target's exact law. Randomness comes from `Dice`, so that a test can enumerate all outcomes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from treedraft import noise
from treedraft.trees.drawn import DrawnTree

VERIFYING = 2  # keeps verification apart from drafting at one position
_EMPTY = 1e-12  # a residual of less than this is rounding, and p stands in for it


class Dice(Protocol):
    """Independent random decisions, one after another."""

    def chance(self, probability: float) -> bool:
        """True with a probability that may exceed 1."""
        ...

    def pick(self, law: Tensor) -> int:
        """An id from a law [V]."""
        ...


class KeyedDice(Dice):
    """Decisions keyed by request seed, the anchor's position and their number in the round."""

    def __init__(self, seed: int, position: int) -> None:
        self.seed, self.position, self.count = seed, position, 0

    def chance(self, probability: float) -> bool:
        self.count += 1
        return float(noise.uniform(self.seed, self.position, VERIFYING, self.count)) < probability

    def pick(self, law: Tensor) -> int:
        self.count += 1
        ids = torch.arange(len(law))
        gumbel = noise.to_gumbel(noise.uniform(self.seed, self.position, VERIFYING, self.count, ids))
        return int((law.log() + gumbel.to(law.device)).argmax())


Rule = Callable[[Tensor, Tensor, Sequence[int], Dice], "tuple[int | None, Tensor]"]


def multi_round(p: Tensor, q: Tensor, tokens: Sequence[int], dice: Dice) -> tuple[int | None, Tensor]:
    """Independent draws from q, one by one: accept x with min(1, p/q), else p becomes norm((p - q)+) (SpecInfer).

    With one token it is the ratio rule (Leviathan et al. 2023). Returns which token is accepted, if any, and the law of
    what follows if none is.
    """
    for place, token in enumerate(tokens):
        if dice.chance(float(p[token] / q[token])):
            return place, p
        p = residual(p, q)
    return None, p


def without_replacement(p: Tensor, q: Tensor, tokens: Sequence[int], dice: Dice) -> tuple[int | None, Tensor]:
    """Draws without replacement: x_i comes from q without x_1 .. x_(i-1), renormalised, and is weighed by that (Sequoia)."""
    for place, token in enumerate(tokens):
        if dice.chance(float(p[token] / q[token])):
            return place, p
        p, q = residual(p, q), _without(q, token)
    return None, p


def point_mass(p: Tensor, _q: Tensor, tokens: Sequence[int], dice: Dice) -> tuple[int | None, Tensor]:
    """Siblings that were not drawn at all: accept x with p(x), else p becomes p without x. Twins count once."""
    for place, token in enumerate(tokens):
        if token not in tokens[:place]:
            if dice.chance(float(p[token])):
                return place, p
            p = _without(p, token)
    return None, p


def k_seq(p: Tensor, q: Tensor, tokens: Sequence[int], dice: Dice) -> tuple[int | None, Tensor]:
    """K independent draws, each accepted with min(1, p / (rho q)) (SpecTr).

    beta = sum min(q, p / rho) and rho in [1, k] solves 1 - (1 - beta)^k = rho beta; the residual is p minus what was
    accepted.
    """
    count = len(tokens)
    low, high = 1.0, float(count)
    for _ in range(200):
        rho = (low + high) / 2
        beta = float(torch.minimum(q, p / rho).sum())
        low, high = (rho, high) if 1 - (1 - beta) ** count > rho * beta else (low, rho)
    accepted = torch.minimum(q, p / high)
    beta = float(accepted.sum())
    for place, token in enumerate(tokens):
        if dice.chance(float(p[token] / (high * q[token]))):
            return place, p
    share = (1 - (1 - beta) ** count) / beta if beta > 0 else 0.0
    return None, _normalised((p - accepted * share).clamp(min=0), p)


def typical(p: Tensor, _q: Tensor, tokens: Sequence[int], dice: Dice) -> tuple[int | None, Tensor]:
    """LOSSY: accept the first x with p(x) > min(0.09, 0.3 exp(-H(p))) (Medusa). Never in a lossless table."""
    entropy = float(-torch.special.xlogy(p, p).sum())
    least = min(0.09, 0.3 * math.exp(-entropy))
    for place, token in enumerate(tokens):
        if float(p[token]) > least:
            return place, p
    return None, p


def residual(p: Tensor, q: Tensor) -> Tensor:
    """norm((p - q)+); p itself where that is numerically empty (p = q never rejects, so nothing is lost)."""
    return _normalised((p - q).clamp(min=0), p)


def _normalised(law: Tensor, otherwise: Tensor) -> Tensor:
    total = law.sum()
    return law / total if float(total) > _EMPTY else otherwise


def _without(law: Tensor, token: int) -> Tensor:
    rest = law.clone()
    rest[token] = 0
    total = rest.sum()
    return rest / total if float(total) > 0 else rest


def walk(drawn: DrawnTree, target_law: Callable[[int], Tensor], rule: Rule, dice: Dice) -> tuple[list[int], int]:
    """Node indices of the accepted path, root first, and the token after it.

    `target_law(node)` is p [V] after a node, under that node's own history.
    """
    path = [0]
    while attempts := drawn.attempts[path[-1]]:
        tokens = [int(drawn.tree.tokens[child]) for child in attempts]
        place, law = rule(target_law(path[-1]), drawn.law(path[-1]), tokens, dice)
        if place is None:
            return path, dice.pick(law)
        path.append(attempts[place])
    return path, dice.pick(target_law(path[-1]))


def block(drawn: DrawnTree, target_law: Callable[[int], Tensor], dice: Dice) -> tuple[list[int], int]:
    """Block verification of a chain (Sun et al. 2024): draws are weighed by joint prefixes, never accepts less.

    With p_i = min(1, p_(i-1) p(x_i) / q(x_i)) and s = sum (p_i p - q)+ after x_i, the prefix of length i is taken with
    s / (s + 1 - p_i), that of all with p_i; the longest taken one counts, and the next token is drawn from (p_i p - q)+.
    """
    nodes = list(range(len(drawn.tree)))
    assert all(len(attempts) <= 1 for attempts in drawn.attempts), "block verification is for chains"
    share, taken, law = 1.0, 0, None
    for node in nodes:
        p = target_law(node)
        if node:
            token = int(drawn.tree.tokens[node])
            above = node - 1
            share = min(1.0, share * float(target_law(above)[token] / drawn.law(above)[token]))
        if node == nodes[-1]:
            if dice.chance(share):
                taken, law = node, p
            continue
        rest = (share * p - drawn.law(node)).clamp(min=0)
        total = float(rest.sum())
        # The empty prefix is always there to fall back on, and with share 1 its residual is norm((p - q)+).
        if node == 0 or dice.chance(total / (total + 1 - share) if total + 1 - share > 0 else 0.0):
            taken, law = node, _normalised(rest, p)
    assert law is not None
    return nodes[: taken + 1], dice.pick(law)


RULES: dict[str, Rule] = {
    "ratio": multi_round,
    "spec_infer": multi_round,
    "sequoia": without_replacement,
    "point_mass": point_mass,
    "k_seq": k_seq,
    "typical": typical,
}
