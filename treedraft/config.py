"""What can be chosen, as frozen dataclasses read from TOML: unknown keys are refused, resolved fields hash to a name.

A component (backbone, context, correction) is a table with a `name`; its other keys are that component's own options
and are checked by its `Config`. No torch here: identities can be listed at once.
"""

from __future__ import annotations

import hashlib
import json
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

Component = dict[str, Any]
Config = TypeVar("Config")
Rung = Literal["marginal", "per_depth", "conditional"]
Rule = Literal["sampler_match", "ratio", "block", "spec_infer", "sequoia", "point_mass", "k_seq", "typical"]
Admit = Literal["fanout", "pop"]
MOST_NODES = 256  # of a tree that is sized by its cost
LEAST_SHARE = 0.02  # of the accepted drafts at a depth that makes a rank worth its node (JetSpec)
LOSSY = frozenset({"typical"})  # acceptance rules that change the output's law
_STRICT = {"extra": "forbid"}


def with_config(config: dict[str, str]) -> Callable[[type[Config]], type[Config]]:
    """What pydantic's decorator of this name does, without importing it: `bench gpu` runs where it is not installed."""

    def mark(kind: type[Config]) -> type[Config]:
        kind.__pydantic_config__ = config  # pyright: ignore[reportAttributeAccessIssue]
        return kind

    return mark


def _positive(owner: str, **values: float | None) -> None:
    for name, value in values.items():
        if value is not None and value <= 0:
            raise ValueError(f"{owner}.{name} is {value}; it has to be positive")


@with_config(_STRICT)
@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterConfig:
    """A point of the grid. `block_size` counts slots, anchor included; None means the target's or all there is."""

    backbone: Component = field(default_factory=lambda: {"name": "causal"})
    context: Component = field(default_factory=lambda: {"name": "full"})
    correction: Component = field(default_factory=lambda: {"name": "none"})
    block_size: int = 16
    layout: Literal["fill-in", "anchor-first"] = "fill-in"
    draft_vocab_size: int | None = None
    tap_layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.block_size < 2:
            raise ValueError(f"drafter.block_size is {self.block_size}; at least 2 (the anchor and one more slot)")
        _positive("drafter", draft_vocab_size=self.draft_vocab_size)
        for seam in ("backbone", "context", "correction"):
            if not isinstance(getattr(self, seam).get("name"), str):
                raise ValueError(f"drafter.{seam} needs a name, as in {seam} = {{ name = ... }}")

    @property
    def depth(self) -> int:
        """Tokens drafted a round as trained: fill-in discards the anchor's own slot, anchor-first uses it."""
        return self.block_size - self.first_slot

    @property
    def first_slot(self) -> int:
        """The slot that predicts the token after the anchor."""
        return 1 if self.layout == "fill-in" else 0


@with_config(_STRICT)
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """One training run. A step takes `sequences` trajectories with `anchors` blocks each.

    `decay` is gamma of exp(-(k - 1) / gamma) over draft positions k, None for uniform weights. `micro_batches` splits a
    step's sequences without changing its gradient. `init` is a drafter folder to go on from. `rope_scaling` stretches the
    rotary angles of target and drafter alike (see `ntk_factor`).
    """

    objective: Literal["ce", "forward_kl", "dspark"] = "forward_kl"
    optimizer: Literal["adamw", "muon"] = "adamw"
    decay: float | None = None
    steps: int = 400
    sequences: int = 16
    anchors: int = 16
    micro_batches: int = 1
    learning_rate: float = 2e-3
    warmup: float = 0.04
    weight_decay: float = 0.0
    clip: float = 1.0
    seed: int = 0
    checkpoint_every: int = 100
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    init: str | None = None
    rope_scaling: str | None = None

    def __post_init__(self) -> None:
        if self.rope_scaling is not None:
            ntk_factor(self.rope_scaling)
        _positive(
            "train", steps=self.steps, sequences=self.sequences, anchors=self.anchors, micro_batches=self.micro_batches,
            learning_rate=self.learning_rate, clip=self.clip, decay=self.decay, checkpoint_every=self.checkpoint_every,
        )  # fmt: skip
        if self.sequences % self.micro_batches:
            parts = f"train.micro_batches {self.micro_batches}"
            raise ValueError(f"train.sequences {self.sequences} does not divide into {parts}")


