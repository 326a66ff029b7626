"""What holds for any tree, prompt, drafter, cap and stop, drawn by hypothesis; tiny targets and tables in float64.

Others are with their contract: shapes, siblings, optimal admission and the heap in contracts/test_tree_builder.py, laws
of the rules that draw their drafts in contracts/test_rules.py, noise in test_noise.py, training in test_training.py.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.contracts.tree_tables import LAWS, random_scorer
from tests.enumerate import Tape, distance, laws
from tests.kit import TableDrafter, TableTarget, adversary, oracle, script, scripted, warped
from tests.tiny_drafters import make_drafter
from treedraft import metrics
from treedraft.config import Acceptance, DecodeConfig, Sampling
from treedraft.drafter import Drafter
from treedraft.speculate import Generation, generate, generate_plain
from treedraft.speculate_many import generate_many
from treedraft.targets import tiny as tiny_module
from treedraft.targets.hf import Target
from treedraft.targets.sampling import Sampler
from treedraft.trees.accept import accept, accept_batch
from treedraft.trees.best_first import BestFirst
from treedraft.trees.chain import Chain
from treedraft.trees.mask import ancestor_mask, depths_of

slow = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

# The parent of node i + 1 is entry i, taken to a node before it.
parent_lists = st.lists(st.integers(0, 30), max_size=24).map(lambda ups: [-1, *(up % (i + 1) for i, up in enumerate(ups))])
prompts = st.lists(st.integers(0, 60), min_size=1, max_size=30)

def maybe(values: st.SearchStrategy) -> st.SearchStrategy:
    return st.none() | values


limits = st.one_of(
    st.just({}),
    st.fixed_dictionaries({"caps": st.lists(st.integers(1, 4), min_size=1, max_size=5).map(tuple)}),
    st.fixed_dictionaries({"gap_cap": st.tuples(st.floats(0.1, 3), st.floats(0, 2))}),
)
configs = st.builds(
    lambda limit, **fields: DecodeConfig(**limit, **fields), limits, mode=st.sampled_from(["chain", "tree"]),
    depth=st.integers(1, 5), width=st.integers(1, 8), budget=st.integers(1, 48), admit=st.sampled_from(["fanout", "pop"]),
    scorer=st.sampled_from(["marginal", "per_depth", "conditional"]), count_root=st.booleans(), frontier=maybe(st.integers(1, 4)),
    candidates=maybe(st.integers(1, 12)),
)  # fmt: skip
drafters = st.tuples(st.sampled_from(["none", "markov", "attention"]), st.integers(0, 3))


def fitting(config: DecodeConfig, kind: tuple[str, int]) -> DecodeConfig:
    """Without candidates where nothing would look at them."""
    return replace(config, candidates=None) if config.scorer == "marginal" or kind[0] == "none" else config



@pytest.fixture(scope="module")
def endless() -> Target:
    target = tiny_module.load(dtype=torch.float64)
    target.eos_token_ids = ()
    return target


_MADE: dict[tuple[int, str, int], Drafter] = {}


def drafter_of(target: Target, kind: tuple[str, int]) -> Drafter:
    name, seed = kind
    correction = {"name": name, "rank": 6} if name == "markov" else name
    return _MADE.setdefault((id(target), name, seed), make_drafter(target, correction=correction, seed=seed))


# -- 4: a larger budget only adds -------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(law=st.sampled_from(LAWS), seed=st.integers(0, 10**6), vocab=st.integers(2, 8), depth=st.integers(1, 5),
       width=st.integers(1, 8), budget=st.integers(1, 40), more=st.integers(0, 24), admit=st.sampled_from(["fanout", "pop"]),
       conditional=st.booleans())  # fmt: skip
def test_4_trees_are_nested_in_their_budget(
    law: str, seed: int, vocab: int, depth: int, width: int, budget: int, more: int, admit: Any, conditional: bool
) -> None:
    scorer = random_scorer(law, conditional=conditional, num_requests=2, depth=depth, vocab=vocab, seed=seed)
    anchor = torch.tensor([1, 2])
    small, large = (
        BestFirst(budget=size, width=width, depth=depth, admit=admit).build(anchor, scorer) for size in (budget, budget + more)
    )
    for request in range(2):
        one, other = small.tree(request), large.tree(request)
        for name in ("tokens", "parents", "depths", "scores"):
            assert torch.equal(getattr(one, name), getattr(other, name)[: len(one)])
    record = torch.randint(vocab, (2, depth), generator=torch.Generator().manual_seed(seed))
    assert (accept_batch(small, record)[1] <= accept_batch(large, record)[1]).all()


# -- 5, 6, 7: masks and positions ------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(parents=parent_lists)
def test_5_a_node_sees_itself_and_its_ancestors(parents: list[int]) -> None:
    mask = ancestor_mask(torch.tensor(parents))
    for node in range(len(parents)):
        seen, up = set(), node
        while up >= 0:
            seen.add(up)
            up = parents[up]
        assert set(mask[node].nonzero().flatten().tolist()) == seen
    depths = depths_of(torch.tensor(parents)).tolist()
    assert all(depth == depths[parent] + 1 for depth, parent in zip(depths[1:], parents[1:], strict=True))


@slow
@given(parents=parent_lists, prompt=prompts, data=st.data())
def test_6_7_nodes_are_their_paths_at_their_depths_in_any_order(
    endless: Target, parents: list[int], prompt: list[int], data: st.DataObject
) -> None:
    """Positions are the prefix's length + depth (c35); logits those of the path fed alone; other branches do not matter (c41)."""
    num_nodes = len(parents)
    tokens = torch.tensor(data.draw(st.lists(st.integers(0, 60), min_size=num_nodes, max_size=num_nodes)))
    asked: list[torch.Tensor] = []
    with pytest.MonkeyPatch.context() as patch:
        forward = endless._forward
        patch.setattr(endless, "_forward", lambda ids, positions, *rest: asked.append(positions) or forward(ids, positions, *rest))
        endless.prefill(prompt)
        logits = endless.verify(tokens, torch.tensor(parents)).logits
    assert torch.equal(asked[1][0], len(prompt) + depths_of(torch.tensor(parents)))
    node = data.draw(st.integers(0, num_nodes - 1))
    path = ancestor_mask(torch.tensor(parents))[node].nonzero().flatten()
    alone = endless.verify(tokens[path], torch.arange(len(path)) - 1).logits[-1]
    torch.testing.assert_close(logits[node], alone, rtol=1e-10, atol=1e-10)
    others = tokens.clone()
    others[~ancestor_mask(torch.tensor(parents))[node]] = data.draw(st.integers(0, 60))
    torch.testing.assert_close(endless.verify(others, torch.tensor(parents)).logits[node], alone, rtol=1e-10, atol=1e-10)
    # Parents first in another order: sort by depth, then by a drawn key.
    keys = data.draw(st.permutations(range(num_nodes)))
    order = torch.tensor(sorted(range(num_nodes), key=lambda i: (int(depths_of(torch.tensor(parents))[i]), keys[i])))
    place = torch.empty_like(order)
    place[order] = torch.arange(num_nodes)
    old = torch.tensor(parents)[order]
    moved = torch.where(old < 0, -1, place[old])
    torch.testing.assert_close(endless.verify(tokens[order], moved).logits, logits[order], rtol=1e-10, atol=1e-10)


