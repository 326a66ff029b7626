"""LongSpark pinned to its specification: sums, counts, bytes, laws and losses; then decoding, replay and training with it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from tests.tiny_drafters import (
    BACKBONES,
    LONGSPARK,
    make_drafter,
    make_features,
    make_sequences,
    name_of,
    random_prompts,
    randomise,
)
from tests.tolerances import assert_close, assert_close_sums
from treedraft import losses
from treedraft.cells import Workbench
from treedraft.config import Acceptance, DecodeConfig, Sampling, TrainConfig
from treedraft.contexts import longspark
from treedraft.data.anchors import batch_for_step, usable_sequences
from treedraft.drafter import Drafter, Prefix
from treedraft.evaluate import Replay, Trajectory
from treedraft.grid import load_grid, load_grids, single_arm
from treedraft.jobs import run_group
from treedraft.metrics import tau
from treedraft.ops import summary
from treedraft.ops.layers import Shape, block_attention
from treedraft.ops.summary import EMPTY, Partial, attend, merge, naive_summaries, prefix_summaries
from treedraft.speculate import generate, generate_plain
from treedraft.speculate_many import generate_many
from treedraft.targets import tiny as tiny_module
from treedraft.targets.generate import generate as generate_batch
from treedraft.targets.hf import Target
from treedraft.trainer import Trainer, TrainStep

WINDOW, STATE = 6, 3e-5  # rows of LONGSPARK's window; the authors' own bound on sixteen rounds of updates in float32
CORRECTIONS: list[dict[str, Any]] = [{"name": "none"}, {"name": "markov", "rank": 6}, {"name": "attention"}]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def one_by_one(queries: Tensor, keys: Tensor, values: Tensor) -> Partial:
    """Every row merged alone; leading axes of keys and values [n, L, k, d] as they come."""
    inside = torch.ones(1, dtype=torch.bool)
    total = Partial(log_total=queries.new_full(queries.shape[:3], EMPTY), mean=torch.zeros_like(queries))
    for row in range(len(keys)):
        total = merge(total, attend(queries, keys[row : row + 1], values[row : row + 1], inside))
    return total


def assert_same(actual: Partial, expected: Partial, bound: float) -> None:
    torch.testing.assert_close(actual.log_total, expected.log_total, rtol=bound, atol=bound)
    torch.testing.assert_close(actual.mean, expected.mean, rtol=bound, atol=bound)


# -- 1: the sums --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("groups", [1, 2, 8])
def test_updates_of_any_size_and_order_are_one_attention(groups: int, seed: int) -> None:
    """Float32, logits of a wide spread; and nothing added changes nothing."""
    rng = np.random.default_rng(seed)
    length, kv_heads = 400, 2
    queries = 3 * random(2, kv_heads * groups, 5, 16, seed=seed, dtype=torch.float32)
    keys, values = (random(length, 2, kv_heads, 16, seed=seed + i, dtype=torch.float32) for i in (10, 20))
    whole = attend(queries, keys, values, torch.ones(length, dtype=torch.bool))
    wide = naive_summaries(queries.double(), keys[None].double(), values[None].double(), torch.tensor([[length]]))[0, 0]
    assert_same(whole, Partial(log_total=wide.log_total.float(), mean=wide.mean.float()), STATE)
    assert_same(one_by_one(queries, keys, values), whole, STATE)
    cuts = np.sort(rng.choice(np.arange(1, length), 16, replace=False))
    parts = [attend(queries, k, v, torch.ones(len(k), dtype=torch.bool)) for k, v in zip(keys.tensor_split(cuts.tolist()), values.tensor_split(cuts.tolist()), strict=True)]
    for order in (range(len(parts)), rng.permutation(len(parts))):
        total = parts[order[0]]
        for place in order[1:]:
            total = merge(total, parts[place])
        assert_same(total, whole, STATE)
    nothing = attend(queries, keys[:3], values[:3], torch.zeros(3, dtype=torch.bool))
    for both in (merge(whole, nothing), merge(nothing, whole)):
        assert torch.equal(both.log_total, whole.log_total) and torch.equal(both.mean, whole.mean)


@pytest.mark.parametrize(("kv_heads", "anchors"), [(4, [[5, 1, 0, 9, 9]]), (2, [[17, 3, 8], [1, 2, 16]]), (1, [[30], [0]]), (1, [[7] * 20])])
def test_summaries_before_anchors_are_one_attention_each(kv_heads: int, anchors: list[list[int]]) -> None:
    """Cut at the anchors and merged along the sequence; so are the gradients of the queries."""
    queries = (2 * random(2, 4, 3, 8)).requires_grad_(True)
    keys, values = (random(len(anchors), 17, 2, kv_heads, 8, seed=seed) for seed in (1, 2))
    ends = torch.tensor(anchors).clamp(max=17)
    fast, slow = (function(queries, keys, values, ends) for function in (prefix_summaries, naive_summaries))
    known = ends > 0
    assert_close(fast.mean, slow.mean)
    assert_close(fast.log_total[known], slow.log_total[known])
    assert bool((fast.log_total[~known] < -1e29).all())
    weights = random(*slow.mean.shape, seed=3)
    gradients = [torch.autograd.grad((item.mean * weights).sum(), queries)[0] for item in (fast, slow)]
    assert_close(*gradients)
    assert prefix_summaries(queries.bfloat16(), keys.bfloat16(), values.bfloat16(), ends).mean.dtype == torch.float32


def test_the_work_of_summaries_does_not_grow_with_the_anchors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are attended to: about twice the sequence, not the sequence once an anchor."""
    rows: list[int] = []
    whole = summary.attend

    def counting(queries: Tensor, keys: Tensor, values: Tensor, inside: Tensor) -> Partial:
        rows.append(inside.numel())
        return whole(queries, keys, values, inside)

    monkeypatch.setattr(summary, "attend", counting)
    for number in (1, 8, 64):
        anchors = torch.randint(1, 512, (1, number), generator=torch.Generator().manual_seed(number))
        prefix_summaries(random(1, 2, 2, 4), random(1, 512, 1, 2, 4), random(1, 512, 1, 2, 4), anchors)
    assert max(rows) <= 2 * 512


