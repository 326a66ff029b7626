"""A grid file turned into named cells: what is trained (`train_id`) and how it is decoded (`cell_id`). No torch here.

    question = "..."
    target = "pocket"
    [data] [train] [drafter]            what all arms share
    [[arms]]                            lists multiply: backbone x correction x objective x seed ...; or method = "dspark"
    [decode] mode, depth, temperature   lists multiply; a list of numbers is one value of caps, gap_cap and tap_layers,
                                        a list of such lists several: caps = [[3, 2, 1], "none"]
    [evaluate]                          prompts, sampling seeds, cap; a list of contexts multiplies
    compare = [["*/attention", "*/none"], ...]

or a suite of such files, which share every training that they have in common:

    question = "..."
    grids = ["core", "markov"]
    [set]                               "train.steps" = 4500: what is set in all of them
    [set.markov]                        "train.steps" = 900: and in one of them
"""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, with_config

from treedraft.config import (
    DataConfig,
    DecodeConfig,
    DrafterConfig,
    TrainConfig,
    canonical,
    parse,
    read_toml,
    short_hash,
    useless_candidates,
)
from treedraft.files import sha256
from treedraft.methods import method
from treedraft.run import assets_folder

COMPONENTS = ("backbone", "context", "correction")
# Fields of a drafter that a label may have to name, and how.
_FIELDS = {"block_size": "b", "layout": "", "draft_vocab_size": "v", "tap_layers": "taps"}


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateConfig:
    """Prompts to decode: a set's name or file, how many of it, sampling seeds a prompt, and the cap on new tokens.

    The set "long" has any length: `context` is about how many tokens its prompts have.
    """

    prompts: str | None = None
    context: int | None = None
    count: int | None = 120
    seeds: tuple[int, ...] = (0, 1, 2)
    max_new_tokens: int = 256

    def __post_init__(self) -> None:
        if (self.count is not None and self.count < 1) or self.max_new_tokens < 1 or not self.seeds:
            given = f"{self.count}, {self.max_new_tokens}, {self.seeds}"
            raise ValueError(f"evaluate needs at least one prompt, token and seed, not {given}")
        if self.context is not None and self.context < 1:
            raise ValueError(f"evaluate.context is {self.context}; at least 1 token")
        if (self.context is None) == (self.prompts == "long"):
            raise ValueError(
                f'evaluate.context is {self.context or "not set"} for prompts {self.prompts or "of the target"!r}: '
                f'prompts = "long" needs a length, and no other set has one'
            )

    def at(self, temperature: float) -> EvaluateConfig:
        """The same for one temperature: greedy decodings have no seeds, so that grids with other seeds share them."""
        return self if temperature > 0 else replace(self, seeds=(0,))

    def check_window(self, target: str, window: int) -> None:
        """ValueError if the longest answers to prompts of `context` tokens do not fit a target's context window."""
        if self.context is not None and self.context + self.max_new_tokens > window:
            raise ValueError(
                f"evaluate.context {self.context} and evaluate.max_new_tokens {self.max_new_tokens} do not fit "
                f"the context window of {window} tokens of {target}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One trained drafter: `label` names it in tables, all its training seeds together."""

    label: str
    target: str
    data: DataConfig
    drafter: DrafterConfig
    train: TrainConfig

    @property
    def train_id(self) -> str:
        fields = {name: getattr(self, name) for name in ("target", "data", "drafter", "train")}
        # How often it is saved does not change what is trained.
        fields["train"] = replace(self.train, checkpoint_every=TrainConfig().checkpoint_every)
        identity: dict[str, str | None] = {
            name: value if isinstance(value, str) else canonical(value) for name, value in fields.items()
        }
        identity["weights"] = shipped_weights(self.target)
        return f"{self.name}-{short_hash(identity)}"

    @property
    def name(self) -> str:
        """The readable part of ids; grids that label an arm differently share its training."""
        return f"{_slug(self.target)}-{_slug(label_of(self.drafter))}-s{self.train.seed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """An arm and one way of decoding with it."""

    arm: Arm
    decode: DecodeConfig
    evaluate: EvaluateConfig

    @property
    def cell_id(self) -> str:
        identity = {"train": self.arm.train_id, "decode": canonical(self.decode), "evaluate": canonical(self.evaluate)}
        setting = f"{self.decode.mode}-d{self.decode.depth}-t{self.decode.temperature:g}"
        setting += f"-c{self.evaluate.context}" if self.evaluate.context is not None else ""
        return f"{self.arm.name}-{setting}-{short_hash(identity)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    name: str
    question: str
    cells: tuple[Cell, ...]
    compare: tuple[tuple[str, str], ...] = field(default=())

    @property
    def arms(self) -> list[Arm]:
        """Every training once."""
        arms = {id(cell.arm): cell.arm for cell in self.cells}.values()
        return list({arm.train_id: arm for arm in arms}.values())

    def comparisons(self) -> list[tuple[str, str]]:
        """Pairs of labels: a pattern's `*` stands for the same text on both sides."""
        labels = list(dict.fromkeys(cell.arm.label for cell in self.cells))
        pairs = [pair for first, second in self.compare for pair in _matches(first, second, labels)]
        return list(dict.fromkeys(pairs))


@cache
def shipped_weights(target: str) -> str | None:
    """sha256 of the weights of a target that ships in the package: what was made with others has another name."""
    path = assets_folder() / target / "model.safetensors"
    return sha256(path) if path.is_file() else None


def single_arm(values: Mapping[str, Any], *, target: str | None, where: str) -> Arm:
    """The one arm of a training's tables; ValueError if a table is unknown or something has several values."""
    known = {"target", "data", "train", "drafter", "method"}
    _refuse_unknown(values, known, where)
    values, target = _for_target(values, target)
    arms = list(_arms({**values, "arms": [{"method": values["method"]} if "method" in values else {}]}, target, where))
    if len(arms) != 1:
        raise ValueError(f"{where}: method = {values['method']!r} names {len(arms)} drafters; a training has one")
    return arms[0]


def _for_target(values: Mapping[str, Any], target: str | None) -> tuple[Mapping[str, Any], str]:
    """The tables and the target they are for. Layer numbers are those of the file's own target: another has its default."""
    own = str(values.get("target", "pocket"))
    if target is None or target == own:
        return values, own
    drafter = {key: value for key, value in values.get("drafter", {}).items() if key != "tap_layers"}
    return {**values, "drafter": drafter}, target


def _refuse_unknown(values: Mapping[str, Any], known: set[str], where: str) -> None:
    wrong = sorted(set(values) - known)
    if wrong:
        from treedraft.registry import unknown

        raise ValueError(f"{where}: " + unknown("table", wrong[0], sorted(known)))


def load_grids(path: Path, *, target: str | None = None, settings: Mapping[str, Any] | None = None) -> list[Grid]:
    """The grid of a file, or those of a suite; ValueError names the file and the key that is wrong."""
    values = read_toml(path)
    if "grids" not in values:
        return [load_grid(path, target=target, settings=settings)]
    _refuse_unknown(values, {"question", "grids", "set"}, str(path))
    missing = [name for name in values["grids"] if not path.with_name(f"{name}.toml").is_file()]
    if missing:
        from treedraft.registry import unknown

        known = [file.stem for file in sorted(path.parent.glob("*.toml")) if "question" in read_toml(file)]
        raise ValueError(f"{path}: " + unknown("grid", missing[0], known))
    shared = {key: value for key, value in values.get("set", {}).items() if not isinstance(value, dict)}
    own = {key: value for key, value in values.get("set", {}).items() if isinstance(value, dict)}
    _refuse_unknown(own, set(values["grids"]), f"{path} [set]")
    return [
        load_grid(path.with_name(f"{name}.toml"), target=target, settings={**shared, **own.get(name, {}), **(settings or {})})
        for name in values["grids"]
    ]


def load_grid(path: Path, *, target: str | None = None, settings: Mapping[str, Any] | None = None) -> Grid:
    """Read and expand a grid file; ValueError names the file and the key that is wrong."""
    from treedraft.config import override

    values = override(read_toml(path), settings or {})
    known = {"question", "target", "data", "train", "drafter", "arms", "decode", "evaluate", "compare"}
    _refuse_unknown(values, known, str(path))
    values, target = _for_target(values, target)
    where = str(path)
    arms = list(_arms(values, target, where))
    decodes = [_decode(fields, path) for fields in _product(values.get("decode", {}), DecodeConfig)]
    evaluates = [parse(EvaluateConfig, fields, where=f"{where} [evaluate]") for fields in _contexts(values.get("evaluate", {}))]
    for arm, decode in itertools.product(arms, decodes):
        useless = useless_candidates(decode.candidates, decode.scorer, str(arm.drafter.correction["name"]))
        if useless is not None:
            raise ValueError(f"{where} [decode]: {useless}")
    cells = tuple(
        Cell(arm=arm, decode=decode, evaluate=evaluate.at(decode.temperature))
        for arm in arms for decode in decodes for evaluate in evaluates
    )  # fmt: skip
    compare = tuple((str(first), str(second)) for first, second in values.get("compare", []))
    return Grid(name=path.stem, question=values.get("question", ""), cells=cells, compare=compare)


def _arms(values: Mapping[str, Any], target: str, where: str) -> Iterator[Arm]:
    shared, trained = values.get("drafter", {}), values.get("train", {})
    data = parse(DataConfig, values.get("data", {}), where=f"{where} [data]")
    drafts: list[tuple[str | None, DrafterConfig, TrainConfig]] = []
    for table in values.get("arms", [{}]):
        for fields in _product({**_lists(trained), **table}, DrafterConfig):
            name = fields.pop("method", None)
            if name is not None:
                fields = {**method(name), **fields}
            own = {key: fields.pop(key) for key in list(fields) if key in TrainConfig.__dataclass_fields__}
            train = parse(TrainConfig, _without_none({**trained, **own}), where=f"{where} [train]")
            components = {part: _component(shared.get(part), fields.pop(part, None)) for part in COMPONENTS}
            merged = {**shared, **fields, **{part: value for part, value in components.items() if value}}
            drafts.append((name, parse(DrafterConfig, _tuples(merged), where=f"{where} [[arms]]"), train))
    for (_, drafter, train), label in zip(drafts, _labels(drafts), strict=True):
        yield Arm(label=label, target=target, data=data, drafter=drafter, train=train)


def _lists(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if isinstance(value, list)}


def _without_none(table: Mapping[str, Any]) -> dict[str, Any]:
    """TOML has no null: "none" leaves an option without a value, as in decay = [7.0, "none"]."""
    return {key: value for key, value in table.items() if value != "none"}


def _component(shared: Any, own: Any) -> dict[str, Any]:
    """A component of an arm: a bare name, or a table, over the options that all arms share."""
    shared, own = ({"name": part} if isinstance(part, str) else part or {} for part in (shared, own))
    return {**shared, **own}


def _product(table: Mapping[str, Any], kind: type) -> Iterator[dict[str, Any]]:
    """The table once for every combination of the alternatives that it lists."""
    for combination in itertools.product(*(_alternatives(key, value, kind) for key, value in table.items())):
        yield dict(zip(table, combination, strict=True))


def _alternatives(key: str, value: Any, kind: type) -> list[Any]:
    fields = kind.__dataclass_fields__  # pyright: ignore[reportAttributeAccessIssue]
    is_vector = key in fields and "tuple" in fields[key].type
    if not isinstance(value, list) or (is_vector and all(isinstance(item, (int, float)) for item in value)):
        return [value]
    if not value:
        raise ValueError(f"{key} is []: at least one value")
    return value


def _decode(fields: Mapping[str, Any], path: Path) -> DecodeConfig:
    """A way of decoding; caps that name a file, found from the grid's folder, are what was measured there."""
    fields = _without_none(fields)
    if isinstance(fields.get("caps"), str):
        from treedraft.metrics import measured_caps

        fields["caps"] = measured_caps(path.parent / fields["caps"])
    return parse(DecodeConfig, _tuples(fields), where=f"{path} [decode]")


def _contexts(table: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The table of [evaluate] once for every length of its prompts."""
    fields, contexts = _tuples(table), table.get("context")
    return [{**fields, "context": context} for context in contexts] if isinstance(contexts, list) else [fields]


def _tuples(table: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in table.items()}


def _labels(drafts: list[tuple[str | None, DrafterConfig, TrainConfig]]) -> list[str]:
    """Short names of arms, longer where two different ones would share one. Training seeds share theirs."""
    short = [name or label_of(drafter) for name, drafter, _ in drafts]
    labels = []
    for (_, drafter, train), label in zip(drafts, short, strict=True):
        alike = [draft for text, draft in zip(short, drafts, strict=True) if text == label]
        others = [other for _, other, _ in alike]
        full = _told_apart(label, drafter, others) if any(other != drafter for other in others) else label
        words = [_word(key, getattr(train, key)) for key in TrainConfig.__dataclass_fields__
                 if key != "seed" and len({getattr(other, key) for _, _, other in alike}) > 1]  # fmt: skip
        labels.append(", ".join([full, *words]))
    return labels


def _told_apart(label: str, drafter: DrafterConfig, others: list[DrafterConfig]) -> str:
    """The label with the options that `others` of this label differ in; a method's name stays: dspark/b7."""
    plain, full = label_of(drafter).split("/"), label_of(drafter, shown=_differing(others)).split("/")
    return "/".join(full if label == "/".join(plain) else [label, *(part for part in full if part not in plain)])


def _word(key: str, value: Any) -> str:
    return value if isinstance(value, str) else f"no {key}" if value is None else f"{key} {value:g}"


def _differing(drafters: list[DrafterConfig]) -> frozenset[str]:
    """Options (correction.rank) and fields (block_size) that are not the same in all."""
    values: dict[str, set[str]] = {}
    tables = [_flat(drafter) for drafter in drafters]
    for key in {key for table in tables for key in table}:
        values[key] = {canonical([table.get(key)]) for table in tables}
    return frozenset(key for key, found in values.items() if len(found) > 1)


def _flat(drafter: DrafterConfig) -> dict[str, Any]:
    options = {f"{seam}.{key}": value for seam in COMPONENTS for key, value in getattr(drafter, seam).items()}
    return options | {name: getattr(drafter, name) for name in _FIELDS}


def label_of(drafter: DrafterConfig, *, shown: frozenset[str] = frozenset()) -> str:
    """A readable name: backbone, context unless full, correction, their options in words, and the numbers `shown`."""
    seams = COMPONENTS if drafter.context["name"] != "full" else ("backbone", "correction")
    parts = ["-".join(_words(seam, getattr(drafter, seam), shown)) for seam in seams]
    for name, prefix in _FIELDS.items():
        value = getattr(drafter, name)
        if name in shown and value is not None:
            parts.append(prefix + ("-".join(map(str, value)) if isinstance(value, tuple) else str(value)))
    return "/".join(parts)


def _words(seam: str, component: Mapping[str, Any], shown: frozenset[str]) -> Iterator[str]:
    yield str(component["name"]).rpartition(".")[2]
    for key, value in component.items():
        differs = f"{seam}.{key}" in shown
        if value is True:
            yield key
        elif value is False and differs:
            yield f"no-{key}"
        elif isinstance(value, str) and key != "name":
            yield value
        elif not isinstance(value, (bool, str)) and differs:
            yield key + "-".join(map(str, value)) if isinstance(value, (list, tuple)) else f"{key}{value}"


def _matches(first: str, second: str, labels: list[str]) -> Iterator[tuple[str, str]]:
    if "*" not in first:
        if first in labels and second in labels:
            yield first, second
        return
    pattern = re.compile(re.escape(first).replace(r"\*", "(.*)"))
    for label in fnmatch.filter(labels, first):
        matched = pattern.fullmatch(label)
        other = second.replace("*", matched.group(1)) if matched else ""
        if other in labels and other != label:
            yield label, other


def _slug(text: str) -> str:
    return re.sub(r"[^a-zA-Z0-9.]+", "-", text).strip("-")