@with_config(_STRICT)
@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Training text: the target's own answers. `tokens` counts response tokens; None takes all there are.

    `folder` is a token store to use. `prompts` are what the target answers itself: the world's, or these with long ones
    among them; None takes the store that ships or was made, and the world where there is none. Temperature, seed and cap
    say how it answers; a store has its own.
    """

    tokens: int | None = None
    folder: str | None = None
    prompts: Literal["world", "world-long"] | None = None
    temperature: float = 1.0
    seed: int = 0
    max_new_tokens: int = 256

    def __post_init__(self) -> None:
        _positive("data", tokens=self.tokens, max_new_tokens=self.max_new_tokens)
        _temperature("data", self.temperature)
        if self.folder is not None and self.prompts is not None:
            raise ValueError(f"data.folder is {self.folder!r} and data.prompts {self.prompts!r}: a store has its own prompts; set one of them")


@with_config(_STRICT)
@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig:
    """How a drafter is used. `budget` counts tree nodes, root included; a chain ignores all that shapes a tree.

    `scorer` is that of `Drafter.scorer`; `admit`, `count_root` and `frontier` are those of `BestFirst`. `caps` are the
    most children of a node, a number a depth, the root's first; `gap_cap` = (beta, g0) gives sure nodes fewer of them
    (trees/limits.py).
    `candidates` are the tokens a slot that a correction looks at, None all.
    """

    mode: Literal["chain", "tree"] = "tree"
    depth: int = 15
    width: int = 7
    budget: int = 255
    temperature: float = 0.0
    scorer: Rung = "conditional"
    admit: Admit = "fanout"
    count_root: bool = True
    caps: tuple[int, ...] | None = None
    gap_cap: tuple[float, float] | None = None
    frontier: int | None = None
    candidates: int | None = None

    @property
    def shape(self) -> str:
        """What else shapes a tree, in words; empty where nothing does."""
        extras = {"frontier": self.frontier, "caps": self.caps, "gap cap": self.gap_cap, "candidates": self.candidates}
        words = [f"{name} {value}" for name, value in extras.items() if value is not None]
        return ", ".join([*words, *([] if self.count_root else ["root not counted"])])

    def __post_init__(self) -> None:
        for name, value in (("depth", self.depth), ("width", self.width), ("budget", self.budget)):
            if value < 1:
                raise ValueError(f"{name} is {value}; at least 1 (the budget counts the root)")
        for name, value in (("frontier", self.frontier), ("candidates", self.candidates)):
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; at least 1")
        if self.caps is not None and min(self.caps, default=0) < 1:
            raise ValueError(f"caps are {self.caps}; a number of at least 1 a depth")
        if self.gap_cap is not None and not all(map(math.isfinite, self.gap_cap)):
            raise ValueError(f"gap_cap is {self.gap_cap}; two finite numbers, beta and g0")
        if self.caps is not None and self.gap_cap is not None:
            raise ValueError("caps and gap_cap exclude each other")
        _temperature("decode", self.temperature)


def useless_candidates(
    candidates: int | None, scorer: Rung, correction: str, *, draft_vocab_size: int | None = None
) -> str | None:
    """Why so many candidates restrict nothing, in a sentence; None if they do, or if there are none."""
    if candidates is None:
        return None
    if scorer == "marginal" or correction == "none":
        what = "the scorer 'marginal'" if scorer == "marginal" else "the correction 'none'"
        return f"candidates is {candidates}: they are what a correction looks at, and {what} has none"
    if draft_vocab_size is not None and candidates >= draft_vocab_size:
        return f"candidates is {candidates}; it has to be fewer than the {draft_vocab_size} tokens that this drafter drafts"
    return None


@with_config(_STRICT)
@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """The rule that decides which drafts are kept. All but sampler match weigh p against q, so they draw their drafts.

    `widths` are the draws a node of each level, 1 below the last one named; ratio and block verify a chain. Sampler
    match repeats plain decoding id for id, the others have its law; typical acceptance is lossy.
    """

    rule: Rule = "sampler_match"
    widths: tuple[int, ...] = (4, 2)

    def __post_init__(self) -> None:
        if min(self.widths, default=0) < 1:
            raise ValueError(f"widths are {self.widths}; at least 1 a level")

    def levels(self, depth: int) -> tuple[int, ...]:
        """Draws a node at depths 0 .. depth - 1."""
        named = () if self.rule in ("ratio", "block") else self.widths[:depth]
        return (*named, *[1] * (depth - len(named)))


@with_config(_STRICT)
@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the target's logits become the next token. None leaves a step out.

    Without a temperature decoding is greedy, unless a filter (top_k, top_p, min_p) asks for sampling: then it is 1.
    Frequency and presence penalties count emitted tokens, the repetition penalty those of the prompt too.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        if self.temperature is not None:
            _temperature("sampling", self.temperature)
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}; at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; above 0, at most 1")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p is {self.min_p}; from 0 to 1")
        for name, value in (("frequency_penalty", self.frequency_penalty), ("presence_penalty", self.presence_penalty)):
            if value is not None and not math.isfinite(value):
                raise ValueError(f"{name} is {value}; a finite number")
        for token, bias in self.logit_bias:
            if math.isnan(bias) or bias == math.inf:
                raise ValueError(f"logit_bias of token {token} is {bias}; a number, or -inf to ban it")
        if self.repetition_penalty is not None and not 0 < self.repetition_penalty < float("inf"):
            raise ValueError(f"repetition_penalty is {self.repetition_penalty}; a positive number, 1 for none")

    @property
    def used_temperature(self) -> float:
        if self.temperature is not None:
            return self.temperature
        return 0.0 if self.top_k is self.top_p is self.min_p is None else 1.0


def _temperature(owner: str, value: float) -> None:
    if not 0 <= value < float("inf"):
        raise ValueError(f"{owner} temperature is {value}; 0 (greedy) or a positive number")


def ntk_factor(scaling: str) -> float:
    """"ntk:4" -> 4.0: fixed NTK scaling, how many times longer a context the rotary angles are made for."""
    kind, _, text = scaling.partition(":")
    try:
        factor = float(text)
    except ValueError:
        factor = 0.0
    if kind != "ntk" or not 1 <= factor < math.inf:
        raise ValueError(f"rope scaling {scaling!r}: expected ntk:FACTOR with a factor of at least 1, as in ntk:4")
    return factor


def parse(kind: type[Config], values: Mapping[str, Any], *, where: str) -> Config:
    """A config dataclass from plain values; ValueError names the place, the key, the value and what is wrong."""
    known = list(getattr(kind, "__dataclass_fields__", {}))
    for key in values:
        # Here, not left to pydantic, which lets unknown keys of a component's plain dataclass pass.
        if key not in known:
            from treedraft.registry import unknown

            raise ValueError(f"{where}: " + unknown("key", key, known))
    try:
        from pydantic import ValidationError
    except ModuleNotFoundError:
        return kind(**values)
    try:
        return _adapter(kind).validate_python(dict(values))
    except ValidationError as error:
        raise ValueError("; ".join(_explain(item, where) for item in error.errors()[:3])) from error


@cache
def _adapter(kind: type[Any]) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def _explain(item: Mapping[str, Any], where: str) -> str:
    key = ".".join(str(part) for part in item["loc"])
    message = item["msg"].removeprefix("Value error, ")
    return f"{where}: {message}" if item["type"] == "value_error" else f"{where}: {key} = {item['input']!r}: {message}"


def read_toml(path: Path) -> dict[str, Any]:
    """The parsed file; ValueError names the file and the line where it is not TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"no file {str(path)!r}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid TOML: {error}") from error


