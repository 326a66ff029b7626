"""A drafter on another device than its target, or in another process: what crosses between them, and its bytes.

LongSpark's split (arXiv 2609.37029): the drafter owns copies of embedding, head and norm and a state of its own. A round
sends it the columns of accepted rows that its context reads: the boundary state of the last one, keys and values of all.
From those the drafter folds its summary onwards, so nothing that crosses grows with the prefix. The prompt is folded
beside the target, and its state crosses once; a context whose state grows is sent the prompt's rows instead. A tree
comes back. The bonus token goes out with the request for the next tree.

Every message starts with a head, int64 [2 + 2 R] for R requests: its kind, a number, and per request a number (the
rows that follow, or the anchor token) and the committed length after it. Lengths that disagree are refused.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from treedraft.config import DecodeConfig
from treedraft.contexts._seam import Context
from treedraft.costs import Profile
from treedraft.drafter import Drafter
from treedraft.drafting import Crossed, Drafting, Ledger, Together
from treedraft.targets.cache import RowCache
from treedraft.targets.hf import Target
from treedraft.trees.tree import PADDING, TreeBatch

OPEN, STATE, ROWS, DRAFT, KEEP, CLOSE = range(6)


class Link(ABC):
    """The target's end: the one place through which anything reaches the drafter or comes back, counted in bytes.

    `crossed` are the bytes since it was last asked. What of the drafter is needed here is its context's `columns`, and
    what folds a prompt: the summary's queries, copied when the link is made.
    """

    def __init__(self, target: Target, context: Context) -> None:
        self.device, self.columns, self.folder = target.device, context.columns, context.folder(target.device)
        self.rows = _rows_of(target)
        self.sent = self.received = 0

    @property
    def devices(self) -> list[torch.device]:
        """Where a round's work is done, as far as this process can wait for it."""
        return [self.device]

    @abstractmethod
    def open(
        self, num_requests: int, *, capacity: int, config: DecodeConfig, profile: Profile | None, ledger: Ledger
    ) -> None:
        """New requests, in place of the last ones."""

    @abstractmethod
    def tell(self, head: list[int], *tensors: Tensor) -> None: ...

    @abstractmethod
    def ask(self, head: list[int]) -> list[Tensor]:
        """The answer: numbers of nodes [R], then the fields of a TreeBatch."""

    def among(self, chosen: Sequence[int], request: int) -> list[bool] | None:
        """As `Drafting.among`, where this process can ask the drafter: nothing crosses for it."""
        return None

    def crossed(self) -> Crossed:
        found = Crossed(to_drafter=self.sent, to_target=self.received)
        self.sent = self.received = 0
        return found


@final
class DeviceLink(Link):
    """To a drafter of this process, on its own device. That may be the target's: then nothing moves, but all is counted."""

    def __init__(self, target: Target, drafter: Drafter) -> None:
        super().__init__(target, drafter.context)
        self.target, self.drafter = target, drafter

    @property
    def devices(self) -> list[torch.device]:
        return [self.device, self.drafter.device]

    def open(
        self, num_requests: int, *, capacity: int, config: DecodeConfig, profile: Profile | None, ledger: Ledger
    ) -> None:
        self.side = Side(self.target, self.drafter, num_requests, capacity=capacity, config=config, profile=profile, ledger=ledger)

    def tell(self, head: list[int], *tensors: Tensor) -> None:
        self.sent += _size(head, tensors)
        self.side.hear(head, [tensor.to(self.drafter.device) for tensor in tensors])

    def ask(self, head: list[int]) -> list[Tensor]:
        self.sent += _size(head, ())
        answer = self.side.answer(head)
        self.received += _size((), answer)
        return [tensor.to(self.device) for tensor in answer]

    def among(self, chosen: Sequence[int], request: int) -> list[bool] | None:
        return self.side.drafting.among(chosen, request)


@final
class ProcessLink(Link):
    """To a drafter that process `peer` of the default torch.distributed group serves (see `serve`); one request at a time.

    Tensors travel through main memory, as gloo has it. Trees are what `serve` was told to grow. `context` is the
    drafter's; its weights are not used, but for the summary's queries.
    """

    def __init__(self, target: Target, context: Context, peer: int) -> None:
        super().__init__(target, context)
        self.peer = peer

    def open(self, num_requests: int, *, capacity: int, config: DecodeConfig, **_its_own: object) -> None:
        if num_requests != 1:
            raise ValueError(f"{num_requests} requests at once: a drafter in another process serves one")
        _check_scored(config)
        self.tell([OPEN, capacity, *self.rows])

    def tell(self, head: list[int], *tensors: Tensor) -> None:
        self.sent += _size(head, tensors)
        _send(self.peer, torch.tensor(head), *tensors)

    def ask(self, head: list[int]) -> list[Tensor]:
        self.tell(head)
        num_nodes = _receive(self.peer, torch.empty(1, dtype=torch.int64))
        size = (1, int(num_nodes))
        types = {name: torch.float64 if name == "scores" else torch.int64 for name in PADDING}
        answer = [num_nodes, *(_receive(self.peer, torch.empty(size, dtype=dtype)) for dtype in types.values())]
        self.received += _size((), answer)
        return [tensor.to(self.device) for tensor in answer]

    def close(self) -> None:
        """End `serve`."""
        self.tell([CLOSE, 0, 0, 0])


