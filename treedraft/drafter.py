"""A drafter = backbone + context + correction: trained, saved, and asked for log q of the tokens after an anchor."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from treedraft import config as configs
from treedraft import files, registry
from treedraft.backbones._block import BlockBackbone
from treedraft.config import DrafterConfig, Rung
from treedraft.contexts._seam import Context, State
from treedraft.corrections._seam import Borrowed, Correction
from treedraft.ops.layers import Shape
from treedraft.ops.memory import Memory, Taps, Whole
from treedraft.ops.packed import DRAFTER, pack_linears, packed_head
from treedraft.targets.cache import RowCache
from treedraft.targets.hf import Target
from treedraft.trees.scorers import BackboneScorer, CandidateScorer, ConditionalScorer, Scorer

log = logging.getLogger(__name__)
FORMAT = 1
# Where a call costs more than what it computes, a correction that is one lookup and one product drafts faster.
DEFAULT_DRAFTERS = {"pocket": "bidirectional-markov"}  # of other targets: causal-attention
# Published DFlash checkpoints keep backbone and context at the top level.
_STORED_PREFIXES = {"backbone.": "", "context.": "", "correction.": "correction."}


def shape_for(target: Target, config: DrafterConfig) -> Shape:
    """The sizes a drafter takes over from its target."""
    return Shape(
        hidden_size=target.hidden_size,
        num_heads=target.config.num_attention_heads,
        kv_heads=target.kv_heads,
        head_dim=target.head_dim,
        intermediate_size=target.config.intermediate_size,
        rms_norm_eps=target.config.rms_norm_eps,
        vocab_size=target.vocab_size,
        draft_vocab_size=min(config.draft_vocab_size or target.default_draft_vocab_size, target.vocab_size),
        num_taps=len(taps_for(target, config).layers),
    )


def taps_for(target: Target, config: DrafterConfig, *, trained: Sequence[int] | None = None) -> Taps:
    """What a drafter's context reads of a target; `trained` are the layers of a full context that names none itself."""
    _, options = _options("contexts", config.context)
    _, backbone = _options("backbones", config.backbone)
    return options.taps(
        chosen=config.tap_layers or (tuple(trained) if trained else None), default=target.default_tap_layers,
        num_layers=target.num_layers, draft_layers=backbone.num_layers,
    )  # fmt: skip


