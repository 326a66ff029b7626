"""The law of tree builders, for every file of treedraft/trees/ that is one."""

from __future__ import annotations

import inspect
import itertools
import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contracts.tree_tables import LAWS, PathScorer, random_scorer, same, table
from tests.tiny_drafters import make_drafter, randomise
from treedraft.targets.hf import Target
from treedraft.trees import builder_names, load_builder
from treedraft.trees.accept import accept_batch
from treedraft.trees.best_first import BestFirst
from treedraft.trees.chain import Chain
from treedraft.trees.limits import Cost, DepthCaps, GapCap
from treedraft.trees.naive import heap_build
from treedraft.trees.scorers import ConditionalScorer, Lanes, MarginalScorer, Scorer
from treedraft.trees.tree import DraftTree

ANCHOR = 7


def make(name: str, **options: int):
    """A builder with those of the options that it knows."""
    builder = load_builder(name)
    return builder(**{key: value for key, value in options.items() if key in inspect.signature(builder).parameters})


def check_shape(tree: DraftTree, *, budget: int, width: int, depth: int) -> None:
    parents, depths = tree.parents, tree.depths
    assert len(tree) <= budget
    assert tree.tokens[0] == ANCHOR and parents[0] == -1 and depths[0] == 0 and tree.scores[0] == 0
    assert (parents[1:] >= 0).all() and (parents < torch.arange(len(tree))).all()
    assert torch.equal(depths[1:], depths[parents[1:]] + 1) and int(depths.max()) <= depth
    assert (tree.scores[1:] <= tree.scores[parents[1:]]).all() and (tree.scores > -torch.inf).all()
    for siblings in tree.children():
        assert len(siblings) <= width
        assert len(set(tree.tokens[siblings].tolist())) == len(siblings)


@pytest.mark.parametrize("name", builder_names())
@pytest.mark.parametrize("conditional", [False, True])
@pytest.mark.parametrize("law", LAWS)
@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    vocab=st.integers(1, 9),
    depth=st.integers(1, 6),
    width=st.integers(1, 9),
    budget=st.integers(1, 60),
)
def test_shape(
    name: str, conditional: bool, law: str, seed: int, vocab: int, depth: int, width: int, budget: int
) -> None:
    scorer = random_scorer(law, conditional=conditional, num_requests=3, depth=depth, vocab=vocab, seed=seed)
    budget = depth + 1 if name == "chain" else budget
    trees = make(name, budget=budget, width=width, depth=depth).build(torch.full((3,), ANCHOR), scorer)
    for request in range(3):
        check_shape(trees.tree(request), budget=budget, width=min(width, vocab), depth=depth)
    padding = ~trees.real
    assert (trees.tokens[padding] == -1).all() and (trees.parents[padding] == -1).all()


@pytest.mark.parametrize("conditional", [False, True])
@pytest.mark.parametrize("law", LAWS)
def test_width_1_is_the_chain(law: str, conditional: bool) -> None:
    for seed in range(20):
        scorer = random_scorer(law, conditional=conditional, num_requests=4, depth=6, vocab=5, seed=seed)
        anchor = torch.full((4,), ANCHOR)
        tree, chain = BestFirst(budget=7, width=1, depth=6).build(anchor, scorer), Chain(depth=6).build(anchor, scorer)
        for request in range(4):
            naive = heap_build(ANCHOR, scorer, budget=7, width=1, depth=6, request=request)
            assert same(tree.tree(request), naive) and same(chain.tree(request), naive)


@pytest.mark.parametrize("conditional", [False, True])
@pytest.mark.parametrize("law", LAWS)
def test_following_a_record_equals_accepting_the_chain(law: str, conditional: bool) -> None:
    for seed in range(20):
        scorer = random_scorer(law, conditional=conditional, num_requests=5, depth=6, vocab=4, seed=seed)
        anchor, chain = torch.full((5,), ANCHOR), Chain(depth=6)
        built = chain.build(anchor, scorer)
        record = built.tokens[:, 1:].clone()
        cut = torch.randint(0, 7, (5,), generator=torch.Generator().manual_seed(seed))
        record[torch.arange(6) >= cut[:, None]] = -1  # what a chain agrees with, and then nothing
        _, accepted = accept_batch(built, record)
        found = chain.replay(anchor, scorer, record)
        assert found.accepted.tolist() == found.spine.tolist() == accepted.tolist() and found.nodes.tolist() == [7] * 5
        assert law == "ties" or accepted.tolist() == torch.minimum(cut, built.num_nodes - 1).tolist()


