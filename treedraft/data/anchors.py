"""Which blocks a training step sees: a pure function of (seed, step), so that a resumed run sees the same ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from treedraft.config import TrainConfig
from treedraft.data.features import FeatureCache

_GROUP = 8  # steps that share one draw of sequences, sorted by length and cut: similar lengths waste little padding


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """S sequences with A blocks of D drafts each.

    ids [S, T] right padded, taps [S, T, C] float16, anchors [S, A] absolute positions, previous and labels [S, A, D]
    (the token before and at each drafted position), teacher [S, A, D, H] float16 (the target's last hidden state before
    each label), valid [S, A, D] (the label lies inside the sequence), samples [S] sequence numbers.
    """

    ids: Tensor
    taps: Tensor
    anchors: Tensor
    previous: Tensor
    labels: Tensor
    teacher: Tensor
    valid: Tensor
    samples: Tensor

    def rows(self, part: slice) -> Batch:
        """Some of the sequences."""
        return Batch(**{name: getattr(self, name)[part] for name in self.__dataclass_fields__})

    def to(self, device: torch.device) -> Batch:
        return Batch(**{name: getattr(self, name).to(device, non_blocking=True) for name in self.__dataclass_fields__})


def usable_sequences(features: FeatureCache) -> np.ndarray:
    """Numbers of the sequences that have an anchor with a label: at least two response tokens."""
    lengths = np.diff(features.starts)[: features.num_sequences]
    usable = np.flatnonzero(lengths - features.sequences.prompt_lengths[: features.num_sequences] >= 2)
    if len(usable) == 0:
        raise ValueError("no training sequence has two response tokens: there is no block to train on")
    return usable


def batch_for_step(features: FeatureCache, usable: np.ndarray, config: TrainConfig, depth: int, step: int) -> Batch:
    """The batch of one optimiser step: sequences without replacement per group of steps, anchors uniform in answers."""
    group = np.random.default_rng([config.seed, step // _GROUP, 0])
    wanted = config.sequences * _GROUP
    drawn = group.choice(usable, size=wanted, replace=wanted > len(usable))
    lengths = np.diff(features.starts)
    drawn = drawn[np.argsort(lengths[drawn], kind="stable")].reshape(_GROUP, config.sequences)
    samples = drawn[group.permutation(_GROUP)[step % _GROUP]]
    return _assemble(features, samples, config, depth, np.random.default_rng([config.seed, step, 1]))


def _assemble(
    features: FeatureCache, samples: np.ndarray, config: TrainConfig, depth: int, rng: np.random.Generator
) -> Batch:
    all_ids, prompt_lengths = features.sequences.ids, features.sequences.prompt_lengths
    lengths = np.array([len(all_ids[i]) for i in samples])
    num_taps = features.width - features.target.hidden_size
    ids = np.zeros((len(samples), lengths.max()), dtype=np.int64)
    rows = torch.zeros((len(samples), int(lengths.max()), features.width), dtype=torch.float16)
    anchors = np.zeros((len(samples), config.anchors), dtype=np.int64)
    for row, index in enumerate(samples):
        ids[row, : lengths[row]] = all_ids[index]
        rows[row, : lengths[row]] = features.rows(int(index))
        candidates = np.arange(int(prompt_lengths[index]), int(lengths[row]) - 1)
        chosen = rng.permutation(candidates)[: config.anchors]
        # Blocks beyond the number of positions sit at the last token, where no label is valid.
        anchors[row] = np.concatenate([np.sort(chosen), np.full(config.anchors - len(chosen), lengths[row] - 1)])
    targets = anchors[..., None] + 1 + np.arange(depth)
    valid = targets < lengths[:, None, None]
    clipped = np.where(valid, targets, 0)
    before = np.where(valid, targets - 1, 0)
    which = np.arange(len(samples))[:, None, None]
    ids_tensor, place = torch.from_numpy(ids), torch.from_numpy(before)
    return Batch(
        ids=ids_tensor,
        taps=rows[..., :num_taps],
        anchors=torch.from_numpy(anchors),
        previous=torch.from_numpy(ids[which, before]),
        labels=torch.from_numpy(ids[which, clipped]),
        teacher=rows[..., num_taps:][torch.arange(len(samples))[:, None, None], place],
        valid=torch.from_numpy(valid),
        samples=torch.from_numpy(samples),
    )
