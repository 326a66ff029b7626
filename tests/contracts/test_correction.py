"""The law of a correction: `step` folded along a path is `forward` under teacher forcing; siblings never leak; a fresh one changes nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.tiny_drafters import CORRECTIONS, make_drafter, name_of, randomise
from tests.tolerances import assert_close
from treedraft.drafter import Drafter
from treedraft.targets.hf import Target
from treedraft.trees.best_first import BestFirst
from treedraft.trees.chain import Chain
from treedraft.trees.naive import heap_build
from treedraft.trees.scorers import CandidateScorer, Lanes, MarginalScorer, chain_lanes

REQUESTS, DEPTH = 3, 5
# root; a b c; d e under a; f under b; g under d; h under e; i under g
PARENTS = [-1, 0, 0, 0, 1, 1, 2, 4, 5, 7]
DEPTHS = [0, 1, 1, 1, 2, 2, 2, 3, 3, 4]

every_correction = pytest.mark.parametrize("correction", CORRECTIONS, ids=name_of)


def setup(target: Target, correction: dict, *, random: bool = True) -> tuple[Drafter, Tensor, Tensor]:
    """A drafter, hidden states [R, D, H] and node tokens [R, N]."""
    drafter = make_drafter(target, correction=correction, random=random)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn((REQUESTS, DEPTH, target.hidden_size), generator=generator, dtype=target.dtype)
    tokens = torch.randint(0, target.vocab_size, (REQUESTS, len(PARENTS)), generator=generator)
    return drafter, hidden, tokens


@torch.no_grad()
def step_through(drafter: Drafter, hidden: Tensor, tokens: Tensor, requests: list[int], *, one_by_one: bool) -> Tensor:
    """Logits [R, N, V] of the children of every node; requests share calls, level by level or with uneven progress."""
    state, capacity = drafter.correction.start(hidden, drafter.lent), len(PARENTS)
    state.reserve(capacity)
    logits = hidden.new_full((len(hidden), capacity, len(drafter.d2t)), torch.nan)
    if one_by_one:
        # Request k is k nodes behind the first, so that one call has lanes of different depths.
        calls = [[(request, turn - lag) for lag, request in enumerate(requests)] for turn in range(capacity + len(requests))]
    else:
        calls = [[(request, node) for request in requests for node in range(capacity) if DEPTHS[node] == level] for level in range(5)]
    for call in calls:
        nodes = [(request, node) for request, node in call if 0 <= node < capacity]
        if not nodes:
            continue
        request, node = torch.tensor(nodes).unbind(1)
        parent = torch.tensor(PARENTS)[node]
        lanes = Lanes(
            request=request,
            slot=torch.tensor(DEPTHS)[node],
            token=tokens[request, node],
            expansion=request * capacity + node,
            parent=torch.where(parent < 0, -1, request * capacity + parent),
        )
        logits[request, node] = state.step(lanes)
    return logits


@every_correction
def test_a_fresh_correction_changes_nothing_bit_for_bit(tiny: Target, correction: dict) -> None:
    drafter, hidden, tokens = setup(tiny, correction, random=False)
    with torch.no_grad():
        expected = drafter.lent.head(hidden)
        assert torch.equal(drafter.correction(hidden, tokens[:, :DEPTH], drafter.lent), expected)
        state = drafter.correction.start(hidden, drafter.lent)
        state.reserve(1)
        request, zero = torch.arange(REQUESTS), torch.zeros(REQUESTS, dtype=torch.int64)
        root = state.step(Lanes(request=request, slot=zero, token=tokens[:, 0], expansion=request, parent=zero - 1))
        # A matrix product may round otherwise when it has other rows beside it, so both candidates are given.
        assert torch.equal(root, expected[:, 0]) or torch.equal(root, drafter.lent.head(hidden[:, 0]))


@every_correction
@pytest.mark.parametrize("one_by_one", [False, True], ids=["levels", "uneven"])
def test_folding_step_along_a_path_is_teacher_forcing(tiny64: Target, correction: dict, one_by_one: bool) -> None:
    drafter, hidden, tokens = setup(tiny64, correction)
    logits = step_through(drafter, hidden, tokens, [2, 0, 1], one_by_one=one_by_one)
    for leaf in range(len(PARENTS)):
        path = [leaf]
        while PARENTS[path[0]] >= 0:
            path.insert(0, PARENTS[path[0]])
        with torch.no_grad():
            expected = drafter.correction(hidden[:, : len(path)], tokens[:, path], drafter.lent)
        assert_close(logits[:, path], expected)


@every_correction
def test_siblings_and_other_requests_never_leak(tiny64: Target, correction: dict) -> None:
    drafter, hidden, tokens = setup(tiny64, correction)
    before = step_through(drafter, hidden, tokens, [0, 1, 2], one_by_one=False)
    changed = tokens.clone()
    changed[0, 1] = (changed[0, 1] + 1) % tiny64.vocab_size  # node a of request 0; below it d e g h i
    after = step_through(drafter, hidden, changed, [0, 1, 2], one_by_one=False)
    others = [0, 2, 3, 6]
    assert torch.equal(before[0, others], after[0, others])
    assert torch.equal(before[1:], after[1:])
    solo = step_through(drafter, hidden, tokens, [1], one_by_one=True)
    assert_close(solo[1], before[1])


@every_correction
def test_tokens_matter_where_they_should(tiny64: Target, correction: dict) -> None:
    """A parent token moves its children's law, unless there is no correction or it reads hidden states alone."""
    drafter, hidden, tokens = setup(tiny64, correction)
    before = step_through(drafter, hidden, tokens, [0], one_by_one=False)[0]
    changed = (tokens + 1) % tiny64.vocab_size
    after = step_through(drafter, hidden, changed, [0], one_by_one=False)[0]
    blind = correction["name"] == "none" or correction.get("inputs") == "hidden"
    assert torch.equal(before, after) == blind
    if blind:
        assert_close(before[1], before[2])


