"""One trainer for every drafter of the grid.

All blocks of a batch go through one forward; corrections are teacher forced. The loss is a sum over supervised slots
divided by the sum of their weights over the whole step, ranks and micro-batches included, so any split gives the same
gradient.
A run is a folder: metrics.jsonl, checkpoint.pt, drafter/, and result.json, written last.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import struct
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

from treedraft import files, losses
from treedraft.config import TrainConfig
from treedraft.data.anchors import Batch, batch_for_step, usable_sequences
from treedraft.data.features import FeatureCache
from treedraft.drafter import Drafter
from treedraft.muon import Muon
from treedraft.run import rank_and_world
from treedraft.targets.hf import Target

LOG_EVERY = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSums:
    """Sums of one micro-batch: weighted loss, and per draft position matches [D] and leading runs [D] over `blocks`."""

    loss: Tensor
    matches: Tensor
    runs: Tensor
    valid: Tensor
    blocks: Tensor


class TrainStep(nn.Module):
    """Batch -> sums of one step; a module so that DDP can wrap it."""

    columns: Tensor

    def __init__(self, drafter: Drafter, target: Target, config: TrainConfig) -> None:
        super().__init__()
        self.drafter, self.config = drafter, config
        columns = torch.full((target.vocab_size,), -1, dtype=torch.int64)
        columns[drafter.d2t.cpu()] = torch.arange(len(drafter.d2t))
        self.register_buffer("columns", columns.to(target.device), persistent=False)
        self.decay = losses.position_weights(drafter.depth, config.decay, target.device)

    def weights(self, batch: Batch) -> Tensor:
        """[S, A, D]: zero where there is no label, or where the objective needs a label the draft vocabulary lacks."""
        weights = batch.valid * self.decay
        return weights if self.config.objective == "forward_kl" else weights * (self.columns[batch.labels] >= 0)

    def forward(self, batch: Batch) -> StepSums:
        drafter, depth = self.drafter, self.drafter.depth
        memory = drafter.remember(batch.taps, torch.arange(batch.ids.shape[1], device=batch.ids.device))
        anchor_tokens = batch.ids.gather(1, batch.anchors)
        hidden = drafter.hidden(memory, anchor_tokens, batch.anchors, depth).flatten(0, 1)
        weights = self.weights(batch).flatten(0, 1)
        supervised = weights > 0
        draft_logits = drafter.correction(hidden, batch.previous.flatten(0, 1), drafter.lent, supervised)
        labels = self.columns[batch.labels.flatten(0, 1)[supervised]]
        row_losses = self._rows(draft_logits, labels, batch.teacher.flatten(0, 1)[supervised])
        matches = torch.zeros_like(supervised)
        matches[supervised] = draft_logits.detach().float().argmax(-1) == labels  # bfloat16 argmax is slow on CPUs
        return StepSums(
            loss=(row_losses * weights[supervised]).sum(),
            matches=matches.sum(0),
            runs=matches.long().cumprod(1).sum(0),
            valid=supervised.sum(0),
            blocks=supervised[:, 0].sum(),
        )

    def _rows(self, draft_logits: Tensor, labels: Tensor, teacher: Tensor) -> Tensor:
        if self.config.objective == "ce":
            return losses.ce(draft_logits, labels)
        with torch.no_grad():
            target_logits = self.drafter.lent.head(teacher.to(next(self.drafter.parameters()).dtype))
        if self.config.objective == "forward_kl":
            return losses.forward_kl(draft_logits, target_logits)
        return losses.dspark(draft_logits, target_logits, labels)


class Trainer:
    """One run in one folder; `run` resumes from the last checkpoint and returns what result.json holds."""

    def __init__(
        self, *, drafter: Drafter, target: Target, features: FeatureCache, config: TrainConfig, folder: Path
    ) -> None:
        self.drafter, self.target, self.features, self.config, self.folder = drafter, target, features, config, folder
        self.rank, self.world = _join_process_group(target.device)
        if config.sequences < self.world * config.micro_batches:
            raise ValueError(
                f"train.sequences is {config.sequences}: every one of {self.world} processes needs "
                f"{config.micro_batches} (train.micro_batches)"
            )
        self.usable = usable_sequences(features)
        self.step_module = TrainStep(drafter.train(), target, config)
        self.parallel: nn.Module = self.step_module
        if self.world > 1:
            self.parallel = nn.parallel.DistributedDataParallel(self.step_module)
        self.parameters = [weight for weight in drafter.parameters() if weight.requires_grad]
        self.optimizers = _optimizers(drafter, config)
        self.schedules = [_schedule(optimizer, config) for optimizer in self.optimizers]
        self.step = 0
        self.seconds = 0.0
        self.blocks = 0  # that had a label, all ranks together

    def run(self) -> dict[str, Any]:
        result_path = self.folder / "result.json"
        if result_path.is_file():
            return files.read_json(result_path)
        self._resume()
        metrics_path = self.folder / "metrics.jsonl"
        begin = time.perf_counter() - self.seconds
        quiet = None if self.rank == 0 else True  # None: shown where stderr is a terminal
        name = self.folder.name[:48]
        bar = tqdm(total=self.config.steps, initial=self.step, desc=name, unit="step", disable=quiet)
        with bar, metrics_path.open("a", encoding="utf-8") as metrics_file:
            while self.step < self.config.steps:
                metrics = self._advance()
                bar.update()
                self.seconds = time.perf_counter() - begin
                if self.step % LOG_EVERY == 0 or self.step == self.config.steps:
                    bar.set_postfix(loss=f"{metrics['loss']:.3f}", tau=f"{metrics['expected_tau']:.2f}")
                    if self.rank == 0:
                        metrics_file.write(json.dumps(metrics) + "\n")
                        metrics_file.flush()
                if self.step % self.config.checkpoint_every == 0 and self.step < self.config.steps:
                    self._checkpoint()
        return self._finish(metrics_path)

    def _advance(self) -> dict[str, Any]:
        """One optimiser step on this rank's share of the batch."""
        batch = batch_for_step(self.features, self.usable, self.config, self.drafter.depth, self.step)
        batch = batch.rows(slice(self.rank, None, self.world)).to(self.target.device)
        total_weight = self._global(self.step_module.weights(batch).sum()).clamp_min(1e-6)
        size = -(-len(batch.ids) // self.config.micro_batches)
        sums: list[StepSums] = []
        for first in range(0, len(batch.ids), size):
            micro = batch.rows(slice(first, first + size))
            last = first + size >= len(batch.ids)
            sync = contextlib.nullcontext() if last or self.world == 1 else self.parallel.no_sync()  # pyright: ignore
            with sync, self._autocast():
                part: StepSums = self.parallel(micro)
            self._check_finite("loss", part.loss, micro)
            (part.loss / total_weight * self.world).backward()
            sums.append(part)
        norm = nn.utils.clip_grad_norm_(self.parameters, self.config.clip)
        self._check_finite("gradient norm", norm, batch)
        for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.blocks += int(self._global(torch.stack([part.blocks for part in sums]).sum()))
        return self._metrics(sums, total_weight, norm)

    def _metrics(self, sums: list[StepSums], total_weight: Tensor, norm: Tensor) -> dict[str, Any]:
        loss = self._global(torch.stack([part.loss.detach() for part in sums]).sum()) / total_weight
        if self.step % LOG_EVERY and self.step != self.config.steps:
            return {"loss": loss.item(), "expected_tau": float("nan")}
        matches, runs, valid, blocks = (
            self._global(cast("Tensor", sum(getattr(part, name) for part in sums)))
            for name in ("matches", "runs", "valid", "blocks")
        )
        return {
            "step": self.step,
            "loss": loss.item(),
            "agreement": (matches.sum() / valid.sum().clamp_min(1)).item(),
            "expected_tau": 1 + (runs.sum() / blocks.clamp_min(1)).item(),
            "gradient_norm": norm.item(),
            "learning_rate": self.schedules[0].get_last_lr()[0],
            "seconds": round(self.seconds, 3),
        }

    def _global(self, value: Tensor) -> Tensor:
        if self.world > 1:
            dist.all_reduce(value)
        return value

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        device = self.target.device.type
        wanted = self.config.precision == "bf16" or (self.config.precision == "auto" and device == "cuda")
        return torch.autocast(device, dtype=torch.bfloat16, enabled=wanted)

    def _check_finite(self, what: str, value: Tensor, batch: Batch) -> None:
        if bool(torch.isfinite(value)):
            return
        broken = [name for name, weight in self.drafter.named_parameters() if not bool(torch.isfinite(weight).all())]
        broken += [
            f"{name}.grad"
            for name, weight in self.drafter.named_parameters()
            if weight.grad is not None and not bool(torch.isfinite(weight.grad).all())
        ]
        rows = ~torch.isfinite(batch.taps.float()).all(-1).all(-1)
        rows |= ~torch.isfinite(batch.teacher.float()).flatten(1).all(-1)
        samples = batch.samples[rows].tolist() or batch.samples.tolist()
        where = broken[0] if broken else "the features" if bool(rows.any()) else "the logits"
        raise FloatingPointError(
            f"{what} is not finite at step {self.step + 1}: first bad tensor {where}, samples {samples[:8]}"
        )

    # -- files ------------------------------------------------------------------------------------------------------

    def _resume(self) -> None:
        path = self.folder / "checkpoint.pt"
        self.folder.mkdir(parents=True, exist_ok=True)
        metrics_path = self.folder / "metrics.jsonl"
        if path.is_file():
            try:
                state = torch.load(path, map_location=self.target.device, weights_only=True)
            except (RuntimeError, EOFError, OSError, pickle.UnpicklingError, struct.error) as error:
                raise ValueError(f"{path}: damaged checkpoint ({error}); delete it to start over") from error
            self.drafter.load_state_dict(state["drafter"])
            for name, parts in (("optimizers", self.optimizers), ("schedules", self.schedules)):
                for part, saved in zip(parts, state[name], strict=True):
                    part.load_state_dict(saved)
            if state["made_from"] != self._made_from():
                raise ValueError(f"{path}: was trained on other data or another target; delete it to start over")
            self.step, self.seconds, self.blocks = state["step"], state["seconds"], state["blocks"]
        if self.rank == 0 and metrics_path.is_file():
            lines = metrics_path.read_text(encoding="utf-8").splitlines()
            kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= self.step]
            files.write_text(metrics_path, "".join(f"{line}\n" for line in kept))

    def _made_from(self) -> list[str]:
        return [self.features.sequences.digest, str(self.features.num_sequences), self.target.fingerprint()]

    def _checkpoint(self) -> None:
        if self.rank != 0:
            return
        state = {
            "drafter": self.drafter.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "schedules": [schedule.state_dict() for schedule in self.schedules],
            "step": self.step,
            "seconds": self.seconds,
            "blocks": self.blocks,
            "made_from": self._made_from(),
        }
        with files.replacing(self.folder / "checkpoint.pt") as path:
            torch.save(state, path)

    def _finish(self, metrics_path: Path) -> dict[str, Any]:
        self.drafter.eval()
        if self.world > 1:
            dist.barrier()  # rank 0 writes the metrics that every rank reads
        rows = [json.loads(line) for line in metrics_path.read_text(encoding="utf-8").splitlines()]
        tail = rows[-min(len(rows), 5) :]
        summary = {
            "steps": self.config.steps,
            "blocks": self.blocks,
            "seconds": round(self.seconds, 1),
            **{name: sum(row[name] for row in tail) / len(tail) for name in ("loss", "agreement", "expected_tau")},
        }
        self.drafter.provenance = {
            "target": {
                "name": self.target.name,
                "fingerprint": self.target.fingerprint(),
                "template": self.target.template_hash(),
                "rope_scaling": self.target.rope_scaling,
            },
            "mask_token_id": self.target.mask_token_id,
            "tap_layers": list(self.target.tap_layers),
            "training": {
                **asdict(self.config),
                "data": self.features.sequences.digest,
                "response_tokens": self.features.sequences.num_response_tokens(self.features.num_sequences),
                "blocks": self.blocks,
                "before": self.drafter.lineage,
            },
        }
        result = {"parameters": self.drafter.parameter_counts(), **summary, **self.drafter.provenance}
        if self.rank == 0:
            self.drafter.save_pretrained(self.folder / "drafter")
            files.write_json(self.folder / "result.json", result)
            (self.folder / "checkpoint.pt").unlink(missing_ok=True)
        return result


