"""`python -m treedraft.floors`: what a drafter cannot know, slot by slot, against what drafters miss.

A proposal that sees less than the tokens before a slot cannot be right about all of them. The floor of a view is the least
expected rejection, the total-variation distance to the target's law, that any proposal of that view can reach:
order 0 sees the prefix and the anchor, order 1 also the realised token before the slot; with all tokens before it the floor
is 0. Rejection minus floor is the model's gap (arXiv 2608.27339).

Estimated from the target alone, at temperature 1: behind each anchor of a recorded answer so many continuations are sampled,
and the best proposal for their laws is found exactly. On the laws that it was fitted to it rejects too little ("at least"),
on the recorded answer's, which it has not seen, too much ("at most"): in expectation the floor lies between the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from treedraft.cli import Repeated, parse_arguments, run_cli
from treedraft.metrics import BOOTSTRAP_DRAWS, Interval

if TYPE_CHECKING:
    import torch

    from treedraft.drafter import Drafter
    from treedraft.evaluate import Trajectory
    from treedraft.targets.hf import Target

AT_LEAST, AT_MOST = "at least", "at most"
ORDERS = ("order 0", "order 1")
_UNLIKELY = 1e-9  # tokens that are no likelier under any law take no part in a fit


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Flags of the command."""

    target: str = "pocket"
    drafter: Repeated = ()
    """Drafters to hold against the floors, shipped names or folders (default: all that ship for the target)."""
    prompts: str | None = None
    """A set of prompts (default: the target's own)."""
    count: int = 120
    anchors: int = 2
    """Anchors an answer."""
    samples: int = 32
    """Continuations an anchor."""
    depth: int = 15
    max_new_tokens: int = 256
    output: Path = Path("ablations/results")
    """Folder of floors-TARGET.csv and floors-TARGET.json."""

    def __post_init__(self) -> None:
        for name in ("count", "anchors", "samples", "depth", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}; at least 1")
        from treedraft.ops.tree_attention.mask import MAX_NODES

        # Of every continuation, and of as many that begin with the recorded token.
        if self.depth + 2 * self.samples * (self.depth - 1) > MAX_NODES:
            most = max(1, (MAX_NODES - self.depth) // max(1, 2 * (self.depth - 1)))
            raise ValueError(f"--samples is {self.samples}; at depth {self.depth} at most {most} continuations go through one forward")


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchor:
    """A place in a recorded answer: ids [P] of the prefix, the anchor last, and the tokens [n] recorded behind it."""

    prompt: str
    prefix: np.ndarray
    record: np.ndarray

    @property
    def num_slots(self) -> int:
        return len(self.record)


def main() -> int:
    arguments = parse_arguments(Arguments, program="python -m treedraft.floors", description=__doc__ or "")
    import pandas as pd

    from treedraft import files
    from treedraft.data.prompts import default_set, prompt_set
    from treedraft.drafter import load_drafter, shipped_drafters
    from treedraft.evaluate import record
    from treedraft.run import commit, hardware
    from treedraft.targets import load_target

    target = load_target(arguments.target)
    drafters = {name: load_drafter(name, target=target) for name in arguments.drafter or shipped_drafters(target.name)}
    prompts = prompt_set(arguments.prompts or default_set(target.name), count=arguments.count)
    texts = record(target, prompts, temperature=1.0, seeds=[0], max_new_tokens=arguments.max_new_tokens)
    anchors = choose_anchors(texts, per_answer=arguments.anchors, depth=arguments.depth)
    if not anchors:
        raise ValueError("no answer is longer than one token: there is no slot to look at")
    values = measure(target, drafters, anchors, samples=arguments.samples, depth=arguments.depth)
    rows = summarise(values, [anchor.prompt for anchor in anchors])
    stem = arguments.output / f"floors-{arguments.target.replace('/', '--')}"
    with files.replacing(stem.with_name(f"{stem.name}.csv")) as path:
        pd.DataFrame(rows).to_csv(path, index=False, float_format="%.5g")
    about = {"target": target.name, "prompts": len({anchor.prompt for anchor in anchors}), "anchors": len(anchors),
             "samples": arguments.samples, "hardware": hardware(), "commit": commit()}  # fmt: skip
    files.write_json(stem.with_name(f"{stem.name}.json"), about)
    for row in rows:
        print(f"slot {row['slot']:>2}  {row['quantity']:<48} {row['value']:.3f} [{row['low']:.3f}, {row['high']:.3f}]")
    return 0


def choose_anchors(texts: Sequence[Trajectory], *, per_answer: int, depth: int, seed: int = 0) -> list[Anchor]:
    """Random places of every answer, at each of which at least one token follows; a slot is one that the answer fills."""
    rng = np.random.default_rng(seed)
    found = []
    for text in sorted(texts, key=lambda item: (item.prompt, item.seed)):
        places = np.arange(text.prompt_length, len(text.ids) - 1)
        for place in np.sort(rng.choice(places, size=min(per_answer, len(places)), replace=False)):
            record = text.ids[place + 1 : place + 1 + depth]
            found.append(Anchor(prompt=text.prompt, prefix=text.ids[: place + 1], record=record))
    return found


def best_proposal(laws: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The q [V] with the largest sum_k w_k sum_v min(p_kv, q_v), for laws p [K, V] and weights w [K].

    As a function of q_v the gain is concave and piecewise linear: its slope up to the j-th smallest p_kv is the weight of
    the laws with a p at least as large. So mass 1 goes to the steepest pieces first.
    """
    order = laws.argsort(axis=0)
    heights = np.take_along_axis(laws, order, axis=0)
    lengths = np.diff(heights, axis=0, prepend=0.0)
    slopes = weights[order][::-1].cumsum(axis=0)[::-1]
    steepest = np.argsort(-slopes, axis=None, kind="stable")
    before = lengths.ravel()[steepest].cumsum() - lengths.ravel()[steepest]
    taken = np.zeros(lengths.size)
    taken[steepest] = np.clip(1.0 - before, 0.0, lengths.ravel()[steepest])
    return taken.reshape(lengths.shape).sum(axis=0)


def floor_of(laws: np.ndarray, weights: np.ndarray, truth: np.ndarray) -> tuple[float, float]:
    """(at least, at most): the best proposal's rejection on the laws [K, V] it was fitted to, and on the law `truth` [V].

    nan without a law of positive weight.
    """
    used = weights > 0
    if not used.any():
        return float("nan"), float("nan")
    laws, weights = laws[used], weights[used] / weights[used].sum()
    likely = (laws > _UNLIKELY).any(axis=0)
    q = best_proposal(laws[:, likely], weights)
    return (
        1.0 - float(weights @ np.minimum(laws[:, likely], q).sum(axis=1)),
        1.0 - float(np.minimum(truth[likely], q).sum()),
    )


def measure(
    target: Target, drafters: Mapping[str, Drafter], anchors: Sequence[Anchor], *, samples: int, depth: int
) -> dict[str, np.ndarray]:
    """By quantity, values [A, D]: floors of both orders, and rejections of the drafters; nan where an answer has ended."""
    from tqdm import tqdm

    values: dict[str, np.ndarray] = {}

    def put(name: str, place: int, numbers: Sequence[float]) -> None:
        values.setdefault(name, np.full((len(anchors), depth), np.nan))[place, : len(numbers)] = numbers

    sampled = continuations(target, anchors, samples=samples, depth=depth)
    for place, anchor in enumerate(tqdm(anchors, desc="anchors", disable=None)):
        truth, laws, weights = laws_behind(target, anchor, sampled[place])
        for order, weight in zip(ORDERS, weights, strict=True):
            found = [floor_of(laws[order][slot], weight[slot], truth[slot]) for slot in range(anchor.num_slots)]
            for name, numbers in zip((AT_LEAST, AT_MOST), zip(*found, strict=True), strict=True):
                put(f"{order}, {name}", place, numbers)
        for name, drafter in drafters.items():
            for rung, q in proposals(target, drafter, anchor).items():
                put(f"{name}, {rung}", place, 1.0 - np.minimum(truth, q).sum(axis=1))
    for name in drafters:
        values[f"{name}, gap to order 1"] = values[f"{name}, true path"] - values[f"order 1, {AT_MOST}"]
        values[f"{name}, exposure"] = values[f"{name}, own path"] - values[f"{name}, true path"]
    return values


def continuations(target: Target, anchors: Sequence[Anchor], *, samples: int, depth: int) -> list[list[list[int]]]:
    """Of every anchor, sampled tokens of up to depth - 1 slots, end-of-text included; no draw is shared with the record."""
    from treedraft.targets.generate import generate

    requests = [anchor.prefix.tolist() for anchor in anchors for _ in range(samples)]
    seeds = [1_000_003 + number for number in range(len(requests))]
    answers = generate(target, requests, max_new_tokens=depth - 1, temperature=1.0, seeds=seeds, batch_size=128)
    return [answers[start : start + samples] for start in range(0, len(requests), samples)]


def laws_behind(
    target: Target, anchor: Anchor, sampled: Sequence[Sequence[int]]
) -> tuple[np.ndarray, dict[str, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Laws of the slots behind an anchor, of one forward over all paths as a tree: along the record [n, V]; by order,
    along the samples [n, K, V]; and the weights [n, K] of the samples under both orders.

    Order 0: what the samples say. Order 1: the sample's law with the recorded token in the last place before the slot,
    weighted by how likely the sample makes that token. A sample that ended before has weight 0.
    """
    import torch

    record, stops = anchor.record.tolist(), set(target.eos_token_ids)
    num_slots, count = anchor.num_slots, len(sampled)
    tokens, parents = [int(anchor.prefix[-1])], [-1]

    def add(token: int, parent: int) -> int:
        tokens.append(token)
        parents.append(parent)
        return len(tokens) - 1

    truth = [0]
    for token in record[:-1]:
        truth.append(add(token, truth[-1]))
    # Node whose law is that of slot s under sample k; -1 where the sample has ended.
    blind, seeing = (np.full((num_slots, count), -1) for _ in ORDERS)
    for k, path in enumerate(sampled):
        node = 0
        for slot in range(num_slots):
            blind[slot, k] = node
            if slot + 1 < num_slots:
                seeing[slot + 1, k] = add(record[slot], node)
            if slot >= len(path) or path[slot] in stops:
                break
            node = add(path[slot], node)
    seeing[0] = 0
    target.prefill(anchor.prefix[:-1].tolist())
    logits = target.verify(torch.tensor(tokens), torch.tensor(parents)).logits
    laws = torch.softmax(logits.double(), -1).cpu().numpy()
    weight_blind = (blind >= 0).astype(float)
    weight_seeing = np.zeros_like(weight_blind)
    weight_seeing[0] = 1.0
    for slot in range(1, num_slots):
        weight_seeing[slot] = (seeing[slot] >= 0) * laws[blind[slot - 1], record[slot - 1]]
    return laws[truth], {"order 0": laws[blind], "order 1": laws[seeing]}, (weight_blind, weight_seeing)


def proposals(target: Target, drafter: Drafter, anchor: Anchor) -> dict[str, np.ndarray]:
    """A drafter's laws [n, V] over target ids for the slots behind an anchor: of the backbone alone, corrected along the
    recorded tokens, and corrected along its own greedy path."""
    import torch

    # Two drafters of one target may tap different layers.
    drafter.attach(target)
    with torch.no_grad():
        prefix = torch.from_numpy(anchor.prefix).to(target.device)
        at = torch.tensor([[len(prefix) - 1]], device=target.device)
        memory = drafter.remember(target.trace(prefix[None]).taps, torch.arange(len(prefix), device=target.device))
        hidden = drafter.hidden(memory, prefix[None, -1:], at, anchor.num_slots)[:, 0]
        record = torch.from_numpy(anchor.record).to(target.device)
        previous = torch.cat([prefix[-1:], record[:-1]])[None]
        own = drafter.scorer(hidden, prefix[-1:], "per_depth")
        slots = torch.arange(anchor.num_slots, device=target.device)
        log_laws = {
            "backbone alone": torch.log_softmax(drafter.lent.head(hidden)[0].double(), -1),
            "true path": torch.log_softmax(drafter.correction(hidden, previous, drafter.lent)[0].double(), -1),
            "own path": own.expand(_first_request(slots)).double(),
        }
        whole = {}
        for name, log_q in log_laws.items():
            law = log_q.new_zeros((anchor.num_slots, target.vocab_size))
            whole[name] = law.index_copy_(1, drafter.d2t.to(target.device), log_q.exp()).cpu().numpy()
        return whole


def _first_request(slots: torch.Tensor) -> Any:
    import torch

    from treedraft.trees.scorers import Lanes

    zeros = torch.zeros_like(slots)
    return Lanes(request=zeros, slot=slots, token=zeros, expansion=slots, parent=slots - 1)


def summarise(values: Mapping[str, np.ndarray], prompts: Sequence[str], *, draws: int = BOOTSTRAP_DRAWS) -> list[dict[str, Any]]:
    """A row a slot and quantity: the mean over anchors that have it, with 95 % bounds of resampled prompts."""
    order = {prompt: place for place, prompt in enumerate(dict.fromkeys(prompts))}
    owner = np.array([order[prompt] for prompt in prompts])
    rng = np.random.default_rng(0)
    weights = rng.multinomial(len(order), np.full(len(order), 1 / len(order)), size=draws).astype(float)
    rows = []
    depth = next(iter(values.values())).shape[1]
    for slot in range(depth):
        for name, numbers in values.items():
            own = numbers[:, slot]
            known = ~np.isnan(own)
            sums = np.bincount(owner[known], own[known], minlength=len(order))
            counts = np.bincount(owner[known], minlength=len(order))
            if counts.sum():
                found = _interval(weights @ sums, weights @ counts, float(own[known].mean()))
                row = {"slot": slot + 1, "quantity": name, "value": found.value, "low": found.low, "high": found.high}
                rows.append({**row, "anchors": int(known.sum())})
    return rows


def _interval(sums: np.ndarray, counts: np.ndarray, value: float) -> Interval:
    drawn = sums[counts > 0] / counts[counts > 0]
    low, high = np.percentile(drawn, [2.5, 97.5])
    return Interval(value=value, low=float(low), high=float(high))


if __name__ == "__main__":
    run_cli(main)
