"""Published systems as points of the grid, each with its own block layout. A grid arm or a training names one by `method`.

How one is trained is the grid's to say, the same for all its arms; published DSpark and LongSpark have objective = "dspark"
and decay = 4.
"""

from __future__ import annotations

from typing import Any

METHODS: dict[str, dict[str, Any]] = {
    # bidirectional block, no correction; 16 slots, the anchor's own is discarded: 15 drafts
    "dflash": {"backbone": "bidirectional", "correction": "none", "layout": "fill-in", "block_size": 16},
    # the same with a causal block
    "jetspec": {"backbone": "causal", "correction": "none", "layout": "fill-in", "block_size": 16},
    # anchor-first: the anchor's slot predicts too, 7 slots are 7 drafts
    "dspark": {"backbone": "bidirectional", "correction": "markov", "layout": "anchor-first", "block_size": 7},
    # a state of fixed size instead of a context that grows; the target's own final norm
    "longspark": {
        "backbone": {"name": "bidirectional", "norm": "target"}, "context": "longspark", "correction": "markov",
        "layout": "anchor-first", "block_size": 7,
    },
    # the post's attention-only layer on a causal block
    "jetspec++": {"backbone": "causal", "correction": "attention", "layout": "fill-in", "block_size": 16},
}


def method(name: str) -> dict[str, Any]:
    """Drafter fields of a published system; ValueError with a suggestion if it is not in the table."""
    if name not in METHODS:
        from treedraft.registry import unknown

        raise ValueError(unknown("method", name, list(METHODS)))
    return dict(METHODS[name])
