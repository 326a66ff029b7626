"""Decoding of a target that is a table: whatever is drawn is enumerated, and the answers have the target's exact law."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tests.enumerate import Laws, Tape, law_of, laws
from tests.kit import TableDrafter, TableTarget, dealt, script, scripted, warped
from treedraft.config import Acceptance, DecodeConfig, Sampling
from treedraft.speculate import generate
from treedraft.speculate_many import generate_many
from treedraft.targets.cache import RowCache

PROMPT = [1, 0]
CONFIGS = [
    DecodeConfig(mode="chain", depth=2),
    DecodeConfig(depth=2, width=2, budget=5),
    DecodeConfig(depth=3, width=3, budget=9, admit="pop"),
    DecodeConfig(depth=3, width=3, budget=6, caps=(2, 1), count_root=False),
    DecodeConfig(depth=3, width=2, budget=8, frontier=1, admit="pop"),
]
SAMPLINGS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.0),
    Sampling(temperature=0.7, top_k=3, top_p=0.8),
    Sampling(top_k=2),
    Sampling(temperature=1.3, min_p=0.3),
    Sampling(temperature=1.0, repetition_penalty=1.5, logit_bias=((1, 0.75),)),
    Sampling(temperature=0.9, frequency_penalty=0.8, presence_penalty=0.5, top_p=0.9),
]


def name(sampling: Sampling) -> str:
    return "-".join(key for key in Sampling.__dataclass_fields__ if getattr(sampling, key) not in (None, ()))


def answers(p: Laws, cap: int, sampling: Sampling, eos: tuple[int, ...] = ()) -> dict[tuple[int, ...], float]:
    """The law of plain decoding: token after token, until there are `cap` or the text ends."""

    def run(dice: Tape) -> tuple[int, ...]:
        emitted: tuple[int, ...] = ()
        while len(emitted) < cap and not set(emitted) & set(eos):
            history = (*PROMPT, *emitted)
            emitted = (*emitted, dice.pick(warped(p(history), history, emitted, sampling)))
        return emitted

    return law_of(run)


def error(law: dict[Any, float], expected: dict[Any, float]) -> float:
    return max(abs(law.get(key, 0.0) - expected.get(key, 0.0)) for key in {*law, *expected})


def decoded(target: TableTarget, drafter: Any, cap: int, **options: Any) -> dict[tuple[int, ...], float]:
    """The law of what `generate` answers."""

    def run(dice: Tape) -> tuple[int, ...]:
        with dealt(dice):
            return tuple(generate(target, drafter, PROMPT, max_new_tokens=cap, **options).ids)

    return law_of(run)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=name)
def test_answers_have_the_law_of_plain_decoding(sampling: Sampling) -> None:
    """Chains and trees of a drafter that knows nothing of the target; ends of text inside of a block, and the cap."""
    vocab = 6 if sampling.top_k else 3
    p, q = laws(vocab, 1), laws(vocab, 2)
    target = TableTarget(p, vocab, eos=(2,))
    expected = answers(p, 3, sampling, (2,))
    for config in CONFIGS:
        assert error(decoded(target, TableDrafter(q, vocab), 3, config=config, sampling=sampling), expected) < 1e-12, config


RULES: list[Any] = ["ratio", "block", "spec_infer", "sequoia", "point_mass", "k_seq"]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("vocab", "depth", "sampling"), [(2, 2, SAMPLINGS[6]), (3, 1, SAMPLINGS[2])], ids=["penalties", "filters"])
def test_drawn_drafts_leave_the_law_as_it_is(rule: Any, vocab: int, depth: int, sampling: Sampling) -> None:
    """The drafts are `draw_tree`'s, of which noise would make the same choices with the same probabilities."""
    p, q = laws(vocab, 3), laws(vocab, 4)
    options = {"config": DecodeConfig(depth=depth), "sampling": sampling, "acceptance": Acceptance(rule=rule, widths=(2,))}
    assert error(decoded(TableTarget(p, vocab), TableDrafter(q, vocab), 3, **options), answers(p, 3, sampling)) < 1e-12