# -- 8, 9, 18, 19: output and counts -----------------------------------------------------------------------------------------


@slow
@given(prompt=prompts, config=configs, kind=drafters, cap=st.integers(0, 20), temperature=st.sampled_from([0.0, 0.7, 1.0]),
       seed=st.integers(0, 99), stop_at=st.integers(0, 20), eos_at=st.integers(0, 30))  # fmt: skip
def test_8_18_19_output_is_plain_decoding_however_it_is_cut(
    prompt: list[int], config: DecodeConfig, kind: tuple[str, int], cap: int, temperature: float, seed: int, stop_at: int, eos_at: int
) -> None:
    """Ids, text and reason; stops and end-of-text at any place; every round counted once."""
    target, config = _ENDING, fitting(config, kind)
    sampling = Sampling(temperature=temperature)
    target.eos_token_ids = ()
    whole = generate_plain(target, prompt, sampling=sampling, max_new_tokens=24, seed=seed).ids
    stop = [text] if (text := target.decode(whole[stop_at : stop_at + 2])) and stop_at < 12 else []
    target.eos_token_ids = (whole[eos_at],) if eos_at < 24 else ()
    options: dict[str, Any] = {"sampling": sampling, "max_new_tokens": cap, "seed": seed, "stop": stop}
    found = generate(target, drafter_of(target, kind), prompt, config=config, **options)
    plain = generate_plain(target, prompt, **options)
    assert (found.ids, found.text, found.finish_reason) == (plain.ids, plain.text, plain.finish_reason)
    assert len(found.ids) <= cap and target.decode(found.ids).startswith(found.text)
    counts = found.counts()
    assert counts.emitted.sum() + min(cap, 1) == len(found.ids)
    assert (counts.emitted <= counts.accepted + 1).all() and (counts.accepted <= config.depth).all()
    assert (counts.emitted[:-1] == counts.accepted[:-1] + 1).all()  # the last round alone is cut
    if len(found.rounds) > 1:
        assert 1 <= metrics.tau([counts]) <= config.depth + 1


