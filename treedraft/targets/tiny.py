"""A seeded random two-layer model with a byte tokenizer: what tests decode with. It knows nothing, but is exact."""

from __future__ import annotations

import torch

from treedraft.targets.hf import Target


def load(
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    seed: int = 0,
    vocab_size: int = 64,
    padded_vocab_size: int | None = None,
    num_layers: int = 2,
    family: str = "qwen3",
    tied: bool = True,
    num_heads: int = 4,
    kv_heads: int = 2,
    max_length: int = 512,
    rope: dict | None = None,
    sharpness: float = 4.0,
    attention: str = "auto",
) -> Target:
    """Heads of 8, a hidden size of 8 a query head; weights from `seed`. `sharpness` scales the head, so that greedy text is not flat.

    The last two real ids are end-of-text and mask.
    """
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    classes = {"qwen3": (Qwen3Config, Qwen3ForCausalLM), "llama": (LlamaConfig, LlamaForCausalLM)}
    if family not in classes:
        raise ValueError(f"unknown family {family!r}; known: {', '.join(classes)}")
    config_class, model_class = classes[family]
    rows = padded_vocab_size or vocab_size
    config = config_class(
        vocab_size=rows,
        hidden_size=8 * num_heads,
        intermediate_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=kv_heads,
        head_dim=8,
        max_position_embeddings=max_length,
        tie_word_embeddings=tied,
        eos_token_id=vocab_size - 2,
        bos_token_id=None,
        pad_token_id=None,
        rope_parameters=rope or {"rope_type": "default", "rope_theta": 10000.0},
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                torch.nn.init.normal_(weight, std=1.0 if "embed" in name or "lm_head" in name else 0.3)
    model.model.norm.weight.data.fill_(sharpness / config.hidden_size**0.5)
    model = model.to(device=torch.device(device or "cpu"), dtype=dtype or torch.float32)
    tokenizer = byte_tokenizer(vocab_size)
    return Target(name="tiny", model=model, tokenizer=tokenizer, mask_token_id=vocab_size - 1, attention=attention)


def byte_tokenizer(vocab_size: int):
    """One id a byte value modulo the ids left over by the two special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    lower, digits, upper = ([chr(c) for c in range(*ends)] for ends in ((97, 123), (48, 58), (65, 91)))
    printable = [*lower, "Ġ", *digits, *upper]
    symbols = (printable + [c for c in alphabet if c not in printable])[: vocab_size - 2]
    # Ids beyond the bytes stand for nothing, but they can be drawn.
    symbols += [f"<{index}>" for index in range(len(symbols), vocab_size - 2)]
    vocabulary = {symbol: index for index, symbol in enumerate(symbols)}
    vocabulary |= {"<|end|>": vocab_size - 2, "<|mask|>": vocab_size - 1}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=symbols[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<|mask|>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", mask_token="<|mask|>")
    fast.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    return fast
