"""Prompts for evaluation and decoding: JSON lines {"id": ..., "turns": [...]}, and the sets that have a name.

Turns alternate user, assistant, user, so their number is odd and the last is what the target answers. mt-bench alone
lists user messages without the replies between them: the first is kept, as a follow-up needs the target's reply.
"""

from __future__ import annotations

import codecs
import json
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

from treedraft import registry

SHIPPED = ("math", "code", "chat")
_SHIPPED_FOLDER = Path(__file__).parent.parent / "assets" / "prompts"
_WORLD_SPLITS = {"world": "evaluation", "world-validation": "validation"}
_WORLD_DEFAULT_COUNT = 120
_LONG = re.compile(r"long-([1-9]\d*)")
_LONG_SAMPLE = 8  # prompts whose mean length stands for all with so many facts
_USERS_ONLY = frozenset({"mt-bench"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A conversation that waits for an answer: user, assistant, user, ... ending with the user."""

    id: str
    domain: str
    turns: tuple[str, ...]


# -- JSON lines -------------------------------------------------------------------------------------------------------


def read_jsonl(path: Path | str, *, limit: int | None = None, domain: str | None = None) -> list[Prompt]:
    """The first `limit` prompts of a JSONL file (default all), with ids and domains of its rows where they have one.

    A missing id is STEM-LINE; a missing domain is `domain`, else the file's stem. Blank lines and a byte order mark are
    skipped. ValueError, "path:line: what is wrong", at the first bad line, with the count of the others read.
    """
    return _read(Path(path), limit=limit, domain=domain, users_only=False)


def _read(path: Path, *, limit: int | None, domain: str | None, users_only: bool) -> list[Prompt]:
    _check_count("limit", limit)
    prompts: list[Prompt] = []
    bad: list[tuple[int, str]] = []
    ids: dict[str, int] = {}
    for number, row in _rows(path):
        try:
            if isinstance(row, ValueError):
                raise row
            prompt = _prompt(row, f"{path.stem}-{number:03d}", domain or path.stem, users_only)
            if prompt.id in ids:
                raise ValueError(f"id {prompt.id!r} is already on line {ids[prompt.id]}")
        except ValueError as error:
            bad.append((number, str(error)))
            continue
        ids[prompt.id] = number
        prompts.append(prompt)
        if len(prompts) == limit:
            break
    if bad:
        others = f" ({len(bad) - 1} more bad lines: {_some_lines(bad[1:])})" if len(bad) > 1 else ""
        raise ValueError(f"{path}:{bad[0][0]}: {bad[0][1]}{others}")
    if not prompts:
        raise ValueError(f"{path}:1: the file has no prompts")
    return prompts


def _some_lines(bad: list[tuple[int, str]]) -> str:
    return ", ".join(str(number) for number, _ in bad[:5]) + (", ..." if len(bad) > 5 else "")


def _rows(path: Path) -> Iterator[tuple[int, Any]]:
    """(line number, parsed JSON, or the ValueError that says why there is none) of every line that is not blank."""
    offset = 0
    try:
        with path.open("rb") as stream:
            for number, raw in enumerate(stream, start=1):
                start, offset = offset, offset + len(raw)
                if number == 1 and raw.startswith(codecs.BOM_UTF8):
                    raw, start = raw.removeprefix(codecs.BOM_UTF8), len(codecs.BOM_UTF8)
                if raw.strip():
                    yield number, _parse(raw, start)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror or error})") from error


def _parse(raw: bytes, start: int) -> Any:
    """The JSON of one line that begins at byte `start` of its file; a ValueError is returned, not raised."""
    if b"\0" in raw:
        return ValueError(f"NUL at byte {start + raw.index(0)}")
    try:
        return json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        return ValueError(f"not UTF-8 at byte {start + error.start} (0x{raw[error.start]:02x})")
    except RecursionError:
        return ValueError("JSON is nested too deeply")
    except ValueError as error:
        if not raw.endswith(b"\n"):
            return ValueError(f"not JSON, the file ends inside this line ({error})")
        return ValueError(f"not JSON ({error})")


def _prompt(row: Any, fallback_id: str, fallback_domain: str, users_only: bool) -> Prompt:
    if not isinstance(row, dict):
        raise ValueError(f"{_json_type(row)} where an object with 'turns' is expected")
    name = row.get("id", fallback_id)
    domain = row.get("domain", fallback_domain)
    for key, value in (("id", name), ("domain", domain)):
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f"{key!r} must be a non-empty string, got {value!r}")
        _check_text(value, repr(key))
    if "turns" not in row:
        raise ValueError(f"no 'turns'; the keys are {', '.join(map(repr, row)) or 'none'}")
    return Prompt(id=name, domain=domain, turns=_turns(row["turns"], users_only))


def _turns(turns: Any, users_only: bool) -> tuple[str, ...]:
    """Checked turns; of a list of user messages only, the first."""
    if not isinstance(turns, list):
        raise ValueError(f"'turns' must be a list of strings, got {_json_type(turns)}")
    if not turns:
        raise ValueError("'turns' is empty")
    for number, turn in enumerate(turns, start=1):
        if not isinstance(turn, str):
            raise ValueError(f"turn {number} must be a string, got {_json_type(turn)}")
        _check_text(turn, f"turn {number}")
        if is_blank(turn):
            raise ValueError(f"turn {number} is blank")
    if users_only:
        return (turns[0],)
    if len(turns) % 2 == 0:
        raise ValueError(f"{len(turns)} turns end with the assistant; turns alternate user, assistant, ..., user")
    return tuple(turns)


def _check_text(text: str, what: str) -> None:
    """ValueError for what no tokenizer takes: NUL and lone surrogates, which JSON can escape."""
    if "\0" in text:
        raise ValueError(f"{what} has a NUL at character {text.index(chr(0))}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{what} has a lone surrogate at character {error.start}") from None


def is_blank(text: str) -> bool:
    """Whether a text shows nothing: white space, control and format characters only."""
    return all(char.isspace() or unicodedata.category(char) in ("Cc", "Cf") for char in text)


def _json_type(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return {dict: "an object", list: "a list", str: "a string"}.get(type(value), "a number")


# -- Named sets -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSet:
    """Where a public set lies on the Hugging Face hub, and the user message of one of its rows."""

    repository: str
    file: str
    domain: str
    text: Callable[[dict[str, Any]], str]
    revision: str | None = None


_PARQUET = "refs/convert/parquet"  # the hub's own copy: CONFIG/SPLIT/0000.parquet whatever the repository looks like
_BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."


def _livecodebench(row: dict[str, Any]) -> str:
    """The benchmark's own template: starter code where the row has some, else standard input and output."""
    if row.get("starter_code"):
        form = "You will use the following starter code to write the solution to the problem"
        form, code = f"{form} and enclose your code within delimiters.", row["starter_code"]
    else:
        form = "Read the inputs from stdin solve the problem and write the answer to stdout (do not directly test on"
        form, code = f"{form} the sample inputs). Enclose your code within delimiters as follows.", "# YOUR CODE HERE"
    return (
        "You will be given a question (problem specification) and will generate a correct Python program that matches "
        f"the specification and passes all tests.\n\n### Question:\n{row['question_content']}\n\n"
        f"### Format: {form}\n```python\n{code}\n```\n\n### Answer: (use the provided format with backticks)"
    )


# The repositories and message texts of the DFlash benchmark (z-lab); livecodebench has one file and a shorter preamble.
HUB_SETS = {
    "gsm8k": HubSet(
        repository="openai/gsm8k",
        file="main/test/0000.parquet",
        revision=_PARQUET,
        domain="math",
        text=lambda row: row["question"] + _BOXED,
    ),
    "math500": HubSet(
        repository="HuggingFaceH4/MATH-500",
        file="test.jsonl",
        domain="math",
        text=lambda row: row["problem"] + _BOXED,
    ),
    "humaneval": HubSet(
        repository="openai/openai_humaneval",
        file="openai_humaneval/test/0000.parquet",
        revision=_PARQUET,
        domain="code",
        text=lambda row: (
            "Write a solution to the following problem and make sure that it passes the tests:\n"
            f"```python\n{row['prompt']}\n```"
        ),
    ),
    "mbpp": HubSet(
        repository="google-research-datasets/mbpp",
        file="sanitized/test/0000.parquet",
        revision=_PARQUET,
        domain="code",
        text=lambda row: row["prompt"],
    ),
    "livecodebench": HubSet(  # the newest of six files, 134 MB: problems of January to May 2025
        repository="livecodebench/code_generation_lite",
        file="test6.jsonl",
        domain="code",
        text=_livecodebench,
    ),
    "aime25": HubSet(
        repository="MathArena/aime_2025",
        file="default/train/0000.parquet",
        revision=_PARQUET,
        domain="math",
        text=lambda row: row["problem"] + _BOXED,
    ),
    "mt-bench": HubSet(
        repository="HuggingFaceH4/mt_bench_prompts",
        file="default/train/0000.parquet",
        revision=_PARQUET,
        domain="chat",
        text=lambda row: row["prompt"][0],
    ),
    "alpaca": HubSet(
        repository="tatsu-lab/alpaca",
        file="default/train/0000.parquet",
        revision=_PARQUET,
        domain="chat",
        text=lambda row: f"{row['instruction']}\n\nInput:\n{row['input']}" if row["input"] else row["instruction"],
    ),
}
NAMES = (*_WORLD_SPLITS, "long-FACTS", *SHIPPED, "shipped", *HUB_SETS)


def prompt_set(name: str, *, count: int | None = None, seed: int = 0) -> list[Prompt]:
    """At most `count` prompts of a named set (`NAMES`), a JSONL file, a folder of them, or several such ("gsm8k+humaneval");
    default all, of a world 120.

    Where a set has several domains or files they take turns: the first of each, the second of each, ..., so that
    "world", "world-validation" and "shipped" are balanced to within one. "long-30" are questions on 30 facts each, of the
    world's evaluation split. `seed` draws the world's examples and nothing else. A real set (gsm8k to alpaca) comes from the hub; a file called NAME.jsonl is read as that set.
    ValueError: unknown name, bad file, set that cannot be reached.
    """
    _check_count("count", count)
    if name.endswith(".jsonl"):
        return _from_file(Path(name), count)
    if name in _WORLD_SPLITS:
        return _world(name, _WORLD_DEFAULT_COUNT if count is None else count, seed)
    if long := _LONG.fullmatch(name):
        return _long(int(long[1]), _WORLD_DEFAULT_COUNT if count is None else count, seed)
    if name in SHIPPED or name == "shipped":
        sets = [read_jsonl(_SHIPPED_FOLDER / f"{one}.jsonl") for one in (SHIPPED if name == "shipped" else (name,))]
        return _take_turns(sets, count)
    if name in HUB_SETS:
        return _from_hub(name, count)
    if Path(name).is_dir():
        files = sorted(path for path in Path(name).glob("*.jsonl") if not path.name.startswith("."))
        if not files:
            raise ValueError(f"{name}: no JSONL file in this folder")
        return _take_turns([_from_file(path, count) for path in files], count)
    if "+" in name:
        return _take_turns([prompt_set(part, count=count, seed=seed) for part in name.split("+")], count)
    raise ValueError(registry.unknown("prompt set", name, list(NAMES)) + ", a path ending in .jsonl, a folder, or several with + between them")


def long_set(
    tokens: int, length: Callable[[Sequence[str]], int], *, count: int | None = None, seed: int = 0
) -> list[Prompt]:
    """The "long-FACTS" set whose prompts come nearest to `tokens` tokens on average, as `length` counts their turns.

    ValueError if even one fact makes a longer prompt.
    """

    @cache
    def mean(num_facts: int) -> float:
        sample = _long(num_facts, _LONG_SAMPLE, seed)
        return sum(length(prompt.turns) for prompt in sample) / len(sample)

    def away(num_facts: int) -> float:
        return abs(mean(num_facts) - tokens)

    shortest = mean(1)
    if tokens < shortest:
        raise ValueError(f"no long prompt has {tokens} tokens: with a single fact they have {shortest:.0f}")
    # Length is nearly linear in the facts, so steps by the mean slope end within a fact or two: neighbours are looked at too.
    seen, num_facts = [1], 16
    while num_facts not in seen:
        seen.append(num_facts)
        slope = (mean(num_facts) - shortest) / (num_facts - 1)
        num_facts = max(1, num_facts + round((tokens - mean(num_facts)) / slope))
    nearest = min(seen, key=away)
    while (closer := min((max(1, nearest - 1), nearest, nearest + 1), key=away)) != nearest:
        nearest = closer
    return prompt_set(f"long-{nearest}", count=count, seed=seed)


def default_set(target_name: str) -> str:
    """The set a target is measured on unless one is named: its own world for the embedded targets."""
    return "world" if target_name in ("pocket", "tiny") else "shipped"


def known_prompt_texts() -> set[str]:
    """`normalise` of every shipped evaluation message: what training prompts must stay disjoint from."""
    return {normalise(turn) for prompt in prompt_set("shipped") for turn in prompt.turns}


def normalise(text: str) -> str:
    """Letters and digits in lower case with single spaces between words, so spacing and punctuation do not count."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    return " ".join("".join(char if char.isalnum() else " " for char in folded).split())


def _check_count(what: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise ValueError(f"{what} is {value}; it must be at least 1")


def _take_turns(sets: list[list[Prompt]], count: int | None) -> list[Prompt]:
    """The first of every set, the second of every set that has one, ..."""
    turns = chain.from_iterable(zip_longest(*sets))
    return list(islice((prompt for prompt in turns if prompt is not None), count))


def _world(name: str, count: int, seed: int) -> list[Prompt]:
    from treedraft.data import world

    per_domain = -(-count // len(world.DOMAINS))
    sets = [
        [
            Prompt(id=f"{name}-{domain}-{index:03d}", domain=domain, turns=(example.user,))
            for index, example in enumerate(
                world.examples(_WORLD_SPLITS[name], count=per_domain, seed=seed, domains=(domain,)), start=1
            )
        ]
        for domain in world.DOMAINS
    ]
    return _take_turns(sets, count)


def _long(num_facts: int, count: int, seed: int) -> list[Prompt]:
    from treedraft.data import world

    drawn = (world.long_example("evaluation", seed=seed, index=index, num_facts=num_facts) for index in range(count))
    return [
        Prompt(id=f"long-{num_facts}-{number:03d}", domain=example.domain, turns=(example.user,))
        for number, example in enumerate(drawn, start=1)
    ]


def _from_file(path: Path, count: int | None) -> list[Prompt]:
    known = HUB_SETS.get(path.stem)
    return _read(path, limit=count, domain=known.domain if known else None, users_only=path.stem in _USERS_ONLY)


def _from_hub(name: str, count: int | None) -> list[Prompt]:
    source = HUB_SETS[name]
    path = _download(name, source)
    rows = _parquet_rows(path, name) if path.suffix == ".parquet" else _hub_rows(path)
    try:
        texts = [source.text(row) for row in islice(rows, count)]
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(
            f"{source.repository} ({source.file}) has other columns than {name} needs: {error!r}"
        ) from error
    if not texts:
        raise ValueError(f"{source.repository} ({source.file}) has no rows")
    return [
        Prompt(id=f"{name}-{number:03d}", domain=source.domain, turns=_turns([text], users_only=False))
        for number, text in enumerate(texts, start=1)
    ]


def _download(name: str, source: HubSet) -> Path:
    """The set's file in the hub's cache, fetched once; HF_HUB_OFFLINE=1 skips the hub's half minute of retries."""
    hint = f"give the path of a file {name}.jsonl, or connect to the hub once to fetch {source.repository}"
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import (
            HTTPError,  # of whichever HTTP client it has  # pyright: ignore[reportPrivateImportUsage]
            LocalEntryNotFoundError,
        )
    except ImportError as error:
        raise ValueError(f"prompt set {name!r} needs huggingface_hub ({error}): {hint}") from error

    def fetch(*, cached: bool) -> Path:
        where = {"repo_type": "dataset", "revision": source.revision, "local_files_only": cached}
        return Path(hf_hub_download(source.repository, source.file, **where))

    try:
        try:
            return fetch(cached=True)
        except LocalEntryNotFoundError:
            return fetch(cached=False)
    except (OSError, HTTPError) as error:
        reason = type(error).__name__
        raise ValueError(f"prompt set {name!r} cannot be fetched from the hub ({reason}): {hint}") from error


def _hub_rows(path: Path) -> Iterator[dict[str, Any]]:
    for number, row in _rows(path):
        if isinstance(row, ValueError):
            raise ValueError(f"{path}:{number}: {row}")
        yield row


def _parquet_rows(path: Path, name: str) -> Iterator[dict[str, Any]]:
    import pandas

    try:
        frame = pandas.read_parquet(path)
    except ImportError as error:
        raise ValueError(
            f"prompt set {name!r} is a parquet file: pip install pyarrow, or give the path of a file {name}.jsonl"
        ) from error
    return iter(frame.to_dict("records"))