_ENDING = tiny_module.load(dtype=torch.float64)


@settings(deadline=None)
@given(rows=st.lists(st.integers(0, 7), min_size=1, max_size=40), cuts=st.lists(st.integers(0, 40), max_size=4))
def test_19_counts_do_not_depend_on_how_rounds_are_grouped(rows: list[int], cuts: list[int]) -> None:
    accepted = np.array(rows)

    def of(part: np.ndarray) -> metrics.Rounds:
        return metrics.Rounds(prompt="", domain="", seed=0, accepted=part, emitted=part + 1, nodes=part)

    whole, parts = [of(accepted)], [of(part) for part in np.split(accepted, sorted(min(cut, len(rows)) for cut in cuts))]
    assert metrics.tau(parts) == metrics.tau(whole) == pytest.approx(1 + sum(rows) / len(rows))
    survived = metrics.survival(whole, 7)
    assert np.array_equal(metrics.survival(parts, 7), survived)
    assert 1 + survived.sum() == pytest.approx(metrics.tau(whole)) and (np.diff(survived) <= 0).all()


# -- 9: bounds ----------------------------------------------------------------------------------------------------------


def reach_of(config: DecodeConfig) -> int:
    """How deep a path goes where every node has one child."""
    return config.depth if config.mode == "chain" else min(config.depth, config.budget - config.count_root)


@settings(max_examples=20, deadline=None)
@given(config=configs, vocab=st.integers(2, 8), seed=st.integers(0, 10**6), prompt=st.lists(st.integers(0, 1), min_size=1, max_size=4),
       temperature=st.sampled_from([0.0, 0.8]))  # fmt: skip
def test_9_an_oracle_commits_a_path_and_the_bonus_an_adversary_one_token(
    config: DecodeConfig, vocab: int, seed: int, prompt: list[int], temperature: float
) -> None:
    target, rounds = TableTarget(laws(vocab, seed), vocab), 3
    options: dict[str, Any] = {"sampling": Sampling(temperature=temperature), "seed": seed, "max_new_tokens": 1 + rounds * (reach_of(config) + 1)}
    plain = generate_plain(target, prompt, **options).ids
    further = generate_plain(target, prompt, **{**options, "max_new_tokens": 40}).ids
    best, worst = (generate(target, drafter(target, [*prompt, *further]), prompt, config=config, **options) for drafter in (oracle, adversary))
    assert best.ids == worst.ids == plain
    assert [item.emitted for item in best.rounds] == [reach_of(config) + 1] * rounds
    assert [item.emitted for item in worst.rounds] == [1] * (len(plain) - 1)


