"""On-policy data: the target answers prompts itself, and its answers become a token store.

Work is cut into shards of a fixed number of prompts. A shard depends on the settings and on the shards before it alone,
so a run that was killed goes on with the first shard that is missing and ends with the same data.
"""

from __future__ import annotations

import hashlib
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from treedraft.data import magpie, tokens
from treedraft.data.prompts import known_prompt_texts, normalise, prompt_set
from treedraft.data.tokens import Conversation, Provenance, TokenStore
from treedraft.run import hardware
from treedraft.targets.generate import generate
from treedraft.targets.hf import Target

MIN_MESSAGE = 12  # characters of a message that a model wrote itself
MAX_PROMPT_TOKENS = 2048
_MESSAGE_TOKENS = 80
_MESSAGE_TEMPERATURE = 0.8
_LONGEST_PERIOD = 64
LONG_EVERY = 4  # of the prompts called "world-long" every so manieth is a long one ...
LONG_FACTS = (4, 128)  # ... of this many facts: about 130 to 2,000 tokens of pocket

log = logging.getLogger(__name__)
Progress = Callable[[int], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to generate: at least `tokens` response tokens. `prompts` is "world", "world-long", "magpie" or a JSONL file.

    Prompt i is answered at temperatures[i mod their number].
    """

    prompts: str
    tokens: int
    temperatures: tuple[float, ...] = (1.0,)
    seed: int = 0
    max_new_tokens: int = 320
    batch_size: int = 128
    prompts_per_shard: int = 512

    def __post_init__(self) -> None:
        for name in ("tokens", "max_new_tokens", "batch_size", "prompts_per_shard"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not self.temperatures or any(not 0 <= value < float("inf") for value in self.temperatures):
            raise ValueError(f"temperatures are {self.temperatures}; give one or more numbers of at least 0")
        if self.prompts not in _SOURCES and not self.prompts.endswith(".jsonl"):
            raise ValueError(f"unknown prompts {self.prompts!r}; choose {', '.join(_SOURCES)}, or a path ending in .jsonl")


def regenerate(target: Target, settings: Settings, folder: Path, *, command: str = "", bar: Any = None) -> TokenStore:
    """Fill the store at `folder`, going on where an earlier run with the same settings stopped.

    ValueError if the folder holds a store that was made otherwise, or a shard of it is damaged. `bar` is a tqdm bar.
    """
    source = _SOURCES.get(settings.prompts, _jsonl)
    provenance = _provenance(target, settings)
    shards = _resume(folder, provenance)
    evaluation = frozenset(known_prompt_texts())
    seen: set[str] = set()
    for conversation in TokenStore.open(folder) if shards else ():
        seen.add(_key(target, conversation.ids[: conversation.prompt_length]))
    done = sum(shard["response_tokens"] for shard in shards)
    while done < settings.tokens:
        index = len(shards)
        first = index * settings.prompts_per_shard
        start = time.monotonic()
        _set(bar, done)
        asked = source(target, settings, range(first, first + settings.prompts_per_shard))
        if not asked:
            log.warning(
                "%s has no more prompts: %d of %d response tokens made", settings.prompts, done, settings.tokens
            )
            break
        conversations, dropped = _answer(
            target, settings, asked, seen, evaluation, bar.update if bar is not None else None
        )
        seconds = time.monotonic() - start
        entry = tokens.write_shard(
            folder,
            index,
            conversations,
            domains=provenance.domains,
            dropped=dropped,
            temperatures=settings.temperatures,
            seconds=seconds,
        )
        shards.append(entry)
        machine = f"{hardware()}, torch {torch.__version__}"
        template = str(target.tokenizer.chat_template)
        tokens.write_manifest(folder, provenance, shards, template=template, hardware=machine, command=command)
        done += entry["response_tokens"]
        log.info(
            "shard %d: %d answers, %d tokens in %.0f s (%.0f tokens/s); %d of %d tokens, dropped %s",
            index, entry["sequences"], entry["response_tokens"], seconds, entry["response_tokens"] / seconds,
            done, settings.tokens, dict(dropped),
        )  # fmt: skip
    _set(bar, done)
    if not shards:
        raise ValueError(f"{settings.prompts} has no prompts")
    return TokenStore.open(folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """A prompt and its number, which fixes its noise and its temperature; `drop` names why it is not to be answered."""

    index: int
    domain: str
    ids: list[int]
    drop: str | None = None


def _answer(
    target: Target,
    settings: Settings,
    asked: Sequence[_Asked],
    seen: set[str],
    evaluation: frozenset[str],
    progress: Progress | None,
) -> tuple[list[Conversation], Counter[str]]:
    """Drop, answer, drop again. The keys of what is kept are added to `seen`."""
    dropped: Counter[str] = Counter()
    fresh: dict[str, _Asked] = {}
    for prompt in asked:
        key = _key(target, prompt.ids)
        reason = prompt.drop or _prompt_fault(target, settings, prompt, key in seen or key in fresh, evaluation)
        if reason:
            dropped[reason] += 1
        else:
            fresh[key] = prompt
    prompts = list(fresh.values())
    answers = generate(
        target,
        [prompt.ids for prompt in prompts],
        max_new_tokens=settings.max_new_tokens,
        temperature=[settings.temperatures[prompt.index % len(settings.temperatures)] for prompt in prompts],
        seeds=[_request_seed(settings.seed, "answer", prompt.index) for prompt in prompts],
        batch_size=settings.batch_size,
        progress=progress,
        head_dtype=_head_dtype(target),
    )
    kept = []
    for (key, prompt), answer in zip(fresh.items(), answers, strict=True):
        reason = _answer_fault(target, answer)
        if reason:
            dropped[reason] += 1
            continue
        seen.add(key)
        ids = np.array([*prompt.ids, *answer], np.int64)
        kept.append(Conversation(ids=ids, prompt_length=len(prompt.ids), domain=prompt.domain))
    return kept, dropped


# -- prompts -----------------------------------------------------------------------------------------------------------


def _world(target: Target, settings: Settings, indices: range) -> list[_Asked]:
    from treedraft.data import world

    examples = world.examples("train", count=indices.stop, seed=settings.seed)[indices.start :]
    return [
        _Asked(index=index, domain=example.domain, ids=target.encode_chat([example.user]))
        for index, example in zip(indices, examples, strict=False)
    ]


def _world_long(target: Target, settings: Settings, indices: range) -> list[_Asked]:
    """The world's prompts, every `LONG_EVERY`-th replaced by a long one of the train split."""
    asked = _world(target, settings, indices)
    return [prompt if (prompt.index + 1) % LONG_EVERY else _long(target, settings, prompt.index) for prompt in asked]


def _long(target: Target, settings: Settings, index: int) -> _Asked:
    """Every doubling of the number of facts is as likely as any other."""
    from treedraft.data import world

    (fewest, most), share = LONG_FACTS, random.Random(f"long/{settings.seed}/{index}").random()
    num_facts = round(fewest * (most / fewest) ** share)
    example = world.long_example("train", seed=settings.seed, index=index, num_facts=num_facts)
    return _Asked(index=index, domain=example.domain, ids=target.encode_chat([example.user]))


def _jsonl(target: Target, settings: Settings, indices: range) -> list[_Asked]:
    rows = prompt_set(settings.prompts)[indices.start : indices.stop]
    return [
        _Asked(index=index, domain=row.domain, ids=target.encode_chat(row.turns))
        for index, row in zip(indices, rows, strict=False)
    ]


def _magpie(target: Target, settings: Settings, indices: range) -> list[_Asked]:
    """Messages that the target writes from stems; those that do not become a message carry the reason."""
    stems = [magpie.stem(index, settings.seed) for index in indices]
    written = generate(
        target,
        [magpie.opening(target, text) for _, text in stems],
        max_new_tokens=_MESSAGE_TOKENS,
        temperature=_MESSAGE_TEMPERATURE,
        seeds=[_request_seed(settings.seed, "message", index) for index in indices],
        batch_size=settings.batch_size,
        head_dtype=_head_dtype(target),
    )
    asked = []
    for index, (domain, text), ids in zip(indices, stems, written, strict=True):
        message = magpie.finish(text + target.decode(ids), ended=ids[-1] in target.eos_token_ids)
        fault = "undecodable" if "\ufffd" in message else "prompt_length" if 0 < len(message) < MIN_MESSAGE else None
        if not message or message.count("```") % 2:
            fault = "unfinished"
        asked.append(_Asked(index=index, domain=domain, ids=target.encode_chat([message or text]), drop=fault))
    return asked


_SOURCES: dict[str, Callable[[Target, Settings, range], list[_Asked]]] = {
    "world": _world,
    "world-long": _world_long,
    "magpie": _magpie,
}


# -- what is dropped ---------------------------------------------------------------------------------------------------


def _prompt_fault(
    target: Target, settings: Settings, prompt: _Asked, duplicate: bool, evaluation: frozenset[str]
) -> str | None:
    if len(prompt.ids) > min(MAX_PROMPT_TOKENS, target.max_length - settings.max_new_tokens):
        return "prompt_length"
    if duplicate:
        return "duplicate"
    key = _key(target, prompt.ids)
    # The key holds the template's own words too, so an evaluation message is looked for inside it.
    return "evaluation" if any(text in key for text in evaluation) else None


def _answer_fault(target: Target, answer: Sequence[int]) -> str | None:
    text = target.decode(answer)
    if not text.strip():
        return "empty"
    if "\ufffd" in text.rstrip("\ufffd"):  # a cut at the token limit may split the last character
        return "undecodable"
    return "loop" if is_loop(answer) else None


def is_loop(ids: Sequence[int]) -> bool:
    """True if some piece of at most 64 tokens comes four times in a row, over 32 tokens or more."""
    array = np.asarray(ids)
    for period in range(1, min(_LONGEST_PERIOD, len(array) // 4) + 1):
        same = array[period:] == array[:-period]
        breaks = np.flatnonzero(~np.concatenate([[False], same, [False]]))
        if int(np.diff(breaks).max()) - 1 >= max(32 - period, 3 * period):
            return True
    return False


def _key(target: Target, prompt: Sequence[int] | np.ndarray) -> str:
    return normalise(target.decode(list(prompt)))


# -- provenance --------------------------------------------------------------------------------------------------------


def _provenance(target: Target, settings: Settings) -> Provenance:
    prompts = settings.prompts
    domains = (*magpie.DOMAINS, "long") if prompts == "world-long" else magpie.DOMAINS
    if prompts.endswith(".jsonl"):
        rows = prompt_set(prompts)
        domains = tuple(sorted({row.domain for row in rows}))
        digest = hashlib.sha256("\0".join(turn for row in rows for turn in row.turns).encode()).hexdigest()[:16]
        prompts = f"{Path(prompts).name} {digest}"
    return Provenance(
        target=target.name,
        fingerprint=target.fingerprint(),
        template_hash=target.template_hash(),
        mask_token_id=target.mask_token_id,
        dtype=str(target.dtype).removeprefix("torch."),
        prompts=prompts,
        seed=settings.seed,
        temperatures=settings.temperatures,
        top_p=None,
        max_new_tokens=settings.max_new_tokens,
        prompts_per_shard=settings.prompts_per_shard,
        batch_size=settings.batch_size,
        domains=domains,
        rope_scaling=target.rope_scaling,
    )


def _resume(folder: Path, provenance: Provenance) -> list[dict[str, Any]]:
    """Manifest entries of the shards that are there; ValueError if they were made with other settings."""
    if not (folder / tokens.MANIFEST).is_file():
        return []
    store = TokenStore.open(folder)
    old, new = asdict(store.provenance), asdict(provenance)
    changed = [f"{name} {old[name]!r} (now {new[name]!r})" for name in new if old[name] != new[name]]
    if changed:
        raise ValueError(
            f"{folder} holds a store made with {', '.join(changed)}: choose another --output or the same settings"
        )
    return list(store.manifest["shards"])


def _head_dtype(target: Target) -> torch.dtype:
    """Half-precision logits tie often, which greedy decoding would resolve by id: they are computed in float32."""
    return torch.promote_types(target.dtype, torch.float32)


def _request_seed(seed: int, stage: str, index: int) -> int:
    digest = hashlib.sha256(f"{seed}/{stage}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _set(bar: Any, done: int) -> None:
    if bar is not None:
        bar.n = done
        bar.refresh()
