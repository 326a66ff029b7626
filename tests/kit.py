"""What tests decode with.

TINY       fixtures `tiny64` and `tiny`: a seeded random model of two layers, in float64 and float32
TABLE      `TableTarget`, fixture `table`: a law by table, so that the exact law of any short answer can be enumerated
ORACLE     `oracle`: a drafter that proposes what the target will say
ADVERSARY  `adversary`: one that never does
SCRIPT     `script`, a tree written by hand, and `scripted`, a drafter that proposes it after every anchor
AR         `generate_plain`: one token a forward

`TableDrafter` drafts from a law by table. Scorers from random tables, for trees alone, are in contracts/tree_tables.py.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.enumerate import Laws, Tape
from treedraft.config import Sampling
from treedraft.ops.memory import Taps
from treedraft.speculate import generate_plain as generate_plain
from treedraft.targets.cache import RowCache
from treedraft.targets.hf import Target
from treedraft.targets.sampling import Sampler
from treedraft.trees import drawn, rules
from treedraft.trees.mask import depths_of
from treedraft.trees.scorers import Lanes, MarginalScorer, Scorer
from treedraft.trees.tree import DraftTree


class TableTarget(Target):
    """A target whose next token has the law `law(history)`, prompt included, float64 [V].

    Prefill, verification, commit and cache are `Target`'s own; what stands in for the model keeps token ids as its keys
    and reads every row's history back through the mask. So a row that is kept, dropped, moved or seen wrongly is
    another history, with another law. `words` are the texts of the ids.
    """

    def __init__(
        self, law: Laws, vocab_size: int, *, eos: tuple[int, ...] = (), words: Sequence[str] = "abcdefghijklmnop", max_length: int = 512
    ) -> None:
        self.law, self.vocab_size, self.eos_token_ids, self.words = law, vocab_size, eos, words
        self.name, self.max_length, self.packed, self.graphs = "table", max_length, False, None
        self.num_layers = self.kv_heads = self.head_dim = 1
        self.embedding = torch.zeros((vocab_size, 1), dtype=torch.float64)
        self.attention: Any = SimpleNamespace(name="sdpa")  # a mask over prefix and tree
        self.taps = Taps(layers=())
        self.cache, self.length, self._pending = self.new_cache(batch=1, capacity=8), 0, 0

    def head(self, hidden: Tensor) -> Tensor:
        return hidden

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.words[token] for token in ids)

    def _forward(
        self, ids: Tensor, positions: Tensor | None, mask: Tensor | None, cache: RowCache | None, extra: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """Logits [B, n, V] in place of hidden states, and the ids themselves as taps [B, n, 1]."""
        assert positions is not None and cache is not None and not extra
        rows = ids.double()[:, None, :, None]
        stored, _ = cache.update(rows, rows, 0)
        if mask is None:
            mask = (torch.arange(stored.shape[2]) <= positions[:, :, None])[:, None]
        logits = torch.empty((*ids.shape, self.vocab_size), dtype=torch.float64)
        for request, row in torch.cartesian_prod(torch.arange(len(ids)), torch.arange(ids.shape[1])).tolist():
            history = stored[request, 0, mask.expand(len(ids), -1, -1, -1)[request, 0, row], 0].long().tolist()
            assert len(history) == int(positions[request, row]) + 1, "a position is the number of tokens before"
            assert history[-1] == int(ids[request, row]), "a row sees itself last"
            logits[request, row] = self.law(tuple(history)).log().clamp(min=-1e4)  # finite, and never drawn
        return logits, rows[:, 0]


def writing(answer: Sequence[int], *, after: int, vocab_size: int) -> Laws:
    """The law of a target that says `answer` after a prompt of `after` tokens, then 0 for ever."""

    def law(history: tuple[int, ...]) -> Tensor:
        place = len(history) - after
        return torch.eye(vocab_size, dtype=torch.float64)[answer[place] if 0 <= place < len(answer) else 0]

    return law


def warped(law: Tensor, history: tuple[int, ...], emitted: tuple[int, ...], sampling: Sampling) -> Tensor:
    """The law of the next token by the definitions, one id at a time, in the order in which transformers applies them."""
    logits = law.log().tolist()
    for token, bias in sampling.logit_bias:
        logits[token] += bias
    if sampling.repetition_penalty is not None:
        for token in set(history):
            logits[token] *= sampling.repetition_penalty if logits[token] < 0 else 1 / sampling.repetition_penalty
    for token in set(emitted):
        logits[token] -= (sampling.frequency_penalty or 0) * emitted.count(token) + (sampling.presence_penalty or 0)
    ranked = sorted(range(len(logits)), key=lambda token: -logits[token])
    if sampling.used_temperature == 0:
        return torch.eye(len(logits), dtype=torch.float64)[ranked[0]]
    weights = [math.exp(logit / sampling.used_temperature) for logit in logits]
    kept = ranked[: sampling.top_k]
    if sampling.top_p is not None:
        total, mass, nucleus = sum(weights[token] for token in kept), 0.0, []
        for token in kept:
            nucleus.append(token)
            mass += weights[token] / total
            if mass >= sampling.top_p:
                break
        kept = nucleus
    if sampling.min_p is not None:
        kept = [token for token in kept if weights[token] >= sampling.min_p * weights[kept[0]]]
    found = torch.zeros(len(logits), dtype=torch.float64)
    for token in kept:
        found[token] = weights[token] / sum(weights[other] for other in kept)
    return found


class Context:
    """A drafter's state that counts the rows it is given."""

    def __init__(self, num_requests: int) -> None:
        self.lengths = [0] * num_requests

    @property
    def memory(self) -> Context:
        return self

    def append(self, taps: Tensor, counts: Sequence[int], requests: Sequence[int]) -> None:
        assert len(taps) == len(counts) and taps.shape[1] >= max(counts)
        for count, request in zip(counts, requests, strict=True):
            self.lengths[request] += count

    def keep(self, requests: Tensor) -> None:
        self.lengths = [self.lengths[request] for request in requests.tolist()]


