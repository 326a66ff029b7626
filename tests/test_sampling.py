"""Temperature, filters, penalties and biases: the same in every decoder, with every node's own history."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from tests.kit import Stub
from tests.tiny_drafters import make_drafter, random_prompts
from treedraft import noise
from treedraft.config import Acceptance, DecodeConfig, Sampling
from treedraft.drafter import Drafter
from treedraft.speculate import generate, generate_plain
from treedraft.targets import tiny as tiny_module
from treedraft.targets.hf import Target
from treedraft.targets.sampling import Sampler
from treedraft.trees import rules
from treedraft.trees.accept import accept
from treedraft.trees.tree import DraftTree

SAMPLINGS = [
    Sampling(temperature=0.8, top_p=0.9),
    Sampling(temperature=0.7, top_k=3, top_p=0.8),
    Sampling(top_k=5),
    Sampling(temperature=1.5, min_p=0.2),
    Sampling(repetition_penalty=1.05),
    Sampling(temperature=1.0, repetition_penalty=1.3),
    Sampling(frequency_penalty=1.5),
    Sampling(temperature=0.9, frequency_penalty=0.5, presence_penalty=0.7),
    Sampling(temperature=1.0, logit_bias=((3, -100.0), (7, 2.0))),
    Sampling(temperature=1.0, top_p=0.9, min_p=0.05, repetition_penalty=1.1, logit_bias=((1, 1.0),)),
]
DECODES = [DecodeConfig(mode="tree", depth=5, width=3, budget=24), DecodeConfig(mode="chain", depth=4)]


def name(sampling: Sampling) -> str:
    return "-".join(f"{key}" for key in Sampling.__dataclass_fields__ if getattr(sampling, key) not in (None, ()))


@pytest.fixture(scope="module")
def drafter(tiny64: Target) -> Drafter:
    return make_drafter(tiny64, correction="attention")


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=name)
def test_speculative_output_is_plain_decoding(tiny64: Target, drafter: Drafter, sampling: Sampling) -> None:
    """Drafters that know nothing, everything and the wrong thing: rejected drafts leave no trace in any penalty."""
    for seed, prompt in enumerate(random_prompts(tiny64, 5, seed=3)):
        plain = generate_plain(tiny64, prompt, sampling=sampling, max_new_tokens=24, seed=seed)
        stubs: list[Any] = [Stub(tiny64, [*prompt, *plain.ids, *[5] * 9], shift) for shift in (0, 1)]
        for each in (drafter, *stubs):
            config = DECODES[seed % 2]
            found = generate(tiny64, each, prompt, config=config, sampling=sampling, max_new_tokens=24, seed=seed)
            assert found.ids == plain.ids, (seed, type(each))


@pytest.mark.parametrize("penalty", [1.05, 1.3])
def test_repetition_penalty_changes_nothing_on_100_prompts(tiny64: Target, drafter: Drafter, penalty: float) -> None:
    changed = 0
    for prompt in random_prompts(tiny64, 100, longest=12, seed=6):
        sampling = Sampling(repetition_penalty=penalty)
        plain = generate_plain(tiny64, prompt, sampling=sampling, max_new_tokens=10).ids
        assert generate(tiny64, drafter, prompt, config=DECODES[0], sampling=sampling, max_new_tokens=10).ids == plain
        changed += plain != generate_plain(tiny64, prompt, max_new_tokens=10).ids
    assert changed > 10  # it does something


@pytest.mark.parametrize(
    "options", [{"repetition_penalty": 1.3}, {"sequence_bias": [[[3], -100.0], [[7], 2.0]]}, {"repetition_penalty": 0.8}], ids=str
)
def test_greedy_output_is_that_of_transformers(tiny64: Target, options: dict[str, Any]) -> None:
    ours = {"logit_bias": ((3, -100.0), (7, 2.0))} if "sequence_bias" in options else options
    model: Any = tiny64.model
    for prompt in random_prompts(tiny64, 6, seed=9):
        expected = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones((1, len(prompt)), dtype=torch.int64), pad_token_id=0,
            max_new_tokens=16, do_sample=False, eos_token_id=list(tiny64.eos_token_ids), **options,
        )  # fmt: skip
        found = generate_plain(tiny64, prompt, sampling=Sampling(**ours), max_new_tokens=16)
        assert found.ids == expected[0, len(prompt) :].tolist()


def test_laws_by_hand() -> None:
    logits = torch.tensor([2.0, 1.5, 1.0, 0.5], dtype=torch.float64)
    law = logits.softmax(-1)

    def of(emitted: tuple[int, ...] = (), **options: Any) -> torch.Tensor:
        return Sampler(Sampling(**options), [3], seed=0, vocab_size=4).law(logits, emitted)

    def kept(*ids: int) -> torch.Tensor:
        mask = torch.zeros(4, dtype=torch.bool)
        mask[list(ids)] = True
        return (law * mask) / (law * mask).sum()

    for got, expected in (
        (of(temperature=1.0), law),
        (of(temperature=0.5), (2 * logits).softmax(-1)),
        (of(temperature=0.0), torch.tensor([1.0, 0, 0, 0])),
        (of(), torch.tensor([1.0, 0, 0, 0])),
        (of(top_k=2), kept(0, 1)),  # a filter without a temperature samples at 1
        (of(top_p=0.5), kept(0, 1)),
        (of(top_p=0.4), kept(0)),
        (of(min_p=0.5), kept(0, 1)),
        (of((1, 1, 2), temperature=1.0, frequency_penalty=0.5), (logits - torch.tensor([0, 1.0, 0.5, 0])).softmax(-1)),
        (of((1, 1, 2), temperature=1.0, presence_penalty=0.5), (logits - torch.tensor([0, 0.5, 0.5, 0])).softmax(-1)),
        (of((1,), temperature=1.0, repetition_penalty=2.0), (logits / torch.tensor([1, 2.0, 1, 2.0])).softmax(-1)),
        (of(temperature=1.0, logit_bias=((0, -1.0),)), (logits - torch.tensor([1.0, 0, 0, 0])).softmax(-1)),
    ):
        torch.testing.assert_close(got, expected.double(), rtol=1e-12, atol=1e-12)


def test_filtered_and_banned_tokens_never_come(tiny64: Target, drafter: Drafter) -> None:
    sampling = Sampling(temperature=1.2, top_k=2, logit_bias=((5, -1e9),))
    for seed in range(40):
        ids = generate(tiny64, drafter, [4, 9], config=DECODES[0], sampling=sampling, max_new_tokens=8, seed=seed).ids
        assert 5 not in ids
        tiny64.prefill([4, 9])
        for place, token in enumerate(ids):
            logits = tiny64.prefill([4, 9, *ids[:place]]).logits[-1]
            logits[5] = -torch.inf
            assert token in logits.topk(2).indices.tolist()


@pytest.mark.parametrize("temperature", [0, 0.0, -0.0, None])
def test_every_way_to_say_greedy(tiny64: Target, drafter: Drafter, temperature: float | None) -> None:
    sampling = Sampling(temperature=temperature)
    found = generate(tiny64, drafter, [4, 9], config=DECODES[0], sampling=sampling, max_new_tokens=12)
    assert found.ids == generate_plain(tiny64, [4, 9], max_new_tokens=12).ids
    assert all(item.emitted >= 1 for item in found.rounds)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature is -1"), ({"temperature": float("nan")}, "temperature is nan"), ({"top_k": 0}, "top_k is 0"),
        ({"top_p": 0.0}, "top_p is 0"), ({"top_p": 1.5}, "top_p is 1.5"), ({"min_p": 2.0}, "min_p is 2"),
        ({"frequency_penalty": float("inf")}, "frequency_penalty is inf"), ({"presence_penalty": float("nan")}, "presence_penalty is nan"),
        ({"logit_bias": ((3, float("nan")),)}, "token 3 is nan"), ({"repetition_penalty": 0.0}, "repetition_penalty is 0"), ({"logit_bias": ((64, 1.0),)}, "token 64; the vocabulary has 0..63"),
    ],
)  # fmt: skip
def test_impossible_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampler(Sampling(**options), [3], seed=0, vocab_size=64)


def test_seeds_are_a_requests_own(tiny64: Target, drafter: Drafter) -> None:
    """The same seed repeats, another one differs, and what was decoded in between does not matter."""
    sampling = Sampling(temperature=1.0)
    one = generate(tiny64, drafter, [4, 9], config=DECODES[0], sampling=sampling, max_new_tokens=12, seed=1).ids
    other = generate(tiny64, drafter, [4, 9], config=DECODES[0], sampling=sampling, max_new_tokens=12, seed=2).ids
    again = generate(tiny64, drafter, [4, 9], config=DECODES[1], sampling=sampling, max_new_tokens=12, seed=1).ids
    assert one == again != other


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, top_p=0.9)], ids=["greedy", "sampled"])
def test_logits_that_are_not_finite_stop_the_run(value: float, sampling: Sampling) -> None:
    target = tiny_module.load(dtype=torch.float64)
    target.eos_token_ids = ()
    drafter = make_drafter(target, correction="attention")
    with torch.no_grad():
        honest, calls = target.verify, []

        def broken(tokens: torch.Tensor, parents: torch.Tensor) -> Any:
            verified = honest(tokens, parents)
            calls.append(len(tokens))
            if len(calls) == 3:
                verified.logits[:, 7] = value
            return verified

        target.verify = broken  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(FloatingPointError, match=r"round 3 of tiny: .* position \d+ are not finite"):
            generate(target, drafter, [4, 9], config=DECODES[0], sampling=sampling, max_new_tokens=24)


# -- rules that draw their drafts -----------------------------------------------------------------------------------------

RULES: list[Any] = ["ratio", "block", "spec_infer", "sequoia", "point_mass", "k_seq"]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("sampling", [Sampling(temperature=1.0), Sampling(temperature=0.7, top_k=4, repetition_penalty=1.2)], ids=name)
def test_drawn_drafts_have_the_law_of_the_target(tiny64: Target, drafter: Drafter, rule: Any, sampling: Sampling) -> None:
    """The second token of an answer, whose first is the same in all: one draft, decided by the rule."""
    acceptance, counts = Acceptance(rule=rule, widths=(3, 2)), torch.zeros(64)
    first: dict[int, int] = {}
    for seed in range(400):
        found = generate(
            tiny64, drafter, [4, 9], config=DecodeConfig(depth=2), sampling=sampling, acceptance=acceptance, max_new_tokens=2, seed=seed
        )
        if len(found.ids) == 2:
            first[found.ids[0]] = first.get(found.ids[0], 0) + 1
            counts[found.ids[1]] += 1
    expected = torch.zeros(64, dtype=torch.float64)
    sampler = Sampler(sampling, [4, 9], seed=0, vocab_size=64)
    for token, times in first.items():
        expected += times * sampler.law(tiny64.prefill([4, 9, token]).logits[-1], [token])
    assert (counts[expected == 0] == 0).all()
    large = expected >= 5
    rest = torch.tensor([counts[~large].sum(), expected[~large].sum()])
    observed, theory = torch.cat([counts[large], rest[:1]]), torch.cat([expected[large], rest[1:].double()])
    keep = theory > 0
    assert stats.chisquare(observed[keep].numpy(), (theory * observed.sum() / theory.sum())[keep].numpy()).pvalue > 1e-4


@pytest.mark.parametrize("rule", [*RULES, "typical"])
def test_drawn_drafts_end_and_repeat(tiny64: Target, drafter: Drafter, rule: Any) -> None:
    options: dict[str, Any] = {"sampling": Sampling(temperature=0.8), "acceptance": Acceptance(rule=rule), "max_new_tokens": 20, "seed": 5}
    one, again = (generate(tiny64, drafter, [4, 9, 1], config=DECODES[0], **options) for _ in range(2))
    assert one.ids == again.ids and 1 + sum(item.emitted for item in one.rounds) == len(one.ids)
    expected = (1, 1, 1, 1, 1) if rule in ("ratio", "block") else (4, 2, 1, 1, 1)
    assert options["acceptance"].levels(5) == expected


def test_drawn_drafts_need_a_temperature(tiny64: Target, drafter: Drafter) -> None:
    with pytest.raises(ValueError, match="temperature 0 draws nothing"):
        generate(tiny64, drafter, [4], config=DECODES[0], acceptance=Acceptance(rule="ratio"), max_new_tokens=4)
    with pytest.raises(ValueError, match="at least 1 a level"):
        Acceptance(rule="sequoia", widths=(2, 0))


# -- one large sample of either decoder (correctness.md 4): the joint law of two tokens, 16 cells, a TV distance of 1 % is seen -----------

NUM_SEEDS = 120_000
LOG_P = torch.log_softmax(2 * torch.randn((5, 4), generator=torch.Generator().manual_seed(3), dtype=torch.float64), -1)  # root, then a first token


def drawn(seeds: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What sampler match asks for: the first token [n] of every seed, and the second one after every first [n, 4]."""
    first = (LOG_P[0] + noise.gumbel(seeds, 0, 4)).argmax(-1)
    return first, (LOG_P[1:] + noise.gumbel(seeds, 1, 4)[:, None]).argmax(-1)


