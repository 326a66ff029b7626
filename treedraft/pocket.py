"""Train `pocket`, the embedded target: `python -m treedraft.pocket train`. All it learns is the procedural world."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from treedraft.cli import run_cli

ASSETS = Path(__file__).parent / "assets" / "pocket"
MARKS = ("<|user|>", "<|assistant|>", "<|end|>", "<|pad|>", "<|mask|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>{{ message['content'] }}<|end|>"
    "{% else %}<|user|>{{ message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes of the Qwen3 model; 3.49 M parameters as they stand, the embedding shared with the head."""

    vocab_size: int = 2048
    hidden_size: int = 192
    num_layers: int = 7
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 48
    intermediate_size: int = 576
    max_length: int = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """One training run. The result depends on every field but `output`, `install`, `threads` and the `*_every`."""

    steps: int = 9000
    """Optimiser steps of about `step_tokens` tokens each."""
    output: Path = Path("runs/pocket")
    """Folder of the checkpoint, metrics.jsonl and the finished model; a rerun goes on from the checkpoint."""
    install: bool = True
    """Copy the finished model into the package, where the target `pocket` is loaded from."""
    seed: int = 0
    threads: int = 1
    checkpoint_every: int = 200
    evaluate_every: int = 2000
    step_tokens: int = 2048
    batch_tokens: int = 2048
    """Padded tokens in one forward; a step accumulates several."""
    matrix_lr: float = 8e-3
    """Peak learning rate of Muon, which trains the layers' matrices."""
    other_lr: float = 3e-3
    """Peak learning rate of AdamW, which trains the embedding and the norms."""
    weight_decay: float = 0.1
    warmup: int = 100
    decay_from: float = 0.3
    """Share of the steps after which the learning rate falls linearly to 0."""
    long_share: float = 0.3
    """Share of the documents that are lists of facts with questions on them."""
    first_facts: int = 4
    """Most facts of a list at the start: looking something up is learnt on short lists."""
    most_facts: int = 140
    """Most facts of a list later, about 2,300 tokens; small numbers are drawn more often."""
    grown_by: float = 0.6
    """Share of the steps after which lists are as long as they get."""
    user_weight: float = 0.25
    """Loss weight of a token of the user's text; an answer's weighs 1."""
    bfloat16: bool = True
    """Multiply in bfloat16; weights, residual stream and loss stay in float32."""
    model: ModelConfig = ModelConfig()

    def check(self) -> None:
        """ValueError for a field out of range."""
        for name in ("steps", "threads", "checkpoint_every", "evaluate_every", "step_tokens", "batch_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("long_share", "grown_by"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be between 0 and 1")
        if not 1 <= self.first_facts <= self.most_facts:
            raise ValueError(f"first_facts is {self.first_facts}; it must be between 1 and most_facts, {self.most_facts}")


def train(config: TrainConfig) -> None:
    """Train the embedded target from scratch, or go on with a run that was stopped."""
    from treedraft import pocket_training

    pocket_training.train(config)


def sample(prompt: str, /, temperature: float = 1.0, seed: int = 0, model: Path = ASSETS) -> None:
    """Print one answer of the trained model (of the folder `model`) to a prompt."""
    from treedraft import pocket_training

    print(pocket_training.sample(model, prompt, temperature=temperature, seed=seed))


def main(arguments: list[str] | None = None) -> None:
    import tyro

    commands = {"train": train, "sample": sample}
    options = (tyro.conf.OmitArgPrefixes,)
    run_cli(
        lambda: tyro.extras.subcommand_cli_from_dict(
            commands, prog="python -m treedraft.pocket", description=__doc__, args=arguments, config=options
        )
    )


if __name__ == "__main__":
    main()