@final
class Side:
    """The drafter's end: what it does when it hears from a link."""

    def __init__(
        self, target: Target, drafter: Drafter, num_requests: int, *, capacity: int, config: DecodeConfig,
        profile: Profile | None, ledger: Ledger,
    ) -> None:  # fmt: skip
        self.columns, self.size, self.dtype = drafter.context.columns, target.tap_size, target.dtype
        self.drafting = Together(
            drafter=drafter, state=drafter.open(num_requests, capacity=capacity), config=config, profile=profile,
            ledger=ledger, device=drafter.device,
        )  # fmt: skip

    def expects(self, head: list[int]) -> list[Tensor]:
        """Empty tensors like those that follow a head."""
        kind, _, numbers, _ = _parts(head)
        if kind == STATE:
            return [torch.empty_like(store) for store in self.drafting.state.stores]
        if kind != ROWS:
            return []
        last, every = (len(range(self.size)[columns]) for columns in self.columns)
        sizes = (sum(number > 0 for number in numbers), last), (sum(numbers), every)
        return [torch.empty(size, dtype=self.dtype) for size in sizes]

    @torch.inference_mode()
    def hear(self, head: list[int], tensors: Sequence[Tensor]) -> None:
        kind, number, numbers, lengths = _parts(head)
        state = self.drafting.state
        if kind == STATE:
            state.load(tensors, lengths)
        elif kind == ROWS:
            self._check(lengths, [length + count for length, count in zip(state.lengths, numbers, strict=True)])
            requests = [request for request, count in enumerate(numbers) if count]
            counts = [numbers[request] for request in requests]
            state.append(_unpacked(self.columns, tensors, counts, self.size), counts, requests)
        else:
            assert kind == KEEP
            self._check(lengths[:number], [state.lengths[request] for request in numbers[:number]])
            self.drafting.keep(torch.tensor(numbers[:number], device=self.drafting.device))

    @torch.inference_mode()
    def answer(self, head: list[int]) -> list[Tensor]:
        _, depth, anchors, lengths = _parts(head)
        self._check(lengths, self.drafting.state.lengths)
        trees = self.drafting.draft(anchors, lengths, depth)
        return [trees.num_nodes, *(getattr(trees, name) for name in PADDING)]

    def _check(self, told: list[int], own: list[int]) -> None:
        if told != own:
            raise ValueError(f"out of order: the target's prefixes have {told} tokens, the drafter's {own}")


@final
class Apart(Drafting):
    """Drafts through a link: here prompts are folded, and rows cut to the columns that are read."""

    def __init__(
        self, link: Link, num_requests: int, *, capacity: int, config: DecodeConfig, profile: Profile | None, ledger: Ledger
    ) -> None:
        link.crossed()  # what an aborted request left is not this one's
        self.link, self.lengths = link, [0] * num_requests
        self.folded = link.folder(num_requests) if link.folder is not None else None
        link.open(num_requests, capacity=capacity, config=config, profile=profile, ledger=ledger)

    def append(self, taps: Tensor, counts: Sequence[int], requests: Sequence[int]) -> None:
        assert list(requests) == sorted(requests) and min(counts) > 0, "rows are unpacked in the order of requests"
        added = [0] * len(self.lengths)
        for request, count in zip(requests, counts, strict=True):
            added[request] = count
        self.lengths = [length + count for length, count in zip(self.lengths, added, strict=True)]
        if self.folded is not None:
            self.folded.append(taps, counts, requests)
        else:
            self.link.tell([ROWS, 0, *added, *self.lengths], *_packed(self.link.columns, taps, counts))

    def settle(self) -> None:
        if self.folded is not None:
            self.link.tell([STATE, 0, *[0] * len(self.lengths), *self.lengths], *self.folded.stores)
            self.folded = None

    def draft(self, anchors: Sequence[int], lengths: Sequence[int], depth: int) -> TreeBatch:
        num_nodes, *fields = self.link.ask([DRAFT, depth, *anchors, *lengths])
        return TreeBatch(**dict(zip(PADDING, fields, strict=True)), num_nodes=num_nodes)

    def keep(self, requests: Tensor) -> None:
        kept = requests.tolist()
        fill = [0] * (len(self.lengths) - len(kept))
        self.lengths = [self.lengths[request] for request in kept]
        if not kept:
            return
        self.link.tell([KEEP, len(kept), *kept, *fill, *self.lengths, *fill])

    def among(self, chosen: Sequence[int], request: int = 0) -> list[bool] | None:
        return self.link.among(chosen, request)

    def crossed(self) -> Crossed:
        return self.link.crossed()


