"""Tree attention inside transformers' models, without touching their code: an attention function that takes the tree.

`model(ids, position_ids=..., attention_mask=NO_MASK, tree=rows, tree_backend="hybrid")`: keyword arguments that a model
does not know travel down to its attention function, and a mask with four axes is passed on as it is, so the model builds no mask of
N x (P + N). Nor do "triton" and "hybrid" have anything of that size; "sdpa" and "reference", which are there to be compared
with, do. Without `tree` the function is transformers' own for "sdpa", masks included.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from treedraft.ops.tree_attention.dispatch import run, scale_of, tree_attention
from treedraft.ops.tree_attention.mask import TreeRows

NAME = "treedraft"


@cache
def register() -> None:
    """Make "treedraft" a value of `attn_implementation`."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, attention)
    # A name without a mask function makes models skip masks, and padding with them.
    AttentionMaskInterface.register(NAME, sdpa_mask)


@cache
def no_mask(device: torch.device) -> Tensor:
    """What stands for the mask that is not built."""
    return torch.ones((1, 1, 1, 1), dtype=torch.bool, device=device)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    tree: TreeRows | None = None,
    tree_backend: str = "auto",
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """query [B, H, N, D] -> [B, N, H, D]; `key` and `value` may be a whole buffer: the prefix length is the tree's."""
    if tree is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **options
        )
    if getattr(module, "sliding_window", None):
        raise ValueError(f"a layer with a sliding window of {module.sliding_window} keys cannot verify a tree")
    if tree_backend == "auto" or getattr(module, "layer_idx", 0) == 0 or torch.compiler.is_compiling():
        out = tree_attention(query, key, value, tree, scale=scaling, backend=tree_backend)
    else:  # shapes were checked in the first layer
        out, _ = run(query, key, value, tree, scale=scale_of(query, scaling), backend=tree_backend, need_lse=False)
    return out.transpose(1, 2), None
