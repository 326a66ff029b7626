"""Draft trees as data, and the scorers' search for the best children."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contracts.tree_tables import LAWS, same, table
from treedraft.trees.mask import depths_of
from treedraft.trees.scorers import ConditionalScorer, Lanes, MarginalScorer, log_law, top_children
from treedraft.trees.tree import DraftTree, TreeBatch

HALF = -0.6931471805599453
TREE = DraftTree(
    tokens=torch.tensor([10, 11, 12, 13, 14, 15]),
    parents=torch.tensor([-1, 0, 0, 1, 1, 2]),  # root; a b; c d under a; e under b
    depths=torch.tensor([0, 1, 1, 2, 2, 2]),
    scores=torch.tensor([0, HALF, HALF, 2 * HALF, 2 * HALF, HALF]).double(),
)


def test_the_mask_is_the_closure_of_the_parents() -> None:
    T, F = True, False
    assert TREE.ancestors().tolist() == [
        [T, F, F, F, F, F],
        [T, T, F, F, F, F],
        [T, F, T, F, F, F],
        [T, T, F, T, F, F],
        [T, T, F, F, T, F],
        [T, F, T, F, F, T],
    ]
    assert torch.equal(depths_of(TREE.parents), TREE.depths)


def test_links() -> None:
    assert TREE.path_to(0) == [0] and TREE.path_to(4) == [0, 1, 4]
    assert TREE.children() == [[1, 2], [3, 4], [5], [], [], []]
    assert len(TREE) == 6


def test_render() -> None:
    words = {10: "root", 11: "a", 12: "b", 13: "c", 14: "d", 15: "e"}
    assert TREE.render(words.__getitem__, {0, 1, 4}).split("\n") == [
        "● root",
        "├─ ● a  0.50",
        "│  ├─ c  0.50",
        "│  └─ ● d  0.50",
        "└─ b  0.50",
        "   └─ e  1.00",
    ]
    assert TREE.render().startswith("10\n")


def test_a_batch_holds_trees_of_any_size() -> None:
    small = DraftTree(tokens=TREE.tokens[:1], parents=TREE.parents[:1], depths=TREE.depths[:1], scores=TREE.scores[:1])
    batch = TreeBatch.of([small, TREE])
    assert batch.num_nodes.tolist() == [1, 6] and len(batch) == 2
    assert same(batch.tree(0), small) and same(batch.tree(1), TREE)
    assert batch.tokens[0, 1:].eq(-1).all() and batch.parents[0, 1:].eq(-1).all()
    assert batch.real.sum(1).tolist() == [1, 6]


@pytest.mark.parametrize("law", LAWS)
@settings(max_examples=30, deadline=None)
@given(num_rows=st.integers(0, 4), vocab=st.integers(1, 40), width=st.integers(1, 9), seed=st.integers(0, 10**6))
def test_top_children_breaks_ties_by_column(law: str, num_rows: int, vocab: int, width: int, seed: int) -> None:
    log_q, width = table(law, (num_rows, vocab), seed), min(width, vocab)
    columns, values = top_children(log_q, width)
    assert columns.shape == values.shape == (num_rows, width)
    assert torch.equal(values, log_q.gather(1, columns))
    for row in range(num_rows):
        ranked = sorted((-value, column) for column, value in enumerate(log_q[row].tolist()))
        assert columns[row].tolist() == [column for _, column in ranked[:width]]


def test_a_marginal_scorer_reads_the_row_of_the_depth() -> None:
    log_q = table("smooth", (2, 3, 5), 0)
    scorer = MarginalScorer(log_q, torch.tensor([50, 51, 52, 53, 54]))
    request, slot = torch.tensor([0, 1, 1]), torch.tensor([2, 0, 2])
    lanes = Lanes(request=request, slot=slot, token=slot, expansion=slot, parent=slot)
    assert torch.equal(scorer.expand(lanes), log_q[request, slot])
    tokens, best = scorer.children(lanes, 2)
    columns, expected = top_children(log_q[request, slot], 2)
    assert torch.equal(tokens, columns + 50) and torch.equal(best, expected)
    assert (scorer.num_requests, scorer.depth, scorer.width_limit) == (2, 3, 5)


def test_a_conditional_scorer_normalises_over_the_whole_vocabulary() -> None:
    class State:
        rows = 0

        def reserve(self, capacity: int) -> None:
            self.rows = capacity

        def step(self, lanes: Lanes) -> torch.Tensor:
            return torch.arange(6, dtype=torch.bfloat16).repeat(len(lanes.token), 1)

    state = State()
    scorer = ConditionalScorer(state, 4, 1, torch.arange(6) * 2)
    scorer.start(9)
    zero = torch.zeros(2, dtype=torch.int64)
    log_q = scorer.expand(Lanes(request=zero, slot=zero, token=zero, expansion=zero, parent=zero - 1))
    assert state.rows == 9 and scorer.width_limit == 6 and log_q.dtype == torch.float32
    torch.testing.assert_close(log_q.exp().sum(-1), torch.ones(2))
    assert scorer.token_ids(torch.tensor([5])).tolist() == [10]
    assert log_law(torch.zeros(3, dtype=torch.float64)).dtype == torch.float64
