"""Who sees whom in a tree, one int64 word for a row and 64 columns: bit j of word w of row i says that i sees 64 w + j.

The prefix is seen by every row and needs no mask, so a tree of N nodes takes N x ceil(N / 64) words whatever the length
of the prefix (the form of TensorRT-LLM's XQA kernels and of DeFT, with words of 64 bits).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

WORD = 64  # columns a word
MAX_NODES = 1024
ALIGNED = 16  # float32 values of 64 bytes: matrix products are a tenth slower with another number of columns


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """Some rows of a tree, and the columns that at least one of them sees, counted from some column of the prefix on.

    rows     which of the N
    columns  int64 [B or 1, C], or None for all of them; the last may be columns that no row sees
    bias     [B or 1, 1, rows, C] to add to scores: 0 where a row sees, -inf where not
    blind    bool [B or 1, rows] of rows that see none of these columns, or None if there are none
    """

    rows: slice
    columns: Tensor | None
    bias: Tensor
    blind: Tensor | None


@dataclass(frozen=True, kw_only=True, eq=False)
class TreeRows:
    """The rows of one verification: N nodes for each of B requests, behind prefixes of their own length.

    seen         who sees whom: bool [B or 1, N, N], or the words of it, int64 [B or 1, N, ceil(N / 64)]
    prefix_lens  int32 [B], on the device of the queries, where a kernel reads it
    prefixes     the same on the host; None where they are known on the device alone (CUDA graphs)
    max_prefix   no prefix is longer; chooses how a kernel splits its work, never what it computes
    num_nodes    int32 [B] or None: rows of a request that are nodes, where trees are padded to a bucket
    sees_itself  known that every row does, as in a tree
    places       `positions`, if known

    Node j of request b lies at column prefix_lens[b] + j of its keys and values.
    """

    seen: Tensor
    prefix_lens: Tensor
    prefixes: tuple[int, ...] | None
    max_prefix: int
    num_nodes: Tensor | None = None
    sees_itself: bool = False
    places: Tensor | None = None
    _blocks: dict[tuple[int, int, torch.dtype], list[Block]] = field(default_factory=dict, init=False, repr=False)

    def fresh(self) -> TreeRows:
        """The same tensors with nothing derived from them yet."""
        return replace(self)

    @property
    def size(self) -> int:
        """N, padding included."""
        return self.seen.shape[1]

    @cached_property
    def words(self) -> Tensor:
        """int64 [B or 1, N, ceil(N / 64)]."""
        return self.seen if self.seen.dtype == torch.int64 else pack(self.seen)

    @cached_property
    def visible(self) -> Tensor:
        """bool [B or 1, N, N]; columns of padding are nobody's."""
        seen = self.seen if self.seen.dtype == torch.bool else unpack(self.seen)
        if self.num_nodes is not None:
            seen = seen & (torch.arange(self.size, device=seen.device) < self.num_nodes[:, None])[:, None]
        return seen

    def blocks(self, ahead: int, size: int, dtype: torch.dtype) -> list[Block]:
        """All rows, `size` at a time, each block with the columns it needs of the last `ahead` of the prefix and of the tree.

        The prefixes have to be of one length. Made once for all layers.
        """
        key = (ahead, size, dtype)
        if key not in self._blocks:
            blind = self.blind if ahead == 0 else None
            visible = torch.nn.functional.pad(self.visible, (ahead, 0), value=True)
            if size >= self.size:
                bias = additive(visible, dtype)[:, None]
                self._blocks[key] = [Block(rows=slice(0, self.size), columns=None, bias=bias, blind=blind)]
            else:
                self._blocks[key] = _dealt(visible, size, dtype, blind)
        return self._blocks[key]

    @cached_property
    def blind(self) -> Tensor | None:
        """bool [B or 1, N] of rows that see no node, or None if there are none: only masks made by hand have them."""
        if self.sees_itself and self.num_nodes is None:
            return None
        blind = ~self.visible.any(-1)
        return blind if bool(blind.any()) else None

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """`prefixes`, read from the device if need be."""
        return self.prefixes if self.prefixes is not None else tuple(self.prefix_lens.tolist())

    @cached_property
    def requests(self) -> list[TreeRows]:
        """Each request alone."""
        several = len(self.seen) > 1
        return [
            TreeRows(
                seen=self.seen[b : b + 1] if several else self.seen, prefix_lens=self.prefix_lens[b : b + 1],
                prefixes=(length,), max_prefix=length, sees_itself=self.sees_itself,
                num_nodes=None if self.num_nodes is None else self.num_nodes[b : b + 1],
            )
            for b, length in enumerate(self.lengths)
        ]  # fmt: skip

    @cached_property
    def common(self) -> int | None:
        """The prefix length of all requests, or None if they differ."""
        return self.lengths[0] if len(set(self.lengths)) == 1 else None

    @cached_property
    def positions(self) -> Tensor:
        """int64 [B, N]: prefix length + depth, the number of ancestors; a row of padding counts as a root."""
        if self.places is not None:
            return self.places
        return self.prefix_lens[:, None] + (self.visible.sum(-1) - 1).clamp(min=0)


