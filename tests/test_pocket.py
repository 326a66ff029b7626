"""The embedded target: what ships, and the trainer that makes it."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest
import torch
from safetensors import safe_open

from treedraft import pocket, pocket_training
from treedraft.data import world
from treedraft.pocket import ASSETS, MARKS, ModelConfig, TrainConfig
from treedraft.targets import pocket as pocket_target

SMALL = ModelConfig(vocab_size=320, hidden_size=32, num_layers=2, head_dim=8, intermediate_size=48)
shipped = pytest.mark.skipif(not (ASSETS / "model.safetensors").is_file(), reason="the model has not been trained here")


@pytest.fixture(scope="module")
def tokenizer():
    drawn = world.examples("train", count=60, seed=3)
    return pocket_training.train_tokenizer([text for e in drawn for text in (e.user, e.answer)], SMALL.vocab_size)


@pytest.fixture(scope="module")
def target():
    return pocket_target.load()


def small_run(folder, tokenizer, **fields) -> TrainConfig:
    tokenizer.save_pretrained(folder / "tokenizer", save_jinja_files=False)
    fields = dict(steps=4, checkpoint_every=2, step_tokens=512, batch_tokens=256, warmup=1, install=False) | fields
    return TrainConfig(output=folder, model=SMALL, **fields)


# -- the trainer ----------------------------------------------------------------------------------------------------------


def test_fast_forward_is_transformers_forward(tokenizer):
    model = pocket_training.new_model(SMALL, tokenizer, seed=1).eval()
    for weight in model.parameters():
        if weight.ndim == 1:
            torch.nn.init.normal_(weight, mean=1.0, std=0.3, generator=torch.Generator().manual_seed(0))
    ids = torch.randint(5, 320, (3, 17), generator=torch.Generator().manual_seed(1))
    expected = model.model(input_ids=ids).last_hidden_state
    torch.testing.assert_close(pocket_training.hidden_states(model, ids, torch.float32), expected, rtol=1e-4, atol=1e-5)


def test_loss_and_gradients_are_those_of_cross_entropy(tokenizer):
    drawn = world.examples("train", count=12, seed=0)
    documents = pocket_training.encode(tokenizer, drawn)
    (batch,) = pocket_training.batches(documents, tokenizer, batch_tokens=10**6, user_weight=0.25)
    gradients, losses = [], []
    for fast in (True, False):
        model = pocket_training.new_model(SMALL, tokenizer, seed=1)
        if fast:
            loss = pocket_training.weighted_loss(model, batch, torch.float32) / 7
        else:
            logits = model(input_ids=batch.ids[:, :-1]).logits.flatten(0, 1)
            rows = torch.nn.functional.cross_entropy(logits, batch.ids[:, 1:].flatten(), reduction="none")
            loss = (rows * batch.weights.flatten()).sum() / 7
        loss.backward()
        losses.append(loss.item())
        gradients.append([weight.grad for weight in model.parameters()])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


def test_weights_mark_answers_and_skip_padding(tokenizer):
    drawn = [
        world.Example(domain="chat", template="t", user="Hi", answer=answer) for answer in ("a", "a b c d e f g h i")
    ]
    documents = pocket_training.encode(tokenizer, drawn)
    (batch,) = pocket_training.batches(documents, tokenizer, batch_tokens=1000, user_weight=0.25)
    for row, document in enumerate(sorted(documents, key=len)):
        start = document.index(tokenizer.convert_tokens_to_ids("<|assistant|>"))
        expected = [0.25] * start + [1.0] * (len(document) - 1 - start)
        expected += [0.0] * (batch.weights.shape[1] - len(expected))
        assert batch.weights[row].tolist() == expected
    assert batch.num_tokens == sum(map(len, documents))


def test_batches_keep_every_document_within_the_limit(tokenizer):
    documents = pocket_training.encode(tokenizer, world.examples("train", count=300, seed=5))
    made = pocket_training.batches(documents, tokenizer, batch_tokens=600, user_weight=1.0)
    assert sum(batch.num_tokens for batch in made) == sum(map(len, documents))
    assert all(len(batch.ids) == 1 or batch.ids.shape[0] * (batch.ids.shape[1] - 7) <= 600 for batch in made)


def test_stopped_run_ends_like_one_that_was_not(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(pocket_training, "evaluate", lambda *_args, **_kwargs: {})
    whole, stopped = (small_run(tmp_path / name, tokenizer) for name in ("whole", "stopped"))
    pocket_training.train(whole)
    take_step = pocket_training.take_step

    def stop_at_3(model, made, step_batches, step, config):
        if step == 3:
            raise KeyboardInterrupt
        return take_step(model, made, step_batches, step, config)

    monkeypatch.setattr(pocket_training, "take_step", stop_at_3)
    with pytest.raises(KeyboardInterrupt):
        pocket_training.train(stopped)
    monkeypatch.setattr(pocket_training, "take_step", take_step)
    pocket_training.train(stopped)
    models = [(config.output / "model" / "model.safetensors").read_bytes() for config in (whole, stopped)]
    assert models[0] == models[1]
    rows = [[json.loads(x) for x in (c.output / "metrics.jsonl").read_text().splitlines()] for c in (whole, stopped)]
    assert [row.get("loss") is not None and row["tokens"] for row in rows[0]] == [
        row.get("loss") is not None and row["tokens"] for row in rows[1]
    ]
    with pytest.raises(ValueError, match="another steps"):
        pocket_training.train(small_run(tmp_path / "whole", tokenizer, steps=5))


def test_learning_rate_warms_up_and_ends_at_zero():
    config = TrainConfig(steps=1000, warmup=100, decay_from=0.3)
    rates = [pocket_training.learning_rate(step, config) for step in (0, 99, 300, 650, 1000)]
    assert rates == pytest.approx([0.01, 1.0, 1.0, 0.5, 0.0])


def test_lists_of_facts_grow_with_the_steps():
    config = TrainConfig(steps=1000, first_facts=4, most_facts=64, grown_by=0.5)
    assert [pocket_training.most_facts(step, config) for step in (0, 250, 500, 900)] == [4, 16, 64, 64]
    for most in (1, 5, 40):
        drawn = pocket_training.draw("train", count=80, seed=1, long_share=1.0, most_facts=most)
        counts = [example.user.count("\nFact ") for example in drawn]
        assert {example.domain for example in drawn} == {"long"} and max(counts) <= most
        assert most == 1 or len(set(counts)) > 3


def test_measures_read_answers():
    assert pocket_training.found_facts("Reply 1: it is so, so the key is red.\nReply 2: no", "Fact 1, so the key is red.\nso, so x") == 1
    assert pocket_training.result_line("1 + 1 = 2.\nAnswer: 2 apples") == "2 apples"
    assert pocket_training.result_line("no result") is None
    assert pocket_training.parses("Sure:\n```python\ndef f(x):\n    return x\n```\nDone.")
    assert not pocket_training.parses("```python\ndef f(x:\n```")


def test_help_needs_no_torch_and_bad_flags_are_refused(capsys):
    code = "import sys; from treedraft import pocket\ntry: pocket.main(['train', '--help'])\nexcept SystemExit: assert 'torch' not in sys.modules"
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--steps" in done.stdout
    assert time.perf_counter() - began < 10
    with pytest.raises(SystemExit) as error:
        pocket.main(["train", "--step", "3"])
    assert error.value.code != 0
    with pytest.raises(SystemExit) as error:
        pocket.main(["train", "--steps", "0"])
    assert error.value.code == 2 and "steps is 0" in capsys.readouterr().err


def test_missing_model_says_what_to_run(tmp_path, monkeypatch):
    monkeypatch.setattr(pocket_target, "ASSETS", tmp_path / "none")
    with pytest.raises(ValueError, match=r"python -m treedraft\.pocket train"):
        pocket_target.load()


# -- what ships -------------------------------------------------------------------------------------------------------------


@shipped
def test_shipped_files_are_small_and_half_precision():
    assert sum(path.stat().st_size for path in ASSETS.iterdir()) <= 12_000_000
    with safe_open(ASSETS / "model.safetensors", framework="pt") as tensors:
        held = [tensors.get_tensor(name) for name in tensors.keys()]  # noqa: SIM118 (no iterator)
    assert {tensor.dtype for tensor in held} == {torch.float16}
    assert 3_000_000 <= sum(tensor.numel() for tensor in held) <= 6_000_000
    record = json.loads((ASSETS / "training.json").read_text())
    assert {"steps", "tokens", "losses", "seed", "hardware", "command"} <= set(record)


@shipped
def test_target_is_the_rounded_weights(target):
    assert (target.name, target.vocab_size, target.dtype) == ("pocket", 2048, torch.float32)
    assert torch.equal(target.embedding, target.embedding.half().float())
    assert target.tokenizer.convert_ids_to_tokens(target.mask_token_id) == "<|mask|>"
    assert target.eos_token_ids == (target.tokenizer.convert_tokens_to_ids("<|end|>"),)


@shipped
def test_prompts_are_rendered_as_in_training(target):
    example = world.examples("validation", count=1, seed=0)[0]
    (document,) = pocket_training.encode(target.tokenizer, [example])
    prompt = target.encode_chat([example.user])
    assert document[: len(prompt)] == prompt
    assert document[-1] in target.eos_token_ids
    turns = target.encode_chat(["Hi.", "Hello.", "Bye."])
    assert target.tokenizer.decode(turns) == "<|user|>Hi.<|assistant|>Hello.<|end|><|user|>Bye.<|assistant|>"


@shipped
def test_tokenizer_keeps_text_and_splits_digits(target):
    texts = [text for e in world.examples("validation", count=50, seed=0) for text in (e.user, e.answer)]
    texts += ["naïve \u2028 \t 日本 🙂", "1234567"]
    for text in texts:
        ids = target.tokenizer(text, add_special_tokens=False)["input_ids"]
        assert target.tokenizer.decode(ids) == text
        assert not set(ids) & set(target.tokenizer.convert_tokens_to_ids(list(MARKS)))
    assert len(target.tokenizer("1234567")["input_ids"]) == 7


@shipped
@torch.inference_mode()
def test_model_knows_the_world(target):
    for domain in world.DOMAINS:
        documents = pocket_training.encode(
            target.tokenizer, world.examples("validation", count=20, seed=1, domains=[domain])
        )
        made = pocket_training.batches(documents, target.tokenizer, batch_tokens=4000, user_weight=0.0)
        loss = sum(pocket_training.weighted_loss(target.model, batch, torch.float32) for batch in made)
        assert loss / sum(batch.weights.sum() for batch in made) < 1.0  # nats a token of an answer