def plain_sample(seeds: torch.Tensor) -> np.ndarray:
    first, second = drawn(seeds)
    return counted(first, second.gather(1, first[:, None])[:, 0])


def speculative_sample(seeds: torch.Tensor) -> np.ndarray:
    """Rounds with trees of three shapes in turn: of what a first round leaves open a second one draws."""
    trees = [
        DraftTree(tokens=torch.tensor(tokens), parents=torch.tensor(parents), depths=torch.tensor(depths), scores=torch.zeros(len(tokens)))
        for tokens, parents, depths in (
            ([9, 0, 2, 1, 3], [-1, 0, 0, 1, 1], [0, 1, 1, 2, 2]), ([9, 1, 3], [-1, 0, 1], [0, 1, 2]), ([9, 3, 2, 1, 0], [-1, 0, 0, 0, 0], [0, 1, 1, 1, 1]),
        )
    ]  # fmt: skip
    firsts, seconds, found = *(part.tolist() for part in drawn(seeds)), []
    for number, (first, second) in enumerate(zip(firsts, seconds, strict=True)):
        tree = trees[number % 3]
        tokens, emitted = tree.tokens.tolist(), []
        while len(emitted) < 2:
            known = tuple(emitted)

            def choose(path: list[int], known=known, tokens=tokens, first=first, second=second) -> int:
                before = [*known, *(tokens[node] for node in path[1:])]
                return (first, second[before[0]] if before else 0, 0)[len(before)]

            path, bonus = accept(tree, choose)
            emitted += [*(tokens[node] for node in path[1:]), bonus]
        found.append(emitted[:2])
    pairs = torch.tensor(found)
    return counted(pairs[:, 0], pairs[:, 1])