def random_rules(choose: random.Random) -> dict[str, Any]:
    """Options of a best-first search, each of which is left out more often than not."""
    caps = (DepthCaps(caps=tuple(choose.randint(1, 4) for _ in range(choose.randint(1, 5)))),
            GapCap(beta=choose.uniform(0.1, 3), g0=choose.uniform(0, 2)))  # fmt: skip
    rules: dict[str, Any] = {
        "admit": choose.choice(["fanout", "pop"]),
        "count_root": choose.random() < 0.6,
        "caps": choose.choice([None, None, *caps]),
        "frontier": choose.choice([None, None, None, 1, 2, 4]),
    }
    if rules["admit"] == "pop" and choose.random() < 0.4:
        steps = itertools.accumulate(sorted(choose.uniform(0.01, 0.2) for _ in range(64)), initial=1.0)
        rules["cost"] = Cost(draft=0.5, level=choose.choice([0, 0.03, 0.3]), correction=choose.choice([0, 0.01, 0.1]),
                             verify=tuple(steps))  # fmt: skip
    return rules


def test_equals_the_heap_in_1000_cases() -> None:
    choose = random.Random(0)
    for case in range(1000):
        law, conditional, num_requests = choose.choice(LAWS), choose.random() < 0.7, choose.choice([1, 1, 2, 5])
        depth, vocab, width = choose.randint(1, 7), choose.randint(1, 12), choose.randint(1, 8)
        budget, lookahead = choose.choice([1, 2, 7, 15, 31, 64]), choose.choice([None, 1, 2, 8, 12])
        rules = random_rules(choose) if case % 2 else {}
        scorer = random_scorer(
            law, conditional=conditional, num_requests=num_requests, depth=depth, vocab=vocab, seed=case
        )
        builder = BestFirst(budget=budget, width=width, depth=depth, lookahead=lookahead, **rules)
        trees = builder.build(torch.full((num_requests,), ANCHOR), scorer)
        for request in range(num_requests):
            naive = heap_build(ANCHOR, scorer, budget=budget, width=width, depth=depth, request=request, **rules)
            assert same(trees.tree(request), naive), (case, law, request, rules)


@pytest.mark.parametrize("law", ["smooth", "ties", "holes", "flat"])
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), vocab=st.integers(1, 4), depth=st.integers(1, 4), budget=st.integers(1, 60))
def test_admission_by_pop_takes_the_best_prefixes_of_all(law: str, seed: int, vocab: int, depth: int, budget: int) -> None:
    scorer = random_scorer(law, conditional=True, num_requests=1, depth=depth, vocab=vocab, seed=seed)
    size = {"width": vocab, "depth": depth}
    every = heap_build(ANCHOR, scorer, budget=400, **size)  # all paths there are
    tree = BestFirst(budget=budget, admit="pop", **size).build(torch.tensor([ANCHOR]), scorer).tree(0)
    assert tree.scores.tolist() == sorted(every.scores.tolist(), reverse=True)[:budget]
    check_shape(tree, budget=budget, width=vocab, depth=depth)