@every_correction
def test_supervised_selects_rows(tiny64: Target, correction: dict) -> None:
    drafter, hidden, tokens = setup(tiny64, correction)
    supervised = torch.rand((REQUESTS, DEPTH), generator=torch.Generator().manual_seed(2)) < 0.5
    with torch.no_grad():
        everything = drafter.correction(hidden, tokens[:, :DEPTH], drafter.lent)
        selected = drafter.correction(hidden, tokens[:, :DEPTH], drafter.lent, supervised)
        none = drafter.correction(hidden, tokens[:, :DEPTH], drafter.lent, torch.zeros_like(supervised))
    assert_close(selected, everything[supervised])
    assert none.shape == (0, tiny64.vocab_size)


@every_correction
def test_a_later_token_reaches_no_earlier_slot(tiny64: Target, correction: dict) -> None:
    drafter, hidden, tokens = setup(tiny64, correction)
    previous, moved = tokens[:, :DEPTH], hidden.clone()
    changed = previous.clone()
    changed[:, 3:] = (changed[:, 3:] + 7) % tiny64.vocab_size
    moved[:, 3:] += 1
    with torch.no_grad():
        before = drafter.correction(hidden, previous, drafter.lent)
        after = drafter.correction(moved, changed, drafter.lent)
    assert_close(after[:, :3], before[:, :3])
    assert not torch.allclose(after[:, 3:], before[:, 3:])


@every_correction
def test_every_weight_is_trained(tiny64: Target, correction: dict) -> None:
    drafter, hidden, tokens = setup(tiny64, correction)
    if not list(drafter.correction.parameters()):
        return
    randomise(drafter.correction, 1)
    drafter.correction(hidden, tokens[:, :DEPTH], drafter.lent).log_softmax(-1)[..., 0].sum().backward()
    for name, weight in drafter.correction.named_parameters():
        assert weight.grad is not None and bool(weight.grad.abs().sum() > 0), name


@every_correction
def test_a_conditional_tree_is_scored_along_its_own_paths(tiny64: Target, correction: dict) -> None:
    """Scores of a best-first tree are sums of teacher-forced log q; `none` gives the marginal tree node for node."""
    drafter, hidden, tokens = setup(tiny64, correction)
    builder = BestFirst(budget=25, width=3, depth=DEPTH)
    with torch.no_grad():
        trees = builder.build(tokens[:, 0], drafter.scorer(hidden, tokens[:, 0]))
        for request in range(REQUESTS):
            tree = trees.tree(request)
            for node in range(1, len(tree)):
                path = tree.path_to(node)
                law = drafter.correction(hidden[request, None, : len(path) - 1], tree.tokens[path[:-1]][None], drafter.lent)
                expected = law.log_softmax(-1)[0, torch.arange(len(path) - 1), tree.tokens[path[1:]]].sum()
                assert_close(tree.scores[node], expected)
        marginal = builder.build(tokens[:, 0], drafter.scorer(hidden, tokens[:, 0], "marginal"))
    if correction["name"] == "none":
        assert torch.equal(marginal.tokens, trees.tokens) and torch.equal(marginal.parents, trees.parents)


@every_correction
def test_the_middle_rung_is_corrected_along_the_greedy_path(tiny64: Target, correction: dict) -> None:
    """Per-depth laws are those of the greedy chain under teacher forcing, whatever branch a node is on."""
    drafter, hidden, tokens = setup(tiny64, correction)
    anchor = tokens[:, 0]
    with torch.no_grad():
        conditional, per_depth = (drafter.scorer(hidden, anchor, rung) for rung in ("conditional", "per_depth"))
        chain, same_chain = (Chain(depth=DEPTH).build(anchor, scorer) for scorer in (conditional, per_depth))
        assert torch.equal(chain.tokens, same_chain.tokens)
        forced = drafter.correction(hidden, chain.tokens[:, :-1], drafter.lent).log_softmax(-1)
        assert isinstance(per_depth, MarginalScorer)  # which an uncorrected drafter's scorer always is
        for slot in range(DEPTH):
            assert_close(per_depth.expand(chain_lanes(torch.arange(REQUESTS), slot, anchor, DEPTH)), forced[:, slot])