# -- 2: one softmax -----------------------------------------------------------------------------------------------------


def naive_attention(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, prefix_keys: Tensor, prefix_values: Tensor, queries: Tensor, window: int
) -> Tensor:
    """One block [B, h, d] behind a prefix [t, k, d]: slots, the last rows and summary entries side by side, one softmax."""
    num_slots, num_heads, size = q.shape
    out = torch.zeros_like(q)
    groups = num_heads // keys.shape[1]
    for slot in range(num_slots):
        for head in range(num_heads):
            k, last = head // groups, slice(max(0, len(prefix_keys) - window), None)
            weights = (queries[head] @ prefix_keys[:, k].T * size**-0.5).softmax(-1)
            side = torch.cat([keys[mask[slot], k], prefix_keys[last, k], queries[head]])
            seen = torch.cat([values[mask[slot], k], prefix_values[last, k], weights @ prefix_values[:, k]])
            out[slot, head] = (side @ q[slot, head] * size**-0.5).softmax(0) @ seen
    return out


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
@pytest.mark.parametrize("length", [1, 100, 255, 256, 257])
def test_attention_is_one_softmax_over_block_window_and_summary(length: int, groups: int) -> None:
    """A state that was filled in chunks, W = 256, on both sides of the window's edge; causal and bidirectional blocks."""
    kv_heads, size = 8 // groups, 4
    shape = Shape(hidden_size=32, num_heads=8, kv_heads=kv_heads, head_dim=size, intermediate_size=8, rms_norm_eps=1e-6, vocab_size=9,
                  draft_vocab_size=9, num_taps=1)  # fmt: skip
    context = longspark.Component(longspark.Config(), shape, num_layers=1, num_slots=7).double()
    state = context.open(1, None, None, capacity=1, cache=None)  # pyright: ignore
    taps = random(1, length, 32 + 2 * kv_heads * size, seed=length)
    for chunk in taps.split(97, dim=1):
        state.append(chunk, [chunk.shape[1]], [0])
    q, keys, values = random(7, 8, size, seed=1), random(7, kv_heads, size, seed=2), random(7, kv_heads, size, seed=3)
    _, cached = context.split(taps)
    with torch.no_grad():
        seen = state.memory.at(torch.tensor([[length]]))
        for mask in (torch.ones((7, 7), dtype=torch.bool), torch.ones((7, 7), dtype=torch.bool).tril()):
            found = block_attention(
                q[None, None] * size**-0.5, seen.keys[0], seen.values[0], keys[None, None], values[None, None], seen.visible, mask, seen.summaries[0]
            )
            expected = naive_attention(q, keys, values, mask, cached[0, :, 0, 0], cached[0, :, 0, 1], context.queries[0], 256)
            assert_close(found[0, 0], expected.flatten(1))


# -- 3: parameters and bytes ----------------------------------------------------------------------------------------------


def shape_of(hidden: int, heads: int, intermediate: int) -> Shape:
    return Shape(
        hidden_size=hidden, num_heads=heads, kv_heads=8, head_dim=128, intermediate_size=intermediate, rms_norm_eps=1e-6,
        vocab_size=151_936, draft_vocab_size=151_936, num_taps=5,
    )  # fmt: skip


QWEN3 = {"4B": (2560, 32, 9728), "8B": (4096, 32, 12288), "14B": (5120, 40, 17408)}