def _optimizers(drafter: Drafter, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """AdamW for everything, or Muon for matrices that act on hidden states and AdamW for norms, tables and biases."""
    adamw = {"lr": config.learning_rate, "betas": (0.9, 0.95), "weight_decay": config.weight_decay}
    named = [(name, weight) for name, weight in drafter.named_parameters() if weight.requires_grad]
    if config.optimizer == "adamw":
        return [torch.optim.AdamW([weight for _, weight in named], **adamw)]
    tables = ("markov", "slot_table")
    others = [weight for name, weight in named if weight.ndim != 2 or any(table in name for table in tables)]
    matrices = [weight for name, weight in named if weight.ndim == 2 and not any(table in name for table in tables)]
    muon = Muon(matrices, lr=config.learning_rate, weight_decay=config.weight_decay)
    return [muon, torch.optim.AdamW(others, **adamw)]


def _schedule(optimizer: torch.optim.Optimizer, config: TrainConfig) -> torch.optim.lr_scheduler.LambdaLR:
    """Linear warm-up, then cosine to zero."""
    from transformers import get_cosine_schedule_with_warmup

    return get_cosine_schedule_with_warmup(optimizer, max(1, round(config.warmup * config.steps)), config.steps)


def _join_process_group(device: torch.device) -> tuple[int, int]:
    """(rank, world size) under torchrun, else (0, 1)."""
    rank, world = rank_and_world()
    if world > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return rank, world
