"""Best-first search for many requests at once and many nodes a call of the scorer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from treedraft.trees.builder import TreeBuilder
from treedraft.trees.chain import usable_depth
from treedraft.trees.limits import Caps, Cost
from treedraft.trees.scorers import Lanes, Scorer
from treedraft.trees.tree import PADDING, TreeBatch

_MANY = 4  # requests


@dataclass(frozen=True, slots=True, kw_only=True)
class BestFirst(TreeBuilder):
    """Pop the best node again and again; its best children become known, until the tree has `budget` nodes.

    budget      number of nodes, the root included unless `count_root` is False; the last expansion is cut to fit
    width       children a node; clipped to the scorer's width_limit
    depth       nodes at this depth are not expanded (None: as many as the scorer has slots)
    admit       "fanout": a popped node's children enter the tree at once (JetSpec: few expansions);
                "pop": a node enters when it is popped, so the tree is the best `budget` prefixes (DDTree)
    caps        fewer children than `width` for some nodes (see limits)
    frontier    no more than so many nodes of a depth are expanded, all of a depth in one call (PCTree, with "pop")
    cost        stop at the first popped node that does not raise the expected throughput (CaDDTree; needs "pop")
    lookahead   nodes a request that are scored in one call; changes the speed, never the tree

    "Best" is the highest score, then the smallest depth, then the lexicographically first path of sibling ranks.
    Node 0 is the root, then come the nodes in the order in which they entered.

    Scores never increase along a path, so the order in which a heap pops nodes is the sorted order of all nodes, and
    every node not yet known descends from a known one that has not been scored. Hence the fix point: sort the known
    nodes, score the best ones among those that the budget still reaches, repeat until they all are scored. What was
    scored in vain stays out of the tree. Exact; equals `naive.heap_build` node for node.
    """

    budget: int
    width: int
    depth: int | None = None
    admit: Literal["fanout", "pop"] = "fanout"
    count_root: bool = True
    caps: Caps | None = None
    frontier: int | None = None
    cost: Cost | None = None
    lookahead: int | None = None

    def __post_init__(self) -> None:
        for name in ("budget", "width", "lookahead", "frontier"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} {value} of a draft tree must be at least 1")
        if self.depth is not None and self.depth < 0:
            raise ValueError(f"depth {self.depth} of a draft tree is negative")
        if self.admit not in ("fanout", "pop"):
            raise ValueError(f"admit {self.admit!r} of a draft tree is unknown; choose fanout or pop")
        if self.cost is not None and self.admit != "pop":
            raise ValueError("a cost-aware stop weighs node by node: it needs admit = 'pop'")

    @torch.no_grad()
    def build(self, anchor: Tensor, scorer: Scorer) -> TreeBatch:
        """Trees below `anchor` [R]. ValueError if the scorer has fewer slots than `depth`."""
        width = min(self.width, scorer.width_limit)
        depth = usable_depth(self.depth, scorer)
        budget = self.budget + (not self.count_root)
        # Almost every node of a "pop" tree is expanded, one in `width` of a "fanout" tree.
        # For few requests a call costs its weights, for many its lanes.
        lookahead = self.lookahead or (32 if self.admit == "pop" else 12 if len(anchor) < _MANY else 8)
        # Expansions of a heap, at most (children of probability zero stay out, so they may exceed budget / width),
        # and room for nodes scored in vain; when that is used up, one node a call is scored, and none in vain.
        inner = sum(width**level for level in range(depth))
        most = min(budget, inner)
        slack = 2 * -(-budget // width) + 4 * lookahead
        capacity = max(1, min(inner, most + slack if self.frontier is None else depth * self.frontier))
        scorer.start(capacity)
        pool = _Pool(anchor, self, capacity=capacity, width=width, depth=depth, budget=budget)
        if self.frontier is not None:
            for level in range(depth):
                nodes, lanes = pool.open(pool.best_of_depth(level, self.frontier))
                pool.add(nodes, lanes, *scorer.children(lanes, width))
            pool.close()
        while True:
            roomy = capacity == inner or pool.num_blocks - 1 + lookahead <= capacity - most
            frontier = pool.frontier(lookahead if roomy else 1)
            if frontier.num_lanes == 0:
                return pool.harvest(frontier)
            nodes, lanes = pool.open(frontier)
            pool.add(nodes, lanes, *scorer.children(lanes, width))


class _Frontier(NamedTuple):
    """The known nodes [R, P] in the order in which a heap would pop them, as far as is known yet."""

    order: Tensor  # node ids, best first
    reached: Tensor  # bool: the search has not ended before this node is popped; a prefix of the order
    wanted: Tensor  # bool: to be scored now
    turn: Tensor  # 1 for the first wanted node of a request, 2 for the second ...
    num_wanted: Tensor  # [R]
    num_lanes: int
    num_blocks: int  # of the request with the most, once the wanted nodes are expanded


class _Pool:
    """All known nodes of R requests, in blocks of `width` siblings: block 0 for the root, then one an expansion.

    So node p is child p % width of block p // width, and links need no storing. What is not a node has score -inf.
    """

    def __init__(self, anchor: Tensor, rules: BestFirst, *, capacity: int, width: int, depth: int, budget: int):
        device = anchor.device
        self.rules, self.pops, self.budget = rules, rules.admit == "pop", budget
        self.num_requests, self.capacity, self.width, self.depth = len(anchor), capacity, width, depth
        self.num_blocks = 1  # of the request with the most
        self.num_expanded = torch.zeros(len(anchor), dtype=torch.int64, device=device)
        blocks, nodes = (len(anchor), capacity + 1), (len(anchor), (capacity + 1) * width)
        self.block_depth = torch.zeros(blocks, dtype=torch.int64, device=device)
        self.block_parent = torch.zeros(blocks, dtype=torch.int64, device=device)  # node whose children the block holds
        self.tokens = torch.full(nodes, -1, device=device)
        self.scores = torch.full(nodes, -torch.inf, dtype=torch.float64, device=device)
        self.keys = self.scores.clone()  # the score of what a heap would pop to some end: not of leaves of "fanout"
        self.fanout = torch.full(nodes, width, device=device)  # number of children, the most possible until scored
        self.block_below = torch.zeros(nodes, dtype=torch.int64, device=device)  # block of the children, 0 until scored
        self.leaf = torch.zeros(nodes, dtype=torch.bool, device=device)  # is never expanded
        self.tokens[:, 0] = anchor
        self.scores[:, 0] = 0
        self.keys[:, 0] = 0 if depth or self.pops else -torch.inf
        self.leaf[:, 0] = depth == 0
        self.ranks = torch.arange(width, device=device)

    def frontier(self, lookahead: int) -> _Frontier:
        """Pop order of the known nodes, those that the search reaches, and the best `lookahead` of these to be scored."""
        size = self.num_blocks * self.width
        # As many as are reached, and the first that is not. With caps nobody knows before how many that are.
        enough = self.budget + 1 if self.pops or self.rules.caps else -(-(self.budget - 1) // self.width) + 1
        keys = self.keys[:, :size]
        frontier, unsure = self._mark(*keys.topk(min(size, enough), dim=1), lookahead)
        if unsure:
            frontier, _ = self._mark(*self._sort_exactly(keys), lookahead)
        return frontier

    def _mark(self, best: Tensor, order: Tensor, lookahead: int) -> tuple[_Frontier, bool]:
        """The frontier under an order, and whether ties or nodes that were left out make the order unsure."""
        scored = self.block_below.gather(1, order) > 0
        place = torch.arange(order.shape[1], device=order.device)
        if self.pops:
            reached = (place < self.budget) & (best > -torch.inf)
            if self.rules.cost is not None:
                reached &= self._pays(best, order, self.rules.cost)
            # Children come after their parent, so those of the last node that fits are not needed.
            unscored = reached & ~scored & ~self.leaf.gather(1, order) & (place < self.budget - 1)
        else:
            fanout = self.fanout.gather(1, order)
            reached = (fanout.cumsum(1) - fanout < self.budget - 1) & (best > -torch.inf)
            unscored = reached & ~scored
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

    def _pays(self, best: Tensor, order: Tensor, cost: Cost) -> Tensor:
        """bool [R, P]: every node up to this one raised the expected tokens a second."""
        inner = self.block_depth.gather(1, order // self.width) < self.depth
        rate = cost.rate(best.exp().cumsum(1), inner.cumsum(1))
        rises = torch.ones_like(inner)
        rises[:, 1:] = rate[:, 1:] > rate[:, :-1]
        return rises.long().cumprod(1).bool()

    def best_of_depth(self, level: int, count: int) -> _Frontier:
        """The `count` best known nodes at a depth, all to be scored."""
        size = self.num_blocks * self.width
        at_level = self.block_depth[:, : self.num_blocks].repeat_interleave(self.width, 1) == level
        keys = self.scores[:, :size].masked_fill(~at_level, -torch.inf)
        best, order = keys.topk(min(size, count + 1), dim=1)
        if bool(((best[:, 1:] == best[:, :-1]) & (best[:, 1:] > -torch.inf)).any()):
            best, order = self._sort_exactly(keys)
        best, order = best[:, :count], order[:, :count]
        wanted = best > -torch.inf
        num_wanted = wanted.sum(1)
        blocks = int((self.num_expanded + num_wanted).max()) + 1
        return _Frontier(order, wanted, wanted, wanted.cumsum(1), num_wanted, int(num_wanted.sum()), blocks)

    def close(self) -> None:
        """What has not been expanded by now never is."""
        self.leaf |= self.block_below == 0
        if not self.pops:
            self.keys.masked_fill_(self.leaf, -torch.inf)

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
        if self.rules.caps is not None:
            log_q = log_q.masked_fill(self.ranks >= self.rules.caps(lanes.slot, log_q)[:, None], -torch.inf)
        scores = self.scores.view(-1)[nodes].unsqueeze(1) + log_q
        depth = lanes.slot + 1
        blocks = lanes.expansion + lanes.request + 1  # a request has one block more than expansions
        self.scores.view(-1, self.width)[blocks] = scores
        leaf = (depth == self.depth).unsqueeze(1)
        self.leaf.view(-1, self.width)[blocks] = leaf
        self.keys.view(-1, self.width)[blocks] = scores if self.pops else scores.masked_fill(leaf, -torch.inf)
        self.tokens.view(-1, self.width)[blocks] = tokens
        self.block_depth.view(-1)[blocks] = depth
        self.fanout.view(-1)[nodes] = (scores > -torch.inf).sum(1)

    def harvest(self, frontier: _Frontier) -> TreeBatch:
        """The tree: what was popped, or the blocks of what was popped without what is not a node, cut at the budget."""
        num_popped = int(frontier.reached.sum(1).max())
        popped, is_popped = frontier.order[:, :num_popped], frontier.reached[:, :num_popped]
        if self.pops:
            ids, real = popped[:, 1:], is_popped[:, 1:]
        else:
            block = self.block_below.gather(1, popped)
            ids = (block.unsqueeze(2) * self.width + self.ranks).flatten(1)
            real = (self.scores.gather(1, ids) > -torch.inf) & is_popped.repeat_interleave(self.width, 1)
        place = real.cumsum(1)
        real &= place < self.budget
        num_nodes = real.sum(1) + 1
        # The last column takes what is not in the tree.
        place = torch.where(real, place, self.budget)
        place_of = torch.zeros((self.num_requests, self.tokens.shape[1] + 1), dtype=torch.int64, device=ids.device)
        place_of.scatter_(1, torch.where(real, ids, self.tokens.shape[1]), place)
        own_block = ids // self.width
        fields = {
            "tokens": self.tokens.gather(1, ids),
            "parents": place_of.gather(1, self.block_parent.gather(1, own_block)),
            "depths": self.block_depth.gather(1, own_block),
            "scores": self.scores.gather(1, ids),
        }
        root = {"tokens": self.tokens[:, 0], "parents": -1, "depths": 0, "scores": 0.0}
        longest = int(num_nodes.max())
        for name, values in fields.items():
            nodes = values.new_full((self.num_requests, self.budget + 1), PADDING[name]).scatter_(1, place, values)
            nodes[:, 0] = root[name]
            fields[name] = nodes[:, :longest]
        return TreeBatch(**fields, num_nodes=num_nodes)

    def _sort_exactly(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [R, P] and node ids sorted by key, depth and path: stable sorts, the weakest first."""
        *strong, weakest = self._path_codes(keys.shape[1]).unbind(0)
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
