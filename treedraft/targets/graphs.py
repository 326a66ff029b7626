"""Verification as a replayed CUDA graph: one a node bucket, the prefix length read on the device.

A forward over a few hundred rows is hundreds of small launches, which take the host longer than the GPU takes to run them.
A graph needs fixed shapes and addresses: trees are padded to a bucket, and attention gets the whole cache and reads on the
device how much of it is prefix. Where nothing can be captured the same fixed-shape forward runs as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from treedraft.ops.tree_attention.launch import on_device
from treedraft.ops.tree_attention.mask import TreeRows, ancestors, check_parents, pack

if TYPE_CHECKING:
    from treedraft.targets.hf import Target

BUCKETS = (16, 32, 64, 128, 256)
MOVING_ANGLES = ("dynamic", "longrope")  # rotary scalings that look at the longest position
_WARM_UPS = 2


def graphable(config: Any) -> bool:
    """Angles that depend on the longest position wait for the device, which a graph cannot."""
    rope = getattr(config, "rope_parameters", None) or {}
    return rope.get("rope_type", "default") not in MOVING_ANGLES


@dataclass(slots=True, kw_only=True)
class _Bucket:
    """The inputs of one graph, written before a replay, and its outputs, written by it."""

    tokens: Tensor  # int64 [1, N]
    columns: Tensor  # int64 [1, N] of the cache, written by this forward
    rows: TreeRows
    last: Tensor
    taps: Tensor
    replay: Callable[[], None]


class GraphedVerify:
    """Runs trees of up to `largest` nodes for one target and whatever cache it has; a cache that moved is captured anew."""

    def __init__(self, target: Target, buckets: tuple[int, ...] = BUCKETS) -> None:
        self.target, self.buckets = target, buckets
        self._captured: dict[int, _Bucket] = {}
        self._storage: tuple[Any, ...] = ()
        self._pool: Any = None

    @property
    def largest(self) -> int:
        return self.buckets[-1]

    def run(self, tokens: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
        """Last hidden states [N, H] and taps [N, C] of a tree of N nodes behind the target's prefix."""
        target, num_nodes = self.target, len(tokens)
        check_parents(parents)
        size = next(bucket for bucket in self.buckets if bucket >= num_nodes)
        target.cache.reserve(target.length + size)
        storage = (target.cache.store.data_ptr(), target.cache.capacity, target.taps)
        if storage != self._storage:
            self._captured.clear()
            self._storage = storage
        # Rows of padding see the prefix alone, write past the tree, and are never read.
        seen = pack(pad(ancestors(parents.to(target.device)[None]), (0, size - num_nodes, 0, size - num_nodes)))
        bucket = self._captured.get(size) or self._new(size)
        bucket.tokens.copy_(pad(tokens.to(target.device), (0, size - num_nodes))[None])
        bucket.columns.copy_(target.length + torch.arange(size, device=target.device)[None])
        bucket.rows.seen.copy_(seen)
        bucket.rows.prefix_lens.fill_(target.length)
        assert bucket.rows.num_nodes is not None
        bucket.rows.num_nodes.fill_(num_nodes)
        if size not in self._captured:
            self._capture(bucket)
            self._captured[size] = bucket
        with on_device(target.device):
            bucket.replay()
        # The next replay writes over both.
        return bucket.last[0, :num_nodes].clone(), bucket.taps[0, :num_nodes].clone()

    @torch.inference_mode(False)  # they outlive the mode that they are first used in
    def _new(self, size: int) -> _Bucket:
        device = self.target.device
        rows = TreeRows(
            seen=torch.zeros((1, size, -(-size // 64)), dtype=torch.int64, device=device),
            prefix_lens=torch.zeros(1, dtype=torch.int32, device=device),
            prefixes=None,
            max_prefix=self.target.cache.capacity - size,
            num_nodes=torch.zeros(1, dtype=torch.int32, device=device),
        )
        whole = torch.zeros((1, size), dtype=torch.int64, device=device)
        return _Bucket(tokens=whole, columns=whole.clone(), rows=rows, last=whole, taps=whole, replay=lambda: None)

    def _forward(self, bucket: _Bucket) -> None:
        target = self.target
        # A graph must derive whatever it needs from its inputs, so nothing may be remembered from another run.
        rows = bucket.rows.fresh()
        target.cache.write_next(bucket.columns, target.cache.capacity)
        bucket.last, bucket.taps = target.forward_tree(bucket.tokens, rows, target.cache)

    def _capture(self, bucket: _Bucket) -> None:
        if self.target.device.type != "cuda":
            bucket.replay = lambda: self._forward(bucket)
            return
        with on_device(self.target.device):
            # Kernels are compiled and libraries set up outside the graph, on a stream of their own as capture asks.
            stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UPS):
                    self._forward(bucket)
            torch.cuda.current_stream().wait_stream(stream)
            # The stream that torch would capture on belongs to the device of the first graph ever made.
            with torch.cuda.graph(graph, pool=self._pool, stream=stream):
                self._forward(bucket)
        self._pool = self._pool or graph.pool()
        bucket.replay = graph.replay
