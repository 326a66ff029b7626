"""Training: one gradient however a step is split, bit-for-bit resumption, serving what was trained, files that are whole or refused."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.tiny_drafters import BACKBONES, CORRECTIONS, make_drafter, make_features, make_sequences, name_of, randomise
from tests.tolerances import GRADIENT, assert_close, assert_close_sums
from treedraft import losses
from treedraft.cells import draft_vocabulary, new_drafter
from treedraft.config import DrafterConfig, TrainConfig
from treedraft.data import features as features_module
from treedraft.data.anchors import batch_for_step, usable_sequences
from treedraft.data.features import FeatureCache, Sequences
from treedraft.drafter import Drafter, Prefix
from treedraft.ops.layers import RMSNorm
from treedraft.targets import load_target
from treedraft.targets import tiny as tiny_module
from treedraft.targets.hf import Target
from treedraft.trainer import Trainer, TrainStep
from treedraft.trees.scorers import Lanes

CONFIG = TrainConfig(steps=12, sequences=4, anchors=3, checkpoint_every=4, learning_rate=1e-2)
ATTENTION = {"name": "attention", "inputs": "fused"}


@pytest.fixture(scope="module")
def features(tiny: Target, tmp_path_factory: pytest.TempPathFactory) -> FeatureCache:
    tiny.tap(tiny.default_tap_layers)  # it is shared with tests of drafters that read others
    return make_features(tiny, tmp_path_factory.mktemp("features"))


@pytest.fixture(scope="module")
def features64(tiny64: Target, tmp_path_factory: pytest.TempPathFactory) -> FeatureCache:
    tiny64.tap(tiny64.default_tap_layers)
    return make_features(tiny64, tmp_path_factory.mktemp("features64"))


def config_with(**fields: Any) -> TrainConfig:
    return TrainConfig(**{**{name: getattr(CONFIG, name) for name in CONFIG.__dataclass_fields__}, **fields})


def trainer_for(target: Target, features: FeatureCache, folder: Path, *, kind: type[Trainer] = Trainer, **fields: Any) -> Trainer:
    drafter = make_drafter(target, correction=ATTENTION, random=False)
    return kind(drafter=drafter, target=target, features=features, config=config_with(**fields), folder=folder)


def weights_of(drafter: Drafter) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in drafter.state_dict().items()}


def same_weights(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# -- objectives ------------------------------------------------------------------------------------------------------


def laws(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    draft, target = (3 * torch.randn((5, 7), generator=generator, dtype=torch.float64) for _ in range(2))
    return draft.requires_grad_(True), target, torch.randint(0, 7, (5,), generator=generator)


def test_objectives_are_their_formulas() -> None:
    draft, target, labels = laws()
    q, p = draft.softmax(-1), target.softmax(-1)
    formulas = {
        "ce": (losses.ce(draft, labels), -q[range(5), labels].log()),
        "forward_kl": (losses.forward_kl(draft, target), (p * (p / q).log()).sum(-1)),
        "dspark": (losses.dspark(draft, target, labels), -0.1 * q[range(5), labels].log() + 0.9 * (q - p).abs().sum(-1)),
    }
    weights = torch.arange(1.0, 6.0, dtype=torch.float64)
    for value, expected in formulas.values():
        assert_close(value, expected)
        gradients = [torch.autograd.grad((item * weights).sum(), draft, retain_graph=True)[0] for item in (value, expected)]
        assert_close(gradients[0], gradients[1])
    assert torch.autograd.gradcheck(lambda logits: losses.forward_kl(logits, target), (draft,))
    assert losses.forward_kl(draft, draft.detach()).abs().max() < 1e-12


def test_objectives_are_finite_where_laws_are_extreme() -> None:
    draft = torch.tensor([[1e4, -1e4, 0.0], [0.0, 0.0, 0.0]], requires_grad=True)
    target = torch.tensor([[-1e4, 1e4, 0.0], [1e4, 0.0, -1e4]])
    for value in (losses.ce(draft, torch.tensor([1, 2])), losses.forward_kl(draft, target), losses.dspark(draft, target, torch.tensor([1, 2]))):
        (gradient,) = torch.autograd.grad(value.sum(), draft)
        assert bool(value.isfinite().all()) and bool(gradient.isfinite().all())
    half = torch.randn((3, 7)).bfloat16().requires_grad_(True)
    losses.forward_kl(half, torch.randn((3, 7)).bfloat16()).sum().backward()
    assert half.grad is not None and half.grad.dtype == torch.bfloat16


def test_position_weights() -> None:
    weights = losses.position_weights(3, 2.0, torch.device("cpu"))
    torch.testing.assert_close(weights, torch.tensor([1.0, 0.6065307, 0.3678794]))
    assert losses.position_weights(3, None, torch.device("cpu")).tolist() == [1, 1, 1]


# -- steps -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", ["ce", "forward_kl", "dspark"])
def test_the_gradient_is_the_same_for_any_split(tiny64: Target, features64: FeatureCache, tmp_path: Path, objective: str) -> None:
    gradients: list[dict[str, Tensor]] = []
    for micro_batches in (1, 2, 4):
        trainer: Any = trainer_for(tiny64, features64, tmp_path, micro_batches=micro_batches, objective=objective, clip=1e9, decay=4.0)
        randomise(trainer.drafter.correction)
        found: dict[str, Tensor] = {}

        def keep(trainer: Trainer = trainer, found: dict[str, Tensor] = found) -> None:
            found.update({name: weight.grad.clone() for name, weight in trainer.drafter.named_parameters() if weight.grad is not None})

        trainer.optimizers = [SimpleNamespace(step=keep, zero_grad=lambda **_: None)]
        trainer.schedules = [SimpleNamespace(step=lambda: None, get_last_lr=lambda: [0.0])]
        trainer._advance()
        gradients.append(found)
    assert gradients[0]
    for other in gradients[1:]:
        assert set(other) == set(gradients[0])
        for name, gradient in gradients[0].items():
            assert_close_sums(other[name], gradient)


def test_blocks_without_labels_change_nothing(tiny64: Target, features64: FeatureCache) -> None:
    """The sum over a batch is the sum over its valid blocks; what pads a batch is not seen."""
    drafter = make_drafter(tiny64, correction=ATTENTION)
    config = config_with(anchors=40)  # more than a sequence has positions
    step = TrainStep(drafter, tiny64, config)
    usable = usable_sequences(features64)
    batch = batch_for_step(features64, usable, config, drafter.depth, 0)
    assert bool((~batch.valid[..., 0]).any())
    few = batch_for_step(features64, usable, config_with(anchors=23), drafter.depth, 0)
    with torch.no_grad():
        whole, parts = step(batch), [step(batch.rows(slice(i, i + 1))) for i in range(4)]
        assert bool(whole.loss.isfinite())
        assert_close(whole.loss, torch.stack([part.loss for part in parts]).sum())
        assert_close(step(few).loss, whole.loss)
        batch.taps[torch.arange(batch.ids.shape[1]) >= (batch.anchors.max(1).values + 1)[:, None]] = 1e4
        assert_close(step(batch).loss, whole.loss)


def test_batches_are_a_function_of_seed_and_step(features: FeatureCache) -> None:
    usable = usable_sequences(features)
    first, again, other = (batch_for_step(features, usable, config_with(seed=seed), 5, 3) for seed in (0, 0, 1))
    assert torch.equal(first.anchors, again.anchors) and torch.equal(first.samples, again.samples)
    assert not torch.equal(first.anchors, other.anchors)
    for row, index in enumerate(first.samples.tolist()):
        ids, prompt = features.sequences.ids[index], features.sequences.prompt_lengths[index]
        for anchor, labels, previous, valid in zip(first.anchors[row], first.labels[row], first.previous[row], first.valid[row], strict=True):
            assert prompt <= anchor < len(ids), "anchors lie in the response"
            inside = int(valid.sum())
            assert labels[valid].tolist() == ids[anchor + 1 : anchor + 1 + inside].tolist()
            assert previous[valid].tolist() == ids[anchor : anchor + inside].tolist()


@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("correction", CORRECTIONS, ids=name_of)
def test_what_is_trained_is_what_is_served(tiny: Target, features: FeatureCache, backbone: str, correction: dict) -> None:
    """Logits of the training graph equal those of prefix, block and node-by-node correction, for every slot with a label."""
    d2t = torch.tensor([i for i in range(tiny.vocab_size) if i % 3])
    drafter = make_drafter(tiny, backbone=backbone, correction=correction, d2t=d2t, num_layers=2)
    batch = batch_for_step(features, usable_sequences(features), CONFIG, drafter.depth, 0)
    step: Any = TrainStep(drafter, tiny, CONFIG)
    captured: list[Tensor] = []
    step._rows = lambda logits, labels, teacher: captured.append(logits) or logits[:, 0]
    with torch.no_grad():
        step(batch)
    trained = captured[0].log_softmax(-1)
    supervised = (step.weights(batch) > 0).nonzero().tolist()
    assert len(supervised) == len(trained) > 20
    served: dict[tuple[int, int], list[Tensor]] = {}
    for sample in range(len(batch.ids)):
        for block, anchor in enumerate(batch.anchors[sample].tolist()):
            prefix = Prefix(drafter, capacity=4)
            for rows in batch.taps[sample, :anchor].split(5):
                prefix.append(rows)
            with torch.no_grad():
                hidden = drafter.hidden(prefix.memory, batch.ids[sample, anchor].view(1, 1), torch.tensor([[anchor]]), drafter.depth)[:, 0]
                scorer = drafter.scorer(hidden, batch.ids[sample, anchor].view(1))
                scorer.start(drafter.depth)
                laws = []
                for slot in range(drafter.depth):
                    one = torch.tensor([slot])
                    token = batch.previous[sample, block, slot].view(1)
                    laws.append(scorer.expand(Lanes(request=one * 0, slot=one, token=token, expansion=one, parent=one - 1))[0])
            served[sample, block] = laws
    assert_close(torch.stack([served[sample, block][slot] for sample, block, slot in supervised]), trained)


def test_the_target_is_not_trained(tiny: Target, features: FeatureCache, tmp_path: Path) -> None:
    before = {name: weight.clone() for name, weight in tiny.model.state_dict().items()}
    fingerprint = tiny.fingerprint()
    result = trainer_for(tiny, features, tmp_path).run()
    assert all(torch.equal(weight, before[name]) for name, weight in tiny.model.state_dict().items())
    assert all(weight.grad is None and not weight.requires_grad for weight in tiny.model.parameters())
    assert tiny.fingerprint() == fingerprint == result["target"]["fingerprint"]


@pytest.mark.parametrize("num_layers", [1, 2, 5])
def test_losses_fall(tiny: Target, features: FeatureCache, tmp_path: Path, num_layers: int) -> None:
    drafter = make_drafter(tiny, correction=ATTENTION, random=False, num_layers=num_layers)
    config = config_with(steps=30, learning_rate=2e-3)
    step, batch = TrainStep(drafter, tiny, config), batch_for_step(features, usable_sequences(features), config, drafter.depth, 0)
    with torch.no_grad():
        before = step(batch).loss
    Trainer(drafter=drafter, target=tiny, features=features, config=config, folder=tmp_path).run()
    with torch.no_grad():
        after = step(batch).loss
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [10, 20, 30] and np.isfinite([row["loss"] for row in rows]).all()
    assert after < 0.95 * before


@pytest.mark.parametrize("where", ["taps", "teacher"])
def test_a_value_that_is_not_finite_stops_the_run(tiny: Target, tmp_path: Path, where: str) -> None:
    features = make_features(tiny, tmp_path / "features")
    trainer = trainer_for(tiny, features, tmp_path / "run")
    sample = int(batch_for_step(features, trainer.usable, CONFIG, 5, 0).samples[2])
    columns = slice(0, 1) if where == "taps" else slice(tiny.tap_size, None)
    features.rows(sample)[:, columns] = torch.nan
    with pytest.raises(FloatingPointError, match=rf"step 1: first bad tensor the features, samples \[{sample}\]"):
        trainer.run()
    weight = trainer.drafter.backbone.norm.weight
    trainer = trainer_for(tiny, make_features(tiny, tmp_path / "features"), tmp_path / "other")
    weight = trainer.drafter.backbone.norm.weight
    weight.data[0] = torch.inf
    with pytest.raises(FloatingPointError, match=r"step 1: first bad tensor backbone.norm.weight"):
        trainer.run()


# -- stopping and resuming -----------------------------------------------------------------------------------------------


class Interrupted(Trainer):
    stop_at = 0

    def _advance(self) -> dict[str, Any]:
        if self.step == self.stop_at:
            raise KeyboardInterrupt
        return super()._advance()


@pytest.mark.parametrize("stop_at", [3, 4, 17, 25])
def test_a_resumed_run_is_the_uninterrupted_one(tiny: Target, features: FeatureCache, tmp_path: Path, stop_at: int) -> None:
    whole = trainer_for(tiny, features, tmp_path / "whole", steps=26)
    result = whole.run()
    Interrupted.stop_at = stop_at
    with pytest.raises(KeyboardInterrupt):
        trainer_for(tiny, features, tmp_path / "parts", kind=Interrupted, steps=26).run()
    assert not (tmp_path / "parts" / "result.json").exists()
    resumed = trainer_for(tiny, features, tmp_path / "parts", steps=26)
    again = resumed.run()
    assert same_weights(weights_of(whole.drafter), weights_of(resumed.drafter))
    lines = [[json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()] for name in ("whole", "parts")]
    assert [row["step"] for row in lines[1]] == [10, 20, 26]
    assert [row["loss"] for row in lines[0]] == [row["loss"] for row in lines[1]]
    assert again["loss"] == result["loss"] and again["training"] == result["training"]
    assert not (tmp_path / "parts" / "checkpoint.pt").exists()
    assert trainer_for(tiny, features, tmp_path / "parts", steps=26).run() == json.loads((tmp_path / "parts" / "result.json").read_text())


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: b"junk", lambda data: b""], ids=["cut", "junk", "empty"])
def test_a_damaged_checkpoint_is_named(tiny: Target, features: FeatureCache, tmp_path: Path, damage: Any) -> None:
    Interrupted.stop_at = 5
    with pytest.raises(KeyboardInterrupt):
        trainer_for(tiny, features, tmp_path, kind=Interrupted).run()
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=r"checkpoint.pt: damaged checkpoint"):
        trainer_for(tiny, features, tmp_path).run()


def two_ranks(folder: str) -> None:
    """What each of two processes runs; see below."""
    torch.set_num_threads(1)
    target = load_target("tiny", dtype=torch.float64)
    features = make_features(target, Path(folder) / f"features-{os.environ['RANK']}")
    trainer_for(target, features, Path(folder) / "run", micro_batches=2).run()


def test_two_processes_train_what_one_does(tiny64: Target, features64: FeatureCache, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    code = f"from tests.test_training import two_ranks; two_ranks({str(tmp_path)!r})"
    processes = [
        subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[1], env={**environment, "RANK": str(rank)}, stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    one = trainer_for(tiny64, features64, tmp_path / "one").run()
    errors = [process.communicate(timeout=240)[1].decode() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    from safetensors.torch import load_file

    first, second = (load_file(tmp_path / name / "drafter" / "model.safetensors") for name in ("one", "run"))
    for name, weight in first.items():
        assert_close_sums(second[name], weight)
    two = json.loads((tmp_path / "run" / "result.json").read_text())
    for name in ("loss", "agreement", "expected_tau"):
        assert abs(two[name] - one[name]) < GRADIENT


# -- features ------------------------------------------------------------------------------------------------------------


def test_an_interrupted_fill_goes_on_and_damage_is_repaired(tiny: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features_module, "CHUNK", 4)
    sequences = make_sequences(tiny)
    computed: list[int] = []
    compute = FeatureCache._compute

    def limited(self: FeatureCache, first: int) -> None:
        if len(computed) == stop_after:
            raise KeyboardInterrupt
        computed.append(first)
        compute(self, first)

    monkeypatch.setattr(FeatureCache, "_compute", limited)
    stop_after = 2
    with pytest.raises(KeyboardInterrupt):
        make_features(tiny, tmp_path, sequences)
    stop_after = 99
    cache = make_features(tiny, tmp_path, sequences)
    assert computed == [0, 4, 8]
    whole = [cache.rows(i).clone() for i in range(12)]
    damaged = cache._path(4)
    data = bytearray(damaged.read_bytes())
    data[-5] ^= 1
    damaged.write_bytes(data)
    cut = cache._path(8)
    cut.write_bytes(cut.read_bytes()[:100])
    again = make_features(tiny, tmp_path, sequences)
    assert computed == [0, 4, 8, 4, 8]
    for i, ids in enumerate(sequences.ids):
        assert torch.equal(again.rows(i), whole[i])
        trace = tiny.trace(torch.from_numpy(ids)[None])
        live = torch.cat([trace.taps, trace.last], -1)[0]
        torch.testing.assert_close(again.rows(i).float(), live, rtol=2e-3, atol=2e-3)  # stored as float16
    assert not list(again.folder.glob(".*")), "no temporary file is left"


def test_the_limit_of_the_cache(tiny: Target, tmp_path: Path) -> None:
    sequences = make_sequences(tiny, 6)
    row_bytes = 2 * (tiny.tap_size + tiny.hidden_size)
    three = sum(len(ids) for ids in sequences.ids[:3]) * row_bytes
    for limit, expected in ((three, 3), (three - 1, 2), (10**9, 6)):
        cache = FeatureCache(tmp_path, tiny, sequences, limit_gb=limit / 1e9)
        assert cache.num_sequences == expected
        assert ("left out" in cache.estimate()) == (expected < 6)
    with pytest.raises(ValueError, match="holds not one sequence"):
        FeatureCache(tmp_path, tiny, sequences, limit_gb=1e-9)


def test_features_of_a_sequence_do_not_depend_on_its_neighbours(tiny64: Target, tmp_path: Path) -> None:
    """Case 59: five sequences in one batch, in two orders; each is what a forward over it alone taps."""
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, 60, size=length) for length in (5, 40, 17, 40, 2)]
    for order in ([0, 1, 2, 3, 4], [3, 1, 4, 0, 2]):
        sequences = Sequences(ids=[ids[i] for i in order], prompt_lengths=np.ones(5, dtype=int), digest=repr(order))
        cache = FeatureCache(tmp_path, tiny64, sequences, limit_gb=1)
        cache.fill()
        for place, i in enumerate(order):
            trace = tiny64.trace(torch.from_numpy(ids[i])[None])
            alone = torch.cat([trace.taps, trace.last], dim=-1)[0].half()
            torch.testing.assert_close(cache.rows(place), alone, rtol=2e-3, atol=1e-4)  # a last place of float16


def test_short_and_long_sequences_train_together(tiny: Target, tmp_path: Path) -> None:
    """Case 39: rows of padding have nothing to see and no part in the loss; it and every gradient stay finite."""
    rng = np.random.default_rng(1)
    ids = [rng.integers(0, 60, size=length) for length in (5, 60, 5, 60)]
    sequences = Sequences(ids=ids, prompt_lengths=np.array([1, 1, 3, 55]), digest="short and long")
    cache = FeatureCache(tmp_path, tiny, sequences, limit_gb=1)
    cache.fill()
    drafter = make_drafter(tiny, correction=ATTENTION).requires_grad_(True)
    config = config_with(anchors=16)
    loss = TrainStep(drafter, tiny, config)(batch_for_step(cache, usable_sequences(cache), config, drafter.depth, 0)).loss
    loss.backward()
    gradients = [weight.grad for weight in drafter.parameters()]
    assert bool(loss.isfinite()) and all(grad is not None and bool(grad.isfinite().all()) for grad in gradients)


def test_caches_of_other_taps_do_not_mix(tmp_path: Path) -> None:
    target = tiny_module.load(num_layers=4)
    sequences = make_sequences(target, 2)
    target.tap([0])
    first = make_features(target, tmp_path, sequences)
    target.tap([1])
    second = make_features(target, tmp_path, sequences)
    assert first.folder != second.folder and not torch.equal(first.rows(0), second.rows(0))


# -- files ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("correction", CORRECTIONS, ids=name_of)
def test_a_saved_drafter_is_loaded_as_it_was(tiny: Target, tmp_path: Path, correction: dict) -> None:
    d2t = torch.tensor([2, 3, 5, 7, 11, 62])
    for mapping in (None, d2t):
        drafter = make_drafter(tiny, correction=correction, d2t=mapping)
        drafter.save_pretrained(tmp_path)
        loaded = Drafter.from_pretrained(tmp_path, target=tiny)
        assert same_weights(weights_of(drafter), weights_of(loaded)) and torch.equal(drafter.d2t, loaded.d2t)
        assert (loaded.config, loaded.shape) == (drafter.config, drafter.shape)
        hidden = torch.randn((1, 5, 32), generator=torch.Generator().manual_seed(0))
        one = torch.tensor([0])
        with torch.no_grad():
            scorers = [item.scorer(hidden, one) for item in (drafter, loaded)]
            children = []
            for scorer in scorers:
                scorer.start(1)
                children.append(scorer.children(Lanes(request=one, slot=one, token=one + 4, expansion=one, parent=one - 1), 3))
        assert torch.equal(children[0][0], children[1][0]) and torch.equal(children[0][1], children[1][1])
        assert set(children[0][0].flatten().tolist()) <= set(drafter.d2t.tolist())
        assert not any(weight.requires_grad for weight in loaded.parameters())
    assert not any("embed" in name or "lm_head" in name for name in loaded.state_dict()), "nothing borrowed is saved"


def test_damaged_and_foreign_folders_are_refused(tiny: Target, features: FeatureCache, tmp_path: Path) -> None:
    folder = tmp_path / "run" / "drafter"
    trainer_for(tiny, features, tmp_path / "run", steps=1).run()
    assert Drafter.from_pretrained(folder, target=tiny).provenance["target"]["name"] == "tiny"
    with pytest.raises(ValueError, match=r"trained for tiny .* they do not fit"):
        Drafter.from_pretrained(folder, target=tiny_module.load(seed=1))
    with pytest.raises(ValueError, match="has no config.json"):
        Drafter.from_pretrained(tmp_path / "nowhere")
    weights, config = folder / "model.safetensors", folder / "config.json"
    whole, text = weights.read_bytes(), config.read_text()
    for bad in (whole[: len(whole) // 2], whole[:4], b""):
        weights.write_bytes(bad)
        with pytest.raises(ValueError, match=r"model.safetensors: missing or damaged"):
            Drafter.from_pretrained(folder)
    weights.unlink()
    with pytest.raises(ValueError, match=r"model.safetensors: missing or damaged"):
        Drafter.from_pretrained(folder)
    weights.write_bytes(whole)
    config.write_text(text.replace('"format": 1', '"format": 7'))
    with pytest.raises(ValueError, match="format 7"):
        Drafter.from_pretrained(folder)
    config.write_text(text.replace('"attention"', '"none"').replace('"inputs": "fused",', ""))
    with pytest.raises(ValueError, match="inputs|not expected"):
        Drafter.from_pretrained(folder)
    config.write_text(text[:100])
    with pytest.raises(ValueError, match=r"config.json:\d+: not valid JSON"):
        Drafter.from_pretrained(folder)


def test_a_loaded_drafter_taps_what_it_was_trained_on(tmp_path: Path) -> None:
    """Also if another drafter, attached before it, made the target tap other layers."""
    target = tiny_module.load(num_layers=4)
    before = target.tap_layers
    trainer_for(target, make_features(target, tmp_path), tmp_path / "run", steps=1).run()
    make_drafter(target, tap_layers=(2,))
    assert target.tap_layers == (2,)
    Drafter.from_pretrained(tmp_path / "run" / "drafter", target=target)
    assert target.tap_layers == before != (2,)


def test_the_draft_vocabulary_is_the_most_frequent_tokens(tiny: Target, features: FeatureCache) -> None:
    d2t = draft_vocabulary(features, tiny, 10)
    answers = np.concatenate([ids[n:] for ids, n in zip(features.sequences.ids, features.sequences.prompt_lengths, strict=True)])
    counts = np.bincount(answers, minlength=64)
    assert d2t.tolist() == sorted(set(d2t.tolist())) and len(d2t) == 10 and 62 in d2t.tolist()
    kept = [i for i in d2t.tolist() if i != 62]
    assert min(counts[kept]) >= max(np.delete(counts, d2t.numpy()))
    drafter = new_drafter(tiny, DrafterConfig(backbone={"name": "causal", "num_layers": 1}, draft_vocab_size=10), features, seed=0)
    assert torch.equal(drafter.d2t, d2t) and drafter.lent.head(torch.zeros(32)).shape == (10,)


@pytest.mark.parametrize("objective", ["ce", "forward_kl", "dspark"])
def test_a_reduced_vocabulary_trains(tiny: Target, features: FeatureCache, tmp_path: Path, objective: str) -> None:
    """Labels that cannot be drafted are no labels for ce and dspark, and never count as a match."""
    d2t = draft_vocabulary(features, tiny, 20)
    drafter = make_drafter(tiny, correction={"name": "markov", "rank": 4}, random=False, d2t=d2t)
    step = TrainStep(drafter, tiny, config_with(objective=objective))
    batch = batch_for_step(features, usable_sequences(features), CONFIG, drafter.depth, 0)
    known = torch.isin(batch.labels, d2t)
    expected = batch.valid if objective == "forward_kl" else batch.valid & known
    assert torch.equal(step.weights(batch) > 0, expected) and bool((batch.valid & ~known).any())
    result = Trainer(drafter=drafter, target=tiny, features=features, config=config_with(objective=objective), folder=tmp_path).run()
    assert 0 <= result["agreement"] <= 1 and 1 <= result["expected_tau"] <= 1 + drafter.depth
    assert torch.equal(Drafter.from_pretrained(tmp_path / "drafter", target=tiny).d2t, d2t)


def test_norms_keep_the_type_of_their_input() -> None:
    norm, x = RMSNorm(8), torch.randn(3, 8)
    assert norm(x.bfloat16()).dtype == torch.bfloat16
    torch.testing.assert_close(norm(x), torch.nn.RMSNorm(8)(x), rtol=0, atol=0)