@settings(max_examples=60, deadline=None)
@given(law=st.sampled_from(["smooth", "ties", "holes", "flat"]), conditional=st.booleans(), seed=st.integers(0, 10**6), vocab=st.integers(1, 5),
       depth=st.integers(1, 5), width=st.integers(1, 5), budget=st.integers(1, 60), admit=st.sampled_from(["fanout", "pop"]))  # fmt: skip
def test_9_a_tree_that_holds_the_chain_accepts_no_less(
    law: str, conditional: bool, seed: int, vocab: int, depth: int, width: int, budget: int, admit: Any
) -> None:
    """And one that holds its first d nodes no less than a chain of depth d; without a limit on nodes a tree holds all of it."""
    scorer = random_scorer(law, conditional=conditional, num_requests=6, depth=depth, vocab=vocab, seed=seed)
    anchor, record = torch.arange(6), 100 + torch.randint(vocab, (6, depth), generator=torch.Generator().manual_seed(seed))
    chain = Chain(depth=depth).build(anchor, scorer)
    record[::2, :] = torch.where(chain.tokens[::2, 1:] >= 0, chain.tokens[::2, 1:], record[::2])  # half the records are the drafts
    tree = BestFirst(budget=budget, width=width, depth=depth, admit=admit).build(anchor, scorer)
    held, accepted = (accept_batch(tree, chain.tokens[:, 1:])[1], accept_batch(tree, record)[1])
    assert (accepted >= torch.minimum(accept_batch(chain, record)[1], held)).all()
    if budget > sum(min(width, vocab) ** level for level in range(1, depth + 1)):
        assert torch.equal(held, chain.num_nodes - 1)


# -- 10, 13: what is drawn ------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(parents=parent_lists.map(lambda parents: parents[:9]), vocab=st.integers(2, 4), seed=st.integers(0, 10**6), greedy=st.booleans(),
       data=st.data())  # fmt: skip
def test_10_sampler_match_has_the_law_of_the_target_with_any_tree(
    parents: list[int], vocab: int, seed: int, greedy: bool, data: st.DataObject
) -> None:
    """By enumeration; trees with twin siblings too, of which one is followed."""
    tree = script(data.draw(st.lists(st.integers(0, vocab - 1), min_size=len(parents), max_size=len(parents))), parents)
    p, tokens = laws(vocab, seed, greedy=greedy), tree.tokens.tolist()

    def verify(dice: Tape) -> tuple[int, ...]:
        path, after = accept(tree, lambda path: dice.pick(p(tuple(tokens[node] for node in path[1:]))))
        return (*(tokens[node] for node in path[1:]), after)

    assert distance(p, vocab, 3, verify) < 1e-12


@settings(max_examples=20, deadline=None)
@given(parents=parent_lists, vocab=st.integers(2, 5), seed=st.integers(0, 10**6), temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
       prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=4), min_size=1, max_size=3), data=st.data())  # fmt: skip
def test_10_sampler_match_draws_what_plain_decoding_draws(
    parents: list[int], vocab: int, seed: int, temperature: float, prompts: list[list[int]], data: st.DataObject
) -> None:
    """Draw by draw under one seed, any tree below every anchor, alone and beside others."""
    tokens = data.draw(st.lists(st.integers(0, vocab - 1), min_size=len(parents), max_size=len(parents)))
    target, drafter = TableTarget(laws(vocab, seed), vocab), scripted(script(tokens, parents), vocab)
    config = DecodeConfig(depth=max(1, int(depths_of(torch.tensor(parents)).max())), width=vocab, budget=len(parents))
    sampling = Sampling(temperature=temperature)
    plain = [generate_plain(target, prompt, sampling=sampling, max_new_tokens=12, seed=seed).ids for prompt in prompts]
    options: dict[str, Any] = {"config": config, "sampling": sampling, "max_new_tokens": 12}
    assert [generate(target, drafter, prompt, seed=seed, **options).ids for prompt in prompts] == plain
    many = generate_many(target, drafter, prompts, batch_size=len(prompts), seeds=[seed] * len(prompts), **options)
    assert [found.ids for found in many] == plain


