"""`python -m treedraft.decode --tree --depth 23 "Write a haiku."`: decode with a drafter and say how it went."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from treedraft.cli import Repeated, parse_arguments, run_cli
from treedraft.config import LOSSY, MOST_NODES, Acceptance, Admit, DecodeConfig, Rule, Rung, Sampling

if TYPE_CHECKING:
    from tyro.conf import Positional

    from treedraft.apart import Link
    from treedraft.costs import Profile
    from treedraft.drafter import Drafter
    from treedraft.speculate import Generation
    from treedraft.targets.hf import Target
else:
    try:
        from tyro.conf import Positional
    except ModuleNotFoundError:  # the annotation alone needs it
        Positional = Annotated[Any, None]


_SHAPING = ("admit", "frontier", "gap_cap", "caps")  # of a best-first tree, where they are set


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Flags of the command."""

    prompt: Positional[str | None] = None
    """What to ask. Without it, and without --prompts, a conversation is read from standard input, a line a turn."""
    prompts: str | None = None
    """A JSONL file of prompts (field `turns`), or the name of a set: world, math, code, chat, gsm8k, ..."""
    limit: int | None = None
    """Decode only the first prompts of the set."""
    batch: int = 1
    """Answer so many of --prompts at once."""
    target: str = "smollm2-135m"
    """A target's name, a model folder, or a hub id of the Llama or Qwen3 families."""
    drafter: str | None = None
    """A drafter folder, or the name of a shipped one (default: the target's first)."""
    tree: bool = False
    """Draft a tree (the default)."""
    chain: bool = False
    """Draft a single chain."""
    depth: int | None = None
    """Drafted tokens on a path (default: as trained)."""
    width: int = 7
    """Children of an expanded node."""
    budget: int | Literal["auto"] = 255
    """Nodes of a tree, the root included; "auto" ends a tree where another node would cost more time than it saves."""
    scorer: Rung = "conditional"
    """How a node is scored: by the backbone alone, corrected once a depth along the greedy path, or under its own path."""
    admit: Admit | None = None
    """fanout: all children of an expanded node enter the tree; pop: the likeliest nodes do (default: fanout; pop with --budget auto)."""
    frontier: int | None = None
    """Expand no more than so many nodes of a depth (default: any number)."""
    gap_cap: str | None = None
    """BETA,G0: fewer children where the drafter is sure, W sigmoid(-BETA (gap - G0)) of them, gap that of the best two log q."""
    caps: str | None = None
    """The most children of a node at each depth, the root's first, as in 3,2,1; or a file of `bench ranks` to take them from."""
    count_root: bool = True
    """Whether the budget counts the root."""
    candidates: int | None = None
    """Tokens a slot that the correction looks at (default: all); prints how often the target's was among them."""
    temperature: float | None = None
    """0 is greedy (the default, unless a filter asks for sampling: then 1)."""
    top_k: int | None = None
    """Sample from the k likeliest tokens."""
    top_p: float | None = None
    """Sample from the fewest tokens that hold this much probability."""
    min_p: float | None = None
    """Sample from tokens of at least this share of the likeliest one's probability."""
    repetition_penalty: float | None = None
    """Above 1: tokens of the prompt and the answer so far become less likely."""
    frequency_penalty: float | None = None
    """Taken off a token's logit for every time that the answer has it."""
    presence_penalty: float | None = None
    """Taken off a token's logit once the answer has it."""
    logit_bias: Repeated = ()
    """ID=BIAS, added to a token's logit."""
    accept: Rule = "sampler_match"
    """The acceptance rule; all but sampler_match draw their drafts, and need a temperature."""
    widths: tuple[int, ...] = (4, 2)
    """Draws a node of each level, for rules with siblings; 1 below the last level named."""
    seed: int = 0
    """Seed of the sampling noise."""
    max_new_tokens: int = 256
    """The longest answer, in tokens."""
    stop: Repeated = ()
    """Strings that end the answer."""
    compare: bool = False
    """Also decode plainly, check that the ids are identical, and print the speed-up."""
    show_tree: bool = False
    """Draw the tree of the round that accepted most."""
    json: bool = False
    """Print one JSON object a prompt on standard output, and nothing else there."""
    rope_scaling: str | None = None
    """ntk:FACTOR: rotary angles of target and drafter for a context that many times longer."""
    attention: Literal["auto", "triton", "hybrid", "sdpa", "reference"] = "auto"
    """How the target attends to a tree; all but auto fail where they cannot run."""
    verbose: bool = False
    """Say on standard error which attention was chosen, and why."""
    device: str | None = None
    """Where the target runs (default: CUDA where there is some)."""
    drafter_device: str | None = None
    """Where the drafter runs apart from its target; counts the bytes that cross (the target's own device will do)."""
    dtype: str | None = None
    """float32, bfloat16, ... (default: bfloat16 on CUDA, float32 elsewhere)."""


