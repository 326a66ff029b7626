"""The law of a backbone: who sees whom. Blocks do not interact, nothing at or after an anchor is seen, any depth runs."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from tests.tiny_drafters import BACKBONES, make_drafter
from tests.tolerances import assert_close
from treedraft.drafter import Drafter
from treedraft.ops import layers
from treedraft.ops.layers import block_attention
from treedraft.targets.hf import Target

every_backbone = pytest.mark.parametrize("backbone", BACKBONES)
LENGTH = 17


def taps_of(target: Target, num_seqs: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((num_seqs, LENGTH, target.tap_size), generator=generator, dtype=target.dtype)


@torch.no_grad()
def draft(drafter: Drafter, taps: Tensor, anchors: list[list[int]], tokens: list[list[int]], depth: int) -> Tensor:
    memory = drafter.remember(taps, torch.arange(taps.shape[1]))
    return drafter.hidden(memory, torch.tensor(tokens), torch.tensor(anchors), depth)


def naive_attention(queries, context_keys, context_values, keys, values, visible, block_mask) -> Tensor:
    """One block, slot and head at a time: the keys it sees side by side, one softmax."""
    num_seqs, num_blocks, num_slots, num_heads, _ = queries.shape
    groups = num_heads // keys.shape[3]
    out = torch.zeros_like(queries)
    for s in range(num_seqs):
        for a in range(num_blocks):
            for b in range(num_slots):
                for h in range(num_heads):
                    seen_keys = torch.cat([context_keys[s, visible[s, a], h // groups], keys[s, a, block_mask[b], h // groups]])
                    seen_values = torch.cat([context_values[s, visible[s, a], h // groups], values[s, a, block_mask[b], h // groups]])
                    out[s, a, b, h] = torch.softmax(seen_keys @ queries[s, a, b, h], 0) @ seen_values
    return out.flatten(3)


@pytest.mark.parametrize(("kv_heads", "causal", "length"), [(4, True, 7), (2, False, 7), (1, True, 5), (2, True, 1)])
def test_block_attention_is_one_softmax_over_context_and_block(kv_heads: int, causal: bool, length: int) -> None:
    generator = torch.Generator().manual_seed(kv_heads)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    far, near = (2, length, kv_heads, 8), (2, 3, 4, kv_heads, 8)
    visible = torch.rand((2, 3, length), generator=generator) < 0.5
    block_mask = torch.ones((4, 4), dtype=torch.bool)
    block_mask = block_mask.tril() if causal else block_mask
    arguments = (random(2, 3, 4, 4, 8), random(*far), random(*far), random(*near), random(*near), visible, block_mask)
    assert_close(block_attention(*arguments), naive_attention(*arguments))


@pytest.mark.parametrize(("kv_heads", "causal", "length"), [(4, True, 7), (2, False, 7), (1, True, 0)])
def test_a_single_block_that_sees_everything_has_a_way_of_its_own(
    kv_heads: int, causal: bool, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(kv_heads)
    shapes = [(2, 1, 4, 4, 8), *[(2, length, kv_heads, 8)] * 2, *[(2, 1, 4, kv_heads, 8)] * 2]
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    block_mask = torch.ones((4, 4), dtype=torch.bool)
    block_mask = block_mask.tril() if causal else block_mask
    expected = naive_attention(*tensors, torch.ones((2, 1, length), dtype=torch.bool), block_mask)
    assert_close(block_attention(*tensors, None, block_mask), expected)
    monkeypatch.setattr(layers, "_FEW", -1)
    assert_close(block_attention(*tensors, None, block_mask), expected)


def test_masks_by_eye() -> None:
    T, F = True, False
    from treedraft import registry

    masks = {name: registry.load("backbones", name).Component.block_mask for name in ("causal", "bidirectional")}
    assert masks["causal"](None, 3, torch.device("cpu")).tolist() == [[T, F, F], [T, T, F], [T, T, T]]
    assert masks["bidirectional"](None, 3, torch.device("cpu")).tolist() == [[T, T, T]] * 3


@every_backbone
def test_later_slots_move_earlier_ones_only_where_the_block_sees_all(tiny64: Target, backbone: str) -> None:
    """Depth 23 of a drafter trained at depth 15: runs, and with the causal mask is the same up to slot 15."""
    drafter = make_drafter(tiny64, backbone=backbone, block_size=16, num_layers=2)
    taps = taps_of(tiny64, 2)
    short = draft(drafter, taps, [[5, 11], [17, 3]], [[1, 2], [3, 4]], 15)
    long = draft(drafter, taps, [[5, 11], [17, 3]], [[1, 2], [3, 4]], 23)
    assert long.shape == (2, 2, 23, tiny64.hidden_size) and bool(long.isfinite().all())
    if backbone == "causal":
        assert_close(long[:, :, :15], short)
    else:
        assert not torch.allclose(long[:, :, :15], short)


@every_backbone
def test_nothing_at_or_after_the_anchor_is_seen(tiny64: Target, backbone: str) -> None:
    drafter = make_drafter(tiny64, backbone=backbone)
    taps, anchors, tokens = taps_of(tiny64, 1), [[4, 9]], [[7, 8]]
    before = draft(drafter, taps, anchors, tokens, 5)
    changed = taps.clone()
    changed[:, 9:] = 1e3 * torch.randn_like(changed[:, 9:])
    assert torch.equal(draft(drafter, changed, anchors, tokens, 5), before)
    changed[:, 4:] += 1
    after = draft(drafter, changed, anchors, tokens, 5)
    assert torch.equal(after[:, 0], before[:, 0]) and not torch.allclose(after[:, 1], before[:, 1])
    changed[:, 3] += 1
    assert not torch.allclose(draft(drafter, changed, anchors, tokens, 5)[:, 0], before[:, 0])


@every_backbone
def test_an_anchor_at_the_very_start_has_no_context(tiny64: Target, backbone: str) -> None:
    drafter = make_drafter(tiny64, backbone=backbone)
    hidden = draft(drafter, taps_of(tiny64, 1), [[0]], [[7]], 5)
    assert bool(hidden.isfinite().all())
    assert torch.equal(draft(drafter, taps_of(tiny64, 1, seed=1), [[0]], [[7]], 5), hidden)


@every_backbone
def test_blocks_and_sequences_do_not_interact(tiny64: Target, backbone: str) -> None:
    """Overlapping blocks of a ragged batch equal each block alone on its own prefix."""
    drafter = make_drafter(tiny64, backbone=backbone, num_layers=2)
    taps, anchors, tokens = taps_of(tiny64, 3), [[4, 5, 12], [1, 17, 16], [3, 3, 8]], [[1, 2, 3], [4, 5, 6], [7, 9, 8]]
    together = draft(drafter, taps, anchors, tokens, 5)
    for s, row in enumerate(anchors):
        for a, anchor in enumerate(row):
            alone = draft(drafter, taps[s : s + 1, :anchor], [[anchor]], [[tokens[s][a]]], 5)
            assert_close(alone[0, 0], together[s, a])


@every_backbone
@pytest.mark.parametrize("layout", ["fill-in", "anchor-first"])
def test_both_layouts_draft_as_deep_as_they_say(tiny64: Target, backbone: str, layout: str) -> None:
    drafter = make_drafter(tiny64, backbone=backbone, layout=layout, block_size=6)
    assert drafter.depth == (5 if layout == "fill-in" else 6)
    hidden = draft(drafter, taps_of(tiny64, 1), [[9]], [[7]], drafter.depth)
    assert hidden.shape == (1, 1, drafter.depth, tiny64.hidden_size)
    other = draft(drafter, taps_of(tiny64, 1), [[9]], [[8]], drafter.depth)
    assert not torch.allclose(other, hidden), "the anchor's token is read"


@every_backbone
def test_positions_are_absolute_and_their_differences_count(tiny64: Target, backbone: str) -> None:
    """Rotary angles: the same context and block, all moved by 100 positions, give the same hidden states."""
    drafter = make_drafter(tiny64, backbone=backbone)
    taps, token = taps_of(tiny64, 1), torch.tensor([[7]])
    visible = torch.ones((1, 1, LENGTH), dtype=torch.bool)
    ids = torch.full((1, 1, 6), tiny64.mask_token_id)
    ids[..., 0] = token
    results = []
    with torch.no_grad():
        for shift, gap in ((0, 0), (100, 0), (0, 1)):
            memory = drafter.remember(taps, torch.arange(LENGTH) + shift)
            anchors = torch.tensor([[LENGTH + shift + gap]])
            seen = dataclasses.replace(memory.at(anchors), visible=visible)
            results.append(drafter.backbone(drafter.lent.embed(ids), anchors, seen, drafter.lent.rotary))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-4)  # angles are float32 inside transformers
    assert not torch.allclose(results[2], results[0], atol=1e-4)


@every_backbone
def test_every_weight_is_trained(tiny64: Target, backbone: str) -> None:
    drafter = make_drafter(tiny64, backbone=backbone, num_layers=2)
    memory = drafter.remember(taps_of(tiny64, 1), torch.arange(LENGTH))
    drafter.hidden(memory, torch.tensor([[1, 2]]), torch.tensor([[5, 9]]), 5)[..., 0].sum().backward()
    for name, weight in [*drafter.backbone.named_parameters(), *drafter.context.named_parameters()]:
        assert weight.grad is not None and bool(weight.grad.abs().sum() > 0), name
