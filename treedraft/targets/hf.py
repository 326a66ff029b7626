"""Any Hugging Face causal LM of the Llama or Qwen3 families as a target: the one place that knows transformers' models.

The target owns its cache. A round is `verify` (one forward over a draft tree under an ancestor mask, position = prefix
length + depth) and `commit` (the accepted rows become the dense tail of the prefix). Everybody else sees tokens,
logits and tapped features.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import inspect
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from treedraft.config import ntk_factor
from treedraft.ops import prefill
from treedraft.ops.memory import Rotary, Taps
from treedraft.ops.packed import TARGET, can_pack, pack_linears, packed_head
from treedraft.ops.tree_attention import hf as tree_glue
from treedraft.ops.tree_attention.dispatch import Choice, choose, full_mask
from treedraft.ops.tree_attention.mask import TreeRows, tree_rows
from treedraft.targets.cache import Recording, RowCache
from treedraft.targets.graphs import MOVING_ANGLES, GraphedVerify, graphable

FAMILIES = ("llama", "qwen3")
TABLED = 4096  # positions whose rotary angles are kept
PREFILL_ROWS = 2048  # of a prompt in one forward: what that makes and drops again must not grow with the prompt
TREE_ROOM = 1024  # columns behind a long prompt, so that the first trees do not copy the whole cache to grow it


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What one target forward says: logits [N, V] after each row and taps [N, C] of each row."""

    logits: Tensor
    taps: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A teacher-forced pass: taps [B, T, C] and post-norm last hidden states [B, T, H], whose head gives the logits."""

    taps: Tensor
    last: Tensor


def default_tap_layers(num_layers: int, num_taps: int = 5) -> tuple[int, ...]:
    """0-based layers whose outputs are tapped: evenly from layer 1 to num_layers - 3 (DFlash), fewer on shallow models.

    Never the last layer: transformers returns that one after the final norm.
    """
    if num_taps == 1:
        return (num_layers // 2,)
    wanted = (round(1 + i * (num_layers - 4) / (num_taps - 1)) for i in range(num_taps))
    return tuple(sorted({min(max(layer, 0), num_layers - 2) for layer in wanted}))


class Target:
    """A frozen language model, its tokenizer and the cache of the request it is serving.

    `vocab_size` counts the ids that the tokenizer knows: rows of the embedding past it are padding and are never
    drafted nor emitted. Raises ValueError for a model family, attention back end or head that this class cannot serve.
    """

    def __init__(
        self,
        *,
        name: str,
        model: nn.Module,
        tokenizer: Any,
        mask_token_id: int | None = None,
        tap_layers: Sequence[int] | None = None,
        self_test: bool = True,
        pack: bool | None = None,
        attention: str = "auto",
    ) -> None:
        config: Any = model.config
        if config.model_type not in FAMILIES:
            raise ValueError(f"target {name!r} has model type {config.model_type!r}; served: {', '.join(FAMILIES)}")
        sliding = [kind for kind in getattr(config, "layer_types", None) or [] if kind != "full_attention"]
        if sliding:
            raise ValueError(f"target {name!r} has {sliding[0]!r} layers; only full attention can be served")
        self.name = name
        self.model = model.eval().requires_grad_(False)
        self.config = config
        self.tokenizer = tokenizer
        self.num_layers: int = config.num_hidden_layers
        self.hidden_size: int = config.hidden_size
        self.kv_heads: int = config.num_key_value_heads or config.num_attention_heads
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.max_length: int = config.max_position_embeddings
        self.rope_scaling: str | None = None
        self._angles: Rotary | None = None
        self.embedding: Tensor = model.get_input_embeddings().weight  # pyright: ignore
        self.vocab_size = min(len(tokenizer), self.embedding.shape[0])
        self.head_weight: Tensor = model.get_output_embeddings().weight[: self.vocab_size]  # pyright: ignore
        # On a CPU, so that verifying a few nodes costs what one token does; plain decoding runs on the same layers.
        self.packed = can_pack(self.model) if pack is None else pack
        if self.packed:
            pack_linears(self.model, TARGET)
        self._head: nn.Module | None = None
        if self.packed:
            own = model.get_output_embeddings()  # pyright: ignore (packed by now; it serves unless it has rows of padding)
            self._head = own if own.out_features == self.vocab_size else packed_head(self.head_weight)
        self.mask_token_id = find_mask_token(name, tokenizer, self.embedding.shape[0], mask_token_id)
        self.eos_token_ids = _eos_token_ids(name, model, tokenizer, self.embedding.shape[0])
        self.cache_argument = _cache_argument(model)
        self._outputs: dict[int, Tensor] = {}
        self._hooks: list[Any] = []
        self.taps = Taps(layers=())
        self.default_tap_layers = tuple(tap_layers or default_tap_layers(self.num_layers))
        self.default_draft_vocab_size = self.vocab_size
        self.tap(self.default_tap_layers)
        self.cache = self.new_cache(batch=1, capacity=256)
        self.length = 0
        self._pending = 0
        self.graphs: GraphedVerify | None = None
        self.attention: Choice
        self.use_attention(attention, self_test=self_test)

    def use_attention(self, name: str, *, self_test: bool = True) -> None:
        """Verify with this backend of tree attention from now on (see `ops.tree_attention.dispatch.BACKENDS`).

        "sdpa" gives the model a mask over prefix and tree, as any attention takes it. ValueError for an unknown name, one
        that cannot run here, or one that fails the self test.
        """
        self.attention = choose(name, device=self.device, dtype=self.dtype, head_dim=self.head_dim)
        tree_glue.register()
        self.model.set_attn_implementation("sdpa" if name == "sdpa" else tree_glue.NAME)  # pyright: ignore
        self.graphs = None
        if self_test:
            self.self_test()
        if self.attention.name == "triton" and self.device.type == "cuda" and graphable(self.config):
            self.graphs = GraphedVerify(self)

    # -- what a drafter borrows ------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    def head(self, hidden: Tensor) -> Tensor:
        """Logits over the usable ids, [..., H] -> [..., vocab_size]."""
        return self._head(hidden) if self._head is not None else nn.functional.linear(hidden, self.head_weight)

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine [..., head_dim] of the target's rotary angles, scaled or not, at absolute positions [...]."""
        if self._angles is None:
            self._angles = _Angles(self.model.model.rotary_emb, self.dtype)  # pyright: ignore
        return self._angles(positions)

    @torch.no_grad()
    def scale_rotary(self, scaling: str) -> None:
        """Fixed NTK scaling, "ntk:ALPHA", at all positions: base' = base * alpha^(d / (d - 2)), a context alpha times as long.

        The weights, and with them the fingerprint, stay what they are. ValueError where angles are scaled already.
        """
        factor, embedding = ntk_factor(scaling), self.model.model.rotary_emb  # pyright: ignore
        kind = self.config.rope_parameters["rope_type"]
        if kind != "default" or self.rope_scaling is not None:
            scaled = self.rope_scaling or kind
            raise ValueError(f"rope scaling {scaling!r}: the rotary angles of {self.name} are scaled already ({scaled})")
        size = 2 * int(embedding.inv_freq.shape[0])  # pyright: ignore
        base = self.config.rope_parameters["rope_theta"] * factor ** (size / (size - 2))
        frequencies = 1.0 / base ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
        for name in ("inv_freq", "original_inv_freq"):
            getattr(embedding, name).copy_(frequencies)
        self._angles = None
        self.max_length, self.rope_scaling = int(self.max_length * factor), scaling

    def final_norm(self, hidden: Tensor) -> Tensor:
        """What stands between the last layer and the head: the target's own RMSNorm, in the type of its input."""
        norm: Any = self.model.model.norm  # pyright: ignore
        return _final_norm(norm.weight, self.config.rms_norm_eps, hidden)

    def norm_and_rotary(self, device: torch.device) -> tuple[Callable[[Tensor], Tensor], Rotary]:
        """`final_norm` and `rotary` for tensors on `device`: these, or on another device than this one's copies of them."""
        if device == self.device:
            return self.final_norm, self.rotary
        model: Any = self.model.model
        norm = partial(_final_norm, model.norm.weight.to(device), self.config.rms_norm_eps)
        return norm, _Angles(copy.deepcopy(model.rotary_emb).to(device), self.dtype)

    def tap(self, layers: Sequence[int], *, cached: Sequence[int] = ()) -> None:
        """Record the outputs of these 0-based layers from now on, and the keys and values of the `cached` ones.

        ValueError outside 0..num_layers - 1.
        """
        bad = [layer for layer in (*layers, *cached) if not 0 <= layer < self.num_layers]
        if bad or not layers:
            wrong = bad[0] if bad else "(none)"
            raise ValueError(f"tap layer {wrong} of {self.name}: choose from 0..{self.num_layers - 1}")
        for hook in self._hooks:
            hook.remove()
        self.taps = Taps(layers=tuple(layers), cached=tuple(cached))
        decoder_layers: Any = self.model.model.layers  # pyright: ignore
        inner = [layer for layer in dict.fromkeys(layers) if layer < self.num_layers - 1]
        self._hooks = [decoder_layers[layer].register_forward_hook(self._recorder(layer)) for layer in inner]

    @property
    def tap_layers(self) -> tuple[int, ...]:
        return self.taps.layers

    @property
    def tap_size(self) -> int:
        """C: numbers a position. Tapped outputs come first, then keys and values of every cached layer."""
        return len(self.taps.layers) * self.hidden_size + len(self.taps.cached) * 2 * self.kv_heads * self.head_dim

    # -- one request --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def prefill(
        self, ids: Sequence[int] | Tensor, *, take: Callable[[Tensor], None] | None = None, rows: int = PREFILL_ROWS
    ) -> Verified:
        """Start a request from prompt ids [P]: logits [1, V] after the last, taps [P, C]. ValueError if too long.

        The prompt goes through in chunks of `rows`. With `take` each chunk's taps [n, C] are handed over as they come,
        and only the last chunk's are returned: nothing as long as the prompt is made but the cache.
        """
        self.check_prompt(ids)
        self.cache.reserve(len(ids) + min(len(ids), TREE_ROOM))
        verified = self.prefill_cache(self.cache, ids, take=take, rows=rows)
        self.length, self._pending = len(ids), 0
        return verified

    @torch.no_grad()
    def prefill_cache(
        self, cache: RowCache, ids: Sequence[int] | Tensor, *, take: Callable[[Tensor], None] | None = None,
        rows: int = PREFILL_ROWS,
    ) -> Verified:  # fmt: skip
        """As `prefill`, into the first columns of a cache of one row."""
        self.check_prompt(ids)
        tokens = torch.as_tensor(ids, dtype=torch.int64, device=self.device)
        parts: list[Tensor] = []
        end = tokens[:0]
        for last, taps in self.fill(cache, tokens, rows=rows):
            if take is not None:
                take(taps[0])
                parts.clear()
            parts.append(taps[0])
            end = last[0, -1:]
        return Verified(logits=self.head(end), taps=torch.cat(parts))

    @torch.no_grad()
    def fill(
        self, cache: RowCache, tokens: Tensor, *, start: int = 0, rows: int = PREFILL_ROWS
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Run tokens [n] through the model behind `start` columns of a cache of one row, `rows` at a time.

        Yields the last hidden states [1, rows, H] and taps [1, rows, C] of every chunk.
        """
        for chunk in tokens.split(rows):
            end = start + len(chunk)
            cache.write_next(slice(start, end), end)
            positions = torch.arange(start, end, device=self.device)
            yield self.forward(chunk[None], positions=positions[None], cache=cache)
            start = end

    def check_prompt(self, ids: Sequence[int] | Tensor) -> None:
        """ValueError if there is no token to start from, or no room for another one."""
        if len(ids) == 0:
            raise ValueError("empty prompt: there is no token to start from")
        if len(ids) >= self.max_length:
            raise ValueError(
                f"prompt of {len(ids)} tokens does not fit the context window of "
                f"{self.max_length} tokens of {self.name}"
            )

    @torch.no_grad()
    def verify(self, tokens: Tensor, parents: Tensor) -> Verified:
        """Score a draft tree of N nodes in one forward: logits [N, V], taps [N, C]. Nothing is kept until `commit`."""
        if self.graphs is not None and len(tokens) <= self.graphs.largest:
            last, taps = self.graphs.run(tokens, parents)
            self._pending = len(tokens)
            return Verified(logits=self.head(last), taps=taps)
        rows = tree_rows(parents.to(self.device), self.length)
        self.cache.write_next(slice(self.length, self.length + rows.size), self.length + rows.size)
        self._pending = rows.size
        last, taps = self.forward_tree(tokens.to(self.device)[None], rows, self.cache)
        return Verified(logits=self.head(last[0]), taps=taps[0])

    def commit(self, path: Tensor | Sequence[int]) -> None:
        """Keep the rows of verified nodes `path` [A] (root first) as the next A tokens of the prefix; drop the rest.

        ValueError unless the path starts at the root, rises and ends within what was verified; a GPU is not waited for to
        check more than its length.
        """
        rows = torch.as_tensor(path, dtype=torch.int64, device=self.device)
        if not 0 < len(rows) <= self._pending or (rows.device.type == "cpu" and not _is_path(rows.tolist(), self._pending)):
            raise ValueError(f"commit of nodes {rows.tolist()}: a path has to start at node 0 and rise, below the {self._pending} nodes last verified")
        self.cache.move(self.length + rows, self.length)
        self.length += len(rows)
        self._pending = 0

    # -- forwards -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def trace(self, ids: Tensor) -> Trace:
        """Teacher-forced features of right-padded sequences ids [B, T]."""
        last, taps = self.forward(ids.to(self.device))
        return Trace(taps=taps, last=last)

    def forward(
        self, ids: Tensor, *, positions: Tensor | None = None, mask: Tensor | None = None, cache: RowCache | None = None
    ) -> tuple[Tensor, Tensor]:
        """Last hidden states [B, n, H] (after the final norm) and taps [B, n, C] of ids [B, n].

        `mask` is boolean, [B or 1, 1, n, columns], true where a row may look; without one the rows are causal, the last of
        those that a cache then holds.
        """
        return self._forward(ids, positions, mask, cache, {})

    def forward_tree(self, ids: Tensor, rows: TreeRows, cache: RowCache) -> tuple[Tensor, Tensor]:
        """The same for the rows of draft trees, ids [B, N], which see their prefix and their own path."""
        if self.attention.name == "sdpa":
            return self._forward(ids, rows.positions, full_mask(rows, cache.visible), cache, {})
        extra = {"tree": rows, "tree_backend": self.attention.name}
        return self._forward(ids, rows.positions, tree_glue.no_mask(ids.device), cache, extra)

    def _forward(
        self, ids: Tensor, positions: Tensor | None, mask: Tensor | None, cache: RowCache | None, extra: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        recording = Recording(cache, self.taps.cached) if self.taps.cached else None
        store, attention = cache if recording is None else recording, contextlib.nullcontext()
        if store is not None:
            extra = {self.cache_argument: store, **extra}
        if store is not None and mask is None:
            # Given a cache, transformers would work out a mask from its length.
            mask, attention = tree_glue.no_mask(ids.device), prefill.installed(self.config)
        base: Any = self.model.model  # pyright: ignore
        self._outputs.clear()
        with attention:
            output = base(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=store is not None, **extra)
        self._outputs[self.num_layers - 1] = output.last_hidden_state
        parts = [self._outputs[layer] for layer in self.taps.layers]
        if recording is not None:
            parts += [part for layer in self.taps.cached for part in recording.rows(layer)]
        self._outputs.clear()
        return output.last_hidden_state, torch.cat(parts, dim=-1)

    def new_cache(self, *, batch: int, capacity: int) -> RowCache:
        return RowCache(
            num_layers=self.num_layers,
            batch=batch,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            capacity=capacity,
            dtype=self.dtype,
            device=self.device,
        )

    def _recorder(self, layer: int):
        def record(_module: nn.Module, _inputs: Any, output: Any) -> None:
            self._outputs[layer] = output[0] if isinstance(output, tuple) else output

        return record

    # -- text ---------------------------------------------------------------------------------------------------

    def encode_chat(self, turns: Sequence[str]) -> list[int]:
        """Prompt ids of a conversation whose turns alternate user, assistant, user.

        Thinking is off where the template knows it.
        """
        if not turns or not all(turn.strip() for turn in turns):
            raise ValueError("empty prompt: every turn needs text")
        messages = [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
        rendered = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False, enable_thinking=False
        )
        return self.tokenizer(rendered, add_special_tokens=False)["input_ids"]

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    # -- identity -------------------------------------------------------------------------------------------------

    def fingerprint(self) -> str:
        """16 hex digits over weights, rotary scaling and tokenizer: what a drafter was trained for."""
        digest = hashlib.sha256()
        for name, weight in sorted(self.model.state_dict().items()):
            digest.update(f"{name}{tuple(weight.shape)}".encode())
            # A strided sample of every tensor: a full hash of 8B parameters would take minutes at each start.
            # Rounded to bfloat16, so that a model is the same one in float32 and in bfloat16.
            sample = weight.flatten()[:: max(1, weight.numel() // 256)].to("cpu", torch.bfloat16)
            digest.update(sample.float().numpy().tobytes())
        digest.update(json.dumps(getattr(self.config, "rope_parameters", None), sort_keys=True, default=str).encode())
        # Padding and truncation are settings of the last call, not of the tokenizer.
        tokenizer = json.loads(self.tokenizer.backend_tokenizer.to_str()) | {"padding": None, "truncation": None}
        digest.update(json.dumps(tokenizer, separators=(",", ":"), ensure_ascii=False).encode())
        return digest.hexdigest()[:16]

    def template_hash(self) -> str:
        """16 hex digits of the chat template that prompts are rendered with."""
        return hashlib.sha256(str(self.tokenizer.chat_template).encode()).hexdigest()[:16]

    # -- start-up checks ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def self_test(self) -> None:
        """Refuse an attention back end that ignores the tree mask, and a head that is not lm_head(norm(hidden)).

        One of two siblings is perturbed: the other's logits must not move, its child's must.
        """
        usable = [token for token in range(self.vocab_size) if token != self.mask_token_id]
        prompt = torch.tensor(usable[:4], device=self.device)
        parents = torch.tensor([-1, 0, 0, 1, 2])
        tree = torch.tensor([usable[i % len(usable)] for i in (5, 7, 9, 11, 13)], device=self.device)
        perturbed = tree.clone()
        perturbed[1] = usable[15 % len(usable)]
        with self._scratch():
            self.prefill(prompt)
            before = self.verify(tree, parents).logits
            after = self.verify(perturbed, parents).logits
        if not torch.equal(before[[0, 2, 4]], after[[0, 2, 4]]) or torch.equal(before[3], after[3]):
            raise ValueError(
                f"attention {self.attention.name!r} of {self.name} ignores the tree mask; choose another one with --attention"
            )
        ids = torch.cat([prompt, tree[:1]])[None]
        expected = self.model(input_ids=ids).logits[0, -1, : self.vocab_size].float()
        got = self.head(self.trace(ids).last[0, -1]).float()
        if not torch.allclose(expected, got, rtol=2e-2, atol=2e-2):
            raise ValueError(f"logits of {self.name} are not lm_head(norm(hidden)): its head cannot be borrowed")

    @contextlib.contextmanager
    def _scratch(self) -> Iterator[None]:
        saved = (self.cache, self.length, self._pending, self.graphs)
        # Graphs belong to a cache: those of the request would be lost to one that lasts a moment.
        self.cache, self.graphs = self.new_cache(batch=1, capacity=16), None
        try:
            yield
        finally:
            self.cache, self.length, self._pending, self.graphs = saved


class _Angles:
    """Positions [...] -> cosine and sine [..., d] of a model's rotary module; on a CPU the first ones are looked up."""

    def __init__(self, embedding: Any, dtype: torch.dtype) -> None:
        # At least float32: angles rounded to bfloat16 drift apart at long positions.
        self.embedding, self.dtype = embedding, torch.promote_types(dtype, torch.float32)
        self.fixed = getattr(embedding, "rope_type", "default") not in MOVING_ANGLES
        self.table: tuple[Tensor, Tensor] | None = None

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        if positions.device.type != "cpu" or not self.fixed or positions.numel() == 0 or int(positions.max()) >= TABLED:
            return self.compute(positions)
        if self.table is None:
            with torch.inference_mode(False):  # training reads it too
                self.table = self.compute(torch.arange(TABLED))
        cosine, sine = self.table
        return cosine[positions], sine[positions]

    def compute(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        like = torch.empty(1, dtype=self.dtype, device=positions.device)
        cosine, sine = self.embedding(like, positions.reshape(1, -1))
        return cosine.view(*positions.shape, -1), sine.view(*positions.shape, -1)


def _final_norm(weight: Tensor, eps: float, hidden: Tensor) -> Tensor:
    weight = weight.to(hidden.dtype)
    return nn.functional.rms_norm(hidden, weight.shape, weight, eps)


def _is_path(nodes: Sequence[int], num_nodes: int) -> bool:
    return nodes[0] == 0 and nodes[-1] < num_nodes and all(one < other for one, other in itertools.pairwise(nodes))


def find_mask_token(name: str, tokenizer: Any, embedding_rows: int, requested: int | None) -> int:
    """The id that fills undrafted slots: as requested, else the embedding's first padding row, else a reserved token.

    ValueError if there is none, or if the id is out of range, an end-of-text or the padding token.
    """
    if requested is None and len(tokenizer) < embedding_rows:
        return len(tokenizer)
    if requested is None:
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        special = sorted((vocabulary[token], token) for token in tokenizer.all_special_tokens if token in vocabulary)
        added = sorted((index, token.content) for index, token in tokenizer.added_tokens_decoder.items())
        marks = ("<|mask|>", "<mask>", "reserved", "unused", "<empty_output>")
        named: list[tuple[int, str]] = [*special, *added]
        found = [index for mark in marks for index, token in named if mark in token.lower()]
        if not found:
            raise ValueError(f"target {name!r} has no unused token to serve as mask: pass mask_token_id")
        requested = found[0]
    if not 0 <= requested < embedding_rows:
        raise ValueError(f"mask token {requested} of {name!r} is outside the embedding's 0..{embedding_rows - 1}")
    if requested in (tokenizer.eos_token_id, tokenizer.pad_token_id):
        what = f"mask token {requested} of {name!r}"
        raise ValueError(f"{what} is its end-of-text or padding token; choose an unused one")
    return requested


def _eos_token_ids(name: str, model: nn.Module, tokenizer: Any, embedding_rows: int) -> tuple[int, ...]:
    """The configured ids, one or several, and the tokenizer's. ValueError if one is out of range."""
    generation = getattr(model, "generation_config", None)
    configured = getattr(generation, "eos_token_id", None)
    if configured is None:
        configured = getattr(model.config, "eos_token_id", None)
    listed = configured if isinstance(configured, (list, tuple)) else [configured]
    found = sorted({i for i in (*listed, tokenizer.eos_token_id) if i is not None})
    outside = [i for i in found if not 0 <= i < embedding_rows]
    if outside:
        raise ValueError(f"end-of-text token {outside[0]} of {name!r} is outside the embedding's 0..{embedding_rows - 1}")
    return tuple(found)


def _cache_argument(model: nn.Module) -> str:
    """transformers renamed the argument `past_key_values` to `cache` in its fifth series."""
    parameters = inspect.signature(model.model.forward).parameters  # pyright: ignore
    return "cache" if "cache" in parameters else "past_key_values"


def load(
    path: str, *, device: str | torch.device | None = None, dtype: torch.dtype | None = None, attention: str = "auto"
) -> Target:
    """Load a model folder or hub id. Device: CUDA where there is one; dtype: bfloat16 there, float32 on the CPU.

    ValueError with one sentence when it is not there or cannot be read.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    _check_folder(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa")
    except OSError as error:
        reason = str(error).strip().splitlines()[0]
        hint = "give a folder, or a hub id where the hub is reachable"
        raise ValueError(f"cannot load target {path!r}: {reason} ({hint})") from error
    except Exception as error:  # safetensors and tokenizers raise types of their own for damaged files
        if type(error).__name__ not in ("SafetensorError", "Exception", "HFValidationError"):
            raise
        raise ValueError(f"cannot read target {path!r}: {error}") from error
    return Target(name=path, model=model.to(device), tokenizer=tokenizer, attention=attention)


def _check_folder(path: str) -> None:
    folder = Path(path)
    if not folder.is_dir():
        return
    config = folder / "config.json"
    if not config.is_file():
        raise ValueError(f"target folder {path!r} has no config.json")
    try:
        json.loads(config.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{config}: not valid JSON ({error})") from error