def published(size: str, **context: Any) -> Drafter:
    """The method's own sizes, unallocated, in bfloat16."""
    tables = {"method": "longspark", "drafter": {"context": context}}
    config = single_arm(tables, target="Qwen/Qwen3", where="a test").drafter
    with torch.device("meta"):
        return Drafter(config, shape_of(*QWEN3[size])).to(torch.bfloat16)


@pytest.mark.parametrize(("size", "expected"), [("4B", 641_778_432), ("8B", 1_193_882_880), ("14B", 1_965_736_192)])
def test_parameters_are_those_published(size: str, expected: int) -> None:
    drafter = published(size)
    assert (drafter.depth, drafter.config.first_slot) == (7, 0)
    assert sum(drafter.parameter_counts().values()) == expected


@pytest.mark.parametrize(("size", "expected"), [("4B", 6_589_440), ("8B", 6_604_800), ("14B", 6_945_280)])
def test_bytes_of_a_request_are_those_published(size: str, expected: int) -> None:
    drafter = published(size)

    def opened(**options: Any) -> int:
        return drafter.context.open(1, drafter.backbone, None, **{"capacity": 1, "cache": None, **options}).num_bytes  # pyright: ignore

    assert opened() == opened(capacity=131_072) == expected
    if size == "8B":
        assert opened(cache=lambda ends, size: []) == 1_361_920


def test_bytes_to_a_drafter_elsewhere_are_those_published() -> None:
    """The state once; a round the boundary state and, of at most eight rows, keys and values."""
    context, size = published("8B").context, 5 * 4096 + 5 * 2 * 8 * 128
    last, every = (len(range(size)[columns]) for columns in context.columns)
    assert (2 * last, 8 * 2 * every) == (40_960, 163_840)
    folder = context.folder(torch.device("meta"))
    assert folder is not None and folder(1).num_bytes == 6_604_800


def test_bytes_of_the_full_context_grow_with_the_prefix() -> None:
    config = single_arm({"method": "dspark"}, target="Qwen/Qwen3", where="a test").drafter
    with torch.device("meta"):
        drafter = Drafter(config, shape_of(*QWEN3["8B"])).to(torch.bfloat16)
    for tokens in (1, 32_768):
        state = drafter.context.open(1, drafter.backbone, None, capacity=tokens, cache=None)  # pyright: ignore
        assert state.num_bytes == 20_480 * tokens


@pytest.mark.parametrize(("num_layers", "expected"), [(36, (0, 9, 18, 26, 35)), (40, (0, 10, 20, 29, 39))])
def test_layers_are_those_published(num_layers: int, expected: tuple[int, ...]) -> None:
    assert longspark.spread_layers(num_layers, 5) == expected


# -- 4, 5: what a state depends on --------------------------------------------------------------------------------------


def drafter_for(target: Target, *, num_layers: int = 2, **fields: Any) -> Drafter:
    drafter = make_drafter(target, context=fields.pop("context", LONGSPARK), num_layers=num_layers, **fields)
    randomise(drafter.context)
    return drafter


@torch.no_grad()
def logits_of(drafter: Drafter, prefix: Prefix) -> Tensor:
    end = torch.tensor([[prefix.length]])
    return drafter.lent.head(drafter.hidden(prefix.memory, torch.tensor([[7]]), end, drafter.depth))


def test_old_rows_count_through_the_summary_alone(tiny64: Target) -> None:
    """A row behind the window may change as it likes while the pairs are held; a row of the window may not."""
    prompt = list(range(20))
    drafter = drafter_for(tiny64)
    prefix = Prefix(drafter, cache=tiny64.cache)
    tiny64.prefill(prompt, take=prefix.append)
    before = logits_of(drafter, prefix)
    for store in (*tiny64.cache.keys, *tiny64.cache.values):
        store[:, :, : len(prompt) - WINDOW] += 1
    assert torch.equal(logits_of(drafter, prefix), before)
    prefix.state.pairs.mean[:] += 1
    assert not torch.allclose(logits_of(drafter, prefix), before)
    prefix.state.pairs.mean[:] -= 1
    tiny64.cache.keys[0][:, :, len(prompt) - WINDOW] += 1
    assert not torch.allclose(logits_of(drafter, prefix), before)


