"""Tapped features of training sequences, computed once and shared by every cell of a grid.

One file holds `CHUNK` consecutive sequences, float16 [rows, C + H]: taps, then the post-norm last hidden state whose
head gives the target's law. Keys and values that a context reads are stored too: for five layers of Qwen3-8B they take
20 KB a token, the layer inputs that they could be computed from 32 KB. Chunks appear by rename and carry a checksum, so a stopped fill goes on where it was and a
damaged chunk is computed again.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from treedraft import config as configs
from treedraft import files
from treedraft.targets.hf import Target

CHUNK = 256
_LARGEST_HALF = float(np.finfo(np.float16).max)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """Token ids of trajectories, the length of each prompt, and a digest of where they come from."""

    ids: Sequence[np.ndarray]
    prompt_lengths: np.ndarray
    digest: str

    @property
    def num_rows(self) -> int:
        return sum(len(ids) for ids in self.ids)

    def num_response_tokens(self, first: int) -> int:
        """Of the first sequences."""
        return sum(map(len, self.ids[:first])) - int(self.prompt_lengths[:first].sum())


class FeatureCache:
    """Features of `sequences` under `target`'s taps, kept in `folder`; `fill` computes what is missing.

    `limit_gb` bounds the size: sequences past it are left out, and `num_sequences` says how many are in.
    """

    def __init__(self, folder: Path, target: Target, sequences: Sequences, *, limit_gb: float) -> None:
        self.sequences, self.target = sequences, target
        self.width = target.tap_size + target.hidden_size
        identity = {
            "sequences": sequences.digest,
            "target": target.fingerprint(),
            "taps": list(target.taps.layers),
            "cached": list(target.taps.cached) or None,
            "dtype": str(target.dtype),
            "rope_scaling": target.rope_scaling,
        }
        self.folder = folder / f"{target.name.replace('/', '--')}-{configs.short_hash(identity)}"
        lengths = np.array([len(ids) for ids in sequences.ids])
        bytes_up_to = np.cumsum(lengths) * self.width * 2
        fitting = int(np.searchsorted(bytes_up_to, limit_gb * 1e9, side="right"))
        if fitting == 0:
            first = f"({bytes_up_to[0] / 1e9:.3f} GB)"
            raise ValueError(f"a feature cache of {limit_gb} GB holds not one sequence {first}; raise --cache-gb")
        self.num_sequences = fitting
        self.num_bytes = int(bytes_up_to[fitting - 1])
        self.starts = np.concatenate([[0], np.cumsum(lengths)])
        self._chunks: dict[int, np.ndarray] = {}

    def estimate(self) -> str:
        """What filling takes, in words."""
        left_out = len(self.sequences.ids) - self.num_sequences
        tail = f"; {left_out} sequences left out by the limit" if left_out else ""
        return f"feature cache: {self.num_sequences} sequences, {self.num_bytes / 1e9:.2f} GB in {self.folder}{tail}"

    def fill(self, rank: int = 0, world: int = 1) -> None:
        """Compute every chunk that is missing or fails its checksum, then open all of them.

        `world` processes share the work: each waits for the chunks of the others.
        """
        missing = [first for first in range(0, self.num_sequences, CHUNK) if not self._open(first)]
        own = missing[rank::world]
        for first in tqdm(own, desc="features", unit="chunk", disable=None if len(own) > 1 else True):
            self._compute(first)
        for first in missing:
            while not self._open(first):
                assert first not in own, "a chunk just written reads back"
                time.sleep(1)

    def rows(self, index: int) -> Tensor:
        """float16 [T, C + H] of one sequence."""
        first = index // CHUNK * CHUNK
        start = self.starts[first]
        return torch.from_numpy(self._chunks[first][self.starts[index] - start : self.starts[index + 1] - start])

    def _path(self, first: int) -> Path:
        return self.folder / f"chunk-{first // CHUNK:05d}.npy"

    def _open(self, first: int) -> bool:
        path = self._path(first)
        record = path.with_suffix(".json")
        if not (path.is_file() and record.is_file()):
            return False
        try:
            rows, checksum = np.load(path, mmap_mode="c"), files.read_json(record)["crc32"]
        except (ValueError, EOFError, OSError, KeyError):
            return False
        last = min(first + CHUNK, self.num_sequences)
        if rows.shape != (self.starts[last] - self.starts[first], self.width):
            return False
        if zlib.crc32(rows.view(np.uint8).reshape(-1)) != checksum:
            return False
        self._chunks[first] = rows
        return True

    def _compute(self, first: int) -> None:
        last = min(first + CHUNK, self.num_sequences)
        ids = [torch.from_numpy(self.sequences.ids[i].astype(np.int64)) for i in range(first, last)]
        out = np.empty((self.starts[last] - self.starts[first], self.width), dtype=np.float16)
        for group in _by_length(ids, rows_at_once=8192):
            padded = torch.nn.utils.rnn.pad_sequence([ids[i] for i in group], batch_first=True)
            trace = self.target.trace(padded)
            values = torch.cat([trace.taps, trace.last], dim=-1).float().cpu()
            for row, i in enumerate(group):
                offset = self.starts[first + i] - self.starts[first]
                kept = values[row, : len(ids[i])]
                if not bool((kept.abs() <= _LARGEST_HALF).all()):
                    what = f"features of sequence {first + i}"
                    raise ValueError(f"{what} overflow float16 or are not finite; they cannot be cached")
                out[offset : offset + len(ids[i])] = kept.numpy()
        path = self._path(first)
        with files.replacing(path) as temporary:
            np.save(temporary, out)
        files.write_json(path.with_suffix(".json"), {"crc32": zlib.crc32(out.view(np.uint8).reshape(-1).data)})


def _by_length(ids: Sequence[Any], *, rows_at_once: int) -> list[list[int]]:
    """Groups of indices of similar length whose padded size stays near `rows_at_once`."""
    groups: list[list[int]] = []
    for index in sorted(range(len(ids)), key=lambda i: len(ids[i])):
        if not groups or (len(groups[-1]) + 1) * len(ids[index]) > rows_at_once:
            groups.append([])
        groups[-1].append(index)
    return groups
