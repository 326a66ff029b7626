"""What replay counts besides acceptance: the greedy spine, drafts by probability, loops, and drafters that know the record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.contracts.tree_tables import LAWS, random_scorer
from tests.tiny_drafters import make_drafter, random_prompts
from treedraft import metrics
from treedraft.config import DecodeConfig
from treedraft.controls import replay_known
from treedraft.evaluate import Replay, Trajectory
from treedraft.metrics import Rounds, ends_in_loop, spine_counts, tallied
from treedraft.targets.generate import generate
from treedraft.targets.hf import Target
from treedraft.trees.accept import accept_batch, ranks_of, spine_length
from treedraft.trees.best_first import BestFirst
from treedraft.trees.builder import TreeBuilder
from treedraft.trees.calibration import EDGES, NUM_BINS, tally
from treedraft.trees.chain import Chain
from treedraft.trees.naive import accept_naive, spine_naive
from treedraft.trees.tree import DraftTree

BUILDERS: list[Callable[[int], TreeBuilder]] = [
    lambda depth: Chain(depth=depth),
    lambda depth: BestFirst(budget=18, width=3, depth=depth),
    lambda depth: BestFirst(budget=18, width=3, depth=depth, admit="pop"),
    lambda depth: BestFirst(budget=9, width=2, depth=depth, admit="pop", frontier=2),
]


def naive_tally(events: list[tuple[float, bool]]) -> np.ndarray:
    found = np.zeros((NUM_BINS, 3))
    for log_q, came_true in events:
        q = np.exp(log_q)
        found[sum(q >= edge for edge in EDGES)] += (1, q, came_true)
    return found


def naive_events(tree: DraftTree, record: list[int], path: list[int]) -> tuple[list[tuple[float, bool]], list[tuple[float, bool]]]:
    """(log q, accepted) of drafts below accepted nodes, and of all drafts, as far as the record goes."""
    steps, paths = [], []
    for node in range(1, len(tree)):
        parent, depth, score = int(tree.parents[node]), int(tree.depths[node]), float(tree.scores[node])
        if depth <= len(record):
            paths.append((score, node in path))
            if parent in path:
                steps.append((score - float(tree.scores[parent]), node in path))
    return steps, paths


def records(anchor: Tensor, builder: TreeBuilder, scorer: Any, seed: int) -> Tensor:
    """Continuations [R, 6] that follow a random node of each tree, then random tokens; some end early."""
    generator = torch.Generator().manual_seed(seed)
    trees = builder.build(anchor, scorer)
    found = torch.randint(0, 4, (len(anchor), 6), generator=generator)
    for request in range(len(anchor)):
        tree = trees.tree(request)
        path = tree.path_to(int(torch.randint(len(tree), (1,), generator=generator)))[1:]
        found[request, : len(path)] = tree.tokens[path]
    ends = torch.randint(0, 8, (len(anchor), 1), generator=generator)
    return found.masked_fill(torch.arange(6) >= ends, -1)


@pytest.mark.parametrize("law", [law for law in LAWS if law not in ("ties", "holes", "dead")])  # normalised
@pytest.mark.parametrize("builder", range(len(BUILDERS)))
def test_replay_counts_what_a_loop_over_nodes_counts(law: str, builder: int) -> None:
    depth, seen = 5, Counter[str]()
    for seed in range(12):
        build = BUILDERS[builder](depth)
        scorer = random_scorer(law, conditional=True, num_requests=6, depth=depth, vocab=4, seed=seed)
        anchor = torch.full((6,), 9)
        continuation = records(anchor, build, scorer, seed)
        found, trees = build.replay(anchor, scorer, continuation), build.build(anchor, scorer)
        for request in range(6):
            tree, record = trees.tree(request), [token for token in continuation[request].tolist() if token >= 0]
            path, _ = accept_naive(tree, torch.tensor([*record, *[-1] * 20])[tree.depths])
            steps, paths = naive_events(tree, record, path)
            assert int(found.accepted[request]) == len(path) - 1
            assert int(found.spine[request]) == spine_naive(tree, path)
            assert np.allclose(found.steps[request].numpy(), naive_tally(steps), atol=1e-12)
            if found.paths is not None:
                assert np.allclose(found.paths[request].numpy(), naive_tally(paths), atol=1e-12)
            seen["off the spine"] += spine_naive(tree, path) < len(path) - 1
        assert (found.paths is None) == isinstance(build, Chain)
    assert isinstance(BUILDERS[builder](depth), Chain) or law == "one_hot" or seen["off the spine"]


def test_the_spine_is_what_a_chain_drafts() -> None:
    scorer = random_scorer("smooth", conditional=True, num_requests=40, depth=5, vocab=4, seed=3)
    anchor = torch.full((40,), 9)
    trees, chains = BestFirst(budget=30, width=4, depth=5).build(anchor, scorer), Chain(depth=5).build(anchor, scorer)
    continuation = torch.randint(0, 4, (40, 5), generator=torch.Generator().manual_seed(0))
    paths, _ = accept_batch(trees, continuation)
    reach = torch.stack([trees.tree(i).depths[trees.tree(i).depths == 1].sum() for i in range(40)])
    assert (reach > 0).all()
    spine, chain = spine_length(ranks_of(trees, paths)), accept_batch(chains, continuation)[1]
    held = spine == chain  # a chain may be deeper than the spine in a tree of 30 nodes
    assert (spine <= chain).all() and held.float().mean() > 0.9


def test_tally_puts_a_probability_on_an_edge_into_the_upper_bin() -> None:
    log_q = torch.tensor([1.0, 0.5, 0.1, 1e-9, 0.0999999], dtype=torch.float64).log()
    found = tally(log_q, torch.tensor([True, False, True, False, False]), torch.tensor([0, 1, 1, 1, 0]), 3)
    assert found.shape == (3, NUM_BINS, 3) and found[2].sum() == 0
    assert found[0, -1].tolist() == [1, 1, 1] and found[1, 0, 0] == 1
    assert found[..., 0].sum() == 5 and found[..., 2].sum() == 2
    assert float(found[..., 1].sum()) == pytest.approx(1 + 0.5 + 0.1 + 1e-9 + 0.0999999)


# -- metrics -----------------------------------------------------------------------------------------------------------


def test_spine_counts_by_hand() -> None:
    accepted, spine = np.array([0, 1, 2, 3, 3]), np.array([0, 1, 0, 1, 3])
    rounds = Rounds(prompt="", domain="", seed=0, accepted=accepted, emitted=accepted + 1, nodes=accepted, spine=spine)
    counts = spine_counts([rounds], 3)
    # kept: rounds 1, 3, 4 at depth 1; round 4 below. Round 2 leaves at once, round 3 with its second draft.
    assert counts == {"kept": [3, 1, 1], "left": [1, 1, 0], "off": [1, 2, 1]}
    assert [a + b for a, b in zip(counts["kept"], counts["off"], strict=True)] == (metrics.survival([rounds], 3) * 5).tolist()
    without = Rounds(prompt="", domain="", seed=0, accepted=accepted, emitted=accepted + 1, nodes=accepted)
    assert spine_counts([rounds, without], 3) is None and tallied([None, np.ones((2, 3))]) is None and tallied([]) is None


def naive_loop(ids: list[int]) -> bool:
    for period in range(1, metrics.LOOP_PERIOD + 1):
        run = period
        while run < len(ids) and ids[-1 - run] == ids[-1 - run + period]:
            run += 1
        if run <= len(ids) and run >= metrics.LOOP_REPEATS * period and run >= metrics.LOOP_TOKENS:
            return True
    return False


def test_loops_are_those_of_a_loop_over_periods() -> None:
    rng, seen = np.random.default_rng(0), Counter[bool]()
    for _ in range(400):
        period, head = int(rng.integers(1, 80)), int(rng.integers(0, 30))
        gram = rng.integers(0, 3, period)
        tail = np.tile(gram, 12)[: int(rng.integers(0, 12 * period))]
        ids = np.concatenate([rng.integers(0, 3, head), tail, rng.integers(0, 3, int(rng.integers(0, 2)))])
        assert ends_in_loop(ids) == naive_loop(ids.tolist())
        seen[ends_in_loop(ids)] += 1
    assert min(seen[True], seen[False]) > 50
    assert not ends_in_loop(np.zeros(0, dtype=np.int64)) and not ends_in_loop(np.arange(200))
    assert ends_in_loop(np.zeros(24, dtype=np.int64)) and not ends_in_loop(np.zeros(23, dtype=np.int64))


# -- replay of the tiny target -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def replay(tiny64: Target) -> Replay:
    prompts = random_prompts(tiny64, 5, longest=12, seed=8)
    answers = generate(tiny64, prompts, max_new_tokens=17, temperature=1.0, seeds=list(range(5)), batch_size=5)
    texts = [
        Trajectory(prompt=str(i), domain="", seed=i, ids=np.array([*prompt, *answer]), prompt_length=len(prompt))
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]
    return Replay(tiny64, texts, at_once=3)


@pytest.mark.parametrize(("mode", "admit", "depth"), [("chain", "fanout", 4), ("tree", "fanout", 4), ("tree", "pop", 7)])
def test_drafters_that_know_the_record(replay: Replay, mode: Any, admit: Any, depth: int) -> None:
    config = DecodeConfig(mode=mode, admit=admit, depth=depth, width=3, budget=20, temperature=1.0)
    for item in replay_known(replay, config, shift=0):
        whole = item.emitted > item.accepted
        assert whole[:-1].all() and (item.emitted[whole] == depth + 1).all()
        assert item.num_rounds == -(-item.emitted.sum() // (depth + 1)) and (item.spine == item.accepted).all()
    for item in replay_known(replay, config, shift=1):
        assert (item.emitted == 1).all() and (item.accepted == 0).all()
    real = {item.seed: item for item in replay.run(make_drafter(replay.target, correction="attention"), config)}
    for item in replay_known(replay, config, shift=0):
        assert item.emitted.sum() == real[item.seed].emitted.sum()


def test_steps_and_paths_of_real_drafters_add_up(replay: Replay) -> None:
    drafter = make_drafter(replay.target, correction="attention")
    config = DecodeConfig(mode="tree", depth=4, width=3, budget=20, temperature=1.0)
    for item in replay.run(drafter, config):
        assert item.steps is not None and item.paths is not None
        # Every accepted draft is a node whose parent was accepted, so that both tallies hold it once.
        assert item.steps[:, 2].sum() == item.paths[:, 2].sum() == item.accepted.sum()
        assert item.paths[:, 0].sum() <= (item.nodes - 1).sum()
    chain = replay.run(drafter, DecodeConfig(mode="chain", depth=4, temperature=1.0))
    assert all(item.paths is None and item.steps is not None and item.steps[:, 2].sum() == item.accepted.sum() for item in chain)


def test_loops_of_outputs_do_not_count_end_of_text() -> None:
    answer = [*range(10, 20), *([1, 2] * 15)]
    texts = [
        Trajectory(prompt=name, domain="", seed=0, ids=np.array([5, *ids]), prompt_length=1)
        for name, ids in (("loop", answer), ("loop, then the end", [*answer, 7]), ("another token", [*answer, 8]), ("end", [7]))
    ]
    target: Any = SimpleNamespace(eos_token_ids=(7,), num_layers=1, kv_heads=1, head_dim=1, dtype=torch.float32, device=torch.device("cpu"))
    looped = Replay(target, texts).looped
    assert looped == {("loop", 0): True, ("loop, then the end", 0): True, ("another token", 0): False, ("end", 0): False}
