"""The law of acceptance rules for drawn trees, by exact enumeration of every draft and every decision."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from tests.contracts.tree_tables import PathScorer, table
from tests.enumerate import Laws, Tape, distance, law_of, laws
from treedraft.config import LOSSY, Sampling
from treedraft.targets.sampling import Sampler
from treedraft.trees import rules
from treedraft.trees.accept import accept
from treedraft.trees.drawn import DrawnTree, draw_tree
from treedraft.trees.mask import depths_of
from treedraft.trees.tree import DraftTree

P = torch.tensor([0.45, 0.30, 0.20, 0.05], dtype=torch.float64)
Q = torch.tensor([0.30, 0.10, 0.20, 0.40], dtype=torch.float64)


def draw(q: Laws, vocab: int, widths: tuple[int, ...], dice: Tape, *, replacement: bool = True) -> DrawnTree:
    """What `draw_tree` says, decided by the dice."""
    tokens, parents, paths, attempts = [0], [-1], [()], [[]]
    level, law_rows, law_of_node = [0], [], [-1]
    for width in widths:
        following = []
        for node in level:
            law = q(paths[node])
            law_of_node[node] = len(law_rows)
            law_rows.append(law)
            children: dict[int, int] = {}
            for _ in range(width):
                if float(law.sum()) == 0:
                    break
                token = dice.pick(law)
                if token not in children:
                    children[token] = len(tokens)
                    following.append(len(tokens))
                    tokens.append(token)
                    parents.append(node)
                    paths.append((*paths[node], token))
                    attempts.append([])
                    law_of_node.append(-1)
                attempts[node].append(children[token])
                if not replacement:
                    law = law.clone()
                    law[token] = 0
                    law = law / law.sum() if float(law.sum()) > 0 else law
        level = following
    depths = depths_of(torch.tensor(parents))
    tree = DraftTree(tokens=torch.tensor(tokens), parents=torch.tensor(parents), depths=depths, scores=-depths.double())
    stacked = torch.stack(law_rows) if law_rows else torch.zeros((0, vocab), dtype=torch.float64)
    return DrawnTree(tree=tree, attempts=attempts, laws=stacked, law_of=torch.tensor(law_of_node))


def node_law(drawn: DrawnTree, p: Laws) -> Callable[[int], Tensor]:
    tree = drawn.tree
    return lambda node: p(tuple(tree.tokens[tree.path_to(node)[1:]].tolist()))


Decide = Callable[[DrawnTree, Callable[[int], Tensor], Tape], tuple[list[int], int]]  # a tree, p after a node, dice


def decide_with(rule: rules.Rule) -> Decide:
    return lambda drawn, law, dice: rules.walk(drawn, law, rule, dice)


def round_with(
    rule: str | Decide, p: Laws, q: Laws, vocab: int, widths: tuple[int, ...]
) -> Callable[[Tape], tuple[int, ...]]:
    """A round under the rule of that name, or another."""
    decide = rule if not isinstance(rule, str) else rules.block if rule == "block" else decide_with(rules.RULES[rule])

    def verify(dice: Tape) -> tuple[int, ...]:
        drawn = draw(q, vocab, widths, dice, replacement=rule != "sequoia")
        path, after = decide(drawn, node_law(drawn, p), dice)
        return (*drawn.tree.tokens[path[1:]].tolist(), after)

    return verify


CASES = [
    ("ratio", 4, (1, 1)), ("ratio", 3, (1, 1, 1)), ("block", 4, (1, 1)), ("block", 3, (1, 1, 1)), ("block", 3, ()),
    ("spec_infer", 4, (2,)), ("spec_infer", 3, (3,)), ("spec_infer", 3, (2, 1)), ("sequoia", 4, (2,)), ("sequoia", 4, (4,)),
    ("sequoia", 3, (2, 1)), ("sequoia", 3, (1, 3)), ("point_mass", 4, (2,)), ("point_mass", 3, (2, 1)), ("k_seq", 4, (2,)),
    ("k_seq", 3, (3,)), ("k_seq", 3, (2, 1)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "vocab", "widths"), CASES)
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 10**6), other=st.integers(0, 10**6), zeros=st.booleans(), kind=st.sampled_from(["any", "equal", "greedy"]))
def test_the_output_has_the_law_of_the_target(
    name: str, vocab: int, widths: tuple[int, ...], seed: int, other: int, zeros: bool, kind: str
) -> None:
    """Also where ids cannot be drawn, where p = q, and at temperature 0, where p is one id and no other is ever kept."""
    p = laws(vocab, seed, zeros=zeros, greedy=kind == "greedy")
    q = p if kind == "equal" else laws(vocab, other, zeros=zeros)
    assert distance(p, vocab, len(widths) + 1, round_with(name, p, q, vocab, widths)) < 1e-12


@pytest.mark.parametrize("name", ["ratio", "block", "spec_infer", "sequoia", "point_mass", "k_seq"])
def test_at_temperature_0_a_draft_is_kept_only_if_it_is_the_argmax(name: str) -> None:
    """q > 0 and p > q at token 0 of the raw laws, but the argmax of p is token 1."""
    raw = torch.tensor([0.30, 0.50, 0.10, 0.05, 0.05], dtype=torch.float64)
    q = torch.tensor([0.22, 0.20, 0.20, 0.19, 0.19], dtype=torch.float64)
    greedy = Sampler(Sampling(temperature=0.0), [0], seed=0, vocab_size=5).law(raw.log(), [])
    widths = (1,) if name in ("ratio", "block") else (2,)
    for p, kept in ((greedy, {1}), (raw, {0, 1, 2, 3, 4})):
        emitted = law_of(lambda dice, p=p: round_with(name, lambda _: p, lambda _: q, 5, widths)(dice)[0])
        assert set(emitted) == kept


@pytest.mark.parametrize("name", ["ratio", "spec_infer", "sequoia", "k_seq", "block"])
def test_equal_laws_are_never_rejected(name: str) -> None:
    p = laws(3, 4)

    def depth_reached(dice: Tape) -> int:
        drawn = draw(p, 3, (1, 1), dice)
        law = node_law(drawn, p)
        return len((rules.block(drawn, law, dice) if name == "block" else rules.walk(drawn, law, rules.RULES[name], dice))[0])

    assert law_of(depth_reached).keys() == {3}


def expected_length(name: str, p: Laws, q: Laws, vocab: int, widths: tuple[int, ...]) -> float:
    verify = round_with(name, p, q, vocab, widths)
    return sum(length * weight for length, weight in law_of(lambda dice: len(verify(dice))).items())


def test_acceptance_is_what_theory_says() -> None:
    """One draw is kept with probability sum min(p, q); block verification keeps no less of a chain than the ratio rule."""
    p, q = (lambda _: P), (lambda _: Q)
    assert abs(expected_length("ratio", p, q, 4, (1,)) - 1 - float(torch.minimum(P, Q).sum())) < 1e-12
    gains = []
    for seed in range(12):
        p, q = laws(3, seed), laws(3, seed + 70)
        ratio, block = (expected_length(name, p, q, 3, (1, 1, 1)) for name in ("ratio", "block"))
        assert block >= ratio - 1e-12
        gains.append(block - ratio)
    assert max(gains) > 0.01


@pytest.mark.parametrize("draft_temperature", [0.0, 0.5, 2.0])
def test_sampler_match_is_lossless_however_drafts_are_chosen(draft_temperature: float) -> None:
    """Greedy or drawn at another temperature than the target's: the law stays, what is accepted is sum p q."""
    logits = torch.tensor([2.0, 1.5, 1.0, 0.5], dtype=torch.float64)
    p = logits.softmax(-1)
    q = (logits / draft_temperature).softmax(-1) if draft_temperature else torch.eye(4, dtype=torch.float64)[0]

    def verify(dice: Tape) -> tuple[int, ...]:
        tree = draw(lambda _: q, 4, (1, 1), dice).tree
        path, after = accept(tree, lambda _: dice.pick(p))
        return (*tree.tokens[path[1:]].tolist(), after)

    assert distance(lambda _: p, 4, 3, verify) < 1e-12
    kept = float((p * q).sum())
    length = sum(length * weight for length, weight in law_of(lambda dice: len(verify(dice))).items())
    assert length == pytest.approx(1 + kept + kept**2, abs=1e-12)


