"""Who sees whom in a tree, one int64 word for a row and 64 columns: bit j of word w of row i says that i sees 64 w + j.

The prefix is seen by every row and needs no mask, so a tree of N nodes takes N x ceil(N / 64) words whatever the length
of the prefix (the form of TensorRT-LLM's XQA kernels and of DeFT, with words of 64 bits).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

WORD = 64  # columns a word
MAX_NODES = 1024


@dataclass(frozen=True, kw_only=True, eq=False)
class TreeRows:
    """The rows of one verification: N nodes for each of B requests, behind prefixes of their own length.

    words        int64 [B or 1, N, ceil(N / 64)]
    depths       int64 [B or 1, N]; 0 for a root
    prefix_lens  int32 [B], on the device of the queries, where a kernel reads it
    prefixes     the same on the host; None where they are known on the device alone (CUDA graphs)
    max_prefix   no prefix is longer; chooses how a kernel splits its work, never what it computes
    num_nodes    int32 [B] or None: rows of a request that are nodes, where trees are padded to a bucket

    Node j of request b lies at column prefix_lens[b] + j of its keys and values.
    """

    words: Tensor
    depths: Tensor
    prefix_lens: Tensor
    prefixes: tuple[int, ...] | None
    max_prefix: int
    num_nodes: Tensor | None = None
    _biases: dict[torch.dtype, Tensor] = field(default_factory=dict, init=False, repr=False)

    @property
    def size(self) -> int:
        """N, padding included."""
        return self.words.shape[1]

    @cached_property
    def visible(self) -> Tensor:
        """bool [B or 1, N, N]; columns of padding are nobody's."""
        seen = unpack(self.words)
        if self.num_nodes is not None:
            seen = seen & (torch.arange(self.size, device=seen.device) < self.num_nodes[:, None])[:, None]
        return seen

    def bias(self, dtype: torch.dtype) -> Tensor:
        """[B or 1, N, N] to add to scores: 0 where a row sees, -inf where not. Made once for all layers."""
        if dtype not in self._biases:
            self._biases[dtype] = additive(self.visible, dtype)
        return self._biases[dtype]

    @cached_property
    def blind(self) -> Tensor | None:
        """bool [B or 1, N] of rows that see no node, or None if there are none: only masks made by hand have them."""
        blind = ~self.visible.any(-1)
        return blind if bool(blind.any()) else None

    @property
    def all_seen(self) -> bool:
        """A single node, which sees itself: no mask at all."""
        return self.size == 1 and self.num_nodes is None

    def positions(self) -> Tensor:
        """int64 [B, N]: prefix length + depth."""
        return self.prefix_lens[:, None].long() + self.depths


def tree_rows(parents: Tensor, prefixes: int | tuple[int, ...]) -> TreeRows:
    """Rows of one tree, parents [N], or of several, [B, N], behind `prefixes` committed tokens each.

    ValueError as `check_parents`, or if the two disagree on B.
    """
    check_parents(parents)
    batch = parents if parents.ndim == 2 else parents[None]
    lengths = (prefixes,) if isinstance(prefixes, int) else tuple(prefixes)
    if len(lengths) != len(batch) or min(lengths) < 0:
        raise ValueError(f"prefixes {lengths} of {len(batch)} trees: one length a tree, at least 0")
    words, depths = mask_words(batch)
    lens = torch.tensor(lengths, dtype=torch.int32, device=parents.device)
    return TreeRows(words=words, depths=depths, prefix_lens=lens, prefixes=lengths, max_prefix=max(lengths))


def check_parents(parents: Tensor) -> None:
    """ValueError unless parents [..., N] are integers, 1 <= N <= 1024, and every parent is -1 or an earlier node."""
    if parents.ndim not in (1, 2) or parents.is_floating_point():
        raise ValueError(f"parents are {parents.dtype} {list(parents.shape)}; expected integers [N] or [B, N]")
    num_nodes = parents.shape[-1]
    if not 1 <= num_nodes <= MAX_NODES:
        raise ValueError(f"a tree of {num_nodes} nodes; between 1 and {MAX_NODES}")
    wrong = (parents < -1) | (parents >= torch.arange(num_nodes, device=parents.device))
    if bool(wrong.any()):
        place = wrong.nonzero()[0].tolist()
        raise ValueError(f"parent {int(parents[tuple(place)])} of node {place[-1]}: a parent is -1 or an earlier node")


def mask_words(parents: Tensor) -> tuple[Tensor, Tensor]:
    """parents [B, N] (-1 for a root) -> words int64 [B, N, ceil(N / 64)] of a node and its ancestors, depths int64 [B, N].

    By doubling: after k steps a row knows its nearest 2^k ancestors. The number of steps depends on N alone, so nothing
    waits for the device.
    """
    batch, num_nodes = parents.shape
    num_words = -(-num_nodes // WORD)
    nodes = torch.arange(num_nodes, device=parents.device)
    # One row more, above every root: it adds nothing, and its parent is itself.
    words = parents.new_zeros((batch, num_nodes + 1, num_words), dtype=torch.int64)
    words[:, nodes, nodes // WORD] = torch.ones_like(nodes) << (nodes % WORD)
    jump = parents.new_full((batch, num_nodes + 1), num_nodes, dtype=torch.int64)
    jump[:, :-1] = torch.where(parents < 0, num_nodes, parents)
    depths = (jump != num_nodes).long()
    for _ in range((num_nodes - 1).bit_length()):
        words |= words.gather(1, jump[:, :, None].expand_as(words))
        depths = depths + depths.gather(1, jump)
        jump = jump.gather(1, jump)
    return words[:, :-1], depths[:, :-1]


def pack(visible: Tensor) -> Tensor:
    """bool [..., N, N] -> words int64 [..., N, ceil(N / 64)]."""
    columns = visible.shape[-1]
    bits = torch.nn.functional.pad(visible, (0, -columns % WORD)).unflatten(-1, (-1, WORD)).long()
    # Distinct bits, so their sum is their union; bit 63 makes a word negative.
    return (bits << torch.arange(WORD, device=visible.device)).sum(-1)


def unpack(words: Tensor) -> Tensor:
    """words int64 [..., N, ceil(N / 64)] -> bool [..., N, N]."""
    bits = (words[..., None] >> torch.arange(WORD, device=words.device)) & 1
    return bits.flatten(-2)[..., : words.shape[-2]].bool()


def additive(visible: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """bool [...] -> 0 where true, -inf where not."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)