def begin(
    drafter: Drafter | Link, num_requests: int, cache: RowCache, *, capacity: int, config: DecodeConfig,
    profile: Profile | None, ledger: Ledger,
) -> Drafting:  # fmt: skip
    """Requests without a prefix, whose rows will be in `cache`. ValueError for a drafter elsewhere that has no link."""
    if isinstance(drafter, Link):
        return Apart(drafter, num_requests, capacity=capacity, config=config, profile=profile, ledger=ledger)
    device = cache.store.device
    if isinstance(drafter, Drafter) and drafter.device != device:
        raise ValueError(f"the drafter is on {drafter.device}, its target on {device}: pass a DeviceLink in its place")
    state = drafter.open(num_requests, capacity=capacity, cache=cache)
    return Together(drafter=drafter, state=state, config=config, profile=profile, ledger=ledger, device=device)


def _check_scored(config: DecodeConfig) -> None:
    if config.candidates is not None:
        raise ValueError(f"candidates is {config.candidates}: a drafter in another process scores all tokens")


def serve(target: Target, drafter: Drafter, peer: int, *, config: DecodeConfig, profile: Profile | None = None) -> Crossed:
    """Draft for the ProcessLink of process `peer` until it closes; returns the bytes that crossed.

    `target` lends the drafter what it borrows and is never run. ValueError for a config with candidates: which tokens
    they were is not told across processes, so that nobody could count their recall.
    """
    _check_scored(config)
    sent = received = 0
    side: Side | None = None
    while (head := _receive(peer, torch.empty(4, dtype=torch.int64)).tolist())[0] != CLOSE:
        if head[0] == OPEN:
            if tuple(head[2:]) != _rows_of(target):
                raise ValueError(f"the link's rows have (numbers, type) {tuple(head[2:])}, this side's {_rows_of(target)}: tap the same layers of the same target")
            side = Side(target, drafter, 1, capacity=head[1], config=config, profile=profile, ledger=Ledger(drafter.device))
            received += _size(head, ())
            continue
        assert side is not None, "a link opens before it speaks"
        tensors = [_receive(peer, like) for like in side.expects(head)]
        received += _size(head, tensors)
        if head[0] == DRAFT:
            answer = side.answer(head)
            sent += _size((), answer)
            _send(peer, *answer)
        else:
            side.hear(head, [tensor.to(drafter.device) for tensor in tensors])
    return Crossed(to_drafter=received + _size(head, ()), to_target=sent)


def _rows_of(target: Target) -> tuple[int, int]:
    """What both ends must agree on: numbers of a row of taps, and their type."""
    return target.tap_size, (torch.float64, torch.float32, torch.bfloat16, torch.float16).index(target.dtype)


def _parts(head: list[int]) -> tuple[int, int, list[int], list[int]]:
    middle = 1 + len(head) // 2
    return head[0], head[1], head[2:middle], head[middle:]


def _packed(columns: tuple[slice, slice], taps: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """Of taps [B, n, C] what is read: last rows [B, E] and, one request's after the other's, all rows [sum(counts), F]."""
    last, every = columns
    inside, ends = _places(counts, taps.device)
    return [taps[(*ends, last)], taps[:, : inside.shape[1], every][inside]]


def _unpacked(columns: tuple[slice, slice], tensors: Sequence[Tensor], counts: Sequence[int], size: int) -> Tensor:
    """Taps [B, n, C] again, zero where nobody looks."""
    (last, every), (ends_taps, rows) = columns, tensors
    inside, ends = _places(counts, rows.device)
    taps = rows.new_zeros((*inside.shape, size))
    taps[..., every][inside] = rows
    taps[(*ends, last)] = ends_taps
    return taps


def _places(counts: Sequence[int], device: torch.device) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Which of [B, max(counts)] are rows, bool, and where the last ones are."""
    number = torch.tensor(counts, device=device)
    inside = torch.arange(max(counts), device=device) < number[:, None]
    return inside, (torch.arange(len(counts), device=device), number - 1)


def _size(head: Sequence[int], tensors: Sequence[Tensor]) -> int:
    return 8 * len(head) + sum(tensor.nbytes for tensor in tensors)


def _send(peer: int, *tensors: Tensor) -> None:
    for tensor in tensors:
        if tensor.numel():
            dist.send(tensor.cpu().contiguous(), peer)


def _receive(peer: int, like: Tensor) -> Tensor:
    tensor = torch.empty_like(like, device="cpu", memory_format=torch.contiguous_format)
    if tensor.numel():
        dist.recv(tensor, peer)
    return tensor
