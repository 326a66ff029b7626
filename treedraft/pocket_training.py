"""The trainer behind `python -m treedraft.pocket train`: tokenizer, data, fast CPU forward, optimisers, checkpoints.

A run is a function of its config and of the world's source: data is drawn on the fly, keyed by seed and chunk number,
and the checkpoint holds the place in the stream, so a run that was stopped ends with the weights of one that was not.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import logging
import math
import os
import platform
import random
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from treedraft import files
from treedraft.data import world
from treedraft.muon import Muon
from treedraft.pocket import ASSETS, CHAT_TEMPLATE, MARKS, ModelConfig, TrainConfig

log = logging.getLogger("treedraft.pocket")

_EMBEDDING_STD = 0.3
_CHUNK = 2000  # documents drawn, sorted by length and cut into batches at a time
_SHIPPED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "model.safetensors",
    "training.json",
)


# -- tokenizer and model -----------------------------------------------------------------------------------------------


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> Any:
    """A byte-level BPE chat tokenizer of exactly `vocab_size` ids, `MARKS` first; every digit is a token of its own."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(MARKS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    user, assistant, end, pad, mask = MARKS
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=end,
        pad_token=pad,
        mask_token=mask,
        additional_special_tokens=[user, assistant],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def new_model(config: ModelConfig, tokenizer: Any, *, seed: int) -> Any:
    """A freshly initialised Qwen3ForCausalLM in float32."""
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    end, pad = (tokenizer.convert_tokens_to_ids(mark) for mark in ("<|end|>", "<|pad|>"))
    shape = Qwen3Config(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_length,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=pad,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(shape)
        # Embeddings large enough that the layers do not drown which token stands where (copying depends on it); the
        # final norm undoes it for the tied head.
        model.model.embed_tokens.weight.data.normal_(std=_EMBEDDING_STD)
    model.model.norm.weight.data.fill_(1 / (_EMBEDDING_STD * config.hidden_size**0.5))
    # Layers start as the identity.
    layers: Any = model.model.layers
    for layer in layers:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=pad)
    return model


# -- data --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """ids [B, T] right padded; weights [B, T - 1] of predicting ids[:, 1:]; the number of real tokens."""

    ids: Tensor
    weights: Tensor
    num_tokens: int


def encode(tokenizer: Any, drawn: Sequence[world.Example]) -> list[list[int]]:
    """Whole documents, user mark to end mark; the chat template's text, without the detour through jinja."""
    user, assistant, end = MARKS[:3]
    texts = [f"{user}{example.user}{assistant}{example.answer}{end}" for example in drawn]
    return tokenizer(texts, add_special_tokens=False)["input_ids"]


def draw(split: str, *, count: int, seed: int, long_share: float, most_facts: int) -> list[world.Example]:
    """World examples, a share of them lists of 1 to `most_facts` facts, of about 16 tokens each; short lists more often."""
    drawn = world.examples(split, count=count, seed=seed)
    rng = random.Random(f"long/{split}/{seed}")
    for index in range(count):
        if rng.random() < long_share:
            num_facts = round(math.exp(rng.uniform(0, math.log(most_facts))))
            drawn[index] = world.long_example(split, seed=seed, index=index, num_facts=num_facts)
    return drawn


def batches(
    documents: Sequence[Sequence[int]], tokenizer: Any, *, batch_tokens: int, user_weight: float
) -> list[Batch]:
    """Documents of similar length side by side: at most `batch_tokens` padded tokens a batch, or one document."""
    assistant, pad = (tokenizer.convert_tokens_to_ids(mark) for mark in ("<|assistant|>", "<|pad|>"))
    made, group = [], []
    for document in [*sorted(documents, key=len), None]:
        if document is None or (len(group) + 1) * len(document) > batch_tokens:
            if group:
                made.append(_pad(group, assistant, pad, user_weight))
            group = []
        group.append(document)
    return made


