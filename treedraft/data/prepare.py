"""Training text for a target, found or made: a named folder, what ships, or the target's answers to the world."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from treedraft.config import DataConfig, short_hash
from treedraft.data.features import Sequences
from treedraft.data.tokens import MANIFEST, SHIPPED, TokenStore
from treedraft.noise import SCHEME
from treedraft.run import runs_folder
from treedraft.targets.hf import Target

_WORLD_TARGETS = ("pocket", "tiny")


def training_sequences(target: Target, config: DataConfig) -> Sequences:
    """The first `config.tokens` response tokens of the target's training store.

    Their digest is of their ids, so a store that has grown since gives the same one. ValueError if there is no store,
    or it is another target's.
    """
    store = _store(target, config)
    store.check(target)
    ids, prompt_lengths, num_tokens = [], [], 0
    for conversation in store:
        if config.tokens is not None and num_tokens >= config.tokens:
            break
        num_tokens += len(conversation.ids) - conversation.prompt_length
        ids.append(conversation.ids)
        prompt_lengths.append(conversation.prompt_length)
    content = hashlib.sha256(np.concatenate([*ids, prompt_lengths]).astype("<i8").tobytes())
    return Sequences(ids=ids, prompt_lengths=np.array(prompt_lengths), digest=content.hexdigest()[:8])


def _store(target: Target, config: DataConfig) -> TokenStore:
    if config.folder is not None:
        return TokenStore.open(config.folder)
    if config.prompts is not None or target.name in _WORLD_TARGETS:
        return _world_store(target, config)
    if (SHIPPED / target.name / MANIFEST).is_file():
        return TokenStore.shipped(target.name)
    made = runs_folder() / "data" / Path(target.name).name
    if (made / MANIFEST).is_file():
        return TokenStore.open(made)
    raise ValueError(
        f"no training text for target {target.name!r}: make some with python -m treedraft.data regenerate "
        f"--target {target.name} --prompts magpie --tokens 1000000 --temperature 1"
    )


def _world_store(target: Target, config: DataConfig) -> TokenStore:
    from tqdm import tqdm

    from treedraft.data.regenerate import Settings, regenerate

    if config.tokens is None:
        missing = "data.tokens is not set: the world has no end"
        raise ValueError(f"{missing}, so say how many tokens {target.name} shall answer")
    prompts = config.prompts or "world"
    settings = Settings(
        prompts=prompts,
        tokens=config.tokens,
        temperatures=(config.temperature,),
        seed=config.seed,
        max_new_tokens=config.max_new_tokens,
        # A row of the cache that answers are made in is as long as the longest prompt and answer.
        batch_size=256 if prompts == "world" else 64,
        prompts_per_shard=1024,
    )
    identity = {"target": target.fingerprint(), "dtype": str(target.dtype), "settings": str(settings), "noise": SCHEME,
                "rope_scaling": target.rope_scaling}  # fmt: skip
    folder = runs_folder() / "data" / f"{target.name.replace('/', '--')}-{short_hash(identity)}"
    with tqdm(total=config.tokens, desc="training text", unit=" tokens", disable=None) as bar:
        return regenerate(target, settings, folder, command="python -m treedraft.ablate", bar=bar)