def override(values: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of nested `values` with dotted keys set: {"correction.rank": 128}; a number is a place: "arms.0.backbone"."""
    result: dict[str, Any] = json.loads(json.dumps(values))
    for key, value in settings.items():
        *tables, last = key.split(".")
        table: Any = result
        for name in tables:
            table = table[_place(table, name, key)] if isinstance(table, list) else table.setdefault(name, {})
            if not isinstance(table, (dict, list)):
                raise ValueError(f"--set {key}: {name} is a value, not a table")
        place: Any = _place(table, last, key) if isinstance(table, list) else last
        table[place] = value
    return result


def _place(found: list[Any], name: str, key: str) -> int:
    if not name.isdecimal() or int(name) >= len(found):
        raise ValueError(f"--set {key}: {name!r} is no place in a list of {len(found)}; they count from 0")
    return int(name)


def parse_settings(settings: Sequence[str]) -> dict[str, Any]:
    """["correction.rank=128"] -> {"correction.rank": 128}; the right side is read as TOML, else as a plain string."""
    parsed: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key.strip():
            raise ValueError(f"--set {setting!r}: expected KEY=VALUE, as in correction.rank=128")
        try:
            parsed[key.strip()] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            parsed[key.strip()] = text.strip()
    return parsed


def canonical(value: Any) -> str:
    """JSON with sorted keys, no spaces and nothing that is None: equal configs give equal text."""
    plain = _set_fields(asdict(value) if hasattr(value, "__dataclass_fields__") else value)
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def _set_fields(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _set_fields(item) for key, item in value.items() if item is not None}
    return [_set_fields(item) for item in value] if isinstance(value, (list, tuple)) else value


def short_hash(value: Any) -> str:
    """Eight hex digits of the canonical JSON."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()[:8]