def test_the_lossy_rule_is_lossy_and_marked() -> None:
    p, q = laws(4, 0), laws(4, 50)
    assert distance(p, 4, 2, round_with("typical", p, q, 4, (1,))) > 0.01
    assert {"typical"} == LOSSY


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), vocab=st.integers(2, 12), scale=st.sampled_from([0.1, 1.0, 30.0, 80.0]))
def test_residuals_are_laws(seed: int, vocab: int, scale: float) -> None:
    """Also in float32 with probabilities down to 1e-38, with p = q, and where q holds all of p."""
    generator = torch.Generator().manual_seed(seed)
    p, q = (scale * torch.randn((2, vocab), generator=generator)).softmax(-1)
    for first, second in ((p, q), (p, p), (p, p * (1 + 1e-7)), (torch.eye(vocab)[0], q), (p, torch.eye(vocab)[0])):
        rest = rules.residual(first, second)
        assert torch.isfinite(rest).all() and float(rest.min()) >= 0 and abs(float(rest.sum()) - 1) < 1e-5
    assert torch.equal(rules.residual(p, p), p)


# -- rules that look right: each gives another law, and the enumeration sees it -----------------------------------------


def ratio_step(token: int, p: Tensor, q: Tensor, dice: Tape) -> bool:
    return dice.chance(float(p[token] / q[token]))