@pytest.mark.parametrize("accepted", range(8))
@pytest.mark.parametrize("length", [1, 4, 5, 6, 30])
def test_a_state_after_rejection_is_that_of_the_committed_prefix(tiny64: Target, accepted: int, length: int) -> None:
    drafter = drafter_for(tiny64)
    prompt = list(range(length))
    drafts = torch.arange(40, 48)
    states = []
    for own_copy in (True, False):
        prefix = Prefix(drafter, cache=None if own_copy else tiny64.cache)
        tiny64.prefill(prompt, take=prefix.append)
        verified = tiny64.verify(drafts, torch.arange(-1, 7))
        path = list(range(accepted + 1))
        tiny64.commit(path)
        prefix.append(verified.taps[path])
        again = Prefix(drafter)
        found = logits_of(drafter, prefix)
        tiny64.prefill([*prompt, *drafts[path].tolist()], take=again.append)
        assert_close(found, logits_of(drafter, again))
        states.append((prefix.state, again.state))
    for state, fresh in states:
        assert_close(state.pairs.log_total, fresh.pairs.log_total)
        assert_close(state.pairs.mean, fresh.pairs.mean)
        assert_close(state.boundary, fresh.boundary)
    assert_close(states[0][0].ring, states[0][1].ring)


# -- 6: nothing is lost -------------------------------------------------------------------------------------------------


def test_drawn_drafts_have_the_law_of_the_target() -> None:
    """Two tokens behind the first one, of many seeds, by rejection sampling in a chain, against exact probabilities."""
    target = tiny_module.load(dtype=torch.float64, vocab_size=8, sharpness=1.0)
    target.eos_token_ids = ()
    drafter = drafter_for(target, backbone="bidirectional", correction={"name": "markov", "rank": 4}, layout="anchor-first", norm="target")
    prompt, counts, number = [1, 4, 2], np.zeros((8, 8)), 800
    config = DecodeConfig(mode="chain", depth=3, temperature=1.0)
    for seed in range(number):
        found = generate(target, drafter, prompt, config=config, acceptance=Acceptance(rule="ratio"), max_new_tokens=3, seed=seed)
        counts[found.ids[1], found.ids[2]] += 1
    first = target.prefill(prompt).logits[-1].softmax(-1)
    law = torch.zeros((8, 8), dtype=torch.float64)
    for token in range(8):
        after = target.prefill([*prompt, token]).logits[-1].softmax(-1)
        for following in range(8):
            law[following] += first[token] * after[following] * target.prefill([*prompt, token, following]).logits[-1].softmax(-1)
    assert abs(float(law.sum()) - 1) < 1e-9
    expected = number * law.numpy()
    rare = expected < 5
    observed, theory = (np.append(table[~rare], table[rare].sum()) for table in (counts, expected))
    assert (~rare).sum() > 20 and stats.chisquare(observed, theory).pvalue > 1e-4


# -- 7: the loss --------------------------------------------------------------------------------------------------------


def test_the_loss_is_a_tenth_cross_entropy_and_nine_tenths_raw_distance() -> None:
    draft, target, labels = random(6, 9, seed=1), random(6, 9, seed=2), torch.arange(6)
    assert_close(losses.dspark(target, target, labels), 0.1 * losses.ce(target, labels))
    total_variation = 0.5 * (draft.softmax(-1) - target.softmax(-1)).abs().sum(-1)
    assert_close(losses.dspark(draft, target, labels) - 0.1 * losses.ce(draft, labels), 2 * 0.9 * total_variation)


# -- 8: what is tapped ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_taps_are_post_norm_at_the_end_and_the_cache_as_stored(family: str) -> None:
    target = tiny_module.load(dtype=torch.float64, num_layers=3, family=family)
    ids = torch.tensor([[3, 9, 1, 4], [5, 6, 7, 8]])
    target.tap((0, 2), cached=(0, 2))
    with torch.no_grad():
        output = target.model(input_ids=ids, output_hidden_states=True)
    trace = target.trace(ids)
    assert_close(trace.last, output.hidden_states[-1])
    assert_close(trace.taps[..., :64], torch.cat([output.hidden_states[1], output.hidden_states[-1]], -1))
    whole = target.prefill(ids[0].tolist())
    rows = [store[layer][:, :, :4].transpose(1, 2).flatten(2) for layer in (0, 2) for store in (target.cache.keys, target.cache.values)]
    assert_close(trace.taps[:1, :, 64:], torch.cat(rows, -1))
    assert_close(whole.taps, trace.taps[0])
    parts: list[Tensor] = []
    chunked = target.prefill(ids[0].tolist(), take=parts.append, rows=3)
    assert_close(torch.cat(parts), whole.taps)
    assert_close(chunked.logits, whole.logits)
    assert torch.equal(chunked.taps, parts[-1])