@every_correction
def test_a_guess_is_the_path_of_best_children(tiny64: Target, correction: dict) -> None:
    """Where a correction guesses that path, it is right, its nodes may be scored together, and the tree is the heap's."""
    drafter, hidden, tokens = setup(tiny64, correction)
    anchor = tokens[:, 0]
    with torch.no_grad():
        chain = Chain(depth=DEPTH).build(anchor, drafter.scorer(hidden, anchor))
        state = drafter.correction.start(hidden, drafter.lent)
        state.reserve(DEPTH)
        guess = state.guess(anchor, DEPTH, lambda columns: drafter.d2t[columns])
        assert (guess is not None) == (correction["name"] == "markov" and correction.get("variant", "vanilla") == "vanilla")
        if guess is not None:
            assert torch.equal(guess, chain.tokens[:, :-1])
        spine = drafter.scorer(hidden, anchor).spine(anchor, DEPTH, 3)
        if spine is not None:
            assert torch.equal(spine[0][..., 0], chain.tokens[:, 1:])
            assert_close(spine[1][..., 0].double().cumsum(1), chain.scores[:, 1:])
        options = {"budget": 25, "width": 3, "depth": DEPTH, "admit": "pop"}
        for request in range(REQUESTS):
            own = slice(request, request + 1)
            tree = BestFirst(**options).build(anchor[own], drafter.scorer(hidden[own], anchor[own])).tree(0)
            heap = heap_build(int(anchor[request]), drafter.scorer(hidden[own], anchor[own]), **options)
            assert torch.equal(tree.tokens, heap.tokens) and torch.equal(tree.parents, heap.parents)
            assert_close(tree.scores, heap.scores)


@every_correction
def test_some_columns_are_those_of_all(tiny64: Target, correction: dict) -> None:
    """Stepping among candidates gives those logits; as a scorer, laws over the whole vocabulary with an exact rest."""
    drafter, hidden, tokens = setup(tiny64, correction)
    with torch.no_grad():
        whole, part = (drafter.correction.start(hidden, drafter.lent) for _ in range(2))
        columns = torch.stack([torch.randperm(len(drafter.d2t))[:9] for _ in range(REQUESTS)])
        for state in (whole, part):
            state.reserve(DEPTH)
        for slot in range(DEPTH):
            lanes = chain_lanes(torch.arange(REQUESTS), slot, tokens[:, slot], DEPTH)
            assert_close(part.step_among(lanes, columns), whole.step(lanes).gather(1, columns))
        anchor, candidates = tokens[:, 0], 20
        if correction["name"] == "none":
            return
        scorer, full = drafter.scorer(hidden, anchor, candidates=candidates), drafter.scorer(hidden, anchor)
        assert isinstance(scorer, CandidateScorer)
        base = drafter.lent.head(hidden)
        assert torch.equal(scorer.columns, base.topk(candidates).indices.sort(-1).values)
        for each in (scorer, full):
            each.start(DEPTH)
        lanes = chain_lanes(torch.arange(REQUESTS), 0, anchor, DEPTH)
        corrected, columns = full.expand(lanes), scorer.columns[:, 0]
        state = drafter.correction.start(hidden, drafter.lent)
        state.reserve(DEPTH)
        logits = state.step(lanes)
        mixed = base[:, 0].scatter(1, columns, logits.gather(1, columns))  # corrected here, the backbone's there
        expected = mixed.log_softmax(-1)
        got = scorer.expand(lanes)
        assert_close(got.gather(1, columns), expected.gather(1, columns))
        assert (got.exp().sum(1) <= 1 + 1e-12).all() and int((got > -torch.inf).sum()) == REQUESTS * candidates
        assert corrected.shape == got.shape
        everything = drafter.scorer(hidden, anchor, candidates=len(drafter.d2t))
        everything.start(DEPTH)
        assert everything.candidates is None
        assert_close(everything.expand(lanes), corrected)
        per_depth = drafter.scorer(hidden, anchor, "per_depth", candidates=candidates)
        assert per_depth.candidates is not None and torch.equal(per_depth.candidates, drafter.d2t[scorer.columns])
        assert_close(per_depth.expand(lanes), got)
        size = {"budget": 12, "width": 3, "depth": DEPTH}
        trees = BestFirst(**size).build(anchor, scorer)
        for request in range(REQUESTS):
            alone = drafter.scorer(hidden[request : request + 1], anchor[:1], candidates=candidates)
            naive = heap_build(int(anchor[request]), alone, **size)
            assert torch.equal(trees.tree(request).tokens, naive.tokens) and torch.equal(trees.tree(request).parents, naive.parents)