def soft_q_for_fixed_children(dice: Tape) -> int:
    p, q = P, Q
    for token in Q.topk(2).indices.tolist():
        if ratio_step(token, p, q, dice):
            return token
        p = rules.residual(p, q)
    return dice.pick(p)


def residual_of_p(dice: Tape) -> int:
    token = dice.pick(Q)
    return token if ratio_step(token, P, Q, dice) else dice.pick(P)


def likelier_of_two(dice: Tape) -> int:
    token = max(dice.pick(Q), dice.pick(Q), key=lambda drawn: float(Q[drawn]))
    return token if ratio_step(token, P, Q, dice) else dice.pick(rules.residual(P, Q))


def twins_tried_twice(dice: Tape) -> int:
    for _ in range(2):
        if dice.chance(float(P[0])):
            return 0
    return dice.pick(rules._without(P, 0))


def a_draw_a_child(dice: Tape) -> int:
    for token in (0, 1):
        if dice.pick(P) == token:
            return token
    return dice.pick(P)


def another_filter_for_the_draft(dice: Tape) -> int:
    filtered = torch.where(Q >= 0.2, Q, 0.0) / Q[Q >= 0.2].sum()
    token = dice.pick(filtered)
    return token if ratio_step(token, P, Q, dice) else dice.pick(rules.residual(P, Q))


def one_number_for_draft_and_residual(dice: Tape) -> int:
    token = dice.pick(Q)
    if ratio_step(token, P, Q, dice):
        return token
    rest = rules.residual(P, Q)  # inverted at the number that drew the token: the middle of its cell
    place = float(Q.cumsum(0)[token] - Q[token] / 2)
    return int(torch.searchsorted(rest.cumsum(0), torch.tensor(place, dtype=torch.float64)))


def first_q_for_every_sibling(dice: Tape) -> int:
    p, tokens = P, []
    law = Q
    for _ in range(2):
        tokens.append(dice.pick(law))
        law = rules._without(law, tokens[-1])
    for token in tokens:
        if ratio_step(token, p, Q, dice):
            return token
        p = rules.residual(p, Q)
    return dice.pick(p)