def main() -> int:
    arguments = parse_arguments(Arguments, program="python -m treedraft.decode", description=__doc__ or "")
    config, limit, sampling = _decode_config(arguments), arguments.limit, _sampling(arguments)
    acceptance = Acceptance(rule=arguments.accept, widths=arguments.widths)
    if acceptance.rule != "sampler_match" and sampling.used_temperature == 0:
        raise ValueError(f"--accept {acceptance.rule} draws its drafts: it needs a --temperature above 0")
    if limit is not None and limit < 1:
        raise ValueError(f"--limit is {limit}; at least 1")
    if arguments.prompt is not None and arguments.prompts is not None:
        raise ValueError("give a prompt or --prompts, not both")
    if arguments.budget == "auto" and (arguments.chain or acceptance.rule != "sampler_match"):
        raise ValueError("--budget auto sizes a best-first tree: it goes with neither --chain nor another --accept")
    if arguments.budget == "auto" and config.admit != "pop":
        raise ValueError("--budget auto weighs node by node: it needs --admit pop")
    shaping = [f"--{name.replace('_', '-')}" for name in _SHAPING if getattr(arguments, name) is not None]
    shaping += [] if arguments.count_root else ["--no-count-root"]
    if shaping and (arguments.chain or acceptance.rule != "sampler_match"):
        raise ValueError(f"{shaping[0]} shapes a best-first tree: it goes with neither --chain nor another --accept")
    if arguments.batch < 1 or (arguments.batch > 1 and (arguments.prompts is None or acceptance.rule != "sampler_match")):
        raise ValueError(f"--batch is {arguments.batch}: at least 1, and more go with --prompts and sampler_match alone")
    if arguments.prompt is not None and not arguments.prompt.strip():
        raise ValueError("empty prompt: there is nothing to answer")
    conversations = _conversations(arguments)
    if arguments.drafter_device is not None and acceptance.rule != "sampler_match":
        raise ValueError(f"--drafter-device goes with sampler_match alone: the laws that {acceptance.rule} weighs would have to cross")
    target, drafter = _load(arguments)
    drafter.check_candidates(config.candidates, config.scorer)
    if arguments.depth is None:
        config = _decode_config(arguments, depth=drafter.depth)
    if arguments.budget == "auto":
        from treedraft.costs import profile_of

        profile = profile_of(target, drafter, config.depth, scorer=config.scorer, candidates=config.candidates)
    else:
        profile = None
    from treedraft.apart import DeviceLink

    link = DeviceLink(target, drafter) if arguments.drafter_device is not None else None
    command = _Command(
        target=target, drafter=link or drafter, config=config, sampling=sampling, acceptance=acceptance, profile=profile,
        arguments=arguments,
    )  # fmt: skip
    if arguments.batch > 1:
        return 0 if command.decode_batch([turns for turns, _ in conversations]) else 1
    good = True
    for turns, record_turn in conversations:
        good &= command.decode(turns, record_turn)
    return 0 if good else 1


