"""What the target emits after a history: its logits through penalties, temperature and filters, then one keyed draw.

Plain and speculative decoding share this, node by node with each node's own history, so neither can warp the law in a
way of its own. The processors are transformers' own, in the order in which its `generate` applies them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from treedraft import noise
from treedraft.config import Sampling


class Sampler:
    """Draws the tokens of one request. ValueError if a biased id is not in the vocabulary."""

    def __init__(self, sampling: Sampling, prompt: Sequence[int], *, seed: int, vocab_size: int) -> None:
        outside = [token for token, _ in sampling.logit_bias if not 0 <= token < vocab_size]
        if outside:
            raise ValueError(f"logit_bias names token {outside[0]}; the vocabulary has 0..{vocab_size - 1}")
        self.temperature, self.seed, self.prompt = sampling.used_temperature, seed, list(prompt)
        self.processors = _processors(sampling, len(self.prompt))

    def scores(self, logits: Tensor, emitted: Sequence[int]) -> Tensor:
        """Processed logits, float64 [V], of the token after the prompt and `emitted`; -inf for what is filtered out.

        FloatingPointError if the logits [V] are not finite.
        """
        if not bool(torch.isfinite(logits).all()):
            raise FloatingPointError(f"the target's logits at position {len(self.prompt) + len(emitted)} are not finite")
        if not self.processors:
            return logits.double()
        history = torch.tensor([[*self.prompt, *emitted]], device=logits.device)
        return self.processors(history, logits.double()[None])[0]  # pyright: ignore[reportArgumentType]

    def law(self, logits: Tensor, emitted: Sequence[int]) -> Tensor:
        """The law [V] that the next token is drawn from, one-hot at temperature 0."""
        scores = self.scores(logits, emitted)
        if self.temperature == 0:
            return torch.zeros_like(scores).index_fill_(0, noise.first_argmax(scores), 1.0)
        return scores.softmax(-1)

    def draw(self, logits: Tensor, emitted: Sequence[int]) -> int:
        """The token after the prompt and `emitted`, by the noise of its position."""
        scores = self.scores(logits, emitted)
        if self.temperature == 0:
            return int(noise.first_argmax(scores))
        position = len(self.prompt) + len(emitted)
        return int(noise.draw(scores, 1.0, noise.gumbel(self.seed, position, len(scores))))


def _processors(sampling: Sampling, prompt_length: int) -> LogitsProcessorList:
    found = LogitsProcessorList()
    if sampling.logit_bias:
        found.append(SequenceBiasLogitsProcessor([[[token], float(bias)] for token, bias in sampling.logit_bias]))
    if sampling.repetition_penalty is not None:
        found.append(RepetitionPenaltyLogitsProcessor(float(sampling.repetition_penalty)))
    if sampling.frequency_penalty or sampling.presence_penalty:
        found.append(CountPenalty(sampling.frequency_penalty or 0.0, sampling.presence_penalty or 0.0, prompt_length))
    if sampling.used_temperature not in (0, 1):
        found.append(TemperatureLogitsWarper(float(sampling.used_temperature)))
    if sampling.top_k is not None:
        found.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p is not None:
        found.append(TopPLogitsWarper(float(sampling.top_p)))
    if sampling.min_p is not None:
        found.append(MinPLogitsWarper(float(sampling.min_p)))
    return found


class CountPenalty(LogitsProcessor):
    """Lower an emitted token by frequency x its count + presence; the prompt does not count (OpenAI's parameters).

    It counts the history that it is given, so that rejected drafts leave no trace.
    """

    def __init__(self, frequency: float, presence: float, prompt_length: int) -> None:
        self.frequency, self.presence, self.prompt_length = frequency, presence, prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        emitted = input_ids[:, self.prompt_length :]
        counts = torch.zeros_like(scores).scatter_add_(1, emitted, torch.ones_like(emitted, dtype=scores.dtype))
        return scores - self.frequency * counts - self.presence * (counts > 0)
