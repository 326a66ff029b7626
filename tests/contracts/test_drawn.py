"""Drawn trees, a level at a time: draw for draw what one node at a time gives with the same noise."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.contracts.tree_tables import LAWS, random_scorer, same
from treedraft import noise
from treedraft.trees.drawn import DRAFTING, DrawnTree, draw_tree
from treedraft.trees.mask import depths_of
from treedraft.trees.scorers import Lanes, Scorer
from treedraft.trees.tree import DraftTree


def draw_naive(
    anchor: int, scorer: Scorer, *, widths: Sequence[int], replacement: bool, temperature: float, vocab_size: int, seed: int, position: int
) -> DrawnTree:
    """The definition of `draw_tree`, node by node and attempt by attempt."""
    scorer.start(1000)
    tokens, parents, scores, attempts, law_of = [anchor], [-1], [0.0], [[]], [-1]
    laws: list[Tensor] = []
    level = [0]
    for slot, width in enumerate(widths):
        log_laws, level_laws = [], []
        for node in level:
            values = slot, tokens[node], len(laws) + len(level_laws), law_of[parents[node]] if node else -1
            slots, token, expansion, parent = (torch.tensor([value]) for value in values)
            lane = Lanes(request=torch.zeros(1, dtype=torch.int64), slot=slots, token=token, expansion=expansion, parent=parent)
            log_q = torch.log_softmax(scorer.expand(lane)[0].double() / temperature, -1)
            law = torch.zeros(vocab_size, dtype=torch.float64)
            for column, value in enumerate(log_q.exp().tolist()):
                law[int(scorer.token_ids(torch.tensor(column)))] += value
            log_laws.append(log_q)
            level_laws.append(law)
        # Without replacement every node of a level has as many attempts as the one with the fewest possible tokens.
        count = width if replacement else min(width, *(int((log_q > -torch.inf).sum()) for log_q in log_laws))
        following = []
        for node, log_q in zip(level, log_laws, strict=True):
            law_of[node] = len(laws) + level.index(node)
            columns: list[int] = []
            for attempt in range(count):
                uniforms = noise.uniform(seed, position + slot + 1, DRAFTING, node, attempt if replacement else 0, torch.arange(len(log_q)))
                keys = log_q + noise.to_gumbel(uniforms)
                if not replacement:
                    keys[columns] = -torch.inf
                columns.append(int(keys.argmax()))
            children: dict[int, int] = {}
            for column in columns:
                token = int(scorer.token_ids(torch.tensor(column)))
                if token not in children:
                    children[token] = len(tokens)
                    following.append(len(tokens))
                    tokens.append(token)
                    parents.append(node)
                    scores.append(scores[node] + float(log_q[column]))
                    attempts.append([])
                    law_of.append(-1)
                attempts[node].append(children[token])
        laws += level_laws
        level = following
    tree = DraftTree(
        tokens=torch.tensor(tokens), parents=torch.tensor(parents), depths=depths_of(torch.tensor(parents)),
        scores=torch.tensor(scores, dtype=torch.float64),
    )  # fmt: skip
    return DrawnTree(tree=tree, attempts=attempts, laws=torch.stack(laws), law_of=torch.tensor(law_of))


@pytest.mark.parametrize("law", [law for law in LAWS if law != "dead"])
@settings(max_examples=20, deadline=None)
@given(
    widths=st.lists(st.integers(1, 4), min_size=1, max_size=4), vocab=st.integers(1, 6), conditional=st.booleans(), replacement=st.booleans(),
    temperature=st.sampled_from([0.5, 1.0, 2.0]), seed=st.integers(0, 10**6),
)  # fmt: skip
def test_a_level_at_a_time_draws_what_a_node_at_a_time_does(
    law: str, widths: list[int], vocab: int, conditional: bool, replacement: bool, temperature: float, seed: int
) -> None:
    scorer = random_scorer(law, conditional=conditional, num_requests=1, depth=4, vocab=vocab, seed=seed)
    fast, naive = (
        draw(7, scorer, widths=widths, replacement=replacement, temperature=temperature, vocab_size=110, seed=seed, position=4)
        for draw in (draw_tree, draw_naive)
    )
    assert same(fast.tree, naive.tree) and torch.equal(fast.tree.depths, naive.tree.depths)
    assert fast.attempts == naive.attempts and torch.equal(fast.law_of, naive.law_of)
    torch.testing.assert_close(fast.laws, naive.laws, rtol=1e-12, atol=1e-300)
