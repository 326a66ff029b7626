"""The kernels, and nothing else: importing this file needs triton, but no GPU.

Sizes: B requests, H query heads, HK key heads, G = H / HK, N nodes, D head size, S splits. A program has BLOCK_M rows of one
key head; row r is query r // G of head r % G, so the queries that share keys sit in one tile and a small tree fills it.
Columns come in tiles of 64, the bits of a mask word: whole tiles of the prefix carry no mask code, at most one is ragged,
and a tile of the tree costs a row one word. Whatever is multiplied by a stride is int64 first: B x stride passes 2^31.
"""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
# (inside a kernel every value is a tensor of triton's own, which annotations do not describe)

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


# What differs from tree to tree must not compile anew: an argument that is a multiple of 16 would.
@triton.jit(do_not_specialize=["num_rows", "num_splits", "num_words", "words_batch", "table_batch"])
def attend(
    q, k, v,  # [B, H, N, D], [B, HK, S, D] twice; pools [pages, page, HK, D] if PAGED; descriptors of k and v if TMA
    words, prefix_lens, num_nodes, block_table,  # int64 [B or 1, N, W], int32 [B], int32 [B] or None, int32 [B, pages] or None
    out, lse,  # [B, N, H, D], float32 [B, H, N]
    part, part_lse,  # float32 [S, B, H, N, D] and [S, B, H, N], the latter in base 2
    scale,  # of the scores, times log2(e)
    num_rows,  # N
    num_splits,
    num_words,
    q_batch, q_head, q_row,
    k_batch, k_head, k_row,
    v_batch, v_head, v_row,
    words_batch, table_batch,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    SPLIT: tl.constexpr, HAS_NUM_NODES: tl.constexpr, PAGE: tl.constexpr, TMA: tl.constexpr, UPCAST: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """Outputs and lse of a tile of rows over the split's share of the columns (straight to `out` without SPLIT).

    PAGE is 0, or the rows of a page. UPCAST: multiply in float32, for the interpreter, which cannot multiply bfloat16.
    """
    BLOCK_N: tl.constexpr = 64  # pyright: ignore[reportAssignmentType]
    batch = (tl.program_id(2) // num_splits).to(tl.int64)
    split = tl.program_id(2) % num_splits
    kv_head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    node = (rows // GROUP).to(tl.int64)
    head = kv_head * GROUP + rows % GROUP
    alive = rows < num_rows * GROUP
    dims = tl.arange(0, BLOCK_D)
    columns = tl.arange(0, BLOCK_N)
    inside = dims < D

    queries = q + batch * q_batch + head[:, None] * q_head + node[:, None] * q_row + dims[None, :]
    if D == BLOCK_D:
        q_tile = tl.load(queries, mask=alive[:, None], other=0.0)  # [BLOCK_M, BLOCK_D]
    else:
        q_tile = tl.load(queries, mask=alive[:, None] & inside[None, :], other=0.0)
    if UPCAST:
        q_tile = q_tile.to(tl.float32)

    prefix = tl.load(prefix_lens + batch)
    nodes = num_rows
    if HAS_NUM_NODES:
        nodes = tl.load(num_nodes + batch)
    whole = prefix // BLOCK_N
    before = (prefix + BLOCK_N - 1) // BLOCK_N
    tiles = before + (nodes + BLOCK_N - 1) // BLOCK_N
    each = (tiles + num_splits - 1) // num_splits
    first = split * each
    last = tl.minimum(first + each, tiles)

    if not TMA and PAGE == 0:
        k_base = k + batch * k_batch + kv_head * k_head
        v_base = v + batch * v_batch + kv_head * v_head
    if PAGE > 0:
        table = block_table + batch * table_batch
    k_inner = columns[:, None] * k_row + dims[None, :]
    v_inner = columns[:, None] * v_row + dims[None, :]

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    # Whole tiles of the prefix: no mask, no bounds.
    for tile in range(first, tl.minimum(last, whole)):
        if TMA:
            k_tile = k.load([batch.to(tl.int32), kv_head.to(tl.int32), tile * BLOCK_N, 0]).reshape(BLOCK_N, BLOCK_D)
        else:
            if PAGE > 0:
                page = tl.load(table + tile * BLOCK_N // PAGE).to(tl.int64)
                offset = tl.cast(tile * BLOCK_N % PAGE, tl.int64)
                k_at = k + page * k_batch + kv_head * k_head + offset * k_row
                v_at = v + page * v_batch + kv_head * v_head + offset * v_row
            else:
                k_at = k_base + tl.cast(tile * BLOCK_N, tl.int64) * k_row
                v_at = v_base + tl.cast(tile * BLOCK_N, tl.int64) * v_row
            if D == BLOCK_D:
                k_tile = tl.load(k_at + k_inner)
            else:
                k_tile = tl.load(k_at + k_inner, mask=inside[None, :], other=0.0)
        if UPCAST:
            k_tile = k_tile.to(tl.float32)
        scores = tl.dot(q_tile, k_tile.T, input_precision="ieee" if EXACT else "tf32") * scale  # [BLOCK_M, BLOCK_N]
        higher = tl.maximum(top, tl.max(scores, 1))
        shrink = tl.exp2(top - higher)
        weights = tl.exp2(scores - higher[:, None])
        total = total * shrink + tl.sum(weights, 1)
        mixed = mixed * shrink[:, None]
        if TMA:
            v_tile = v.load([batch.to(tl.int32), kv_head.to(tl.int32), tile * BLOCK_N, 0]).reshape(BLOCK_N, BLOCK_D)
        elif D == BLOCK_D:
            v_tile = tl.load(v_at + v_inner)
        else:
            v_tile = tl.load(v_at + v_inner, mask=inside[None, :], other=0.0)
        if UPCAST:
            v_tile = v_tile.to(tl.float32)
        mixed = tl.dot(weights.to(v_tile.dtype), v_tile, mixed, input_precision="ieee" if EXACT else "tf32")
        top = higher

    # At most one ragged tile of the prefix, then the tree: bounded, and of the tree a word a row.
    for tile in range(tl.maximum(first, whole), last):
        in_tree = tile >= before
        node_tile = tl.maximum(tile - before, 0)
        start = tl.where(in_tree, prefix + node_tile * BLOCK_N, tile * BLOCK_N)
        end = tl.where(in_tree, prefix + nodes, prefix)
        place = start + columns
        here = place < end
        word = tl.load(words + batch * words_batch + node * num_words + node_tile, mask=alive, other=0)
        # By halves: a shift of 64 bits takes several instructions and twice the registers.
        half = tl.where((columns < 32)[None, :], word.to(tl.int32)[:, None], (word >> 32).to(tl.int32)[:, None])
        seen = ((half >> (columns % 32)[None, :]) & 1) != 0
        free = (rows[:, None] * 0 + tile) < before
        seen = (seen | free) & here[None, :]
        if PAGE > 0:
            # The tree starts anywhere, so a tile of it may lie in two pages.
            page = tl.load(table + place // PAGE, mask=here, other=0).to(tl.int64)
            row = (place % PAGE).to(tl.int64)
        if TMA:
            k_tile = k.load([batch.to(tl.int32), kv_head.to(tl.int32), start, 0]).reshape(BLOCK_N, BLOCK_D)
        else:
            if PAGE > 0:
                k_ptrs = k + page[:, None] * k_batch + kv_head * k_head + row[:, None] * k_row + dims[None, :]
            else:
                k_ptrs = k_base + tl.cast(start, tl.int64) * k_row + k_inner
            if D == BLOCK_D:
                k_tile = tl.load(k_ptrs, mask=here[:, None], other=0.0)
            else:
                k_tile = tl.load(k_ptrs, mask=here[:, None] & inside[None, :], other=0.0)
        if UPCAST:
            k_tile = k_tile.to(tl.float32)
        scores = tl.dot(q_tile, k_tile.T, input_precision="ieee" if EXACT else "tf32") * scale
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        # A row that has seen nothing yet: -inf - -inf is NaN.
        level = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp2(top - level)
        weights = tl.exp2(scores - level[:, None])
        total = total * shrink + tl.sum(weights, 1)
        mixed = mixed * shrink[:, None]
        if TMA:
            v_tile = v.load([batch.to(tl.int32), kv_head.to(tl.int32), start, 0]).reshape(BLOCK_N, BLOCK_D)
            # A row of slack may be NaN, and zero times NaN is NaN.
            v_tile = tl.where(here[:, None], v_tile, 0.0)
        else:
            if PAGE > 0:
                v_ptrs = v + page[:, None] * v_batch + kv_head * v_head + row[:, None] * v_row + dims[None, :]
            else:
                v_ptrs = v_base + tl.cast(start, tl.int64) * v_row + v_inner
            if D == BLOCK_D:
                v_tile = tl.load(v_ptrs, mask=here[:, None], other=0.0)
            else:
                v_tile = tl.load(v_ptrs, mask=here[:, None] & inside[None, :], other=0.0)
        if UPCAST:
            v_tile = v_tile.to(tl.float32)
        mixed = tl.dot(weights.to(v_tile.dtype), v_tile, mixed, input_precision="ieee" if EXACT else "tf32")
        top = higher

    # A row that saw nothing: 0, and -inf.
    some = tl.where(total == 0.0, 1.0, total)
    mixed = mixed / some[:, None]
    log_sum = tl.where(total == 0.0, float("-inf"), top + tl.log2(some))
    num_heads: tl.constexpr = H
    if SPLIT:
        # [S, B, H, N]; program 2 is b S + s.
        num_batches = tl.num_programs(2) // num_splits
        place = ((tl.cast(split, tl.int64) * num_batches + batch) * num_heads + head) * num_rows + node
        tl.store(part_lse + place, log_sum, mask=alive)
        targets = part + place[:, None] * D + dims[None, :]
    else:
        tl.store(lse + (batch * num_heads + head) * num_rows + node, log_sum * 0.6931471805599453, mask=alive)
        targets = out + ((batch * num_rows + node) * num_heads + head)[:, None] * D + dims[None, :]
    if D == BLOCK_D:
        tl.store(targets, mixed.to(targets.dtype.element_ty), mask=alive[:, None])
    else:
        tl.store(targets, mixed.to(targets.dtype.element_ty), mask=alive[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["num_rows", "num_splits", "num_items"])
def merge(
    part, part_lse, out, lse, num_rows, num_splits, num_items,
    H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """The splits of each of B H N items: outputs weighed by 2^(lse - the largest), lse in natural units."""
    items = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    alive = items < num_items
    dims = tl.arange(0, BLOCK_D)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    for split in range(num_splits):
        top = tl.maximum(top, tl.load(part_lse + split * num_items + items, mask=alive, other=float("-inf")))
    level = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    full = alive[:, None] & (dims < D)[None, :]
    for split in range(num_splits):
        place = split * num_items + items
        weight = tl.exp2(tl.load(part_lse + place, mask=alive, other=float("-inf")) - level)
        mixed += weight[:, None] * tl.load(part + place[:, None] * D + dims[None, :], mask=full, other=0.0)
        total += weight
    some = tl.where(total == 0.0, 1.0, total)
    mixed = mixed / some[:, None]
    tl.store(lse + items, tl.where(total == 0.0, float("-inf"), top + tl.log2(some)) * 0.6931471805599453, mask=alive)
    batch = items // (H * num_rows)
    head = items // num_rows % H
    node = items % num_rows
    targets = out + ((batch * num_rows + node) * H + head)[:, None] * D + dims[None, :]
    tl.store(targets, mixed.to(targets.dtype.element_ty), mask=full)