# -- slots --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", ["repeat", "interpolate", "rotary"])
def test_slots_beyond_the_trained_table(tiny64: Target, slots: str) -> None:
    """Any depth drafts; a causal block's first slots move only where all slots move closer together."""
    drafter = drafter_for(tiny64, context={**LONGSPARK, "slots": slots}, backbone="causal")
    context: Any = drafter.context
    signal = context.signal(23).detach()
    assert signal.shape == (23, 32)
    table = context.slot_table.weight.detach()
    if slots == "repeat":
        assert torch.equal(signal[:6], table) and all(torch.equal(row, table[-1]) for row in signal[6:])
    elif slots == "interpolate":
        assert_close(signal[[0, 22]], table[[0, 5]])
        assert_close(context.signal(6), table)
    else:
        assert table.shape == (1, 32) and torch.equal(signal[:6], context.signal(6))
        assert len(torch.unique(signal.round(decimals=9), dim=0)) == 23
        assert_close(signal.norm(dim=1), table.norm().expand(23))
    prefix = Prefix(drafter)
    prefix.append(tiny64.prefill([3, 9, 1]).taps)
    anchor, end = torch.tensor([[7]]), torch.tensor([[3]])
    with torch.no_grad():
        short, long = (drafter.hidden(prefix.memory, anchor, end, depth) for depth in (5, 22))
    assert bool(long.isfinite().all())
    assert torch.allclose(long[:, :, :5], short, atol=1e-10) == (slots != "interpolate")


def test_the_grid_of_slot_rules_goes_beyond_what_its_tables_were_trained_for() -> None:
    """Every rule under both corrections; the repeated row is trained once for this grid and that of the components."""
    folder = Path(__file__).parents[1] / "ablations"
    grid, components = load_grid(folder / "slots.toml"), load_grid(folder / "longspark.toml")
    rules = {(arm.drafter.correction["name"], arm.drafter.context.get("slots", "repeat")) for arm in grid.arms}
    assert rules == {(correction, rule) for correction in ("markov", "attention") for rule in ("repeat", "interpolate", "rotary")}
    assert {arm.drafter.depth for arm in grid.arms} == {7} and {cell.decode.depth for cell in grid.cells} == {7, 15, 23}
    assert len(grid.comparisons()) == 4
    assert len({arm.train_id for arm in grid.arms} & {arm.train_id for arm in components.arms}) == 1
    assert "slots" in [item.name for item in load_grids(folder / "campaign.toml")]


@pytest.mark.parametrize(
    ("context", "backbone", "message"),
    [
        ({"window": -1}, {}, "context.window is -1"),
        ({"layers": (0,)}, {}, "names 1 layers for 2 draft layers"),
        ({"layers": (0, 7)}, {}, "tap layer 7 of tiny: choose from 0..1"),
        ({"slots": "none"}, {}, "slots = 'none'"),
        ({"rows": 3}, {}, "unknown key 'rows'"),
        ({}, {"kv_heads": 1}, "4 query and 2 key-value heads, not 4 and 1"),
    ],
)
def test_options_that_do_not_fit_are_refused(tiny: Target, context: dict, backbone: dict, message: str) -> None:
    from treedraft.config import DrafterConfig
    from treedraft.drafter import shape_for

    with pytest.raises(ValueError, match=message):
        config = DrafterConfig(backbone={"name": "causal", "num_layers": 2, **backbone}, context={"name": "longspark", **context})
        Drafter(config, shape_for(tiny, config)).attach(tiny)


# -- training -----------------------------------------------------------------------------------------------------------

CONFIG = TrainConfig(steps=20, sequences=4, anchors=3, learning_rate=1e-2, objective="dspark", decay=4.0)


def features_for(target: Target, drafter: Drafter, folder: Path) -> Any:
    """With what that drafter reads."""
    assert target.taps == drafter.taps
    return make_features(target, folder, make_sequences(target, 16, new_tokens=32))