class Tie(PathScorer):
    """A leaf of a closed depth and a node that could be expanded have one score, and a cost may separate them."""

    def expand(self, lanes: Lanes) -> torch.Tensor:
        log_q = super().expand(lanes).clone()
        log_q[lanes.slot == 0, :3] = log_q.new_tensor([-0.125, -0.25, -2.0])
        log_q[(lanes.slot == 1) & (lanes.token == 100), :2] = log_q.new_tensor([-0.25, -1.875])
        return log_q


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("budget", [7, 15, 31])
def test_a_tie_where_a_cost_stops_is_settled_as_the_heap_does(budget: int, seed: int) -> None:
    rows = -6 - 4 * torch.rand((64, 5), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    scorer = Tie(rows.sort(-1, descending=True).values, torch.tensor([seed]), 3)
    cost = Cost(draft=0.0, correction=0.1, verify=tuple(1 + 0.001 * n for n in range(100)))
    rules: dict[str, Any] = {"budget": budget, "width": 5, "depth": 3, "admit": "pop", "frontier": 2, "cost": cost}
    assert same(BestFirst(**rules).build(torch.tensor([ANCHOR]), scorer).tree(0), heap_build(ANCHOR, scorer, **rules))


@pytest.mark.parametrize("admit", ["fanout", "pop"])
def test_a_frontier_ends_where_nothing_is_left_to_expand(admit: Any) -> None:
    log_q = torch.log_softmax(torch.zeros((1, 3, 4), dtype=torch.float64), -1)
    log_q[:, 1] = -torch.inf
    tree = BestFirst(budget=8, width=2, depth=3, admit=admit, frontier=2).build(torch.tensor([ANCHOR]), MarginalScorer(log_q)).tree(0)
    assert len(tree) == 3 and int(tree.depths.max()) == 1


def test_half_precision_scores_grow_the_tree_of_their_exact_values() -> None:
    log_q = table("smooth", (2, 4, 9), 3).bfloat16()
    anchor, size = torch.full((2,), ANCHOR), {"budget": 30, "width": 4, "depth": 4}
    half, exact = (BestFirst(**size).build(anchor, MarginalScorer(values)) for values in (log_q, log_q.double()))
    assert same(half, exact)


def test_a_level_that_does_not_pay_ends_the_tree_there() -> None:
    """By hand, children of 0.5 and 0.2 and a second a round. With a second a level the root gives 1 / 2, its child with a
    level 1.5 / 3, which is no more, as a leaf 1.5 / 2; its sibling follows as a leaf at the depth that is left."""
    probabilities = torch.tensor([0.5, 0.2, 0.1, 0.1, 0.1], dtype=torch.float64)
    scorer = MarginalScorer(probabilities.log().expand(1, 3, 5).contiguous())
    flat = Cost(draft=0.0, level=1.0, correction=0.0, verify=(1.0,) * 99)
    size: dict[str, Any] = {"budget": 9, "width": 2, "depth": 3, "admit": "pop"}
    tree = BestFirst(**size, cost=flat).build(torch.tensor([ANCHOR]), scorer).tree(0)
    assert tree.tokens.tolist() == [ANCHOR, 0, 1] and tree.depths.tolist() == [0, 1, 1]
    # At 0.3 s the second level pays, 1 / 1.3 < 1.5 / 1.6, the third does not, 1.75 / 1.9; what is left are leaves.
    cheap = Cost(draft=0.0, level=0.3, correction=0.0, verify=(1.0,) * 99)
    tree = BestFirst(**size, cost=cheap).build(torch.tensor([ANCHOR]), scorer).tree(0)
    assert tree.depths.tolist() == [0, 1, 2, 1, 2, 2, 2]


def test_a_cost_stops_at_the_first_node_that_does_not_pay() -> None:
    stopped = []
    for seed in range(30):
        scorer = random_scorer("smooth", conditional=True, num_requests=1, depth=6, vocab=5, seed=seed)
        size: dict[str, Any] = {"budget": 120, "width": 4, "depth": 6, "admit": "pop"}
        anchor = torch.tensor([ANCHOR])
        whole = BestFirst(**size).build(anchor, scorer).tree(0)
        cost = Cost(draft=0.3, correction=0.01, verify=tuple(1 + 0.02 * n for n in range(40)))
        tree = BestFirst(**size, cost=cost).build(anchor, scorer).tree(0)
        rates, gain, inner = [], 0.0, 0
        for nodes, (score, depth) in enumerate(zip(whole.scores.tolist(), whole.depths.tolist(), strict=True), start=1):
            gain, inner = gain + math.exp(score), inner + (depth < 6)
            rates.append(gain / (0.3 + 0.01 * inner + 1 + 0.02 * (nodes - 1)))
        falls = [place for place in range(1, len(rates)) if rates[place] <= rates[place - 1]]
        assert len(tree) == falls[0] and torch.equal(tree.tokens, whole.tokens[: len(tree)])
        stopped.append(len(tree))
    assert len(set(stopped)) > 5  # trees of the sure are small
    free = Cost(draft=1.0, correction=0.0, verify=(1.0,) * 200)
    assert len(BestFirst(**size, cost=free).build(anchor, scorer).tree(0)) == 120


def test_a_frontier_as_wide_as_the_tree_changes_nothing() -> None:
    scorer = PathScorer(table("smooth", (64, 9), 2), torch.arange(4), 6)
    for admit in ("fanout", "pop"):
        size: dict[str, Any] = {"budget": 40, "width": 4, "admit": admit}
        anchor = torch.full((4,), ANCHOR)
        free, wide = (BestFirst(**size, frontier=frontier).build(anchor, scorer) for frontier in (None, 40))
        assert same(free, wide)
        assert scorer.num_calls == 6  # one a depth


def test_caps() -> None:
    log_q = np.array([[-0.01, -5.0, -6.0, -7.0], [-1.0, -1.0, -1.4, -1.6], [0.0, -np.inf, -np.inf, -np.inf]])
    slots = np.array([0, 1, 2])
    assert GapCap(beta=2.0, g0=1.0)(slots, log_q).tolist() == [1, 4, 1]
    assert GapCap(g0=1e9)(slots[:2], log_q[:2]).tolist() == [4, 4]
    assert DepthCaps(caps=(3, 1))(slots, log_q).tolist() == [3, 1, 4]
    with pytest.raises(ValueError, match="at least 1"):
        DepthCaps(caps=(2, 0))


def test_equals_the_heap_in_1000_trees_of_255_nodes_with_the_attention_correction(tiny64: Target) -> None:
    """In float64, where one lane and many lanes round alike to 1e-12, so no two nodes change places."""
    drafter = make_drafter(tiny64, correction={"name": "attention"})
    randomise(drafter.correction, scale=0.5)
    size, at_once = {"budget": 255, "width": 7, "depth": 15}, 50
    for batch in range(20):
        generator = torch.Generator().manual_seed(batch)
        shape = at_once, size["depth"], tiny64.hidden_size
        scale = torch.linspace(0.5, 8, at_once, dtype=torch.float64)[:, None, None]  # from flat laws to sure ones
        hidden = scale * torch.randn(shape, generator=generator, dtype=torch.float64)
        anchor = torch.full((at_once,), ANCHOR)
        trees = BestFirst(**size).build(anchor, drafter.scorer(hidden, anchor))
        for request in range(at_once):
            tree = trees.tree(request)
            naive = heap_build(ANCHOR, drafter.scorer(hidden[request : request + 1], anchor[:1]), **size)
            assert same(replace(tree, scores=naive.scores), naive), (batch, request)
            torch.testing.assert_close(tree.scores, naive.scores, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("law", ["ties", "flat", "float32"])
@pytest.mark.parametrize(
    ("depth", "width", "budget"), [(31, 7, 255), (31, 1, 32), (40, 2, 90), (3, 64, 255), (15, 7, 255)]
)
def test_equals_the_heap_when_it_is_large(law: str, depth: int, width: int, budget: int) -> None:
    scorer = PathScorer(table(law, (64, 80), 3), torch.tensor([1, 2]), depth)
    trees = BestFirst(budget=budget, width=width).build(torch.full((2,), ANCHOR), scorer)
    for request in range(2):
        assert same(
            trees.tree(request), heap_build(ANCHOR, scorer, budget=budget, width=width, depth=depth, request=request)
        )


@pytest.mark.parametrize("name", builder_names())
@pytest.mark.parametrize("law", LAWS)
def test_a_batch_equals_solo_builds(name: str, law: str) -> None:
    seeds = torch.arange(6)
    rows = table(law, (64, 8), 5)
    builder = make(name, budget=40, width=4, depth=5)
    together = builder.build(seeds, PathScorer(rows, seeds, 5))
    for request in range(6):
        alone = builder.build(seeds[request : request + 1], PathScorer(rows, seeds[request : request + 1], 5))
        assert same(together.tree(request), alone.tree(0))


@pytest.mark.parametrize("law", LAWS)
def test_a_smaller_budget_is_a_prefix(law: str) -> None:
    scorer = PathScorer(table(law, (64, 8), 9), torch.tensor([4]), 5)
    anchor = torch.tensor([ANCHOR])
    large = BestFirst(budget=60, width=3).build(anchor, scorer).tree(0)
    for budget in range(1, 60):
        small = BestFirst(budget=budget, width=3).build(anchor, scorer).tree(0)
        assert len(small) == min(budget, len(large))
        for field in ("tokens", "parents", "depths", "scores"):
            assert torch.equal(getattr(small, field), getattr(large, field)[: len(small)])


def test_a_full_tree_has_every_path() -> None:
    scorer = MarginalScorer(table("smooth", (1, 3, 4), 0))
    tree = BestFirst(budget=200, width=9).build(torch.tensor([ANCHOR]), scorer).tree(0)
    assert len(tree) == 1 + 4 + 16 + 64


def test_a_path_scorer_that_ignores_the_path_is_marginal() -> None:
    log_q = table("smooth", (2, 4, 6), 1)

    class Indifferent(MarginalScorer):
        children = PathScorer.children  # one search a node, not one a depth

    builder, anchor = BestFirst(budget=50, width=3), torch.tensor([1, 2])
    assert same(builder.build(anchor, MarginalScorer(log_q)), builder.build(anchor, Indifferent(log_q)))


def test_lookahead_saves_calls() -> None:
    calls = []
    for lookahead in (1, 8):
        scorer = PathScorer(table("smooth", (64, 50), 2), torch.tensor([3]), 15)
        BestFirst(budget=255, width=7, lookahead=lookahead).build(torch.tensor([ANCHOR]), scorer)
        calls.append((scorer.num_calls, scorer.num_lanes))
    assert calls[0] == (37, 37)  # one call an expansion, ceil(254 / 7) of them, none in vain
    assert calls[1][0] < 20 and calls[1][1] < 80


@pytest.mark.parametrize("kind", ["smooth", "flat", "float32"])
def test_lookahead_lasts_while_a_tree_of_popped_nodes_grows(kind: str) -> None:
    """Almost every node of it is expanded: that is no waste, after which one node a call would be scored."""
    scorer = PathScorer(table(kind, (64, 50), 2), torch.tensor([3]), 15)
    tree = BestFirst(budget=255, width=7, admit="pop").build(torch.tensor([ANCHOR]), scorer).tree(0)
    assert len(tree) == 255 and scorer.num_calls < 30 and scorer.num_lanes < 400


class Pairs:
    """A correction that reads a node's slot and token [D, V, V]; its guess goes wrong behind so many nodes."""

    def __init__(self, laws: torch.Tensor, right: int) -> None:
        self.laws, self.right, self.num_calls = laws, right, 0

    def reserve(self, capacity: int) -> None: ...

    def step(self, lanes: Lanes) -> torch.Tensor:
        self.num_calls += 1
        return self.laws[lanes.slot, lanes.token]

    def step_among(self, lanes: Lanes, columns: torch.Tensor) -> torch.Tensor:
        return self.step(lanes).gather(1, columns)

    def guess(self, anchor: torch.Tensor, depth: int, token_ids: Any) -> torch.Tensor | None:
        path = [anchor]
        for slot in range(depth - 1):
            best, worst = self.laws[slot, path[-1]].argmax(-1), self.laws[slot, path[-1]].argmin(-1)
            path.append(token_ids(best if slot < self.right - 1 else worst))
        return torch.stack(path, 1) if self.right else None


@pytest.mark.parametrize("options", [{}, {"caps": DepthCaps(caps=(2, 1, 3))}, {"cost": Cost(draft=2.0, correction=0.1, level=0.05, verify=(1.0, 1.1, 1.3))}], ids=["plain", "caps", "cost"])
@pytest.mark.parametrize("law", ["smooth", "ties", "one_hot", "flat"])
@pytest.mark.parametrize("budget", [1, 2, 5, 40])
def test_a_guessed_path_saves_calls_and_changes_no_tree(law: str, budget: int, options: dict[str, Any]) -> None:
    depth, vocab, calls = 6, 5, {}
    laws, anchors = table(law, (depth, vocab, vocab), 4), torch.tensor([2, 4])
    for right in (0, 1, 3, depth):
        scorer = ConditionalScorer(Pairs(laws, right), depth=depth, num_requests=2, d2t=torch.arange(vocab))
        size = {"budget": budget, "width": 3, "depth": depth, "admit": "pop", **options}
        trees = BestFirst(**size).build(anchors, scorer)
        calls[right] = scorer.state.num_calls
        for request, anchor in enumerate(anchors.tolist()):
            assert same(trees.tree(request), heap_build(anchor, scorer, **size)), right
    if law == "one_hot" and budget > 2 and not options:
        assert calls[0] == min(depth, budget - 1) and calls[depth] == 1


class Spine(Scorer):
    """A certain path whose deeper siblings are the better ones, so that what looks best at first is scored in vain."""

    width_limit, depth, num_requests = 7, 31, 1

    def start(self, capacity: int) -> None:
        self.on_spine = torch.zeros(capacity, dtype=torch.bool)
        self.num_lanes = 0

    def expand(self, lanes: Lanes) -> torch.Tensor:
        spine = (lanes.slot == 0) | ((lanes.token == 0) & self.on_spine[lanes.parent])
        self.on_spine[lanes.expansion] = spine
        self.num_lanes += len(spine)
        siblings = lanes.slot.unsqueeze(1) - 100.0 - torch.arange(1, 7) / 8
        return torch.where(spine.unsqueeze(1), torch.cat([torch.zeros(len(spine), 1), siblings], 1), -1000.0)

    def token_ids(self, columns: torch.Tensor) -> torch.Tensor:
        return columns


def test_waste_is_bounded() -> None:
    """When the room for nodes that are scored in vain is used up, the builder goes on without any."""
    scorer, builder = Spine(), BestFirst(budget=255, width=7, lookahead=16)
    tree = builder.build(torch.tensor([ANCHOR]), scorer).tree(0)
    assert scorer.num_lanes > 74 + 4 * 16
    assert len(scorer.on_spine) == 255 + 74 + 4 * 16
    assert same(tree, heap_build(ANCHOR, scorer, budget=255, width=7, depth=31))


@pytest.mark.parametrize(
    "options", [{"budget": 0}, {"width": 0}, {"depth": -1}, {"lookahead": 0}, {"frontier": 0}, {"admit": "push"}]
)
def test_impossible_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=str(*options.values())):
        BestFirst(**{"budget": 3, "width": 2, **options})


def test_a_cost_needs_admission_by_pop() -> None:
    with pytest.raises(ValueError, match="admit = 'pop'"):
        BestFirst(budget=3, width=2, cost=Cost(draft=1, correction=0, verify=(1.0,)))
    with pytest.raises(ValueError, match="at least 0"):
        Cost(draft=-1, correction=0, verify=(1.0,))


def test_a_depth_beyond_the_slots_is_refused() -> None:
    with pytest.raises(ValueError, match="depth 5 exceeds the 3 slots"):
        Chain(depth=5).build(torch.tensor([ANCHOR]), MarginalScorer(table("smooth", (1, 3, 4), 0)))


def test_unknown_builders_are_refused() -> None:
    assert builder_names() == ["best-first", "chain"]
    with pytest.raises(ValueError, match="did you mean 'chain'"):
        load_builder("chian")