@pytest.mark.parametrize(
    ("mutant", "gives"),
    [
        (soft_q_for_fixed_children, [0.875, 0, 0, 0.125]),
        (residual_of_p, [0.4575, 0.205, 0.27, 0.0675]),
        (likelier_of_two, [0.51, 0.33, 0.08, 0.08]),
        (twins_tried_twice, [0.6975, 0.165, 0.11, 0.0275]),
        (a_draw_a_child, None),
        (another_filter_for_the_draft, None),
        (one_number_for_draft_and_residual, None),
        (first_q_for_every_sibling, None),
    ],
)
def test_mutants_are_caught(mutant: Callable[[Tape], int], gives: list[float] | None) -> None:
    if gives is not None:
        law = law_of(mutant)
        assert [law.get(token, 0.0) for token in range(4)] == pytest.approx(gives, abs=1e-9)
    assert distance(lambda _: P, 4, 1, lambda dice: (mutant(dice),)) > 1e-3


def block_with_residuals_of_one_token(drawn: DrawnTree, law: Callable[[int], Tensor], dice: Tape) -> tuple[list[int], int]:
    """Prefixes are taken by their joint ratio, but weighed as if each stood alone."""
    share, taken, last = 1.0, 0, len(drawn.tree) - 1
    for node in range(1, last + 1):
        token = int(drawn.tree.tokens[node])
        share = min(1.0, share * float(law(node - 1)[token] / drawn.law(node - 1)[token]))
        taken = node if dice.chance(share) else taken
    return list(range(taken + 1)), dice.pick(law(taken) if taken == last else rules.residual(law(taken), drawn.law(taken)))


def k_seq_with_the_residual_of_one_draw(p: Tensor, q: Tensor, tokens: Sequence[int], dice: rules.Dice) -> tuple[int | None, Tensor]:
    """Independent draws are each weighed against the whole of p, and what is left is that of a single one."""
    for place, token in enumerate(tokens):
        if dice.chance(float(p[token] / q[token])):
            return place, p
    return None, rules.residual(p, q)


@pytest.mark.parametrize(
    ("right", "mutant", "widths"),
    [("block", block_with_residuals_of_one_token, (1, 1)), ("k_seq", decide_with(k_seq_with_the_residual_of_one_draw), (2,))],
    ids=["block", "k_seq"],
)
def test_mutants_of_blocks_and_of_several_draws_are_caught(right: str, mutant: Decide, widths: tuple[int, ...]) -> None:
    for seed in range(3):
        p, q = laws(3, seed), laws(3, seed + 50)
        good, bad = (distance(p, 3, len(widths) + 1, round_with(rule, p, q, 3, widths)) for rule in (right, mutant))
        assert good < 1e-12 and bad > 1e-3


@pytest.mark.parametrize("penalty", [{"frequency_penalty": 1.5}, {"presence_penalty": 1.0}, {"repetition_penalty": 1.7}], ids=str)
def test_penalties_that_count_rejected_drafts_are_caught(penalty: dict[str, float]) -> None:
    """A history shared by the branches of a tree, in which rejected drafts stay, against one a node."""
    base, sampler = laws(3, 5), Sampler(Sampling(temperature=1.0, **penalty), [], seed=0, vocab_size=3)
    tree = DraftTree(  # root; a b under it; c under a, d under b
        tokens=torch.tensor([0, 1, 2, 2, 0]), parents=torch.tensor([-1, 0, 0, 1, 2]), depths=torch.tensor([0, 1, 1, 2, 2]), scores=torch.zeros(5)
    )

    def p(emitted: tuple[int, ...]) -> Tensor:
        return sampler.law(base(emitted).log(), emitted)

    def verify(dice: Tape, shared: bool) -> tuple[int, ...]:
        rejected: list[int] = []

        def choose(path: list[int]) -> int:
            own = tuple(tree.tokens[path[1:]].tolist())
            token = dice.pick(sampler.law(base(own).log(), [*own, *(rejected if shared else ())]))
            rejected.extend(int(tree.tokens[node]) for node in tree.children()[path[-1]] if int(tree.tokens[node]) != token)
            return token

        path, after = accept(tree, choose)
        return (*tree.tokens[path[1:]].tolist(), after)

    assert distance(p, 3, 3, lambda dice: verify(dice, shared=False)) < 1e-12
    assert distance(p, 3, 3, lambda dice: verify(dice, shared=True)) > 1e-3