def _decode_config(arguments: Arguments, *, depth: int = 15) -> DecodeConfig:
    if arguments.tree and arguments.chain:
        raise ValueError("--tree and --chain exclude each other")
    return DecodeConfig(
        mode="chain" if arguments.chain else "tree",
        depth=arguments.depth if arguments.depth is not None else depth,
        width=arguments.width,
        budget=MOST_NODES if arguments.budget == "auto" else arguments.budget,
        scorer=arguments.scorer,
        admit=arguments.admit or ("pop" if arguments.budget == "auto" else "fanout"),
        count_root=arguments.count_root,
        caps=_caps(arguments.caps),
        gap_cap=_gap_cap(arguments.gap_cap),
        frontier=arguments.frontier,
        candidates=arguments.candidates,
        temperature=_sampling(arguments).used_temperature,
    )


def _caps(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(cap) for cap in text.split(","))
    except ValueError:
        from treedraft.metrics import measured_caps

        return measured_caps(Path(text))


def _gap_cap(text: str | None) -> tuple[float, float] | None:
    if text is None:
        return None
    try:
        beta, g0 = map(float, text.split(","))
    except ValueError:
        raise ValueError(f"--gap-cap {text!r}: expected BETA,G0, as in 1,1") from None
    return beta, g0


def _sampling(arguments: Arguments) -> Sampling:
    names = [name for name in Sampling.__dataclass_fields__ if name != "logit_bias"]
    return Sampling(
        **{name: getattr(arguments, name) for name in names}, logit_bias=tuple(map(_bias, arguments.logit_bias))
    )


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise ValueError(f"--logit-bias {text!r}: expected ID=BIAS, as in 42=-5") from None


def _conversations(arguments: Arguments) -> Iterator[tuple[list[str], Any]]:
    """(turns so far, what to do with the answer) for every question."""
    if arguments.prompt is not None:
        return iter([([arguments.prompt], None)])
    if arguments.prompts is not None:
        from treedraft.data.prompts import prompt_set

        prompts = prompt_set(arguments.prompts, count=arguments.limit)
        return iter([(list(prompt.turns), None) for prompt in prompts])
    return _dialogue()


def _dialogue() -> Iterator[tuple[list[str], Any]]:
    turns: list[str] = []
    interactive = sys.stdin.isatty()
    while True:
        if interactive:
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            if not turns:
                raise ValueError("empty prompt: standard input has no line")
            return
        if line.strip():
            turns.append(line.strip())
            yield turns, turns.append