def a_draw_a_child(seeds: torch.Tensor) -> np.ndarray:
    """The fault: every drafted child is compared with a draw of its own, so that drafted tokens come too often."""
    first, second = drawn(seeds)
    for child in (0, 2):
        own = (LOG_P[0] + noise.gumbel(seeds + 10**9 * (child + 1), 0, 4)).argmax(-1)
        first = torch.where(own == child, child, first)
    return counted(first, second.gather(1, first[:, None])[:, 0])


def counted(first: torch.Tensor, second: torch.Tensor) -> np.ndarray:
    return torch.bincount(4 * first + second, minlength=16).numpy()


def test_a_large_sample_is_that_of_plain_decoding_beside_a_null_and_a_biased_run() -> None:
    seeds = torch.arange(NUM_SEEDS)
    plain, others = plain_sample(seeds), seeds + NUM_SEEDS
    law = (LOG_P[0][:, None] + LOG_P[1:]).exp().flatten().numpy() * NUM_SEEDS
    runs = {"null": plain_sample(others), "speculative": speculative_sample(others), "biased": a_draw_a_child(others)}
    for name_, counts in runs.items():
        alike = stats.chi2_contingency(np.stack([plain, counts])).pvalue > 1e-4
        exact = stats.chisquare(counts, law).pvalue > 1e-4
        assert alike == exact == (name_ != "biased"), name_
    # With the same seeds the two are one sample, token for token.
    assert (speculative_sample(seeds[:5000]) == plain_sample(seeds[:5000])).all()