def test_bonus_of_the_parent_is_caught() -> None:
    p, q = laws(3, 1), laws(3, 51)

    def verify(dice: Tape) -> tuple[int, ...]:
        drawn = draw(q, 3, (1, 1), dice)
        law = node_law(drawn, p)
        path, _ = rules.walk(drawn, law, rules.multi_round, dice)
        return (*drawn.tree.tokens[path[1:]].tolist(), dice.pick(law(path[max(0, len(path) - 2)])))

    assert distance(p, 3, 3, verify) > 1e-3


# -- how trees are drawn ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replacement", [True, False])
def test_drawn_trees(replacement: bool) -> None:
    """Paths, laws and attempts belong together, and the first attempts have the law that is written down."""
    rows = table("smooth", (64, 5), 0)
    scorer = PathScorer(rows, torch.tensor([3]), 3)
    firsts, pairs = [], []
    for seed in range(2000):
        drawn = draw_tree(7, scorer, widths=(2, 2, 1), replacement=replacement, temperature=1.0, vocab_size=110, seed=seed, position=4)
        tree = drawn.tree
        for node, children in enumerate(drawn.attempts):
            assert all(int(tree.parents[child]) == node for child in children)
            if int(tree.depths[node]) < 3:
                assert len(children) == (2, 2, 1)[int(tree.depths[node])]
                assert float(drawn.law(node).sum()) == pytest.approx(1, abs=1e-9)
                assert all(float(drawn.law(node)[tree.tokens[child]]) > 0 for child in children)
        assert len(set(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True))) == len(tree)
        first, second = (int(tree.tokens[child]) - 100 for child in drawn.attempts[0])
        firsts.append(first)
        pairs.append(first * 5 + second)
    law = drawn.law(0)[100:105]
    counts = torch.bincount(torch.tensor(firsts), minlength=5).numpy()
    assert stats.chisquare(counts, 2000 * law.numpy()).pvalue > 1e-4
    joint = torch.outer(law, law) if replacement else (law[:, None] * law / (1 - law[:, None])).fill_diagonal_(0)
    seen = torch.bincount(torch.tensor(pairs), minlength=25)[joint.flatten() > 0].numpy()
    assert seen.sum() == 2000
    assert stats.chisquare(seen, 2000 * joint.flatten()[joint.flatten() > 0].numpy()).pvalue > 1e-4


def test_a_drawn_tree_needs_a_temperature() -> None:
    scorer = PathScorer(table("smooth", (64, 5), 0), torch.tensor([3]), 3)
    options = {"replacement": True, "vocab_size": 110, "seed": 0, "position": 0}
    with pytest.raises(ValueError, match="temperature 0"):
        draw_tree(7, scorer, widths=(1,), temperature=0.0, **options)
    with pytest.raises(ValueError, match="at least 1 a level"):
        draw_tree(7, scorer, widths=(2, 0), temperature=1.0, **options)


def test_keyed_dice_repeat_and_are_fair() -> None:
    """The same seed and position decide alike; a choice has the law, unmoved by what was decided before it."""
    picks, chances = [], []
    for seed in range(4000):
        dice, again = rules.KeyedDice(seed, 9), rules.KeyedDice(seed, 9)
        chances.append(dice.chance(0.3))
        picks.append(dice.pick(P))
        assert (chances[-1], picks[-1]) == (again.chance(0.3), again.pick(P))
    table_of = torch.zeros((2, 4))
    for chance, pick in zip(chances, picks, strict=True):
        table_of[int(chance), pick] += 1
    expected = torch.outer(torch.tensor([0.7, 0.3]), P.float()) * 4000
    assert stats.chisquare(table_of.flatten().numpy(), expected.flatten().numpy() * float(table_of.sum()) / float(expected.sum())).pvalue > 1e-4