def _load(arguments: Arguments) -> tuple[Target, Drafter]:
    from treedraft.drafter import load_drafter
    from treedraft.targets import load_target, parse_device, parse_dtype

    drafter_device = parse_device(arguments.drafter_device)
    target = load_target(
        arguments.target, device=parse_device(arguments.device), dtype=parse_dtype(arguments.dtype), rope_scaling=arguments.rope_scaling,
        attention=arguments.attention,
    )  # fmt: skip
    if arguments.verbose:
        print(f"attention: {target.attention.reason}", file=sys.stderr)
    return target, load_drafter(arguments.drafter, target=target, device=drafter_device)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Command:
    """What every answer of one call shares."""

    target: Target
    drafter: Drafter | Link
    config: DecodeConfig
    sampling: Sampling
    acceptance: Acceptance
    profile: Profile | None
    arguments: Arguments

    @property
    def options(self) -> dict[str, Any]:
        return {
            "sampling": self.sampling,
            "max_new_tokens": self.arguments.max_new_tokens,
            "stop": self.arguments.stop,
        }

    def decode(self, turns: list[str], record_turn: Any) -> bool:
        """Answer one conversation; False if the answer is not what it has to be."""
        from treedraft import speculate

        prompt, seed = self.target.encode_chat(turns), self.arguments.seed
        stream = None if self.arguments.json else _Streamer(self.target, self.arguments.stop)
        result = speculate.generate(
            self.target, self.drafter, prompt, config=self.config, acceptance=self.acceptance, profile=self.profile,
            seed=seed, on_tokens=stream, **self.options,
        )  # fmt: skip
        if record_turn is not None:
            record_turn(result.text if result.text.strip() else "...")
        if stream is not None:
            print("\n" if result.text else "", flush=True)
        return self._say(turns[-1] if record_turn is None else turns[-2], prompt, result)

    def decode_batch(self, conversations: list[list[str]]) -> bool:
        """Answer many, `--batch` at a time, each told as it ends."""
        from treedraft.speculate_many import generate_many

        prompts = [self.target.encode_chat(turns) for turns in conversations]
        good: list[bool] = []

        def tell(index: int, answer: Generation) -> None:
            if not self.arguments.json:
                print(f"{conversations[index][-1]}\n{answer.text}\n")
            good.append(self._say(conversations[index][-1], prompts[index], answer))

        generate_many(
            self.target, self.drafter, prompts, config=self.config, profile=self.profile, on_done=tell,
            batch_size=self.arguments.batch, seeds=[self.arguments.seed] * len(prompts), **self.options,
        )  # fmt: skip
        return all(good)

    def _say(self, question: str, prompt: list[int], result: Generation) -> bool:
        """Print the numbers of an answer, compared with plain decoding if asked for."""
        record = self._record(prompt, result)
        if self.arguments.json:
            print(json.dumps({"prompt": question, **self._settings(), **record}, ensure_ascii=False), flush=True)
        else:
            print(_words(record, self.acceptance.rule))
        if self.arguments.show_tree and result.rounds:
            best = max(result.rounds, key=lambda item: len(item.path))
            print(_drawing(self.target, best), file=sys.stderr if self.arguments.json else sys.stdout)
        # The other rules share the target's law with plain decoding, not its draws; half precision promises no identity.
        excused = self.target.dtype.itemsize < 4 and record.get("first_difference", {}).get("near_tie", False)
        excused |= not record.get("plain_repeats", True)
        return bool(record.get("identical", True)) or self.acceptance.rule != "sampler_match" or excused

    def _settings(self) -> dict[str, Any]:
        """How it was decoded, as JSON has it: what shapes the drafts is the mode's or the rule's own."""
        config, rule = self.config, self.acceptance.rule
        shape: dict[str, Any] = {"mode": config.mode, "scorer": config.scorer}
        if rule != "sampler_match":
            shape |= {"mode": "drawn", "widths": self.acceptance.levels(config.depth)}
        elif config.mode == "tree":
            shape |= {"width": config.width, "budget": self.arguments.budget, "admit": config.admit}
            shape |= {name: value for name in _SHAPING if (value := getattr(config, name)) is not None}
            shape |= {} if config.count_root else {"count_root": False}
        if config.candidates is not None:
            shape["candidates"] = config.candidates
        if self.arguments.rope_scaling is not None:
            shape["rope_scaling"] = self.arguments.rope_scaling
        if self.arguments.drafter_device is not None:
            shape["drafter_device"] = self.arguments.drafter_device
        sampling = {name: value for name, value in asdict(self.sampling).items() if value not in (None, ())}
        return {"target": self.target.name, "depth": config.depth, **shape, "accept": rule, "lossless": rule not in LOSSY,
                "sampling": sampling, "temperature": config.temperature, "seed": self.arguments.seed,
                "batch": self.arguments.batch}  # fmt: skip

    def _record(self, prompt: list[int], result: Generation) -> dict[str, Any]:
        from treedraft import speculate

        if not self.arguments.compare:
            return speculate.report(result, None)
        options = {**self.options, "seed": self.arguments.seed}
        plain = speculate.generate_plain(self.target, prompt, **options)
        record = speculate.report(result, plain)
        if not record["identical"] and self.acceptance.rule == "sampler_match":
            again = speculate.generate_plain(self.target, prompt, **options)
            record["plain_repeats"] = again.ids == plain.ids
            greedy = self.sampling in (Sampling(), Sampling(temperature=0.0))
            record["first_difference"] = speculate.audit(self.target, prompt, result, plain, greedy=greedy)
        if self.arguments.batch > 1:
            # Its time is a share of the batch's, that of plain decoding is not.
            record.pop("speedup")
        return record