class _Drafter:
    """Whose block is its own positions."""

    config = SimpleNamespace(first_slot=1)

    def open(self, num_requests: int, **_: Any) -> Context:
        return Context(num_requests)

    def hidden(self, memory: Context, anchor_tokens: Tensor, anchors: Tensor, depth: int) -> Tensor:
        assert memory.lengths == anchors.flatten().tolist(), "one row of context a committed token, the anchor not among them"
        return (anchors[..., None] + 1 + torch.arange(depth))[..., None]


class Stub(_Drafter):
    """A drafter that proposes `ids[position] + shift`: 0 is the oracle, 1 the adversary."""

    def __init__(self, target: Target, ids: list[int], shift: int) -> None:
        self.target, self.ids, self.shift = target, torch.tensor(ids), shift

    def scorer(
        self, hidden: Tensor, anchor: Tensor, rung: str = "conditional", *, candidates: int | None = None
    ) -> MarginalScorer:
        tokens = (self.ids[hidden[..., 0].clamp(max=len(self.ids) - 1)] + self.shift) % self.target.vocab_size
        log_q = torch.full((*tokens.shape, self.target.vocab_size), -torch.inf, dtype=torch.float64)
        return MarginalScorer(log_q.scatter_(-1, tokens[..., None], 0.0))


def oracle(target: Target, ids: list[int]) -> Any:
    """Of prompt and answer, and of what comes after, or it is wrong there."""
    return Stub(target, ids, 0)


def adversary(target: Target, ids: list[int]) -> Any:
    return Stub(target, ids, 1)


class TableScorer(Scorer):
    """log q of a node's children by its path, the anchor included."""

    def __init__(self, q: Laws, num_requests: int, depth: int, vocab_size: int) -> None:
        self.q, self.num_requests, self.depth, self.width_limit = q, num_requests, depth, vocab_size

    def start(self, capacity: int) -> None:
        self.paths: dict[int, tuple[int, ...]] = {}

    def expand(self, lanes: Lanes) -> Tensor:
        links = zip(lanes.expansion.tolist(), lanes.parent.tolist(), lanes.token.tolist(), strict=True)
        paths = {row: (*(self.paths[above] if above >= 0 else ()), token) for row, above, token in links}
        self.paths |= paths
        return torch.stack([self.q(path) for path in paths.values()]).log()

    def token_ids(self, columns: Tensor) -> Tensor:
        return columns


class TableDrafter(_Drafter):
    """A drafter whose next token has the law `q(path)`, the tokens from the anchor on."""

    def __init__(self, q: Laws, vocab_size: int) -> None:
        self.q, self.vocab_size = q, vocab_size

    def scorer(
        self, hidden: Tensor, anchor: Tensor, rung: str = "conditional", *, candidates: int | None = None
    ) -> TableScorer:
        return TableScorer(self.q, *hidden.shape[:2], self.vocab_size)


def script(tokens: list[int], parents: list[int]) -> DraftTree:
    depths = depths_of(torch.tensor(parents))
    return DraftTree(tokens=torch.tensor(tokens), parents=torch.tensor(parents), depths=depths, scores=-depths.double())


def scripted(tree: DraftTree, vocab_size: int) -> Any:
    """Proposes the tree below every anchor; siblings in their order, and nothing else."""
    tokens, children = tree.tokens.tolist(), tree.children()
    below = {tuple(tokens[i] for i in tree.path_to(node)[1:]): [tokens[i] for i in children[node]] for node in range(len(tree))}

    def q(path: tuple[int, ...]) -> Tensor:
        law = torch.zeros(vocab_size, dtype=torch.float64)
        for rank, token in enumerate(below.get(path[1:], ())):
            law[token] = 0.5 ** (rank + 1)
        return law

    return TableDrafter(q, vocab_size)


@contextlib.contextmanager
def dealt(dice: Tape) -> Iterator[None]:
    """Decoding in which dice decide what noise decides elsewhere: tokens of the target, drafts, and what is accepted."""

    def draw(log_q: Tensor, width: int, replacement: bool, *_keys: object) -> Tensor:
        possible = width if replacement else min(width, int((log_q > -torch.inf).sum(1).min()))
        return torch.tensor([[*_attempts(law, possible, replacement, dice)] for law in log_q.exp()])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sampler, "draw", lambda self, logits, emitted: dice.pick(self.law(logits, emitted)))
        patch.setattr(rules, "KeyedDice", lambda seed, position: dice)
        patch.setattr(drawn, "_draw", draw)
        yield


def _attempts(law: Tensor, number: int, replacement: bool, dice: Tape) -> Iterator[int]:
    for _ in range(number):
        token = dice.pick(law)
        yield token
        if not replacement:
            law = law.index_fill(0, torch.tensor(token), 0.0)
            law = law / law.sum().clamp(min=1e-300)
