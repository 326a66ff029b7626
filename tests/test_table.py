"""Decoding of a target that is a table: whatever is drawn is enumerated, and the answers have the target's exact law."""

from __future__ import annotations

from typing import Any

import pytest

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
    p, q = laws(2, 5), laws(2, 6)
    target, sampling, config = TableTarget(p, 2), Sampling(temperature=1.0), CONFIGS[1]

    def run(dice: Tape) -> tuple[tuple[int, ...], ...]:
        with dealt(dice):
            found = generate_many(target, TableDrafter(q, 2), [PROMPT, PROMPT], config=config, sampling=sampling, batch_size=2, max_new_tokens=3)
        return tuple(tuple(item.ids) for item in found)

    alone = answers(p, 3, sampling)
    assert error(law_of(run), {(one, other): a * b for one, a in alone.items() for other, b in alone.items()}) < 1e-12


def test_a_cache_that_keeps_the_wrong_rows_is_seen() -> None:
    """The second child is accepted, and the first one's row stays in its place."""
    p, sampling = laws(3, 7), Sampling(temperature=1.0)
    drafter = scripted(script([0, 1, 2, 0], [-1, 0, 0, 2]), 3)
    options: dict[str, Any] = {"config": DecodeConfig(depth=2, width=2, budget=4), "sampling": sampling}
    assert error(decoded(TableTarget(p, 3), drafter, 4, **options), answers(p, 4, sampling)) < 1e-12
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RowCache, "move", lambda self, sources, start: None)
        assert error(decoded(TableTarget(p, 3), drafter, 4, **options), answers(p, 4, sampling)) > 1e-3
