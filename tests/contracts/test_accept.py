"""The law of acceptance: greedy output is the target's own, sampled output has its exact law, whatever the tree."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contracts.tree_tables import PathScorer, table
from treedraft import noise
from treedraft.trees import builder_names, load_builder
from treedraft.trees.accept import accept, accept_batch
from treedraft.trees.best_first import BestFirst
from treedraft.trees.chain import Chain
from treedraft.trees.mask import depths_of
from treedraft.trees.naive import accept_naive
from treedraft.trees.scorers import MarginalScorer
from treedraft.trees.tree import DraftTree, TreeBatch

VOCAB, DEPTH = 4, 3


SMALL = [-1, 0, 0, 1, 1, 3]  # root; a b under it; c d under a; e under c


def small_tree(tokens: list[int], parents: list[int] = SMALL) -> DraftTree:
    depths = depths_of(torch.tensor(parents))
    return DraftTree(tokens=torch.tensor(tokens), parents=torch.tensor(parents), depths=depths, scores=-depths.double())


def random_tree(num_nodes: int, vocab: int, seed: int, *, twins: bool = False) -> DraftTree:
    """Any parents, siblings with different tokens (without `twins` a node that would be one is left out)."""
    generator = torch.Generator().manual_seed(seed)
    parents, tokens = [-1], [0]
    for node in range(1, num_nodes):
        parent = int(torch.randint(max(0, node - 4), node, (), generator=generator)) % len(parents)
        token = int(torch.randint(vocab, (), generator=generator))
        if twins or (parent, token) not in zip(parents, tokens, strict=True):
            parents.append(parent)
            tokens.append(token)
    return small_tree(tokens, parents)


def target_law(prefix: tuple[int, ...]) -> torch.Tensor:
    """A target as a table: float64 logits [VOCAB] after the tokens of `prefix` (those after the anchor)."""
    row = sum((token + 1) * (VOCAB + 1) ** place for place, token in enumerate(prefix))
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(row), dtype=torch.float64)


def node_logits(tree: DraftTree) -> torch.Tensor:
    return torch.stack([target_law(tuple(tree.tokens[tree.path_to(node)[1:]].tolist())) for node in range(len(tree))])


def draft_trees() -> list[DraftTree]:
    """Chains and trees of drafters that know nothing, whose tokens are those of the table model."""
    trees = []
    for seed, (law, budget, width) in enumerate(
        itertools.product(("smooth", "one_hot", "flat"), (1, 2, 6, 40), (1, 2, 4))
    ):
        scorer = PathScorer(table(law, (64, VOCAB), seed), torch.tensor([seed]), DEPTH)
        scorer.token_ids = lambda columns: columns
        trees.append(BestFirst(budget=budget, width=width).build(torch.tensor([0]), scorer).tree(0))
    return trees


def walk(tree: DraftTree, choices: torch.Tensor) -> tuple[list[int], int]:
    """`accept` where the choice [N] after every node is known beforehand."""
    return accept(tree, lambda path: int(choices[path[-1]]))


@settings(max_examples=300, deadline=None)
@given(num_nodes=st.integers(1, 40), vocab=st.integers(1, 5), seed=st.integers(0, 10**6), twins=st.booleans())
def test_equals_the_naive_walk(num_nodes: int, vocab: int, seed: int, twins: bool) -> None:
    tree = random_tree(num_nodes, vocab, seed, twins=twins)
    choices = torch.randint(vocab, (len(tree),), generator=torch.Generator().manual_seed(seed + 1))
    assert walk(tree, choices) == accept_naive(tree, choices)


@settings(max_examples=200, deadline=None)
@given(num_nodes=st.integers(1, 30), vocab=st.integers(1, 3), seed=st.integers(0, 10**6))
def test_twins_lose_no_branch(num_nodes: int, vocab: int, seed: int) -> None:
    """A tree with twins accepts what the tree without them does, and its path is a path."""
    tree = random_tree(num_nodes, vocab, seed, twins=True)
    spelt = [tuple(tree.tokens[tree.path_to(node)[1:]].tolist()) for node in range(len(tree))]
    record = tuple(torch.randint(vocab, (num_nodes + 1,), generator=torch.Generator().manual_seed(seed + 1)).tolist())
    path, after = accept(tree, lambda path: record[len(path) - 1])
    assert len(path) - 1 == max(len(tokens) for tokens in spelt if tokens == record[: len(tokens)])
    assert path == tree.path_to(path[-1]) and spelt[path[-1]] == record[: len(path) - 1] and after == record[len(path) - 1]


def test_a_child_of_the_second_twin_is_found() -> None:
    tree = small_tree([0, 4, 4, 5, 6], [-1, 0, 0, 1, 2])
    assert accept(tree, lambda path: (4, 6, 9)[len(path) - 1]) == ([0, 2, 4], 9)


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    vocab=st.integers(1, 4),
    length=st.integers(1, 9),
    seed=st.integers(0, 10**6),
)
def test_replay_follows_the_recorded_tokens(sizes: list[int], vocab: int, length: int, seed: int) -> None:
    trees = [random_tree(size, vocab, seed + place) for place, size in enumerate(sizes)]
    continuation = torch.randint(-1, vocab, (len(trees), length), generator=torch.Generator().manual_seed(seed))
    paths, num_accepted = accept_batch(TreeBatch.of(trees), continuation)
    for tree, recorded, path, accepted in zip(
        trees, continuation.tolist(), paths.tolist(), num_accepted.tolist(), strict=True
    ):
        following = torch.tensor([*recorded, *[-1] * 50])[tree.depths]  # what the record has after each depth
        expected, _ = accept_naive(tree, following)
        assert path == expected + [-1] * (len(path) - len(expected)) and accepted == len(expected) - 1


@pytest.mark.parametrize("name", builder_names())
def test_bounds(name: str) -> None:
    """A drafter that is always right commits depth + 1 tokens a round, one that is always wrong commits 1."""
    truth = torch.randint(9, (8, 6), generator=torch.Generator().manual_seed(0))
    certain = torch.full((8, 5, 9), -torch.inf).scatter_(2, truth[:, :5, None], 0.0)
    builder = load_builder(name)() if name == "chain" else load_builder(name)(budget=20, width=3)
    trees = builder.build(torch.zeros(8, dtype=torch.int64), MarginalScorer(certain))
    assert (accept_batch(trees, truth)[1] + 1 == 6).all()
    assert (accept_batch(trees, (truth + 1) % 9)[1] + 1 == 1).all()


def test_a_tree_that_holds_the_chain_accepts_no_less() -> None:
    scorer = PathScorer(table("smooth", (64, 3), 1), torch.arange(200), 4)
    anchor = torch.zeros(200, dtype=torch.int64)
    continuation = 100 + torch.randint(3, (200, 5), generator=torch.Generator().manual_seed(0))
    accepted_by_chain = accept_batch(Chain().build(anchor, scorer), continuation)[1]
    accepted_by_tree = accept_batch(BestFirst(budget=121, width=2).build(anchor, scorer), continuation)[1]
    assert (accepted_by_tree >= accepted_by_chain).all() and (accepted_by_tree > accepted_by_chain).any()


def draw_after(before: tuple[int, ...], temperature: float, seed: int) -> int:
    """The token that plain decoding of the table model draws after those."""
    return int(noise.draw(target_law(before), temperature, noise.gumbel(seed, len(before), VOCAB)))


def decode(trees: list[DraftTree], num_tokens: int, *, temperature: float, seed: int) -> list[int]:
    """Rounds of draft, verify, accept over the table model; the trees take turns below the committed prefix."""
    committed: list[int] = []
    for tree in itertools.cycle(trees):
        if len(committed) >= num_tokens:
            break
        start = tuple(committed)

        def choose(path: list[int], tree: DraftTree = tree, start: tuple[int, ...] = start) -> int:
            before = (*start, *tree.tokens[path[1:]].tolist())
            return draw_after(before, temperature, seed)

        path, after = accept(tree, choose)
        committed += [*tree.tokens[path[1:]].tolist(), after]
    return committed[:num_tokens]


@pytest.mark.parametrize("temperature", [0, 0.7, 1.0])
def test_output_equals_plain_decoding(temperature: float) -> None:
    trees = draft_trees()
    for seed in range(20):
        plain: list[int] = []
        for position in range(12):
            assert len(plain) == position
            plain.append(draw_after(tuple(plain), temperature, seed))
        drafted = decode(trees[seed % 7 :: 7], 12, temperature=temperature, seed=seed)
        assert drafted == plain


def accepted_law(tree: DraftTree, rule) -> dict[tuple[int, ...], float]:
    """Law of the first DEPTH + 1 tokens of one round, completed by plain decoding, with the noise integrated exactly.

    A walk sees the choice of one node a depth, and depths have noise of their own, so its law does not depend on how
    the choices of one depth hang together. Here they share a uniform number and invert their CDFs: a walk then changes
    only where it crosses an edge of one, and one number a cell between edges, weighted by its width, is the integral.
    """
    logits = node_logits(tree)
    cuts = torch.softmax(logits, -1).cumsum(-1).clamp(max=1)
    grids = []
    for depth in range(DEPTH + 1):
        edges = torch.cat([torch.tensor([0.0, 1.0]).double(), cuts[tree.depths == depth].flatten()]).unique()
        grids.append(
            [
                (float(left + right) / 2, float(right - left))
                for left, right in itertools.pairwise(edges)
                if right > left
            ]
        )
    law: dict[tuple[int, ...], float] = {}
    for cells in itertools.product(*grids):
        uniforms = torch.tensor([cell[0] for cell in cells]).double()
        mass = 1.0
        for cell in cells:
            mass *= cell[1]
        path, after = rule(tree, torch.searchsorted(cuts, uniforms[tree.depths, None], right=True)[:, 0].clamp(max=VOCAB - 1))
        tokens = (*tree.tokens[path[1:]].tolist(), after)
        law[tokens] = law.get(tokens, 0.0) + mass
    return _complete(law)


def _complete(law: dict[tuple[int, ...], float]) -> dict[tuple[int, ...], float]:
    """Shorter outputs continued by the target itself, so that all have DEPTH + 1 tokens."""
    complete: dict[tuple[int, ...], float] = {}
    for tokens, mass in law.items():
        for rest in itertools.product(range(VOCAB), repeat=DEPTH + 1 - len(tokens)):
            whole, chance = (*tokens, *rest), mass
            for place in range(len(tokens), DEPTH + 1):
                chance *= float(torch.softmax(target_law(whole[:place]), -1)[whole[place]])
            complete[whole] = complete.get(whole, 0.0) + chance
    return complete


def _distance(law: dict[tuple[int, ...], float]) -> float:
    target = _complete({(): 1.0})
    return max(abs(law.get(tokens, 0.0) - chance) for tokens, chance in target.items())


@pytest.mark.parametrize(
    "tree",
    [
        small_tree([0, 1, 2, 1, 3, 0]),
        small_tree([0, 3, 0, 0, 1, 2]),
        small_tree([0], [-1]),
        small_tree([0, 2, 2, 2], [-1, 0, 1, 2]),
        small_tree([0, 0, 1, 2, 3], [-1, 0, 0, 0, 0]),
    ],
)
def test_sampled_output_has_the_law_of_the_target(tree: DraftTree) -> None:
    assert _distance(accepted_law(tree, walk)) < 1e-12


def test_mutants_are_caught() -> None:
    tree = small_tree([0, 1, 2, 1, 3, 0])

    def deepest_match(tree: DraftTree, choices: torch.Tensor) -> tuple[list[int], int]:
        """Accepts a node whose own token agrees, its ancestors unasked."""
        agrees = tree.tokens == choices[tree.parents.clamp(min=0)]
        agrees[0] = True
        path = tree.path_to(int(agrees.nonzero()[-1]))
        return path, int(choices[path[-1]])

    def bonus_of_the_parent(tree: DraftTree, choices: torch.Tensor) -> tuple[list[int], int]:
        path, _ = walk(tree, choices)
        return path, int(choices[path[max(0, len(path) - 2)]])

    for mutant in (deepest_match, bonus_of_the_parent):
        assert _distance(accepted_law(tree, mutant)) > 1e-3