class _Streamer:
    """Prints text as it becomes certain: a character split over two tokens waits for its second half."""

    def __init__(self, target: Target, stop: tuple[str, ...]) -> None:
        self.target, self.stop, self.printed = target, stop, 0

    def __call__(self, result: Generation) -> None:
        text = result.text if result.finished else self._certain(self.target.decode(result.ids))
        print(text[self.printed :], end="", flush=True)
        self.printed = max(self.printed, len(text))

    def _certain(self, text: str) -> str:
        """Without half a character, and without what may be the beginning of a stop string."""
        text = text.rstrip("\ufffd")  # some tokenizers give one for every byte of it
        longest = max((len(stop) for stop in self.stop), default=1) - 1
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self.stop):
                return text[:-size]
        return text


def _words(record: dict[str, Any], rule: Rule) -> str:
    import numpy as np

    from treedraft.metrics import conditional

    stages = "  ".join(f"{name} {value:.2f} s" for name, value in record["seconds"].items())
    by_depth = " ".join(f"{share:.2f}" for share in conditional(np.array(record["survival"])))
    recall = f"   target's token among the candidates {record['candidate_recall']:.1%}" if "candidate_recall" in record else ""
    lines = [
        f"tau {record['tau'] or float('nan'):.2f}   {record['tokens_per_second']:.1f} tokens/s   "
        f"{record['tokens']} tokens in {record['rounds']} rounds   ended by {record['finish_reason']}{recall}",
        f"stages: {stages}",
        *_crossing(record),
        f"acceptance by depth, of the rounds that got there: {by_depth or 'none'}",
    ]
    if "identical" in record:
        same = "identical to plain decoding" if record["identical"] else "NOT IDENTICAL to plain decoding"
        if rule != "sampler_match":
            same = "lossy: not the law of plain decoding" if rule in LOSSY else "other draws from the law of plain decoding"
        if not record.get("plain_repeats", True):
            same = "nothing to compare with: plain decoding does not repeat itself here"
        elif "first_difference" in record:
            same += _difference(record["first_difference"])
        plain = f"{record['plain_tokens_per_second']:.1f} tokens/s"
        if "speedup" in record:
            same += f"   speed-up {record['speedup']:.2f} x over {plain}"
        lines.append(same)
    return "\n".join(lines)


def _difference(found: dict[str, Any]) -> str:
    """What `speculate.audit` found, in words."""
    where = f" from token {found['place']} on"
    if "units" not in found:
        return where
    (one, other), logits = found["tokens"], found["logits"]
    return f"{where}, {one} in place of {other} (logits {logits[0]:.4f} and {logits[1]:.4f}, {found['units']:.1f} units of the last place)"


def _crossing(record: dict[str, Any]) -> list[str]:
    if "crossed" not in record:
        return []
    prompt, rounds = record["crossed"]["prompt"], record["crossed"]["rounds"]
    out, back = (sum(item[way] for item in rounds) / max(1, len(rounds)) for way in ("to_drafter", "to_target"))
    return [f"bytes between target and drafter: {prompt['to_drafter']:,.0f} of the prompt; a round {out:,.0f} there, {back:,.0f} back"]


def _drawing(target: Target, best: Any) -> str:
    return best.tree.render(lambda token: repr(target.tokenizer.decode([token])), set(best.path))


if __name__ == "__main__":
    run_cli(main)
