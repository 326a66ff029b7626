"""Key-value storage whose rows can be written, kept and dropped by position.

transformers' own caches append and crop, and what `crop` means has changed between releases. Here the target says
which columns a forward writes, so accepting a tree path is one gather and rejecting the rest is forgetting a length.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor


class RowCache:
    """Keys and values of every layer, [B, kv_heads, capacity, head_dim] each.

    Passed to a transformers model as its cache: the model calls `update` once a layer, which writes the new columns at
    `self.columns` and returns a view of the first `self.visible` columns without copying them. Capacity doubles when
    it runs out.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        batch: int,
        kv_heads: int,
        head_dim: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (batch, kv_heads, capacity, head_dim)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.columns: slice | Tensor = slice(0, 0)
        self.visible = 0

    @property
    def capacity(self) -> int:
        return self.keys[0].shape[2]

    def rows(self, rows: slice) -> RowCache:
        """The same storage seen as a cache of those rows alone."""
        view = copy.copy(self)
        view.keys = [store[rows] for store in self.keys]
        view.values = [store[rows] for store in self.values]
        return view

    def write_next(self, columns: slice | Tensor, visible: int) -> None:
        """The next forward writes at `columns` and sees columns < visible.

        `columns` is a slice shared by all rows, or those of each row, [B] or [B, n].
        """
        self.columns, self.visible = columns, visible
        self._reserve(visible)

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_args, **_kwargs) -> tuple[Tensor, Tensor]:
        """Store [B, kv_heads, n, head_dim] of one layer; return all visible columns. Called by the model."""
        for store, new in ((self.keys[layer_idx], keys), (self.values[layer_idx], values)):
            if isinstance(self.columns, slice):
                store[:, :, self.columns] = new
            else:
                columns = self.columns.view(len(store), -1)
                rows = torch.arange(len(store), device=store.device)[:, None]
                store[rows, :, columns] = new.transpose(1, 2)
        return self.keys[layer_idx][:, :, : self.visible], self.values[layer_idx][:, :, : self.visible]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns before the current write; asked by the model only when no positions are passed."""
        return self.columns.start if isinstance(self.columns, slice) else int(self.columns.max())

    def before(self, layer: int, ends: Sequence[int], size: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B, n, kv_heads, head_dim] of the n <= size rows before ends [B], right aligned.

        n is that of the longest row; what a shorter one has at the left says nothing. Views where all end together.
        """
        store = self.keys[layer], self.values[layer]
        longest = max(ends)
        number = min(size, longest)
        if min(ends) == longest:
            keys, values = (part[:, :, longest - number : longest].transpose(1, 2) for part in store)
            return keys, values
        columns = torch.tensor(ends, device=store[0].device)[:, None] + torch.arange(-number, 0, device=store[0].device)
        rows = torch.arange(len(ends), device=columns.device)[:, None]
        keys, values = (part[rows, :, columns.clamp(min=0)] for part in store)
        return keys, values

    def move(self, sources: Tensor, start: int) -> None:
        """Copy columns `sources` [A] to start, start + 1, ... in every layer (the accepted path becomes dense)."""
        if torch.equal(sources, torch.arange(start, start + len(sources), device=sources.device)):
            return
        target = slice(start, start + len(sources))
        for store in (*self.keys, *self.values):
            store[:, :, target] = store[:, :, sources]

    def _reserve(self, columns: int) -> None:
        if columns <= self.capacity:
            return
        extra = max(columns, 2 * self.capacity) - self.capacity
        for stores in (self.keys, self.values):
            for layer, store in enumerate(stores):
                empty = store.new_zeros((*store.shape[:2], extra, store.shape[3]))
                stores[layer] = torch.cat([store, empty], dim=2)


class Recording:
    """A cache as a model sees it that also remembers the keys and values just computed in some layers.

    Without a cache behind it a forward attends to its own rows alone.
    """

    def __init__(self, cache: RowCache | None, layers: Sequence[int]) -> None:
        self.cache, self.layers = cache, frozenset(layers)
        self.new: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_args, **_kwargs) -> tuple[Tensor, Tensor]:
        """Called by the model with [B, kv_heads, n, head_dim] of one layer."""
        if layer_idx in self.layers:
            self.new[layer_idx] = keys, values
        return self.cache.update(keys, values, layer_idx) if self.cache is not None else (keys, values)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.cache.get_seq_length(layer_idx) if self.cache is not None else 0

    def rows(self, layer: int) -> list[Tensor]:
        """Keys and values of that layer, [B, n, kv_heads * head_dim] each."""
        return [part.transpose(1, 2).flatten(2) for part in self.new[layer]]