@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("correction", CORRECTIONS, ids=name_of)
def test_what_is_trained_is_what_is_served(tiny64: Target, tmp_path: Path, backbone: str, correction: dict) -> None:
    """Hidden states of the training graph equal those of a prefix that was appended in chunks, block by block."""
    drafter = drafter_for(tiny64, backbone=backbone, correction=correction)
    features = features_for(tiny64, drafter, tmp_path)
    batch = batch_for_step(features, usable_sequences(features), CONFIG, drafter.depth, 0)
    with torch.no_grad():
        memory = drafter.remember(batch.taps, torch.arange(batch.ids.shape[1]))
        trained = drafter.hidden(memory, batch.ids.gather(1, batch.anchors), batch.anchors, drafter.depth)
    for sample in range(len(batch.ids)):
        for block, anchor in enumerate(batch.anchors[sample].tolist()):
            prefix = Prefix(drafter)
            for rows in batch.taps[sample, :anchor].split(5):
                prefix.append(rows)
            with torch.no_grad():
                served = drafter.hidden(prefix.memory, batch.ids[sample, anchor].view(1, 1), torch.tensor([[anchor]]), drafter.depth)
            assert_close(served[0, 0], trained[sample, block])


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_training_falls_is_saved_and_loaded(tiny: Target, tmp_path: Path, optimizer: Any) -> None:
    """The published loss on the one path of all drafters; the queries learn; a loaded drafter taps what it was trained on."""
    drafter = make_drafter(tiny, backbone="bidirectional", correction={"name": "markov", "rank": 6}, context=LONGSPARK, num_layers=2,
                           layout="anchor-first", norm="target", random=False)  # fmt: skip
    features = features_for(tiny, drafter, tmp_path / "features")
    config = TrainConfig(**{**{name: getattr(CONFIG, name) for name in CONFIG.__dataclass_fields__}, "optimizer": optimizer})
    step, batch = TrainStep(drafter, tiny, config), batch_for_step(features, usable_sequences(features), config, drafter.depth, 0)
    queries: Any = drafter.context.queries
    start = queries.detach().clone()
    with torch.no_grad():
        before = step(batch).loss
    result = Trainer(drafter=drafter.requires_grad_(True), target=tiny, features=features, config=config, folder=tmp_path / "run").run()
    with torch.no_grad():
        assert step(batch).loss < 0.95 * before
    assert not torch.allclose(queries, start, atol=1e-4)
    assert result["parameters"]["context"] > 0
    tiny.tap((0,))
    loaded = Drafter.from_pretrained(tmp_path / "run" / "drafter", target=tiny)
    assert tiny.taps == loaded.taps == drafter.taps and tiny.taps.cached == (0, 1)
    for name, weight in drafter.state_dict().items():
        assert torch.equal(weight, loaded.state_dict()[name])


def test_the_gradient_is_the_same_for_any_split(tiny64: Target, tmp_path: Path) -> None:
    """Of a whole step and of its sequences one by one; what pads a sequence or lies behind its last anchor is not seen."""
    drafter = drafter_for(tiny64, correction={"name": "markov", "rank": 6})
    features = features_for(tiny64, drafter, tmp_path)
    batch = batch_for_step(features, usable_sequences(features), CONFIG, drafter.depth, 0)
    step, gradients = TrainStep(drafter, tiny64, CONFIG), []
    rows = [batch.rows(slice(i, i + 1)) for i in range(len(batch.ids))]
    for parts in ([batch], rows):
        drafter.zero_grad()
        for part in parts:
            step(part).loss.backward()
        gradients.append({name: weight.grad.clone() for name, weight in drafter.named_parameters() if weight.grad is not None})
    assert gradients[0].keys() == dict(drafter.named_parameters()).keys()
    for name, gradient in gradients[0].items():
        assert_close_sums(gradients[1][name], gradient)
    with torch.no_grad():
        before = step(batch).loss
        batch.taps[torch.arange(batch.ids.shape[1]) >= (batch.anchors.max(1).values + 1)[:, None]] = 1e4
        assert_close(step(batch).loss, before)