class Drafter(nn.Module):
    """Blocks [anchor, MASK, ...] over a remembered prefix -> scores of the tokens that may follow the anchor.

    `d2t` [V'] maps draft-vocabulary columns to target ids, ascending. A drafter works once it is attached to its
    target, which lends it embedding, head and rotary angles; those are not parameters and are never saved.
    """

    d2t: Tensor

    def __init__(self, config: DrafterConfig, shape: Shape, d2t: Tensor | None = None) -> None:
        super().__init__()
        self.config, self.shape = config, shape
        self.backbone: BlockBackbone = _build("backbones", config.backbone, shape)
        block = {"num_layers": self.backbone.config.num_layers, "num_slots": config.block_size}
        self.context: Context = _build("contexts", config.context, shape, **block)
        own = self.backbone.shape
        if self.context.reads_cache and (own.num_heads, own.kv_heads) != (shape.num_heads, shape.kv_heads):
            raise ValueError(
                f"the context {config.context['name']!r} reads the target's keys: the backbone needs its {shape.num_heads} "
                f"query and {shape.kv_heads} key-value heads, not {own.num_heads} and {own.kv_heads}"
            )
        self.correction: Correction = _build("corrections", config.correction, shape)
        self.register_buffer("d2t", torch.arange(shape.draft_vocab_size) if d2t is None else d2t, persistent=False)
        assert len(self.d2t) == shape.draft_vocab_size
        twice = [] if d2t is None else d2t[1:][d2t[1:] == d2t[:-1]].tolist()
        if twice:
            raise ValueError(f"the draft vocabulary names token {twice[0]} twice: twin siblings would be drafted")
        self.provenance: dict[str, Any] = {}
        self.lineage: dict[str, Any] | None = None  # how the weights that training started from were trained
        self.borrowed: Borrowed | None = None
        self.taps = Taps(layers=())  # of the target it is attached to
        self.mask_token_id = -1

    def attach(self, target: Target) -> Drafter:
        """Borrow embedding, head and rotary angles; taps the layers this drafter was trained on.

        ValueError if it was made for another target.
        """
        made_for = self.provenance.get("target")
        if made_for and made_for["fingerprint"] != target.fingerprint():
            raise ValueError(
                f"this drafter was trained for {made_for['name']} ({made_for['fingerprint']}), "
                f"the target is {target.name} ({target.fingerprint()}): they do not fit"
            )
        scaling = made_for and made_for.get("rope_scaling")
        if scaling and scaling != target.rope_scaling:
            raise ValueError(
                f"this drafter was trained under rope scaling {scaling}, the target runs under {target.rope_scaling or 'none'}: "
                f"pass --rope-scaling {scaling}"
            )
        mask_token_id = self.provenance.get("mask_token_id", target.mask_token_id)
        if mask_token_id != target.mask_token_id:
            raise ValueError(f"this drafter fills slots with token {mask_token_id}, the target's mask is {target.mask_token_id}")
        self.taps = taps_for(target, self.config, trained=self.provenance.get("tap_layers"))
        if self.taps != target.taps:
            target.tap(self.taps.layers, cached=self.taps.cached)
        head_weight = target.head_weight
        if len(self.d2t) != target.vocab_size:
            head_weight = head_weight[self.d2t.to(target.device)]
        self.borrow(target, head_weight)
        return self

    def borrow(self, target: Target, head_weight: Tensor) -> None:
        """What it needs of the target while it drafts; copies, where the drafter is on another device."""
        device, dtype = self.device, next(self.parameters()).dtype
        embedding = target.embedding.to(device, dtype)
        head_weight = head_weight.to(device, dtype)
        norm, rotary = target.norm_and_rotary(device)
        self.mask_token_id = target.mask_token_id
        pack = target.packed and (device, dtype) == (target.device, target.dtype)
        whole = pack and len(self.d2t) == target.vocab_size
        self.borrowed = Borrowed(
            embed=lambda ids: nn.functional.embedding(ids, embedding),
            norm=norm,
            head=target.head if whole else packed_head(head_weight) if pack else lambda hidden: nn.functional.linear(hidden, head_weight),
            head_rows=lambda columns: nn.functional.embedding(columns, head_weight),
            rotary=rotary,
        )

    @property
    def device(self) -> torch.device:
        return self.d2t.device

    @property
    def depth(self) -> int:
        """Tokens drafted a round as trained."""
        return self.config.depth

    @property
    def lent(self) -> Borrowed:
        assert self.borrowed is not None, "attach the drafter to its target first"
        return self.borrowed

    # -- the three stages -------------------------------------------------------------------------------------

    def remember(self, taps: Tensor, positions: Tensor) -> Whole:
        """Whole sequences, any anchor of which may be asked for: taps [S, T, C] at absolute positions [S, T] or [T]."""
        return self.context.remember(taps, positions, self.backbone, self.lent.rotary)

    def open(self, num_requests: int, *, capacity: int = 256, cache: RowCache | None = None) -> State:
        """Requests without a prefix. A context that reads the target's own rows takes them from `cache`, or copies them."""
        return self.context.open(
            num_requests, self.backbone, self.lent.rotary, capacity=capacity,
            cache=None if cache is None else lambda ends, size: [cache.before(layer, ends, size) for layer in self.taps.cached],
        )  # fmt: skip

    def hidden(self, memory: Memory, anchor_tokens: Tensor, anchors: Tensor, depth: int) -> Tensor:
        """Hidden states [S, A, D, H] of the D drafted slots behind anchors: tokens, absolute positions [S, A]."""
        first = self.config.first_slot
        ids = anchor_tokens.new_full((*anchor_tokens.shape, depth + first), self.mask_token_id)
        ids[..., 0] = anchor_tokens
        seen = memory.at(anchors)
        inputs = self.context.inputs(self.lent.embed(ids), seen)
        block = self.backbone(inputs, anchors, seen, self.lent.rotary)[..., first:, :]
        return self.lent.norm(block) if self.backbone.norm is None else block

    def scorer(
        self, hidden: Tensor, anchor: Tensor, rung: Rung = "conditional", *, candidates: int | None = None
    ) -> Scorer:
        """log q for tree builders, from hidden [R, D, H] and anchor [R].

        A node is scored by the backbone alone ("marginal"), corrected once a depth along the greedy path ("per_depth"),
        or corrected under its own ancestry ("conditional"). With `candidates` a correction looks at a slot's so many
        likeliest tokens alone; where that restricts nothing a warning says so, once (see `check_candidates`).
        """
        num_requests, depth = hidden.shape[:2]
        useless = self._useless(candidates, rung)
        if useless is not None:
            _warn(useless)
            candidates = None
        if rung == "marginal" or self.config.correction["name"] == "none":
            return BackboneScorer(hidden, self.lent.head, self.d2t)
        state = self.correction.start(hidden, self.lent)
        if candidates is not None:
            scorer: ConditionalScorer = CandidateScorer(state, self.lent.head(hidden), candidates, d2t=self.d2t)
        else:
            scorer = ConditionalScorer(state, depth=depth, num_requests=num_requests, d2t=self.d2t)
        return scorer if rung == "conditional" else scorer.per_depth(anchor)

    def check_candidates(self, candidates: int | None, rung: Rung) -> None:
        """ValueError if so many candidates restrict nothing here."""
        useless = self._useless(candidates, rung)
        if useless is not None:
            raise ValueError(useless)

    def _useless(self, candidates: int | None, rung: Rung) -> str | None:
        return configs.useless_candidates(candidates, rung, self.config.correction["name"], draft_vocab_size=len(self.d2t))

    def adopt(self, other: Drafter) -> None:
        """Take over another drafter's weights and draft vocabulary, to train on. ValueError if it has another shape."""
        if (self.config, self.shape) != (other.config, other.shape):
            raise ValueError(
                "train.init names a drafter of another configuration; backbone, correction and sizes have to agree"
            )
        self.load_state_dict(other.state_dict())
        self.d2t.copy_(other.d2t)
        self.lineage = other.provenance.get("training")

    # -- sizes and files ------------------------------------------------------------------------------------------

    def parameter_counts(self) -> dict[str, int]:
        """Trained parameters of each part; the context counts as part of DFlash's backbone in published totals."""
        parts = {"backbone": self.backbone, "context": self.context, "correction": self.correction}
        return {name: sum(weight.numel() for weight in part.parameters()) for name, part in parts.items()}

    def save_pretrained(self, folder: Path, *, dtype: torch.dtype | None = None) -> None:
        """Write model.safetensors, then config.json, each whole or not at all."""
        from safetensors.torch import save_file

        weights = {
            _stored_name(name): weight.detach().to(dtype or weight.dtype).contiguous()
            for name, weight in self.state_dict().items()
        }
        if len(self.d2t) < self.shape.vocab_size:
            weights["d2t"] = self.d2t.to(torch.int32)
        with files.replacing(folder / "model.safetensors") as path:
            save_file(weights, path, metadata={"format": "pt"})
        record = {
            "format": FORMAT,
            "drafter": dataclasses.asdict(self.config),
            "shape": dataclasses.asdict(self.shape),
            "parameters": self.parameter_counts(),
            **self.provenance,
        }
        files.write_json(folder / "config.json", record)

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, *, target: Target | None = None, device: torch.device | None = None
    ) -> Drafter:
        """Load a drafter folder, in float32, attached to `target` if given, on its device or another one.

        ValueError names what is missing or bad.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        folder = Path(folder)
        if not (folder / "config.json").is_file():
            raise ValueError(f"no drafter at {str(folder)!r}: it has no config.json")
        record = files.read_json(folder / "config.json")
        if record.get("format") != FORMAT:
            raise ValueError(f"{folder / 'config.json'}: format {record.get('format')!r}; this version reads {FORMAT}")
        try:
            weights = load_file(folder / "model.safetensors")
        except (SafetensorError, FileNotFoundError) as error:
            raise ValueError(f"{folder / 'model.safetensors'}: missing or damaged ({error})") from error
        d2t = weights.pop("d2t", None)
        config = configs.parse(DrafterConfig, record["drafter"], where=str(folder / "config.json"))
        shape = configs.parse(Shape, record["shape"], where=str(folder / "config.json"))
        drafter = cls(config, shape, None if d2t is None else d2t.long())
        known = ("format", "drafter", "shape", "parameters")
        drafter.provenance = {key: value for key, value in record.items() if key not in known}
        if d2t is None and drafter.shape.draft_vocab_size < drafter.shape.vocab_size:
            raise ValueError(
                f"{folder / 'model.safetensors'}: tensor 'd2t' is missing, the draft vocabulary is reduced"
            )
        named = {_stored_name(name): name for name in drafter.state_dict()}
        if set(named) != set(weights):
            wrong = sorted(set(named) ^ set(weights))[0]
            how = "missing" if wrong in named else "not expected"
            raise ValueError(f"{folder / 'model.safetensors'}: tensor {wrong!r} is {how}")
        try:
            drafter.load_state_dict({named[name]: weight.float() for name, weight in weights.items()})
        except RuntimeError as error:
            raise ValueError(f"{folder / 'model.safetensors'}: {error}") from error
        drafter.eval().requires_grad_(False)
        return drafter.to(device or target.device).attach(target) if target is not None else drafter


@functools.cache
def _warn(sentence: str) -> None:
    """Once, not once a round."""
    log.warning(sentence)


class Prefix:
    """The committed prefix of one request as its drafter sees it; grows by the taps of accepted rows and nothing else.

    Law: appending in any chunks equals remembering the whole prefix at once; rejected rows leave no trace.
    """

    def __init__(self, drafter: Drafter, *, capacity: int = 256, cache: RowCache | None = None) -> None:
        self.state = drafter.open(1, capacity=capacity, cache=cache)

    @property
    def length(self) -> int:
        return self.state.lengths[0]

    @property
    def memory(self) -> Memory:
        return self.state.memory

    def append(self, taps: Tensor) -> None:
        """Add rows taps [n, C] at the next n positions."""
        self.state.append(taps[None], [len(taps)], [0])


def shipped_drafters(target_name: str) -> list[str]:
    """Names of the drafters that ship for a target, the default first."""
    from treedraft.run import assets_folder

    folders = (assets_folder() / "drafters" / target_name).glob("*/config.json")
    names = sorted(path.parent.name for path in folders)
    default = DEFAULT_DRAFTERS.get(target_name, "causal-attention")
    return sorted(names, key=lambda name: name != default)


def load_drafter(name: str | None, *, target: Target, device: torch.device | None = None) -> Drafter:
    """The drafter in folder `name`, the one shipped for this target under that name, or (None) the target's default.

    It is for decoding: on a CPU its layers are packed, and must not be trained on. On another `device` than the
    target's it decodes through a link (`treedraft.apart`).
    """
    drafter = _load(name, target, device)
    if target.packed and drafter.device == target.device:
        pack_linears(drafter, DRAFTER)
    return drafter


def _load(name: str | None, target: Target, device: torch.device | None) -> Drafter:
    from treedraft.run import assets_folder

    shipped = shipped_drafters(target.name)
    if name is None and not shipped:
        raise ValueError(
            f"no drafter ships for target {target.name!r}: train one with python -m treedraft.train --target "
            f"{target.name} and pass --drafter FOLDER"
        )
    chosen = name or shipped[0]
    if chosen in shipped:
        return Drafter.from_pretrained(assets_folder() / "drafters" / target.name / chosen, target=target, device=device)
    if not Path(chosen).is_dir():
        raise ValueError(registry.unknown("drafter", chosen, shipped) + ", or a drafter folder")
    return Drafter.from_pretrained(chosen, target=target, device=device)


def _options(seam: str, component: configs.Component) -> tuple[Any, Any]:
    """A component's module and its checked config."""
    options = {key: value for key, value in component.items() if key != "name"}
    module = registry.load(seam, component["name"])
    kind = seam.removesuffix("s")
    return module, configs.parse(module.Config, options, where=f"{kind} {component['name']!r}")


def _build(seam: str, component: configs.Component, shape: Shape, **block: int) -> Any:
    module, options = _options(seam, component)
    return module.Component(options, shape, **block)


def _stored_name(name: str) -> str:
    prefix = next(prefix for prefix in _STORED_PREFIXES if name.startswith(prefix))
    return _STORED_PREFIXES[prefix] + name.removeprefix(prefix)