def _pad(group: Sequence[Sequence[int]], assistant: int, pad: int, user_weight: float) -> Batch:
    width = -(-len(group[-1]) // 8) * 8
    ids = torch.full((len(group), width), pad)
    weights = torch.zeros(len(group), width)
    for row, document in enumerate(group):
        start = document.index(assistant) + 1
        ids[row, : len(document)] = torch.tensor(document)
        # However long the user's text, it weighs no more than 100 of its tokens: lists of random facts teach little.
        weights[row, :start] = user_weight * min(1.0, 100 / start)
        weights[row, start : len(document)] = 1.0
    return Batch(ids=ids, weights=weights[:, 1:].contiguous(), num_tokens=sum(map(len, group)))


def most_facts(step: int, config: TrainConfig) -> int:
    """Of a list drawn at this step: grows evenly in its logarithm."""
    grown = min(1.0, step / max(1.0, config.grown_by * config.steps))
    return round(config.first_facts * (config.most_facts / config.first_facts) ** grown)


def stream(config: TrainConfig, tokenizer: Any, state: dict[str, Any]) -> Iterator[Batch]:
    """Training batches for ever. `state` holds the place of the next one: its chunk, the step at which that was drawn, and
    its offset there; a chunk is a function of its number and that step."""
    while True:
        if state["offset"] == 0:
            state["drawn_at"] = state["step"]
        drawn = draw(
            "train", count=_CHUNK, seed=config.seed * 100_000 + state["chunk"], long_share=config.long_share,
            most_facts=most_facts(state["drawn_at"], config),
        )  # fmt: skip
        made = batches(
            encode(tokenizer, drawn), tokenizer, batch_tokens=config.batch_tokens, user_weight=config.user_weight
        )
        random.Random(f"batches/{config.seed}/{state['chunk']}").shuffle(made)
        for index in range(state["offset"], len(made)):
            last = index + 1 == len(made)
            state["chunk"], state["offset"] = state["chunk"] + last, 0 if last else index + 1
            yield made[index]


# -- forward and loss: the same function as transformers' model, about 1.4 times as fast on one core -------------------


def hidden_states(model: Any, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Final-norm hidden states [B, T, H] of right-padded ids [B, T]; products in `dtype`, all else in float32."""
    config = model.config
    batch, length = ids.shape
    heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    cos, sin = _rope_tables(length, size, config.rope_parameters["rope_theta"], dtype)
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    epsilon = config.rms_norm_eps
    stream_ = F.embedding(ids, model.model.embed_tokens.weight)
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        normed = F.rms_norm(stream_, stream_.shape[-1:], layer.input_layernorm.weight, epsilon).to(dtype)
        weight = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]).to(dtype)
        rows = F.linear(normed, weight).view(batch, length, heads + 2 * kv_heads, size)
        query, key, value = (part.transpose(1, 2) for part in rows.split([heads, kv_heads, kv_heads], dim=2))
        query = _rotate(F.rms_norm(query, (size,), attention.q_norm.weight.to(dtype) * size**-0.5, epsilon), cos, sin)
        key = _rotate(F.rms_norm(key, (size,), attention.k_norm.weight.to(dtype), epsilon), cos, sin)
        mixed = _attend(query, key, value, future).transpose(1, 2).reshape(batch, length, heads * size)
        stream_ = stream_ + F.linear(mixed, attention.o_proj.weight.to(dtype))
        normed = F.rms_norm(stream_, stream_.shape[-1:], layer.post_attention_layernorm.weight, epsilon).to(dtype)
        gate, up = F.linear(normed, torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]).to(dtype)).chunk(2, dim=-1)
        stream_ = stream_ + F.linear(F.silu(gate) * up, mlp.down_proj.weight.to(dtype))
    return F.rms_norm(stream_, stream_.shape[-1:], model.model.norm.weight, epsilon).to(dtype)


def _rope_tables(length: int, size: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sign-folded sin [T, size]: rotate_half(x) * sin = roll(x) * signed sin."""
    frequencies = theta ** (-torch.arange(0, size, 2) / size)
    angles = (torch.arange(length)[:, None] * frequencies).repeat(1, 2)
    sign = torch.ones(size).index_fill_(0, torch.arange(size // 2), -1.0)
    return angles.cos().to(dtype), (angles.sin() * sign).to(dtype)


def _rotate(rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rows * cos + rows.roll(rows.shape[-1] // 2, dims=-1) * sin


def _attend(query: Tensor, key: Tensor, value: Tensor, future: Tensor) -> Tensor:
    """Causal attention [B, heads, T, size]; plain products, because the CPU's flash kernel is slower on short rows."""
    batch, heads, length, size = query.shape
    group = heads // key.shape[1]
    queries = query.reshape(-1, group * length, size)
    scores = torch.bmm(queries, key.reshape(-1, length, size).mT).view(-1, group, length, length)
    shares = scores.masked_fill(future, -1e4).softmax(dim=-1).view(-1, group * length, length)
    return torch.bmm(shares, value.reshape(-1, length, size)).view(batch, heads, length, size)


class _HeadLoss(torch.autograd.Function):
    """Sum of weighted cross entropies of hidden [N, H] under head [V, H]; the gradient is made with it, in slices.

    The logits of a batch are its largest tensor by far. A slice of them stays in the processor's cache.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        matrix = head.to(hidden.dtype)
        hidden_gradient, head_gradient = torch.empty_like(hidden), torch.zeros_like(head)
        total = hidden.new_zeros((), dtype=torch.float32)
        for start in range(0, len(hidden), 512):
            rows = slice(start, start + 512)
            label, weight = labels[rows, None], weights[rows, None]
            logits = (hidden[rows] @ matrix.T).float()
            log_shares = logits.sub_(logits.logsumexp(dim=1, keepdim=True))
            total -= (log_shares.gather(1, label) * weight).sum()
            slope = (
                log_shares.exp_().scatter_add_(1, label, torch.full_like(weight, -1.0)).mul_(weight).to(hidden.dtype)
            )
            hidden_gradient[rows] = slope @ matrix
            head_gradient += slope.T @ hidden[rows]
        ctx.save_for_backward(hidden_gradient, head_gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden_gradient, head_gradient = ctx.saved_tensors
        return hidden_gradient * slopes[0], head_gradient * slopes[0], None, None


def weighted_loss(model: Any, batch: Batch, dtype: torch.dtype) -> Tensor:
    """Sum over the batch of weight x cross entropy in nats."""
    hidden = hidden_states(model, batch.ids[:, :-1], dtype)
    return _HeadLoss.apply(
        hidden.reshape(-1, hidden.shape[-1]),
        model.lm_head.weight,
        batch.ids[:, 1:].reshape(-1),
        batch.weights.reshape(-1),
    )


# -- optimisation ------------------------------------------------------------------------------------------------------


def learning_rate(step: int, config: TrainConfig) -> float:
    """Share of the peak rate at a step: linear warm-up, flat, then linear to 0."""
    left = (config.steps - step) / max(1.0, config.steps * (1 - config.decay_from))
    return min(1.0, (step + 1) / config.warmup if config.warmup else 1.0, left)


def optimizers(model: Any, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the embedding and the norms (which do not decay)."""
    matrices = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
    norms = [weight for weight in model.parameters() if weight.ndim == 1]
    embedding = [model.model.embed_tokens.weight]
    adam = [dict(params=embedding, weight_decay=config.weight_decay), dict(params=norms, weight_decay=0.0)]
    made: list[torch.optim.Optimizer] = [torch.optim.AdamW(adam, lr=config.other_lr, betas=(0.9, 0.95), fused=True)]
    decay = config.weight_decay
    made.append(Muon(matrices, lr=config.matrix_lr, weight_decay=decay))
    for optimizer in made:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return made


def take_step(
    model: Any, made: list[torch.optim.Optimizer], step_batches: list[Batch], step: int, config: TrainConfig
) -> float:
    """One optimiser step over the batches; the weighted mean loss before it. ValueError if it is not finite."""
    dtype = torch.bfloat16 if config.bfloat16 else torch.float32
    total_weight = float(sum(batch.weights.sum() for batch in step_batches))
    total = 0.0
    for batch in step_batches:
        loss = weighted_loss(model, batch, dtype) / total_weight
        loss.backward()
        total += loss.item()
    if not math.isfinite(total):
        raise ValueError(f"the loss of step {step} is {total}")
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    share = learning_rate(step, config)
    for optimizer in made:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * share
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return total


# -- measuring ---------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def answer(model: Any, tokenizer: Any, prompts: Sequence[str], *, max_new_tokens: int = 320) -> list[str]:
    """Greedy answers to user messages, in one batch."""
    user, assistant = MARKS[:2]
    texts = [f"{user}{prompt}{assistant}" for prompt in prompts]
    encoded = tokenizer(texts, add_special_tokens=False, padding=True, padding_side="left", return_tensors="pt")
    ids, mask = encoded["input_ids"], encoded["attention_mask"]
    made = model.generate(input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=max_new_tokens)
    return tokenizer.batch_decode(made[:, ids.shape[1] :], skip_special_tokens=True)


def result_line(text: str) -> str | None:
    """What follows the last "Answer:" of a worked solution."""
    found = re.findall(r"Answer: *(.+?)\.?\s*$", text, flags=re.MULTILINE)
    return found[-1] if found else None


def parses(text: str) -> bool:
    """Whether the Python inside the fence, or the whole text without one, is a Python file."""
    fenced = re.search(r"```python\n(.*?)```", text, flags=re.DOTALL)
    try:
        ast.parse(fenced[1] if fenced else text)
    except (SyntaxError, ValueError):
        return False
    return True


LONG = (8, 30, 90)  # facts of the lists that are measured: about 150, 500 and 1,500 tokens


@torch.inference_mode()
def evaluate(
    model: Any, tokenizer: Any, *, split: str = "validation", count: int = 60, questions: int = 24
) -> dict[str, Any]:
    """Loss of the answers in nats a token by domain (`count` documents each), and the share of greedy answers right.

    Math is right when its last "Answer:" is; code when it parses; a question on a list when what follows ", so " is. The
    first answer of each domain comes back as text.
    """
    measured: dict[str, Any] = {}
    lists = {f"long_{facts}": facts for facts in LONG}
    for domain in (*world.DOMAINS, *lists):
        if domain in lists:
            drawn = [world.long_example(split, seed=0, index=i, num_facts=lists[domain]) for i in range(count // 5)]
            asked = drawn[: questions // 4]
        else:
            drawn = world.examples(split, count=count, seed=0, domains=[domain])
            asked = drawn[: questions if domain != "chat" else 1]
        made = batches(encode(tokenizer, drawn), tokenizer, batch_tokens=4096, user_weight=0.0)
        weight = sum(float(batch.weights.sum()) for batch in made)
        loss = sum(float(weighted_loss(model, batch, torch.float32)) for batch in made) / weight
        measured[f"loss_{domain}"] = round(loss, 4)
        texts = answer(model, tokenizer, [example.user for example in asked])
        measured[f"sample_{domain}"] = f"{asked[0].user[-300:]}\n>>> {texts[0]}"
        pairs = list(zip(texts, asked, strict=True))
        if domain == "math":
            measured["math_accuracy"] = sum(result_line(text) == result_line(e.answer) for text, e in pairs) / len(pairs)
        if domain == "code":
            measured["code_parses"] = sum(map(parses, texts)) / len(texts)
        if domain in lists:
            wanted = sum(len(example.answer.splitlines()) for example in asked)
            measured[f"accuracy_{domain}"] = round(sum(found_facts(text, e.answer) for text, e in pairs) / wanted, 3)
    return measured


def found_facts(text: str, answer: str) -> int:
    """Lines of an answer about a list whose conclusion is right; their reason may be worded in several ways."""
    told, wanted = ([line.rpartition(", so ")[2] for line in each.splitlines()] for each in (text, answer))
    return sum(got == want for got, want in zip(told, wanted, strict=False))


# -- the run -----------------------------------------------------------------------------------------------------------


def train(config: TrainConfig) -> dict[str, Any]:
    """Train, checkpointing into `config.output`; write the float16 model there and install it; the record of the run.

    ValueError if the folder holds a run with another config.
    """
    from tqdm import tqdm

    config.check()
    _configure(config)
    output, checkpoint = config.output, config.output / "checkpoint.pt"
    tokenizer = _tokenizer(config)
    model = new_model(config.model, tokenizer, seed=config.seed).train()
    made = optimizers(model, config)
    state = _resume(checkpoint, config, model, made)
    _truncate_metrics(output / "metrics.jsonl", state["step"])
    num_parameters = sum(weight.numel() for weight in model.parameters())
    log.info(f"{num_parameters:,} parameters; steps {state['step']} to {config.steps}; output {output}")
    source = stream(config, tokenizer, state)
    began, began_tokens, losses = time.perf_counter(), state["tokens"], []
    with tqdm(total=config.steps, initial=state["step"], unit="step", disable=None) as bar:
        while state["step"] < config.steps:
            step_batches, num_padded = [], 0
            while num_padded < config.step_tokens - config.batch_tokens // 2:
                batch = next(source)
                step_batches.append(batch)
                num_padded += batch.ids.numel()
                state["tokens"] += batch.num_tokens
            losses.append(take_step(model, made, step_batches, state["step"], config))
            step = state["step"] = state["step"] + 1
            seconds = time.perf_counter() - began
            if step % 20 == 0 or step == config.steps:
                loss, losses = sum(losses) / len(losses), []
                rate = (state["tokens"] - began_tokens) / seconds
                _record(
                    output, dict(step=step, loss=round(loss, 4), tokens=state["tokens"], tokens_per_second=round(rate))
                )
                bar.set_postfix(loss=f"{loss:.3f}", tokens_per_second=f"{rate:,.0f}")
                if bar.disable:
                    left = seconds / (step - state["resumed"]) * (config.steps - step)
                    log.info(
                        f"step {step}/{config.steps} loss {loss:.4f} {rate:,.0f} tokens/s {left / 60:.1f} min left"
                    )
            bar.update()
            if step % config.evaluate_every == 0 and step < config.steps:
                _report(output, step, evaluate(model.eval(), tokenizer))
                model.train()
            if step % config.checkpoint_every == 0 or step == config.steps:
                state["seconds"] = state["seconds_before"] + time.perf_counter() - began
                _save_checkpoint(checkpoint, config, model, made, state)
    return _finish(config, model, tokenizer, state)


def _configure(config: TrainConfig) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    torch.set_num_threads(config.threads)
    world_hash()
    for domain in world.DOMAINS:  # imported now, so that the hash is that of the code that will run
        world.templates(domain)


def _tokenizer(config: TrainConfig) -> Any:
    """The run's tokenizer, trained on 20,000 documents the first time."""
    from transformers import AutoTokenizer

    folder = config.output / "tokenizer"
    if not (folder / "tokenizer.json").is_file():
        drawn = draw("train", count=20_000, seed=config.seed * 100_000 + 99_999, long_share=0.05, most_facts=8)
        tokenizer = train_tokenizer([text for e in drawn for text in (e.user, e.answer)], config.model.vocab_size)
        building = folder.with_name("tokenizer.building")
        tokenizer.save_pretrained(building, save_jinja_files=False)
        shutil.rmtree(folder, ignore_errors=True)
        building.rename(folder)
    return AutoTokenizer.from_pretrained(folder)


def _identity(config: TrainConfig) -> dict[str, Any]:
    """What two runs must share to be one run: the config that matters, and the world's source."""
    fields = asdict(config)
    for name in ("output", "install", "threads", "checkpoint_every", "evaluate_every"):
        del fields[name]
    return fields | {"world_sha256": world_hash()}


@functools.cache
def world_hash() -> str:
    """sha256 of the world's source files: the data of a run with a given seed is a function of them."""
    digest = hashlib.sha256()
    for path in sorted(Path(world.__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _resume(checkpoint: Path, config: TrainConfig, model: Any, made: list[torch.optim.Optimizer]) -> dict[str, Any]:
    if not checkpoint.is_file():
        return dict(step=0, resumed=0, chunk=0, drawn_at=0, offset=0, tokens=0, seconds=0.0, seconds_before=0.0)
    saved = torch.load(checkpoint, weights_only=True)
    identity = _identity(config)
    changed = sorted(name for name in identity if saved["identity"].get(name) != identity[name])
    if changed:
        raise ValueError(
            f"{checkpoint} is of a run with another {', '.join(changed)}: remove it or choose another --output"
        )
    model.load_state_dict(saved["model"])
    for optimizer, values in zip(made, saved["optimizers"], strict=True):
        optimizer.load_state_dict(values)
    state = saved["state"]
    return state | dict(resumed=state["step"], seconds_before=state["seconds"])


def _save_checkpoint(
    checkpoint: Path, config: TrainConfig, model: Any, made: list[torch.optim.Optimizer], state: dict[str, Any]
) -> None:
    values = dict(
        identity=_identity(config),
        model=model.state_dict(),
        optimizers=[optimizer.state_dict() for optimizer in made],
        state=state,
    )
    with files.replacing(checkpoint) as temporary:
        torch.save(values, temporary)


def _truncate_metrics(path: Path, step: int) -> None:
    """Drop rows past the checkpoint, which the resumed run writes again."""
    if path.is_file():
        rows = [line for line in path.read_text(encoding="utf-8").splitlines() if json.loads(line)["step"] <= step]
        files.write_text(path, "".join(f"{row}\n" for row in rows))


def _record(output: Path, row: dict[str, Any]) -> None:
    output.mkdir(parents=True, exist_ok=True)
    with (output / "metrics.jsonl").open("a", encoding="utf-8") as stream_:
        stream_.write(json.dumps(row) + "\n")


def _report(output: Path, step: int, measured: dict[str, Any]) -> None:
    numbers = {name: value for name, value in measured.items() if not name.startswith("sample_")}
    _record(output, dict(step=step, **numbers))
    log.info(f"step {step} validation {numbers}")
    for name, text in measured.items():
        if name.startswith("sample_"):
            log.info(f"{name}: {text}")


def _finish(config: TrainConfig, model: Any, tokenizer: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Round to float16, measure what is shipped, write the model folder and install it."""
    folder = config.output / "model"
    model.half().float().eval()
    measured = evaluate(model, tokenizer, count=200, questions=100)
    _report(config.output, state["step"], measured)
    rows = [json.loads(line) for line in (config.output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    record = {
        "command": f"python -m treedraft.pocket train --steps {config.steps} --seed {config.seed} "
        f"--threads {config.threads}",
        "config": _identity(config),
        "seed": config.seed,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "steps": state["step"],
        "tokens": state["tokens"],
        "seconds": round(state["seconds"]),
        "losses": {row["step"]: row["loss"] for row in rows if "loss" in row and row["step"] % 100 == 0},
        "hardware": f"{config.threads} thread(s) of {_processor()}",
        "torch": torch.__version__,
        "validation": {name: value for name, value in measured.items() if not name.startswith("sample_")},
    }
    model.half().save_pretrained(folder)
    model.float()
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    files.write_json(folder / "training.json", record)
    if config.install:
        for name in _SHIPPED:
            with files.replacing(ASSETS / name) as temporary:
                shutil.copyfile(folder / name, temporary)
        log.info(f"installed in {ASSETS}")
    return record


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.+)", cpuinfo.read_text()) if cpuinfo.is_file() else []
    return names[0] if names else platform.processor() or platform.machine()


def sample(folder: Path, prompt: str, *, temperature: float, seed: int) -> str:
    """One answer of a trained model folder; ValueError if there is none."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not (folder / "model.safetensors").is_file():
        raise ValueError(f"no model in {folder}: run `python -m treedraft.pocket train`")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if temperature == 0:
        return answer(model, tokenizer, [prompt])[0]
    user, assistant = MARKS[:2]
    ids = tokenizer(f"{user}{prompt}{assistant}", add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.random.fork_rng(devices=[]), torch.inference_mode():
        torch.manual_seed(seed)
        made = model.generate(input_ids=ids, do_sample=True, temperature=temperature, top_k=0, max_new_tokens=400)
    return tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)