def test_half_precision_trains_and_sums_in_float32(tiny: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    types = set()
    whole = summary.scan

    def watched(parts: Partial) -> Partial:
        types.update({parts.log_total.dtype, parts.mean.dtype})
        return whole(parts)

    monkeypatch.setattr(summary, "scan", watched)
    drafter = make_drafter(tiny, context=LONGSPARK, num_layers=2, correction={"name": "markov", "rank": 6}, random=False).requires_grad_(True)
    config = TrainConfig(**{**{name: getattr(CONFIG, name) for name in CONFIG.__dataclass_fields__}, "steps": 3, "precision": "bf16"})
    result = Trainer(drafter=drafter, target=tiny, features=features_for(tiny, drafter, tmp_path), config=config, folder=tmp_path / "run").run()
    assert types == {torch.float32} and math.isfinite(result["loss"])


def test_queries_learn_as_queries_and_as_keys(tiny64: Target) -> None:
    drafter = drafter_for(tiny64, num_layers=1)
    memory = drafter.remember(random(1, 12, tiny64.tap_size), torch.arange(12))
    context: Any = drafter.context
    anchors, tokens = torch.tensor([[5, 9]]), torch.tensor([[1, 2]])
    gradients = []
    for held in ("nothing", "values", "keys"):
        seen = memory.at(anchors)
        assert seen.summaries is not None
        entry = seen.summaries[0]
        entry = type(entry)(
            keys=entry.keys.detach() if held == "keys" else entry.keys, values=entry.values.detach() if held == "values" else entry.values, known=entry.known
        )
        seen = type(seen)(keys=seen.keys, values=seen.values, visible=seen.visible, boundary=seen.boundary, summaries=[entry])
        ids = torch.full((1, 2, 6), drafter.mask_token_id)
        ids[..., 0] = tokens
        hidden = drafter.backbone(context.inputs(drafter.lent.embed(ids), seen), anchors, seen, drafter.lent.rotary)
        gradients.append(torch.autograd.grad((hidden * random(*hidden.shape, seed=5)).sum(), context.queries)[0])
    as_both, as_key, as_query = gradients
    assert bool((as_key != 0).any()) and bool((as_query != 0).any())
    assert_close(as_key + as_query, as_both)


# -- decoding and replay --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("correction", CORRECTIONS, ids=name_of)
def test_output_is_plain_decoding(tiny64: Target, backbone: str, correction: dict) -> None:
    """210 prompts in all, greedy trees side by side in batches; across the window's edge, one by one, sampled too."""
    drafter = drafter_for(tiny64, backbone=backbone, correction=correction)
    seed = 3 * BACKBONES.index(backbone) + CORRECTIONS.index(correction)
    edge = [list(range(5, 5 + length)) for length in (1, WINDOW - 1, WINDOW, WINDOW + 1)]
    prompts = [*edge, *random_prompts(tiny64, 31, seed=seed)]
    config = DecodeConfig(mode="tree", depth=(5, 9)[seed % 2], width=3, budget=24)
    expected = generate_batch(tiny64, prompts, max_new_tokens=14, temperature=0.0, seeds=[0] * len(prompts), batch_size=64)
    many = generate_many(tiny64, drafter, prompts, config=config, batch_size=16, max_new_tokens=14)
    assert [found.ids for found in many] == expected
    for place, prompt in enumerate(edge):
        for mode, sampling in (("tree", Sampling()), ("chain", Sampling()), ("tree", Sampling(temperature=1.0))):
            config = DecodeConfig(mode=mode, depth=5, width=3, budget=24)
            alone = generate(tiny64, drafter, prompt, config=config, sampling=sampling, max_new_tokens=14, seed=place)
            assert alone.ids == generate_plain(tiny64, prompt, sampling=sampling, max_new_tokens=14, seed=place).ids


@pytest.mark.parametrize(("num_heads", "kv_heads", "family"), [(3, 1, "llama"), (6, 2, "qwen3"), (5, 1, "qwen3"), (10, 2, "llama")])
def test_groups_of_three_and_five_heads(num_heads: int, kv_heads: int, family: str) -> None:
    """Trees side by side, plain decoding, and what training sees of a prefix: end to end on targets with such heads."""
    target = tiny_module.load(dtype=torch.float64, num_heads=num_heads, kv_heads=kv_heads, family=family)
    drafter = drafter_for(target, correction={"name": "markov", "rank": 6})
    prompts = [list(range(5, 5 + length)) for length in (1, WINDOW - 1, WINDOW, WINDOW + 1, 30)]
    expected = generate_batch(target, prompts, max_new_tokens=12, temperature=0.0, seeds=[0] * 5, batch_size=5)
    config = DecodeConfig(mode="tree", depth=5, width=3, budget=24)
    assert [found.ids for found in generate_many(target, drafter, prompts, config=config, batch_size=5, max_new_tokens=12)] == expected
    assert generate(target, drafter, prompts[-1], config=config, max_new_tokens=12).ids == expected[-1]
    ids, anchor, prefix = torch.tensor([prompts[-1]]), torch.tensor([[19]]), Prefix(drafter)
    taps = target.trace(ids).taps
    with torch.no_grad():
        trained = drafter.hidden(drafter.remember(taps, torch.arange(30)), ids[:, 19:20], anchor, 5)
        for rows in taps[0, :19].split(5):
            prefix.append(rows)
        assert_close(drafter.hidden(prefix.memory, ids[:, 19:20], anchor, 5), trained)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("mode", ["chain", "tree"])
def test_replay_is_live_round_by_round(tiny64: Target, tmp_path: Path, mode: Any, temperature: float) -> None:
    """With a drafter that was trained a little, so that rounds accept something."""
    drafter = make_drafter(tiny64, backbone="bidirectional", correction={"name": "markov", "rank": 6}, context=LONGSPARK, num_layers=2, random=False)
    config = TrainConfig(**{**{name: getattr(CONFIG, name) for name in CONFIG.__dataclass_fields__}, "steps": 40, "sequences": 8})
    Trainer(drafter=drafter.requires_grad_(True), target=tiny64, features=features_for(tiny64, drafter, tmp_path), config=config, folder=tmp_path / "run").run()
    decode = DecodeConfig(mode=mode, depth=7, width=3, budget=20, temperature=temperature)
    prompts = random_prompts(tiny64, 6, longest=14, seed=8)
    answers = generate_batch(tiny64, prompts, max_new_tokens=20, temperature=temperature, seeds=list(range(6)), batch_size=6)
    texts = [
        Trajectory(prompt=str(i), domain="", seed=i, ids=np.array([*prompt, *answer]), prompt_length=len(prompt))
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]
    replayed = {item.seed: item for item in Replay(tiny64, texts, at_once=4).run(drafter, decode)}
    live = [generate(tiny64, drafter, prompt, config=decode, max_new_tokens=20, seed=i).counts() for i, prompt in enumerate(prompts)]
    for i, rounds in enumerate(live):
        assert replayed[i].emitted.tolist() == rounds.emitted.tolist() and replayed[i].nodes.tolist() == rounds.nodes.tolist()
    assert tau(list(replayed.values())) == tau(live) > 1.1


# -- longer contexts ----------------------------------------------------------------------------------------------------


def test_ntk_scaling_is_a_larger_base_for_target_and_drafter() -> None:
    target = tiny_module.load(dtype=torch.float64)
    fingerprint = target.fingerprint()
    plain = target.trace(torch.arange(40)[None]).last
    target.scale_rotary("ntk:4")
    other = tiny_module.load(dtype=torch.float64, rope={"rope_type": "default", "rope_theta": 10_000.0 * 4 ** (8 / 6)})
    assert torch.equal(target.trace(torch.arange(40)[None]).last, other.trace(torch.arange(40)[None]).last)
    assert not torch.allclose(plain, other.trace(torch.arange(40)[None]).last)
    drafter = drafter_for(target)
    positions = torch.tensor([3, 1000])
    for found, expected in zip(drafter.lent.rotary(positions), other.rotary(positions), strict=True):
        assert torch.equal(found, expected)
    assert (target.max_length, target.rope_scaling, target.fingerprint()) == (4 * 512, "ntk:4", fingerprint)
    prompt = list(range(60)) * 10  # longer than the unscaled window
    found = generate(target, drafter, prompt, config=DecodeConfig(depth=5, width=3, budget=16), max_new_tokens=8)
    assert found.ids == generate_plain(target, prompt, max_new_tokens=8).ids
    with pytest.raises(ValueError, match="scaled already"):
        target.scale_rotary("ntk:2")


@pytest.mark.parametrize("scaling", ["ntk", "yarn:4", "ntk:0.5", "ntk:x", "ntk:inf"])
def test_other_scalings_are_refused(scaling: str) -> None:
    with pytest.raises(ValueError, match="expected ntk:FACTOR"):
        TrainConfig(rope_scaling=scaling)


def test_a_drafter_knows_the_scaling_it_was_trained_under(tmp_path: Path) -> None:
    """One that was trained without runs under any; stored with the run."""
    target = tiny_module.load()
    config = TrainConfig(**{**{name: getattr(CONFIG, name) for name in CONFIG.__dataclass_fields__}, "steps": 1})
    folders = {}
    for scaling in (None, "ntk:4"):
        if scaling is not None:
            target.scale_rotary(scaling)
        drafter = make_drafter(target, context=LONGSPARK, num_layers=2).requires_grad_(True)
        features = features_for(target, drafter, tmp_path / "features")
        folders[scaling] = tmp_path / str(scaling)
        result = Trainer(drafter=drafter, target=target, features=features, config=config, folder=folders[scaling]).run()
        assert result["target"]["rope_scaling"] == scaling
    assert len(list((tmp_path / "features").iterdir())) == 2
    for folder in folders.values():
        Drafter.from_pretrained(folder / "drafter", target=target)
    with pytest.raises(ValueError, match="trained under rope scaling ntk:4, the target runs under none"):
        Drafter.from_pretrained(folders["ntk:4"] / "drafter", target=tiny_module.load())


@pytest.mark.parametrize("name", ["longspark", "contexts", "slots"])
def test_cells_of_the_shipped_grids_train_and_replay(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few steps of every arm with this context, on the tiny target; all of its cells decode."""
    monkeypatch.setenv("TREEDRAFT_RUNS", str(tmp_path))
    settings = {"train.steps": 2, "train.sequences": 4, "train.anchors": 2, "data.tokens": 300, "data.max_new_tokens": 12,
                "evaluate.count": 2, "evaluate.seeds": [0], "evaluate.max_new_tokens": 8}  # fmt: skip
    if name == "slots":
        settings |= {"decode.mode": "tree", "decode.temperature": 0.0, "decode.budget": 24}
    grid = load_grid(Path(__file__).parents[1] / "ablations" / f"{name}.toml", target="tiny", settings=settings)
    bench, taus, arms = Workbench("tiny", cache_gb=0.1), [], {}
    for cell in grid.cells:
        if cell.arm.drafter.context["name"] == "longspark":
            arms.setdefault(cell.arm.train_id, []).append(cell)
    for cells in arms.values():
        assert run_group(bench, cells) == {}
        taus += [bench.evaluate(cell)["tau"] for cell in cells]
    assert len(arms) == {"longspark": 9, "contexts": 6, "slots": 6}[name] and all(value >= 1 for value in taus)
