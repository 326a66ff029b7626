"""Plain decoding: one request a token at a time (`plain`, the reference), or many at once (`generate`, to make data).

Both draw the token at absolute position t of a request with the noise of (seed, t), so they return the same ids (contract L2)
wherever their logits agree to rounding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from treedraft.config import Sampling
from treedraft.noise import draw, gumbel
from treedraft.targets.cache import RowCache
from treedraft.targets.hf import Target
from treedraft.targets.sampling import Sampler

_ATTENTION = "treedraft_rows"
_CHUNK = 32  # rows that share a padded length in attention
_DRAW_ROWS = 8  # rows drawn at once on a CPU: their float64 copies stay in its cache


@torch.inference_mode()
def plain(
    target: Target,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    seed: int = 0,
    stop: Sequence[int] | None = None,
) -> Iterator[int]:
    """Ids of the answer one by one, the stop id included (the target's end-of-text ids unless `stop` names others).

    Ends at `max_new_tokens` or where the context window is full.
    """
    stops = set(target.eos_token_ids if stop is None else stop)
    sampler = Sampler(sampling, prompt, seed=seed, vocab_size=target.vocab_size)
    logits = target.prefill(prompt, take=lambda _: None).logits
    emitted: list[int] = []
    for _ in range(_budget(target, prompt, max_new_tokens)):
        emitted.append(sampler.draw(logits[-1], emitted))
        yield emitted[-1]
        if emitted[-1] in stops or target.length + 1 >= target.max_length:
            return
        logits = target.verify(torch.tensor(emitted[-1:], device=target.device), torch.tensor([-1])).logits
        target.commit([0])


@torch.inference_mode()
def generate(
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float | Sequence[float],
    seeds: Sequence[int],
    batch_size: int,
    progress: Callable[[int], object] | None = None,
    stop: Sequence[int] | None = None,
    head_dtype: torch.dtype | None = None,
) -> list[list[int]]:
    """Answers of many prompts, stop id included, by continuous batching: a finished row at once gets the next prompt.

    `temperature` is one number or one a prompt. `progress(count)` is called with the tokens of each step. `head_dtype`
    computes logits in another type than the model's (bfloat16 logits tie often). ValueError for a prompt that is empty
    or does not fit the context window.
    """
    temperatures = [float(temperature)] * len(prompts) if isinstance(temperature, (int, float)) else list(temperature)
    assert len(prompts) == len(seeds) == len(temperatures), "one seed and one temperature a prompt"
    answers: list[list[int]] = [[] for _ in prompts]
    if not prompts or max_new_tokens < 1:
        return answers
    budgets = [_budget(target, prompt, max_new_tokens) for prompt in prompts]
    # Long prompts first: rows are kept in falling order of length, and new ones enter at the short end.
    waiting = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    with _grouped_attention(target):
        batch = _Batch(
            target,
            prompts,
            budgets,
            temperatures,
            seeds,
            min(batch_size, len(prompts)),
            stop,
            head_dtype or target.dtype,
        )
        while waiting or batch.live:
            while waiting and batch.live < batch.size:
                batch.admit(waiting.pop())
            produced = batch.live
            for index, ids in batch.step():
                answers[index] = ids
            if progress is not None:
                progress(produced)
    return answers


class _Batch:
    """Rows 0 .. live - 1 of one preallocated cache, in falling order of length (roughly: chunk by chunk).

    A row is its cache columns 0 .. lengths - 1 and one token that is still to be fed at column `lengths`.
    """

    def __init__(
        self,
        target: Target,
        prompts: Sequence[Sequence[int]],
        budgets: Sequence[int],
        temperatures: Sequence[float],
        seeds: Sequence[int],
        size: int,
        stop: Sequence[int] | None,
        head_dtype: torch.dtype,
    ) -> None:
        device = target.device
        self.target, self.prompts, self.size, self.live = target, prompts, size, 0
        self.head_weight = target.head_weight.to(head_dtype)
        self.stops = torch.tensor(
            target.eos_token_ids if stop is None else list(stop), device=device, dtype=torch.int64
        )
        self.budgets = torch.tensor(budgets, device=device)
        self.temperatures = torch.tensor(temperatures, dtype=torch.float64, device=device)
        self.seeds = torch.tensor(seeds, dtype=torch.int64, device=device)
        capacity = max(len(prompt) + budget for prompt, budget in zip(prompts, budgets, strict=True))
        self.cache = target.new_cache(batch=size, capacity=capacity)
        self.owners = torch.zeros(size, dtype=torch.int64, device=device)
        self.tokens = torch.zeros(size, dtype=torch.int64, device=device)
        self.lengths = torch.zeros(size, dtype=torch.int64, device=device)
        self.counts = torch.zeros(size, dtype=torch.int64, device=device)
        self.written = torch.zeros((size, max(budgets)), dtype=torch.int64, device=device)
        self.prefix = _common_prefix(prompts)
        self.prefix_cache = target.new_cache(batch=1, capacity=max(self.prefix, 1))
        if self.prefix:
            self._fill(self.prefix_cache, prompts[0], 0, self.prefix)

    def admit(self, index: int) -> None:
        """Put prompt `index` in the first free row: all but its last token is computed now, that at the next step."""
        row, prompt = self.live, self.prompts[index]
        view = self.cache.rows(slice(row, row + 1))
        for store, prefix in _pairs(view, self.prefix_cache):
            store[:, :, : self.prefix] = prefix[:, :, : self.prefix]
        self._fill(view, prompt, self.prefix, len(prompt) - 1)
        self.owners[row], self.tokens[row], self.lengths[row], self.counts[row] = index, prompt[-1], len(prompt) - 1, 0
        self.live += 1

    def _fill(self, cache: RowCache, prompt: Sequence[int], start: int, end: int) -> None:
        """Compute columns start .. end - 1 of a one-row cache."""
        if start == end:
            return
        ids = torch.tensor(list(prompt[start:end]), dtype=torch.int64, device=self.target.device)
        for _ in self.target.fill(cache, ids, start=start):
            pass

    def step(self) -> list[tuple[int, list[int]]]:
        """One token for every live row; the (prompt index, answer) pairs that it finished, whose rows are freed."""
        live = slice(0, self.live)
        columns = self.lengths[live].clone()
        visible = int(columns.max()) + 1
        mask = torch.arange(visible, device=columns.device) <= columns[:, None]
        view = self.cache.rows(live)
        view.write_next(columns, visible)
        last, _ = self.target.forward(
            self.tokens[live, None], positions=columns[:, None], mask=mask[:, None, None], cache=view
        )
        logits = nn.functional.linear(last[:, 0].to(self.head_weight.dtype), self.head_weight)
        owners = self.owners[live]
        new = _draw_rows(logits, self.temperatures[owners], self.seeds[owners], columns + 1)
        self.tokens[live] = new
        self.lengths[live] += 1
        self.written[live].scatter_(1, self.counts[live, None], new[:, None])
        self.counts[live] += 1
        ended = torch.isin(new, self.stops) | (self.counts[live] >= self.budgets[owners])
        # From the last row down, so that freeing a row does not move one that is still to be freed.
        rows = ended.nonzero().flatten().tolist()
        finished = [(int(self.owners[row]), self.written[row, : int(self.counts[row])].tolist()) for row in rows]
        for row in reversed(rows):
            self._free(row)
        return finished

    def _free(self, row: int) -> None:
        """Fill the hole with the longest row of the next chunk, that hole likewise, and so on; the last row last."""
        for start in range((row // _CHUNK + 1) * _CHUNK, self.live, _CHUNK):
            longest = start + int(self.lengths[start : min(start + _CHUNK, self.live)].argmax())
            self._copy(longest, row)
            row = longest
        if row != self.live - 1:
            self._copy(self.live - 1, row)
        self.live -= 1

    def _copy(self, source: int, row: int) -> None:
        length = int(self.lengths[source])
        for store in (*self.cache.keys, *self.cache.values):
            store[row, :, :length] = store[source, :, :length]
        for state in (self.owners, self.tokens, self.lengths, self.counts, self.written):
            state[row] = state[source]


def _pairs(one: RowCache, other: RowCache) -> Iterator[tuple[Tensor, Tensor]]:
    yield from zip((*one.keys, *one.values), (*other.keys, *other.values), strict=True)


def _common_prefix(prompts: Sequence[Sequence[int]]) -> int:
    """Leading ids shared by all prompts (the system turn of a template), one short of the shortest at most."""
    first, last = min(map(tuple, prompts)), max(map(tuple, prompts))
    shared = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))
    return min(shared, min(map(len, prompts)) - 1)


def _budget(target: Target, prompt: Sequence[int], max_new_tokens: int) -> int:
    """Tokens that may be drawn after `prompt`; ValueError if not even one fits."""
    target.check_prompt(prompt)
    return min(max_new_tokens, target.max_length - len(prompt))


def _draw_rows(logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """`draw` with a temperature, seed and position a row: logits [B, V] -> ids [B]."""
    ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    for temperature in temperatures.unique().tolist():
        rows = (temperatures == temperature).nonzero().flatten()
        for part in rows.split(_DRAW_ROWS if logits.device.type == "cpu" else len(rows)):
            noise = gumbel(seeds[part], positions[part], logits.shape[-1]) if temperature else None
            ids[part] = draw(logits[part], temperature, noise)
    return ids


@contextlib.contextmanager
def _grouped_attention(target: Target) -> Iterator[None]:
    """Run the model with `_attend_rows` in place of its own attention."""
    from transformers import AttentionInterface

    AttentionInterface.register(_ATTENTION, _attend_rows)
    config = target.config
    saved, config._attn_implementation = config._attn_implementation, _ATTENTION
    try:
        yield
    finally:
        config._attn_implementation = saved


def _attend_rows(
    _module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    **_unused: object,
) -> tuple[Tensor, None]:
    """Attention of query [B, heads, n, d] over key, value [B, kv_heads, columns, d], boolean mask [B, 1, n, columns].

    The query heads of a key-value head are stacked as more query rows, so no key is copied for them; `_CHUNK` requests
    at a time see no column past their longest. At 9/3 heads on a CPU that is 10 to 20 times faster than repeating the
    keys.
    """
    assert mask is not None, "rows have different lengths, so a mask is needed"
    batch, heads, num_queries, size = query.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads
    stacked = query.reshape(batch, kv_heads, group * num_queries, size)
    stacked_mask = mask.repeat(1, 1, group, 1)
    lengths = mask[:, 0, -1].sum(-1)
    attend = _attend_few if num_queries == 1 and query.device.type == "cpu" else _attend_many
    parts = []
    for start in range(0, batch, _CHUNK):
        rows = slice(start, start + _CHUNK)
        columns = int(lengths[rows].max())
        seen = key[rows, :, :columns], value[rows, :, :columns], stacked_mask[rows, :, :, :columns]
        parts.append(attend(stacked[rows], *seen, scaling))
    attended = torch.cat(parts).reshape(batch, heads, num_queries, size)
    return attended.transpose(1, 2).contiguous(), None


def _attend_many(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float) -> Tensor:
    return nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)


def _attend_few(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float) -> Tensor:
    """The same for a handful of queries a head: the fused kernel of CPUs is built for many and takes twice as long.

    Keys come first in the product, since matrix libraries are slow at few rows and fast at few columns.
    """
    scores = torch.matmul(key, (query * scaling).transpose(2, 3)).transpose(2, 3)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)).masked_fill(~mask, float("-inf"))
    return torch.matmul(scores.softmax(-1).to(value.dtype), value)
