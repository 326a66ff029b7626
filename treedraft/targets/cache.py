"""Key-value storage whose rows can be written, kept and dropped by position.

transformers' own caches append and crop, and what `crop` means has changed between releases. Here the target says
which columns a forward writes, so accepting a tree path is one gather and rejecting the rest is forgetting a length.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

MOST_ROOM = 8192  # columns that are made before they are needed: behind a long prompt twice as many would lie idle


class RowCache:
    """Keys and values of every layer, in one tensor `store` [2, layers, B, kv_heads, capacity, head_dim].

    Passed to a transformers model as its cache: the model calls `update` once a layer, which writes the new columns at
    `self.columns` and returns a view of the first `self.visible` columns without copying them. Capacity doubles when
    it runs out, a large one grows by MOST_ROOM columns.
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
        shape = (2, num_layers, batch, kv_heads, capacity, head_dim)
        with torch.inference_mode(False):  # a tensor of that mode could not be written to outside of it
            self.store = torch.zeros(shape, dtype=dtype, device=device)
        self.columns: slice | Tensor = slice(0, 0)
        self.visible = 0

    @property
    def keys(self) -> Tensor:
        """[layers, B, kv_heads, capacity, head_dim]."""
        return self.store[0]

    @property
    def values(self) -> Tensor:
        """[layers, B, kv_heads, capacity, head_dim]."""
        return self.store[1]

    @property
    def capacity(self) -> int:
        return self.store.shape[4]

    def rows(self, rows: slice) -> RowCache:
        """The same storage seen as a cache of those rows alone."""
        view = copy.copy(self)
        view.store = self.store[:, :, rows]
        return view

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows alone, in this order."""
        self.store = self.store[:, :, rows]

    def write_next(self, columns: slice | Tensor, visible: int) -> None:
        """The next forward writes at `columns` and sees columns < visible.

        `columns` is a slice shared by all rows, or those of each row, [B] or [B, n].
        """
        self.columns, self.visible = columns, visible
        self.reserve(visible)

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_args, **_kwargs) -> tuple[Tensor, Tensor]:
        """Store [B, kv_heads, n, head_dim] of one layer; return all visible columns. Called by the model."""
        for store, new in ((self.store[0, layer_idx], keys), (self.store[1, layer_idx], values)):
            if isinstance(self.columns, slice):
                store[:, :, self.columns] = new
            else:
                columns = self.columns.view(len(store), -1)
                rows = torch.arange(len(store), device=store.device)[:, None]
                store[rows, :, columns] = new.transpose(1, 2)
        return self.store[0, layer_idx, :, :, : self.visible], self.store[1, layer_idx, :, :, : self.visible]

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
        """Copy columns `sources` [A] to start, start + 1, ...: one gather over all layers (the path becomes dense)."""
        # Asking costs a GPU more than copying.
        if sources.device.type == "cpu" and torch.equal(sources, torch.arange(start, start + len(sources))):
            return
        self.store[..., start : start + len(sources), :] = self.store.index_select(4, sources)

    def move_rows(self, sources: Tensor, targets: Tensor) -> None:
        """Copy columns sources[b] to targets[b] of every row b, both [B, A], in all layers at once."""
        rows = torch.arange(len(sources), device=sources.device)[:, None]
        self.store[:, :, rows, :, targets] = self.store[:, :, rows, :, sources]

    def reserve(self, columns: int) -> None:
        """Make room for so many columns."""
        if columns <= self.capacity:
            return
        extra = max(columns - self.capacity, min(self.capacity, MOST_ROOM))
        with torch.inference_mode(False):
            self.store = torch.nn.functional.pad(self.store, (0, 0, 0, extra))


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