def tree_rows(parents: Tensor, prefixes: int | tuple[int, ...]) -> TreeRows:
    """Rows of one tree, parents [N], or of several, [B, N], behind `prefixes` committed tokens each.

    ValueError as `check_parents`, or if the two disagree on B.
    """
    check_parents(parents)
    batch = parents if parents.ndim == 2 else parents[None]
    lengths = (prefixes,) if isinstance(prefixes, int) else tuple(prefixes)
    if len(lengths) != len(batch) or min(lengths) < 0:
        raise ValueError(f"prefixes {lengths} of {len(batch)} trees: one length a tree, at least 0")
    seen, device = _closure(batch.numpy(force=True)), parents.device
    starts = np.array(lengths)
    return TreeRows(
        seen=torch.from_numpy(seen).to(device), prefix_lens=torch.from_numpy(starts.astype(np.int32)).to(device),
        prefixes=lengths, max_prefix=max(lengths), sees_itself=True,
        places=torch.from_numpy(seen.sum(-1) - 1 + starts[:, None]).to(device),
    )  # fmt: skip


def check_parents(parents: Tensor) -> None:
    """ValueError unless parents [..., N] are integers, 1 <= N <= 1024, and every parent is -1 or an earlier node."""
    if parents.ndim not in (1, 2) or parents.is_floating_point():
        raise ValueError(f"parents are {parents.dtype} {list(parents.shape)}; expected integers [N] or [B, N]")
    num_nodes = parents.shape[-1]
    if not 1 <= num_nodes <= MAX_NODES:
        raise ValueError(f"a tree of {num_nodes} nodes; between 1 and {MAX_NODES}")
    values = parents.numpy(force=True)  # a few dozen values: numpy's calls cost a tenth of torch's
    wrong = (values < -1) | (values >= np.arange(num_nodes))
    if wrong.any():
        place = tuple(np.argwhere(wrong)[0])
        raise ValueError(f"parent {values[place]} of node {place[-1]}: a parent is -1 or an earlier node")


def ancestors(parents: Tensor) -> Tensor:
    """parents [B, N] (-1 for a root) -> bool [B, N, N]; row i is true at i and at i's ancestors."""
    return torch.from_numpy(_closure(parents.numpy(force=True))).to(parents.device)


def _closure(parents: np.ndarray) -> np.ndarray:
    """By doubling: after k steps a row knows its nearest 2^k ancestors.

    On the host, whatever the device: a few thousand bits cost numpy less than the launches would, and parents are checked
    there anyway.
    """
    nodes, request = np.arange(parents.shape[1]), np.arange(len(parents))[:, None]
    seen = np.zeros((*parents.shape, parents.shape[1]), dtype=bool)
    seen[:, nodes, nodes] = True
    jump = np.where(parents < 0, nodes, parents)  # a root's parent is itself, which adds nothing
    while True:
        seen |= seen[request, jump]
        further = np.take_along_axis(jump, jump, 1)
        if (further == jump).all():
            return seen
        jump = further


def _dealt(visible: Tensor, size: int, dtype: torch.dtype, blind: Tensor | None) -> list[Block]:
    """visible [B or 1, N, columns] in blocks of `size` rows: a row sees little of a tree, and so do a few neighbours.

    Requests share a number of columns, so some get columns that none of their rows sees, as all do where it is rounded up.
    """
    host = visible.numpy(force=True)
    starts = np.arange(0, host.shape[1], size)
    seen = np.logical_or.reduceat(host, starts, axis=1)  # [B, blocks, columns]
    counts = -(-seen.sum(-1).max(0) // ALIGNED) * ALIGNED
    columns = np.argsort(~seen, axis=-1, kind="stable")  # those that are seen first, in their order
    found = []
    for place, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
        rows, own = slice(start, min(start + size, host.shape[1])), columns[:, place, :count]
        bias = additive(torch.from_numpy(np.take_along_axis(host[:, rows], own[:, None], 2)), dtype)[:, None]
        found.append(
            Block(
                rows=rows, columns=torch.from_numpy(own).to(visible.device), bias=bias.to(visible.device),
                blind=None if blind is None else blind[:, rows],
            )
        )  # fmt: skip
    return found


def pack(visible: Tensor) -> Tensor:
    """bool [..., N, N] -> words int64 [..., N, ceil(N / 64)]."""
    columns = visible.shape[-1]
    bits = torch.nn.functional.pad(visible, (0, -columns % WORD)).unflatten(-1, (-1, WORD)).long()
    # Distinct bits, so their sum is their union; bit 63 makes a word negative.
    words = (bits << torch.arange(WORD, device=visible.device)).sum(-1)
    return words if words.is_contiguous() else words.contiguous()  # of a transposed mask they are transposed


def unpack(words: Tensor) -> Tensor:
    """words int64 [..., N, ceil(N / 64)] -> bool [..., N, N]."""
    bits = (words[..., None] >> torch.arange(WORD, device=words.device)) & 1
    return bits.flatten(-2)[..., : words.shape[-2]].bool()


def additive(visible: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """bool [...] -> 0 where true, -inf where not."""
    return visible.to(dtype).log_()
