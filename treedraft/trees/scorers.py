"""Who says how likely the children of a node are. A conditional tree is the same search with another scorer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """L nodes to be expanded in one call; tensors are int64 [L].

    An expansion is a row of the scorer's state, unique to its node. A node's parent was expanded in an earlier call.
    The rows of request r are r * capacity ... (r + 1) * capacity - 1.
    """

    request: Tensor
    slot: Tensor  # depth of the node, 0 for the root: the drafted slot which its children fill, counted from 0
    token: Tensor  # target token id of the node: the parent token of its children
    expansion: Tensor  # row of this node's state
    parent: Tensor  # row of the state of the node's parent, -1 for the root
    deepest: int | None = None  # the largest slot, from whoever knows it without waiting for the device

    @property
    def reach(self) -> int:
        """Slots that these lanes and their ancestors fill: 1 + the largest."""
        return 1 + (int(self.slot.max()) if self.deepest is None else self.deepest)


class Scorer(Protocol):
    """The seam between drafter and tree. Log q is normalised over the whole draft vocabulary: it is never positive."""

    width_limit: int  # number of usable draft tokens; the fan-out of a tree is clipped to it
    depth: int  # D, number of drafted slots
    num_requests: int  # R
    candidates: Tensor | None = None  # target token ids [R, D, M] that may be drafted in a slot, None: all

    def start(self, capacity: int) -> None:
        """Forget the last tree and make room for `capacity` expansions a request."""
        ...

    def expand(self, lanes: Lanes) -> Tensor:
        """log q [L, V] of the children of every lane, over the draft vocabulary; -inf for what can never be drafted."""
        ...

    def token_ids(self, columns: Tensor) -> Tensor:
        """Target token ids of draft-vocabulary columns, any shape."""
        ...

    def children(self, lanes: Lanes, width: int) -> tuple[Tensor, Tensor]:
        """Target token ids and log q, both [L, width], of the best children of every lane, best first."""
        columns, log_q = top_children(self.expand(lanes), width)
        return self.token_ids(columns), log_q

    def spine(self, anchor: Tensor, depth: int, width: int) -> tuple[Tensor, Tensor] | None:
        """What `children` says of the root, its best child, that one's best child, ... at once, for `depth` levels or the
        first few of them, both [R, levels, width]; None where a call a level is all there is."""
        return None


_FEW = 64  # rows that are cheaper to compute all at once than in a few calls


class MarginalScorer(Scorer):
    """One law a depth, the same under every parent: the backbone's own logits (JetSpec, DDTree)."""

    def __init__(self, log_q: Tensor, d2t: Tensor | None = None):
        """`log_q` [R, D, V]; `d2t` [V] maps draft-vocabulary columns to target token ids (None: they are the same)."""
        self.log_q, self.d2t = log_q, d2t
        self.num_requests, self.depth, self.width_limit = log_q.shape
        self._best: tuple[Tensor, Tensor] | None = None

    def start(self, capacity: int) -> None:
        self._best = None

    def expand(self, lanes: Lanes) -> Tensor:
        return self._rows(lanes.request, lanes.slot)

    def token_ids(self, columns: Tensor) -> Tensor:
        return columns if self.d2t is None else self.d2t[columns]

    def children(self, lanes: Lanes, width: int) -> tuple[Tensor, Tensor]:
        # Many nodes of a tree share a row, so every row is searched once, when the first of them is expanded.
        if self._best is None or self._best[0].shape[-1] != width:
            shape, device = (self.num_requests * self.depth, width), lanes.slot.device
            tokens = torch.full(shape, -1, device=device)
            self._best = tokens, torch.zeros(shape, dtype=torch.float64, device=device)
        tokens, log_q = self._best
        row = lanes.request * self.depth + lanes.slot
        new = row[tokens[row, 0] < 0].unique()
        if len(new) and len(tokens) <= _FEW:
            new = (tokens[:, 0] < 0).nonzero().squeeze(1)
        if len(new):
            columns, best = top_children(self._rows(new // self.depth, new % self.depth), width)
            tokens[new], log_q[new] = self.token_ids(columns), best.double()
        return tokens[row], log_q[row]

    def spine(self, anchor: Tensor, depth: int, width: int) -> tuple[Tensor, Tensor]:
        return _along(anchor[:, None].expand(-1, depth), self, width)

    def _rows(self, request: Tensor, slot: Tensor) -> Tensor:
        return self.log_q[request, slot]


class BackboneScorer(MarginalScorer):
    """The same from hidden states [R, D, H], of which `head` makes draft logits only where they are asked for."""

    def __init__(self, hidden: Tensor, head: Callable[[Tensor], Tensor], d2t: Tensor):
        self.hidden, self.head, self.d2t = hidden, head, d2t
        self.num_requests, self.depth = hidden.shape[:2]
        self.width_limit = len(d2t)
        self._best = None

    def _rows(self, request: Tensor, slot: Tensor) -> Tensor:
        return log_law(self.head(self.hidden[request, slot]))


class CorrectionState(Protocol):
    """What a causal correction remembers of the expanded nodes of one tree, one row an expansion."""

    def reserve(self, capacity: int) -> None:
        """Forget the last tree and make room for `capacity` rows a request."""
        ...

    def step(self, lanes: Lanes) -> Tensor:
        """Corrected draft logits [L, V] of the children of every lane; stores the lanes' own rows."""
        ...

    def step_among(self, lanes: Lanes, columns: Tensor) -> Tensor:
        """The same for draft columns [L, M] alone: [L, M]."""
        ...

    def guess(self, anchor: Tensor, depth: int, token_ids: Callable[[Tensor], Tensor]) -> Tensor | None:
        """Likely tokens [R, depth] of the path of best children, the root first, where a node needs nothing of its parent."""
        ...


class ConditionalScorer(Scorer):
    """Every node is scored under its own ancestry: the correction is stepped along the node's path."""

    def __init__(self, state: CorrectionState, depth: int, num_requests: int, d2t: Tensor):
        """`d2t` [V] maps draft-vocabulary columns to target token ids (arange(V) where they are the same)."""
        self.state, self.depth, self.num_requests, self.d2t = state, depth, num_requests, d2t
        self.width_limit = len(d2t)

    def start(self, capacity: int) -> None:
        self.state.reserve(capacity)

    def expand(self, lanes: Lanes) -> Tensor:
        return log_law(self.state.step(lanes))

    def token_ids(self, columns: Tensor) -> Tensor:
        return self.d2t[columns]

    def spine(self, anchor: Tensor, depth: int, width: int) -> tuple[Tensor, Tensor] | None:
        path = self.state.guess(anchor, depth, self.token_ids)
        if path is None:
            return None
        tokens, log_q = _along(path, self, width)
        same = (tokens[:, :-1, 0] == path[:, 1:]).all(0)
        levels = 1 + int(same.long().cumprod(0).sum())
        return tokens[:, :levels], log_q[:, :levels]

    def per_depth(self, anchor: Tensor) -> MarginalScorer:
        """One law a depth, corrected once along the greedy path below `anchor` [R]: the middle rung of the ladder
        marginal, per depth, conditional. A chain has the nodes of the conditional one."""
        request, token, laws = torch.arange(len(anchor), device=anchor.device), anchor, []
        self.start(self.depth)
        for slot in range(self.depth):
            laws.append(self.expand(chain_lanes(request, slot, token, self.depth)))
            token = self.token_ids(top_children(laws[-1], 1)[0][:, 0])
        scorer = MarginalScorer(torch.stack(laws, 1), self.d2t)
        scorer.width_limit, scorer.candidates = self.width_limit, self.candidates
        return scorer


class CandidateScorer(ConditionalScorer):
    """Corrects the M likeliest tokens of every slot alone; the others keep what the backbone gives them, and are not drafted.

    Laws are normalised over the whole vocabulary: Z = Z_base - sum_M exp(base) + sum_M exp(corrected). What the cut costs
    is the recall of the target's tokens among the candidates, which whoever decodes can count.
    """

    def __init__(self, state: CorrectionState, base_logits: Tensor, num_candidates: int, d2t: Tensor):
        """`base_logits` [R, D, V] are the backbone's own."""
        super().__init__(state, depth=base_logits.shape[1], num_requests=base_logits.shape[0], d2t=d2t)
        self.width_limit = min(num_candidates, len(d2t))
        logits = base_logits.to(torch.promote_types(base_logits.dtype, torch.float32))
        # In the order of columns, so that ties go to the lowest one.
        self.columns = logits.topk(self.width_limit).indices.sort(-1).values
        outside = logits.scatter(-1, self.columns, -torch.inf)
        self.log_rest = outside.logsumexp(-1)  # -inf if there is nothing else
        self.candidates = d2t[self.columns]

    def expand(self, lanes: Lanes) -> Tensor:
        columns, log_q = self._laws(lanes)
        everything = log_q.new_full((len(columns), len(self.d2t)), -torch.inf)
        return everything.scatter_(1, columns, log_q)

    def children(self, lanes: Lanes, width: int) -> tuple[Tensor, Tensor]:
        columns, log_q = self._laws(lanes)
        best, log_q = top_children(log_q, width)
        return self.token_ids(columns.gather(1, best)), log_q

    def spine(self, anchor: Tensor, depth: int, width: int) -> None:
        return None  # a guess does not know the candidates

    def _laws(self, lanes: Lanes) -> tuple[Tensor, Tensor]:
        """Candidate columns and their log q, both [L, M]."""
        columns = self.columns[lanes.request, lanes.slot]
        logits = self.state.step_among(lanes, columns).to(self.log_rest.dtype)
        rest = self.log_rest[lanes.request, lanes.slot]
        return columns, logits - torch.logaddexp(rest, logits.logsumexp(-1))[:, None]


def _along(path: Tensor, scorer: Scorer, width: int) -> tuple[Tensor, Tensor]:
    """Children [R, D, width] of the nodes of paths [R, D], of scorers that remember nothing of a branch."""
    num_requests, depth = path.shape
    request, slot = torch.arange(num_requests, device=path.device), torch.arange(depth, device=path.device)
    none = torch.full((num_requests * depth,), -1, device=path.device)
    lanes = Lanes(
        request=request.repeat_interleave(depth), slot=slot.repeat(num_requests), token=path.flatten(),
        expansion=none, parent=none, deepest=depth - 1,
    )  # fmt: skip
    tokens, log_q = scorer.children(lanes, width)
    return tokens.view(num_requests, depth, width), log_q.view(num_requests, depth, width)


def chain_lanes(request: Tensor, slot: int, token: Tensor, capacity: int) -> Lanes:
    """The nodes at depth `slot` of these requests' chains."""
    expansion = request * capacity + slot
    parent = expansion - 1 if slot else torch.full_like(request, -1)
    slots = torch.full_like(request, slot)
    return Lanes(request=request, slot=slots, token=token, expansion=expansion, parent=parent, deepest=slot)


def log_law(logits: Tensor) -> Tensor:
    """log softmax over the last axis, in float32 or the dtype of `logits` if that is wider."""
    return torch.log_softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def top_children(log_q: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The `width` best columns of every row and their log q, [L, V] -> two [L, width]; ties go to the lowest column.

    torch.topk leaves the choice among equals open, and equals are common where logits come from bfloat16. So one value
    more is fetched, and only if two neighbours are equal are the columns chosen again by counting from the left.
    """
    num_rows, num_columns = log_q.shape
    assert 1 <= width <= num_columns, f"width {width} of {num_columns} columns"
    values, columns = log_q.topk(min(width + 1, num_columns))
    if bool((values[:, 1:] == values[:, :-1]).any()):
        least = values[:, width - 1 : width]
        above, equal = log_q > least, log_q == least
        taken = above | (equal & (equal.cumsum(1) <= width - above.sum(1, keepdim=True)))
        columns = taken.nonzero()[:, 1].view(num_rows, width)
        values, ranks = log_q.gather(1, columns).sort(dim=1, descending=True, stable=True)
        columns = columns.gather(1, ranks)
    return columns[:, :width], values[:, :width]
