"""Best-first search for many requests at once and many nodes a call of the scorer."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from treedraft.trees.builder import TreeBuilder
from treedraft.trees.chain import usable_depth
from treedraft.trees.limits import Caps, Cost
from treedraft.trees.scorers import Lanes, Scorer
from treedraft.trees.tree import PADDING, TreeBatch

_MANY = 4  # requests
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class BestFirst(TreeBuilder):
    """Pop the best node again and again; its best children become known, until the tree has `budget` nodes.

    budget      number of nodes, the root included unless `count_root` is False; the last expansion is cut to fit
    width       children a node; clipped to the scorer's width_limit, with a warning
    depth       nodes at this depth are not expanded (None: as many as the scorer has slots)
    admit       "fanout": a popped node's children enter the tree at once (JetSpec: few expansions);
                "pop": a node enters when it is popped, so the tree is the best `budget` prefixes (DDTree)
    caps        fewer children than `width` for some nodes (see limits)
    frontier    no more than so many nodes of a depth are expanded, all of a depth in one call (PCTree, with "pop")
    cost        stop at the first popped node that does not raise the expected throughput; one that would open a level is
                tried as a leaf first (see limits; needs "pop")
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
        if width < self.width:
            say_clipped(self.width, width)
        depth = usable_depth(self.depth, scorer)
        budget = self.budget + (not self.count_root)
        # Almost every node of a "pop" tree is expanded, one in `width` of a "fanout" tree.
        # For few requests a call costs its weights, for many its lanes.
        lookahead = self.lookahead or (32 if self.admit == "pop" else 10 if len(anchor) < _MANY else 8)
        # Expansions of a heap, at most (children of probability zero stay out, so they may exceed budget / width),
        # and room for nodes scored in vain; when that is used up, one node a call is scored, and none in vain.
        inner = sum(width**level for level in range(depth))
        most = min(budget, inner)
        slack = (most if self.admit == "pop" else 2 * -(-budget // width)) + 4 * lookahead
        capacity = max(1, min(inner, most + slack if self.frontier is None else depth * self.frontier))
        scorer.start(capacity)
        pool = _Pool(anchor, self, capacity=capacity, width=width, depth=depth, budget=budget)
        if self.frontier is not None:
            for level in range(depth):
                best = pool.best_of_depth(level, self.frontier)
                if not best.wanted.any():
                    break
                pool.expand(best, scorer)
            pool.close()
        elif self.admit == "pop" and len(anchor) < _MANY and (levels := min(depth, budget - 1)) > 0:
            # Most of such a tree's levels hold few nodes besides the path of best children, so that each would be a call.
            spine = scorer.spine(anchor, levels, width)
            if spine is not None:
                pool.follow(*spine)
        while True:
            roomy = capacity == inner or pool.num_blocks - 1 + lookahead <= capacity - most
            frontier = pool.frontier(lookahead if roomy else 1)
            if not frontier.wanted.any():
                return pool.harvest(frontier)
            pool.expand(frontier, scorer)


@functools.cache
def say_clipped(width: int, limit: int) -> None:
    """Once, not once a round."""
    log.warning("width %d of a draft tree: %d tokens can be drafted, so that no node has more children", width, limit)


class _Frontier(NamedTuple):
    """The known nodes [R, P] in the order in which a heap would pop them, as far as is known yet."""

    nodes: ndarray  # places in the flattened pool, best first
    reached: ndarray  # bool: the search has not ended before this node is popped; a prefix of the order
    wanted: ndarray  # bool: to be scored now
    turn: ndarray  # 1 for the first wanted node of a request, 2 for the second ...


class _Pool:
    """All known nodes of R requests, in blocks of `width` siblings: block 0 for the root, then one an expansion.

    So node p is child p % width of block p // width, and links need no storing. Bookkeeping of a few hundred numbers is
    for the host, on every device: a call of the scorer takes lanes there and brings children back, and that is all.
    """

    def __init__(self, anchor: Tensor, rules: BestFirst, *, capacity: int, width: int, depth: int, budget: int):
        self.rules, self.pops, self.budget, self.device = rules, rules.admit == "pop", budget, anchor.device
        self.capacity, self.width, self.depth = capacity, width, depth
        self.forwards = rules.cost.forwards((capacity + 1) * width) if rules.cost is not None else None
        self.num_requests, self.num_blocks = len(anchor), 1  # blocks of the request with the most
        self.num_expanded = np.zeros(len(anchor), dtype=np.int64)
        shape = (len(anchor), capacity + 1)
        self.block_depth = np.zeros(shape, dtype=np.int64)
        self.block_parent = np.zeros(shape, dtype=np.int64)  # place of the node whose children the block holds
        shape = (*shape, width)
        self.tokens = np.full(shape, -1)
        self.surprisal = np.full(shape, np.inf)  # minus the score; of what is not a node infinite
        self.keys = np.full(shape, np.inf)  # the same of what a heap would pop to some end: not of leaves of "fanout"
        self.fanout = np.full(shape, width)  # number of children, the most possible until scored
        self.block_below = np.zeros(shape, dtype=np.int64)  # block of the children, 0 until scored
        self.leaf = np.zeros(shape, dtype=bool)  # is never expanded
        self.first = np.arange(len(anchor))[:, None] * ((capacity + 1) * width)  # place of a request's root
        self.tokens[:, 0, 0] = anchor.numpy(force=True)
        self.surprisal[:, 0, 0] = 0
        self.keys[:, 0, 0] = 0 if depth or self.pops else np.inf
        self.leaf[:, 0, 0] = depth == 0

    def frontier(self, lookahead: int) -> _Frontier:
        """Pop order of the known nodes, those that the search reaches, and the best `lookahead` of these to be scored."""
        # As many as are reached, and the first that is not. With caps nobody knows before how many that are.
        enough = self.budget + 1 if self.pops or self.rules.caps else -(-(self.budget - 1) // self.width) + 1
        keys = self._known(self.keys)
        frontier, unsure = self._mark(_smallest(keys, enough), lookahead)
        if unsure:
            frontier, _ = self._mark(self._sort_exactly(keys), lookahead)
        return frontier

    def _mark(self, order: ndarray, lookahead: int) -> tuple[_Frontier, bool]:
        """The frontier under an order, and whether ties or nodes that were left out make the order unsure."""
        nodes = order + self.first
        if self.pops:
            keys, leaf = self.keys.take(nodes), self.leaf.take(nodes)
            place = np.arange(order.shape[1])
            reached = (place < self.budget) & (keys < np.inf)
            if self.forwards is not None:
                nodes, keys, leaf, pays = self._pays(nodes, keys, leaf)
                reached &= pays
            # Children come after their parent, so those of the last node that fits are not needed.
            wanted = reached & (self.block_below.take(nodes) == 0) & ~leaf & (place < self.budget - 1)
        else:
            keys, fanout = self.keys.take(nodes), self.fanout.take(nodes)
            reached = (fanout.cumsum(1) - fanout < self.budget - 1) & (keys < np.inf)
            wanted = reached & (self.block_below.take(nodes) == 0)
        turn = wanted.cumsum(1)
        wanted &= turn <= lookahead
        # A tie matters up to the first node that is not reached; with a cost that node's too, for its equal may pay.
        known, matters = keys < np.inf, reached
        if self.forwards is not None:
            matters = np.concatenate([known[:, :1], known[:, 1:] & reached[:, :-1]], axis=1)
        unsure = bool(((keys[:, 1:] == keys[:, :-1]) & matters[:, :-1]).any())
        if order.shape[1] < self.num_blocks * self.width:
            unsure |= bool((matters.sum(1) == known.sum(1)).any())
        return _Frontier(nodes, reached, wanted, turn), unsure

    def _pays(self, nodes: ndarray, keys: ndarray, leaf: ndarray) -> tuple[ndarray, ndarray, ndarray, ndarray]:
        """Nodes [R, P], those below the last level that pays moved to the end, their keys, now infinite there, which are
        leaves, and which pay, like every node before them."""
        depth = self.block_depth.take(nodes // self.width)
        levels, rises = self._rises(keys, depth, leaf)
        first = rises.argmin(1)  # that does not pay, or 0
        request = np.arange(len(nodes))
        opens = (first > 0) & (levels[request, first] > levels[request, first - 1])
        if opens.any():
            floor = np.where(opens, depth[request, first], self.depth)[:, None]
            keys = np.where(depth > floor, np.inf, keys)
            order = (keys == np.inf).argsort(axis=1, kind="stable") + request[:, None] * nodes.shape[1]
            nodes, keys, depth = nodes.take(order), keys.take(order), depth.take(order)
            leaf = leaf.take(order) | (depth >= floor)
            _, rises = self._rises(keys, depth, leaf)
        return nodes, keys, leaf, np.logical_and.accumulate(rises, axis=1)

    def _rises(self, keys: ndarray, depth: ndarray, leaf: ndarray) -> tuple[ndarray, ndarray]:
        """Of every first so many nodes [R, P]: levels, and whether the last raised the expected tokens a second."""
        assert self.rules.cost is not None and self.forwards is not None
        levels = np.maximum.accumulate(np.where(leaf, 0, depth + 1), axis=1)
        gain = np.exp(-keys).cumsum(1)
        rate = self.rules.cost.rate(gain, (~leaf).cumsum(1), levels, self.forwards[: keys.shape[1]])
        rises = np.ones_like(leaf)
        rises[:, 1:] = rate[:, 1:] > rate[:, :-1]
        return levels, rises

    def best_of_depth(self, level: int, count: int) -> _Frontier:
        """The `count` best known nodes at a depth, all to be scored."""
        keys = np.where((self.block_depth == level)[:, :, None], self.surprisal, np.inf)
        known = self._known(keys)
        order = _smallest(known, count + 1)
        best = keys.take(order + self.first)
        if ((best[:, 1:] == best[:, :-1]) & (best[:, 1:] < np.inf)).any():
            order = self._sort_exactly(known)
        nodes = order[:, :count] + self.first
        wanted = keys.take(nodes) < np.inf
        return _Frontier(nodes, wanted, wanted, wanted.cumsum(1))

    def close(self) -> None:
        """What has not been expanded by now never is."""
        self.leaf |= self.block_below == 0
        if not self.pops:
            self.keys[self.leaf] = np.inf

    def expand(self, frontier: _Frontier, scorer: Scorer) -> None:
        """Give the wanted nodes a block each, and have the scorer fill it with their children."""
        place = frontier.wanted.ravel().nonzero()[0]
        request, nodes = place // frontier.wanted.shape[1], frontier.nodes.ravel()[place]
        below = self.num_expanded[request] + frontier.turn.ravel()[place]
        own, first = nodes // self.width, request * (self.capacity + 1)
        depth, root = self.block_depth.take(own), own == first
        # A request has one block more than expansions: the root's.
        expansion, parent = first + below - request - 1, np.where(root, -1, own - request - 1)
        lanes = torch.from_numpy(np.stack((request, depth, self.tokens.take(nodes), expansion, parent))).to(self.device)
        tokens, log_q = scorer.children(
            Lanes(request=lanes[0], slot=lanes[1], token=lanes[2], expansion=lanes[3], parent=lanes[4], deepest=int(depth.max())),
            self.width,
        )
        log_q = self._capped(depth, log_q)
        self._fill(nodes, below, depth, tokens.numpy(force=True), self.surprisal.take(nodes)[:, None] - log_q)
        self._count(frontier.wanted.sum(1))

    def follow(self, tokens: Tensor, log_q: Tensor) -> None:
        """Give the root, its best child, that one's best child, ... their children [R, levels, width]."""
        request, level = np.indices(tokens.shape[:2]).reshape(2, -1)
        laws = self._capped(level, log_q.flatten(0, 1)).reshape(tokens.shape)
        surprisal = -laws
        surprisal[:, 1:] += (-laws[:, :-1, :1]).cumsum(1)
        # Block l + 1 holds the children of the best node at depth l, which is the first one of block l.
        nodes = self.first[request, 0] + level * self.width
        self._fill(nodes, level + 1, level, tokens.flatten(0, 1).numpy(force=True), surprisal.reshape(-1, self.width))
        self._count(tokens.shape[1])

    def _capped(self, depth: ndarray, log_q: Tensor) -> ndarray:
        """log q [L, W] in float64, of what a cap leaves out minus infinity."""
        laws = log_q.double().numpy(force=True)
        if self.rules.caps is not None:
            laws[np.arange(self.width) >= self.rules.caps(depth, laws)[:, None]] = -np.inf
        return laws

    def _count(self, expanded: ndarray | int) -> None:
        self.num_expanded += expanded
        self.num_blocks = int(self.num_expanded.max()) + 1

    def _fill(self, nodes: ndarray, below: ndarray, depth: ndarray, tokens: ndarray, surprisal: ndarray) -> None:
        """Put the children [L, W] of nodes at these depths into blocks of their requests."""
        self.block_below.put(nodes, below)
        blocks = nodes // ((self.capacity + 1) * self.width) * (self.capacity + 1) + below
        self.fanout.put(nodes, (surprisal < np.inf).sum(1))
        leaf = (depth + 1 == self.depth)[:, None]
        self.block_parent.put(blocks, nodes)
        self.block_depth.put(blocks, depth + 1)
        self._blocks(self.leaf)[blocks] = leaf
        self._blocks(self.tokens)[blocks] = tokens
        self._blocks(self.surprisal)[blocks] = surprisal
        self._blocks(self.keys)[blocks] = surprisal if self.pops else np.where(leaf, np.inf, surprisal)

    def harvest(self, frontier: _Frontier) -> TreeBatch:
        """The tree: what was popped, or the blocks of what was popped without what is not a node, cut at the budget."""
        num_popped = int(frontier.reached.sum(1).max())
        popped, is_popped = frontier.nodes[:, :num_popped], frontier.reached[:, :num_popped]
        if self.pops:
            nodes, real = popped[:, 1:], is_popped[:, 1:]
        else:
            block = self.block_below.take(popped) + self.first // self.width
            nodes = (block[:, :, None] * self.width + np.arange(self.width)).reshape(self.num_requests, -1)
            real = (self.surprisal.take(nodes) < np.inf) & is_popped.repeat(self.width, axis=1)
        place = real.cumsum(1)
        real &= place < self.budget
        num_nodes = real.sum(1) + 1
        request, rank = real.nonzero()
        nodes, place = nodes[request, rank], place[request, rank]
        place_of = np.zeros(self.tokens.size, dtype=np.int64)
        place_of[nodes] = place
        parent = self.block_parent.take(nodes // self.width)
        fields = {
            "tokens": (self.tokens[:, 0, 0], self.tokens.take(nodes)),
            "parents": (-1, place_of[parent]),
            "depths": (0, self.block_depth.take(nodes // self.width)),
            "scores": (0.0, -self.surprisal.take(nodes)),
        }
        found = {}
        for name, (root, values) in fields.items():
            rows = np.full((self.num_requests, int(num_nodes.max())), PADDING[name])
            rows[:, 0], rows[request, place] = root, values
            found[name] = torch.from_numpy(rows).to(self.device)
        return TreeBatch(**found, num_nodes=torch.from_numpy(num_nodes).to(self.device))

    def _known(self, values: ndarray) -> ndarray:
        """Those of the blocks that some request has opened, [R, P]."""
        return values[:, : self.num_blocks].reshape(self.num_requests, -1)

    def _blocks(self, values: ndarray) -> ndarray:
        return values.reshape(-1, self.width)

    def _sort_exactly(self, keys: ndarray) -> ndarray:
        """Nodes [R, P] of every request sorted by key [R, P], depth and path."""
        return np.lexsort((*self._path_codes()[::-1], keys), axis=1)

    def _path_codes(self) -> ndarray:
        """[K, R, P]: depth and sibling ranks from the root as K integers, which sort like (depth, path)."""
        rank_bits, depth_bits = max(1, (self.width - 1).bit_length()), max(1, self.depth.bit_length())
        # The digit of depth d lies `rank_bits` below that of d - 1, in the next word where this one is full.
        word, free, places = 0, 62 - depth_bits, [(0, 0)]
        for _ in range(self.depth):
            if free < rank_bits:
                word, free = word + 1, 62
            free -= rank_bits
            places.append((word, free))
        word_of, shift_of = np.array(places).T
        words = np.arange(word + 1)[:, None, None]

        depth = self.block_depth[:, : self.num_blocks]
        parent = self.block_parent[:, : self.num_blocks] - self.first  # of block 0 meaningless, and not looked at
        above = (depth - 1).clip(min=0)
        codes = np.where((word_of[above] == words) & (depth > 0), (parent % self.width) << shift_of[above], 0)
        request, jump = np.arange(self.num_requests)[:, None], np.where(depth > 0, parent // self.width, 0)
        for _ in range(self.depth.bit_length()):  # block 0 is its own parent and has code 0
            codes = codes + codes[:, request, jump]
            jump = jump[request, jump]
        codes[0] += depth << (62 - depth_bits)
        own = np.where((word_of[depth] == words)[..., None], np.arange(self.width) << shift_of[depth][..., None], 0)
        return (codes[..., None] + own).reshape(word + 1, self.num_requests, -1)


def _smallest(keys: ndarray, count: int) -> ndarray:
    """Columns [R, min(P, count)] of the smallest keys [R, P], in order."""
    if keys.shape[1] <= 2 * count:
        return keys.argsort(axis=1)[:, :count]
    part = keys.argpartition(count, axis=1)[:, :count]
    rows = np.arange(len(keys))[:, None]
    return part[rows, keys[rows, part].argsort(axis=1)]


Builder = BestFirst