@pytest.mark.parametrize("rule", ["spec_infer", "sequoia"])
def test_a_sample_of_a_rule_that_draws_its_drafts_beside_a_biased_run(rule: str) -> None:
    """The token that follows two drafted ones: the rule's, and that of one which takes a rejected draft's law for the target's."""
    num_seeds, p = 6_000, LOG_P[0].exp()
    q = torch.softmax(torch.tensor([0.0, 1.5, 0.3, -0.5], dtype=torch.float64), -1)
    seeds = torch.arange(num_seeds)
    drafts = (q.log() + noise.gumbel(seeds + 10**9, 0, 4)).topk(2).indices  # without replacement
    if rule == "spec_infer":
        drafts[:, 1] = (q.log() + noise.gumbel(seeds + 10**10, 0, 4)).argmax(-1)
    counts = {"right": torch.zeros(4), "biased": torch.zeros(4)}
    for seed, tokens in enumerate(drafts.tolist()):
        place, rest = rules.RULES[rule](p, q, tokens, dice := rules.KeyedDice(seed, 0))
        for which, law in (("right", rest), ("biased", p)):
            counts[which][tokens[place] if place is not None else dice.pick(law)] += 1
    expected = (p * num_seeds).numpy()
    assert stats.chisquare(counts["right"].numpy(), expected).pvalue > 1e-4
    assert stats.chisquare(counts["biased"].numpy(), expected).pvalue < 1e-4
