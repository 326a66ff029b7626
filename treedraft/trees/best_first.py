"""Best-first search with fan-out admission, for many requests at once and many nodes a call of the scorer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from treedraft.trees.chain import usable_depth
from treedraft.trees.scorers import Lanes, Scorer
from treedraft.trees.tree import PADDING, TreeBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class BestFirst:
    """Expand the best node again and again; its `width` best children enter the tree, `budget` nodes in all.

    budget     number of nodes, the root included; the last expansion is cut to fit
    width      children a node; clipped to the scorer's width_limit
    depth      nodes at this depth are not expanded (None: as many as the scorer has slots)
    lookahead  nodes a request that are scored in one call; changes the speed, never the tree

    "Best" is the highest score, then the smallest depth, then the lexicographically first path of sibling ranks.
    Node 0 is the root, then come the children of the nodes in the order in which those were expanded, best child first.

    Scores never increase along a path, so the order in which a heap pops nodes is the sorted order of all nodes, and
    every node not yet known descends from a known one that has not been scored. Hence the fix point: sort the known
    nodes, score the best ones among those that the budget still reaches, repeat until they all are scored. What was
    scored in vain stays out of the tree. Exact; equals `naive.heap_build` node for node.
    """

    budget: int
    width: int
    depth: int | None = None
    lookahead: int = 8

    def __post_init__(self) -> None:
        for name in ("budget", "width", "lookahead"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} of a draft tree must be at least 1")
        if self.depth is not None and self.depth < 0:
            raise ValueError(f"depth {self.depth} of a draft tree is negative")

    @torch.no_grad()
    def build(self, anchor: Tensor, scorer: Scorer) -> TreeBatch:
        """Trees below `anchor` [R]. ValueError if the scorer has fewer slots than `depth`."""
        width = min(self.width, scorer.width_limit)
        depth = usable_depth(self.depth, scorer)
        # Expansions of a heap, at most (children of probability zero stay out, so they may exceed budget / width),
        # and room for nodes scored in vain; when that is used up, one node a call is scored, and none in vain.
        inner = sum(width**level for level in range(depth))
        most = min(self.budget, inner)
        slack = 2 * -(-self.budget // width) + 4 * self.lookahead
        capacity = max(1, min(inner, most + slack))
        scorer.start(capacity)
        pool = _Pool(anchor, capacity=capacity, width=width, depth=depth)
        while True:
            roomy = capacity == inner or pool.num_blocks - 1 + self.lookahead <= capacity - most
            frontier = pool.frontier(self.budget, self.lookahead if roomy else 1)
            if frontier.num_lanes == 0:
                return pool.harvest(frontier, self.budget)
            nodes, lanes = pool.open(frontier)
            pool.add(nodes, lanes, *scorer.children(lanes, width))


class _Frontier(NamedTuple):
    """The known nodes [R, P] in the order in which a heap would pop them, as far as is known yet."""

    order: Tensor  # node ids, best first
    reached: Tensor  # bool: the budget is not used up before this node is popped; a prefix of the order
    wanted: Tensor  # bool: to be scored now
    turn: Tensor  # 1 for the first wanted node of a request, 2 for the second ...
    num_wanted: Tensor  # [R]
    num_lanes: int
    num_blocks: int  # of the request with the most, once the wanted nodes are expanded


class _Pool:
    """All known nodes of R requests, in blocks of `width` siblings: block 0 for the root, then one an expansion.

    So node p is child p % width of block p // width, and links need no storing. What is not a node has score -inf.
    """

    def __init__(self, anchor: Tensor, *, capacity: int, width: int, depth: int):
        device = anchor.device
        self.num_requests, self.capacity, self.width, self.depth = len(anchor), capacity, width, depth
        self.num_blocks = 1  # of the request with the most
        self.num_expanded = torch.zeros(len(anchor), dtype=torch.int64, device=device)
        blocks, nodes = (len(anchor), capacity + 1), (len(anchor), (capacity + 1) * width)
        self.block_depth = torch.zeros(blocks, dtype=torch.int64, device=device)
        self.block_parent = torch.zeros(blocks, dtype=torch.int64, device=device)  # node whose children the block holds
        self.tokens = torch.full(nodes, -1, device=device)
        self.scores = torch.full(nodes, -torch.inf, dtype=torch.float64, device=device)
        self.keys = self.scores.clone()  # the score of what may be expanded: not of nodes at full depth
        self.fanout = torch.full(nodes, width, device=device)  # number of children, the most possible until scored
        self.block_below = torch.zeros(nodes, dtype=torch.int64, device=device)  # block of the children, 0 until scored
        self.tokens[:, 0] = anchor
        self.scores[:, 0] = 0
        self.keys[:, 0] = 0 if depth else -torch.inf
        self.ranks = torch.arange(width, device=device)

    def frontier(self, budget: int, lookahead: int) -> _Frontier:
        """Pop order of the known nodes, those the budget reaches, and the best `lookahead` of these to be scored."""
        size = self.num_blocks * self.width
        # As many as the budget reaches if all have `width` children, and the first that it does not reach.
        enough = min(size, -(-(budget - 1) // self.width) + 1)
        frontier, unsure = self._mark(*self.keys[:, :size].topk(enough, dim=1), budget, lookahead)
        if unsure:
            frontier, _ = self._mark(*self._sort_exactly(size), budget, lookahead)
        return frontier

    def _mark(self, best: Tensor, order: Tensor, budget: int, lookahead: int) -> tuple[_Frontier, bool]:
        """The frontier under an order, and whether ties or nodes that were left out make the order unsure."""
        fanout = self.fanout.gather(1, order)
        reached = (fanout.cumsum(1) - fanout < budget - 1) & (best > -torch.inf)
        unscored = reached & (self.block_below.gather(1, order) == 0)
        turn = unscored.cumsum(1)
        wanted = unscored & (turn <= lookahead)
        num_wanted = wanted.sum(1)
        # A tie matters up to the first node that is not reached.
        unsure = ((best[:, 1:] == best[:, :-1]) & reached[:, :-1]).any()
        if order.shape[1] < self.num_blocks * self.width:
            unsure |= reached[:, -1].any()
        # The one wait for the device in a round.
        counts = torch.stack((num_wanted.sum(), (self.num_expanded + num_wanted).max(), unsure)).tolist()
        return _Frontier(order, reached, wanted, turn, num_wanted, counts[0], counts[1] + 1), bool(counts[2])

    def open(self, frontier: _Frontier) -> tuple[Tensor, Lanes]:
        """Give the wanted nodes a block each: their ids in the flattened pool [L], and the lanes for the scorer."""
        place = frontier.wanted.flatten().nonzero().squeeze(1)
        request = place // frontier.wanted.shape[1]
        node = frontier.order.flatten()[place]
        block = self.num_expanded[request] + frontier.turn.flatten()[place]
        self.num_expanded += frontier.num_wanted
        self.num_blocks = frontier.num_blocks
        nodes = request * self.tokens.shape[1] + node
        self.block_below.view(-1)[nodes] = block
        first_block = request * (self.capacity + 1)
        self.block_parent.view(-1)[first_block + block] = node
        own_block = node // self.width
        before_first_row = request * self.capacity - 1  # the root's block is no expansion
        lanes = Lanes(
            request=request,
            slot=self.block_depth.view(-1)[first_block + own_block],
            token=self.tokens.view(-1)[nodes],
            expansion=before_first_row + block,
            parent=torch.where(own_block > 0, before_first_row + own_block, -1),
        )
        return nodes, lanes

    def add(self, nodes: Tensor, lanes: Lanes, tokens: Tensor, log_q: Tensor) -> None:
        """Enter the children [L, width] of the opened nodes."""
        scores = self.scores.view(-1)[nodes].unsqueeze(1) + log_q
        depth = lanes.slot + 1
        blocks = lanes.expansion + lanes.request + 1  # a request has one block more than expansions
        self.scores.view(-1, self.width)[blocks] = scores
        self.keys.view(-1, self.width)[blocks] = scores.masked_fill((depth == self.depth).unsqueeze(1), -torch.inf)
        self.tokens.view(-1, self.width)[blocks] = tokens
        self.block_depth.view(-1)[blocks] = depth
        self.fanout.view(-1)[nodes] = (scores > -torch.inf).sum(1)

    def harvest(self, frontier: _Frontier, budget: int) -> TreeBatch:
        """The tree: the blocks of the reached nodes in pop order, without what is not a node, cut at the budget."""
        num_popped = int(frontier.reached.sum(1).max())
        popped, is_popped = frontier.order[:, :num_popped], frontier.reached[:, :num_popped]
        block = self.block_below.gather(1, popped)
        ids = (block.unsqueeze(2) * self.width + self.ranks).flatten(1)
        scores = self.scores.gather(1, ids)
        real = (scores > -torch.inf) & is_popped.repeat_interleave(self.width, 1)
        place = real.cumsum(1)
        real &= place < budget
        num_nodes = real.sum(1) + 1
        # The last column takes what is not in the tree.
        place = torch.where(real, place, budget)
        place_of = torch.zeros((self.num_requests, self.tokens.shape[1] + 1), dtype=torch.int64, device=ids.device)
        place_of.scatter_(1, torch.where(real, ids, self.tokens.shape[1]), place)
        fields = {
            "tokens": self.tokens.gather(1, ids),
            "parents": place_of.gather(1, popped).repeat_interleave(self.width, 1),
            "depths": self.block_depth.gather(1, block).repeat_interleave(self.width, 1),
            "scores": scores,
        }
        root = {"tokens": self.tokens[:, 0], "parents": -1, "depths": 0, "scores": 0.0}
        longest = int(num_nodes.max())
        for name, values in fields.items():
            nodes = values.new_full((self.num_requests, budget + 1), PADDING[name]).scatter_(1, place, values)
            nodes[:, 0] = root[name]
            fields[name] = nodes[:, :longest]
        return TreeBatch(**fields, num_nodes=num_nodes)

    def _sort_exactly(self, size: int) -> tuple[Tensor, Tensor]:
        """Keys and node ids sorted by score, depth and path: stable sorts, the weakest key first."""
        keys = self.keys[:, :size]
        *strong, weakest = self._path_codes(size).unbind(0)
        order = weakest.argsort(dim=1, stable=True)
        for word in reversed(strong):
            order = order.gather(1, word.gather(1, order).argsort(dim=1, stable=True))
        best, rank = keys.gather(1, order).sort(dim=1, descending=True, stable=True)
        return best, order.gather(1, rank)

    def _path_codes(self, size: int) -> Tensor:
        """[K, R, P]: depth and sibling ranks from the root as K integers, which sort like (depth, path)."""
        rank_bits, depth_bits = max(1, (self.width - 1).bit_length()), max(1, self.depth.bit_length())
        # The digit of depth d lies `rank_bits` below that of d - 1, in the next word where this one is full.
        word, free, places = 0, 62 - depth_bits, [(0, 0)]
        for _ in range(self.depth):
            if free < rank_bits:
                word, free = word + 1, 62
            free -= rank_bits
            places.append((word, free))
        word_of, shift_of = torch.tensor(places, device=self.tokens.device).unbind(1)
        words = torch.arange(word + 1, device=self.tokens.device)[:, None, None]

        depth = self.block_depth[:, : self.num_blocks]
        parent = self.block_parent[:, : self.num_blocks]
        above = (depth - 1).clamp(min=0)
        codes = torch.where(word_of[above] == words, (parent % self.width) << shift_of[above], 0)
        jump = (parent // self.width).expand_as(codes)
        for _ in range(self.depth.bit_length()):  # block 0 is its own parent and has code 0
            codes = codes + codes.gather(2, jump)
            jump = jump.gather(2, jump)
        codes[0] += depth << (62 - depth_bits)
        own = torch.where((word_of[depth] == words).unsqueeze(3), self.ranks << shift_of[depth].unsqueeze(2), 0)
        return (codes.unsqueeze(3) + own).flatten(2)[:, :, :size]


Builder = BestFirst