samplings = st.builds(
    Sampling, temperature=maybe(st.floats(0.3, 2.0)), top_k=maybe(st.integers(1, 4)), top_p=maybe(st.floats(0.2, 1.0)),
    min_p=maybe(st.floats(0.0, 0.6)), repetition_penalty=maybe(st.floats(0.7, 1.6)), frequency_penalty=maybe(st.floats(-1.0, 1.5)),
    presence_penalty=maybe(st.floats(-1.0, 1.5)), logit_bias=st.just(()) | st.tuples(st.tuples(st.integers(0, 1), st.sampled_from([-100.0, -1.0, 2.0]))),
)  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(sampling=samplings, config=configs, vocab=st.integers(3, 8), seed=st.integers(0, 10**6), other=st.integers(0, 10**6),
       rule=st.sampled_from(["sampler_match", "sampler_match", "ratio", "block", "spec_infer", "sequoia", "k_seq"]))  # fmt: skip
def test_13_a_law_is_warped_before_it_is_drawn_from(
    sampling: Sampling, config: DecodeConfig, vocab: int, seed: int, other: int, rule: Any
) -> None:
    """Tokens lie in the filtered set of their own history; processors see those histories alone and keep nothing of them."""
    rule = rule if sampling.used_temperature > 0 else "sampler_match"
    p, prompt = laws(vocab, seed), [1, 0, 1]
    target, drafter = TableTarget(p, vocab), TableDrafter(laws(vocab, other), vocab)
    seen: list[tuple[int, ...]] = []
    samplers: list[Sampler] = []
    with pytest.MonkeyPatch.context() as patch:
        scores, init = Sampler.scores, Sampler.__init__
        patch.setattr(Sampler, "scores", lambda self, logits, emitted: (seen.append(tuple(emitted)), scores(self, logits, emitted))[1])
        patch.setattr(Sampler, "__init__", lambda self, *args, **kwargs: (samplers.append(self), init(self, *args, **kwargs))[1])
        found = generate(
            target, drafter, prompt, config=config, sampling=sampling, acceptance=Acceptance(rule=rule, widths=(2,)), max_new_tokens=7, seed=seed
        )
    for place, token in enumerate(found.ids):
        emitted = tuple(found.ids[:place])
        assert warped(p((*prompt, *emitted)), (*prompt, *emitted), emitted, sampling)[token] > 0
    if rule == "sampler_match":  # once a token, and of the last round some that the cap cut off
        assert [len(emitted) for emitted in seen] == list(range(len(seen)))
        assert seen[: len(found.ids)] == [tuple(found.ids[:place]) for place in range(len(found.ids))]
    replayed = Sampler(sampling, prompt, seed=seed, vocab_size=vocab)
    for place in range(len(found.ids)):
        replayed.scores(p((*prompt, *found.ids[:place])).log(), found.ids[:place])
    (used,) = samplers
    assert [repr(vars(item)) for item in used.processors] == [repr(vars(item)) for item in replayed.processors]


# -- 15, 16: the cache -------------------------------------------------------------------------------------------------------