def test_rows_of_a_batch_have_the_joint_law_of_independent_requests() -> None:
    """The first token is certain, so that there is less to enumerate."""
    free, q = laws(2, 5), laws(2, 6)

    def p(history: tuple[int, ...]) -> torch.Tensor:
        return torch.eye(2, dtype=torch.float64)[1] if len(history) == len(PROMPT) else free(history)

    target, sampling, config = TableTarget(p, 2), Sampling(temperature=1.0), CONFIGS[1]

    def run(dice: Tape) -> tuple[tuple[int, ...], ...]:
        with dealt(dice):
            found = generate_many(target, TableDrafter(q, 2), [PROMPT, PROMPT], config=config, sampling=sampling, batch_size=2, max_new_tokens=4)
        return tuple(tuple(item.ids) for item in found)

    alone = answers(p, 4, sampling)
    assert error(law_of(run), {(one, other): a * b for one, a in alone.items() for other, b in alone.items()}) < 1e-12


def test_b20_the_token_after_a_whole_path_has_the_law_of_its_last_node(table: TableTarget) -> None:
    """Every path is drafted, so that a round accepts two drafts whatever is drawn."""
    options: dict[str, Any] = {"config": DecodeConfig(depth=2, width=3, budget=13), "sampling": Sampling(temperature=1.0)}
    drafter: Any = TableDrafter(laws(3, 8), 3)
    assert error(decoded(table, drafter, 4, **options), answers(table.law, 4, options["sampling"])) < 1e-12
    assert [len(item.path) for item in generate(table, drafter, PROMPT, max_new_tokens=7, **options).rounds] == [3, 3]


def test_a_cache_that_keeps_the_wrong_rows_is_seen(table: TableTarget) -> None:
    """The second child is accepted, and the first one's row stays in its place."""
    drafter = scripted(script([0, 1, 2, 0], [-1, 0, 0, 2]), 3)
    options: dict[str, Any] = {"config": DecodeConfig(depth=2, width=2, budget=4), "sampling": Sampling(temperature=1.0)}
    expected = answers(table.law, 4, options["sampling"])
    assert error(decoded(table, drafter, 4, **options), expected) < 1e-12
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RowCache, "move", lambda self, sources, start: None)
        assert error(decoded(table, drafter, 4, **options), expected) > 1e-3


@pytest.mark.parametrize("count", [1, 3])
def test_d51_the_last_child_at_every_depth_is_accepted(count: int) -> None:
    """1 2 3 1 2 3 ...: a target that falls silent as soon as its history is another, and a drafter that likes the right token least."""

    def law(history: tuple[int, ...]) -> torch.Tensor:
        right = all(after == before % 3 + 1 for before, after in itertools.pairwise(history))
        return torch.eye(4, dtype=torch.float64)[history[-1] % 3 + 1 if right else 0]

    def q(path: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor([0.3, 0.3, 0.3, 0.3], dtype=torch.float64).index_fill(0, torch.tensor(path[-1] % 3 + 1), 0.1)

    target, config, prompts = TableTarget(law, 4), DecodeConfig(depth=3, width=4, budget=85), [[1], [3, 1, 2], [2, 3]][:count]
    for prompt, found in zip(
        prompts, generate_many(target, TableDrafter(q, 4), prompts, config=config, batch_size=count, max_new_tokens=13), strict=True
    ):
        assert found.ids == [(prompt[-1] + place) % 3 + 1 for place in range(13)]
        for item in found.rounds:
            assert len(item.path) == 4 and all(node == item.tree.children()[above][-1] for above, node in itertools.pairwise(item.path))


@pytest.mark.parametrize("siblings", [[1, 2], [2, 1]], ids=str)
def test_a9_the_argmax_is_followed_whatever_the_order_of_siblings(siblings: list[int]) -> None:
    """The other one is a millionth less likely."""
    law = torch.tensor([0.1, 0.45 + 1e-6, 0.45, 0.0], dtype=torch.float64)
    target, drafter = TableTarget(lambda _: law / law.sum(), 4), scripted(script([0, *siblings], [-1, 0, 0]), 4)
    found = generate(target, drafter, [0], config=DecodeConfig(depth=1, width=2, budget=3), max_new_tokens=9)
    assert found.ids == [1] * 9
    assert all([int(item.tree.tokens[node]) for node in item.path[1:]] == [1] for item in found.rounds)