@slow
@given(prompt=prompts, rounds=st.lists(st.tuples(parent_lists, st.integers(0, 30)), min_size=1, max_size=4), token=st.integers(0, 60))
def test_15_16_a_committed_cache_is_a_fresh_prefill(
    endless: Target, prompt: list[int], rounds: list[tuple[list[int], int]], token: int
) -> None:
    """After any trees and accepted paths, on a cache that grows on the way; what is not committed leaves no trace."""
    endless.cache = endless.new_cache(batch=1, capacity=4)
    endless.prefill(prompt)
    committed = list(prompt)
    for parents, end in rounds:
        tokens = (token + 7 * torch.arange(len(parents))) % 61
        endless.verify((tokens + 1) % 61, torch.tensor(parents))  # a tree that is dropped whole
        endless.verify(tokens, torch.tensor(parents))
        path = ancestor_mask(torch.tensor(parents))[end % len(parents)].nonzero().flatten()
        endless.commit(path)
        committed += tokens[path].tolist()
        assert endless.length == len(committed)
    live = [store[:, :, : endless.length] for store in (*endless.cache.keys, *endless.cache.values)]
    endless.cache = endless.new_cache(batch=1, capacity=256)
    endless.prefill(committed)
    fresh = [store[:, :, : endless.length] for store in (*endless.cache.keys, *endless.cache.values)]
    for one, other in zip(live, fresh, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@settings(max_examples=40, deadline=None)
@given(prompt=st.lists(st.integers(0, 3), min_size=1, max_size=6), parents=parent_lists, end=st.integers(0, 30), token=st.integers(0, 3),
       data=st.data())  # fmt: skip
def test_16_what_is_no_path_is_refused_and_changes_nothing(
    prompt: list[int], parents: list[int], end: int, token: int, data: st.DataObject
) -> None:
    """There is no crop to get wrong: a cache goes on from its length, and what lies beyond it is written over before it is seen."""
    target = TableTarget(laws(4, 9), 4)
    target.prefill(prompt)
    tokens = (token + torch.arange(len(parents))) % 4
    target.verify(tokens, torch.tensor(parents))
    before = target.cache.store.clone()
    path = data.draw(st.lists(st.integers(-1, len(parents) + 1), max_size=4))
    rises = all(one < other for one, other in itertools.pairwise(path))
    if not (path and path[0] == 0 and rises and path[-1] < len(parents)):
        with pytest.raises(ValueError, match="commit of nodes"):
            target.commit(path)
        assert target.length == len(prompt) and torch.equal(target.cache.store, before)
    path = ancestor_mask(torch.tensor(parents))[end % len(parents)].nonzero().flatten().tolist()
    target.commit(path)
    committed = [*prompt, *tokens[path].tolist()]
    logits = target.verify(tokens, torch.tensor(parents)).logits  # on what a longer tree left behind
    target.prefill(committed)
    with pytest.raises(ValueError, match="below the 0 nodes"):
        target.commit([0])
    assert target.length == len(committed) and torch.equal(target.verify(tokens, torch.tensor(parents)).logits, logits)


# -- 14, 17: requests do not meet ----------------------------------------------------------------------------------------------


@settings(slow, max_examples=10)
@given(batch=st.lists(prompts, min_size=1, max_size=5), config=configs, kind=drafters, temperature=st.sampled_from([0.0, 1.0]),
       data=st.data())  # fmt: skip
def test_14_17_rows_of_a_batch_are_their_solo_runs_in_any_order(
    endless: Target, batch: list[list[int]], config: DecodeConfig, kind: tuple[str, int], temperature: float, data: st.DataObject
) -> None:
    drafter, config, sampling = drafter_of(endless, kind), fitting(config, kind), Sampling(temperature=temperature)
    seeds = list(range(len(batch)))
    solo = [generate(endless, drafter, prompt, config=config, sampling=sampling, max_new_tokens=9, seed=seed).ids
            for prompt, seed in zip(batch, seeds, strict=True)]  # fmt: skip
    order = data.draw(st.permutations(seeds))
    together: list[Generation] = generate_many(
        endless, drafter, [batch[i] for i in order], config=config, sampling=sampling, max_new_tokens=9,
        seeds=[seeds[i] for i in order], batch_size=data.draw(st.integers(1, len(batch))),
    )  # fmt: skip
    assert [found.ids for found in together] == [solo[i] for i in order]
