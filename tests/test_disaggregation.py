"""Drafter and target apart: the same text, and what crosses between them is counted, known from shapes, and never grows."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator
from dataclasses import astuple
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.tiny_drafters import CONTEXTS, LONGSPARK, make_drafter, name_of, random_prompts, randomise
from treedraft.apart import ROWS, Apart, DeviceLink, ProcessLink, serve
from treedraft.config import Acceptance, DecodeConfig, Sampling
from treedraft.decode import main
from treedraft.drafter import Drafter
from treedraft.drafting import Ledger
from treedraft.speculate import Generation, generate, generate_plain, report
from treedraft.speculate_many import generate_many
from treedraft.targets import load_target
from treedraft.targets.hf import Target

every_context = pytest.mark.parametrize("context", CONTEXTS, ids=name_of)
CONFIGS = [DecodeConfig(mode="chain", depth=4), DecodeConfig(mode="tree", depth=5, width=8, budget=60)]
PROMPTS = [[5], list(range(20)), list(range(50)) * 4]
HEAD = 8 * 4  # bytes of a message's head, for one request


def drafter_with(target: Target, context: dict[str, Any]) -> Drafter:
    """One whose every weight counts, and whose correction knows some of the target's bigrams: rounds of all lengths."""
    drafter = make_drafter(target, backbone="bidirectional", correction={"name": "markov", "rank": 64}, context=context, num_layers=2)
    randomise(drafter.context)
    correction: Any = drafter.correction
    correction.markov_w1.weight.data = torch.eye(64, dtype=target.dtype)
    for prompt in PROMPTS:
        ids = [prompt[-1], *generate_plain(target, prompt, max_new_tokens=32).ids]
        correction.markov_w2.weight.data[ids[1:], ids[:-1]] += 30.0
    return drafter


def read_numbers(drafter: Drafter, context: dict[str, Any]) -> tuple[int, int]:
    """Numbers that a state reads of the last accepted row alone, and of every accepted row."""
    shape = drafter.shape
    hidden = shape.num_taps * shape.hidden_size
    if context["name"] == "full":
        return 0, hidden
    cached = 2 * 2 * shape.kv_heads * shape.head_dim if context["window"] or context["summary"] else 0
    return hidden if context.get("boundary", True) else 0, cached


def check_rounds(answer: Generation, drafter: Drafter, context: dict[str, Any], size: int) -> set[int]:
    """Every round's bytes are those of its accepted rows and its tree; returns the numbers of accepted rows."""
    last, every = read_numbers(drafter, context)
    for item in answer.rounds:
        assert item.crossed is not None
        assert item.crossed.to_drafter == 2 * HEAD + size * (last + len(item.path) * every)
        assert item.crossed.to_target == 8 + 32 * len(item.tree)
    return {len(item.path) for item in answer.rounds}


# -- one process --------------------------------------------------------------------------------------------------------


@every_context
@pytest.mark.parametrize("config", CONFIGS, ids=["chain", "tree"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_apart_is_together(tiny: Target, tiny64: Target, context: dict, config: DecodeConfig, dtype: torch.dtype) -> None:
    """Ids of plain decoding; trees of the drafter beside its target; bytes of a round that do not know the prompt's length."""
    target = tiny64 if dtype == torch.float64 else tiny
    drafter = drafter_with(target, context)
    link, seen, prompt_bytes = DeviceLink(target, drafter), [], []
    for prompt, sampling in zip(PROMPTS, (Sampling(), Sampling(), Sampling(temperature=1.0)), strict=True):
        options: dict[str, Any] = {"config": config, "sampling": sampling, "max_new_tokens": 24}
        found, together = generate(target, link, prompt, **options), generate(target, drafter, prompt, **options)
        assert found.ids == together.ids == generate_plain(target, prompt, sampling=sampling, max_new_tokens=24).ids
        assert together.crossed is None and all(item.crossed is None for item in together.rounds)
        if dtype == torch.float64:
            for one, other in zip(found.rounds, together.rounds, strict=True):
                assert one.path == other.path and torch.equal(one.tree.tokens, other.tree.tokens)
        seen.append(check_rounds(found, drafter, context, dtype.itemsize))
        assert found.crossed is not None and found.crossed.to_target == 0
        prompt_bytes.append(int(found.crossed.to_drafter))
        if context["name"] == "full":
            assert prompt_bytes[-1] == HEAD + dtype.itemsize * len(prompt) * target.tap_size
        else:
            assert prompt_bytes[-1] == HEAD + drafter.open(1).num_bytes
        assert report(found, None)["crossed"]["prompt"]["to_drafter"] == prompt_bytes[-1]
        assert "crossed" not in report(together, None)
    assert (len(set(prompt_bytes)) == 1) == (context["name"] != "full")
    assert len(set().union(*seen)) > 2


@every_context
def test_a_batch_apart(tiny64: Target, context: dict) -> None:
    """Ragged rows, rows that leave: a batch moves the rows that its requests move alone, and heads of its own."""
    drafter, config = drafter_with(tiny64, context), CONFIGS[1]
    prompts = random_prompts(tiny64, 5, seed=3)
    options: dict[str, Any] = {"config": config, "max_new_tokens": 16, "sampling": Sampling(temperature=0.8)}
    link = DeviceLink(tiny64, drafter)
    alone = [generate(tiny64, link, prompt, seed=i, **options) for i, prompt in enumerate(prompts)]
    many = generate_many(tiny64, link, prompts, batch_size=5, seeds=range(5), **options)
    assert [answer.ids for answer in many] == [answer.ids for answer in alone]
    assert link.crossed().to_drafter == 0
    last, every = read_numbers(drafter, context)
    total = sum(item.crossed.to_drafter for answer in many for item in answer.rounds if item.crossed)
    rows = sum(8 * (last + len(item.path) * every) for answer in alone for item in answer.rounds)
    live = [5, *(sum(len(answer.rounds) > turn for answer in many) for turn in range(max(len(answer.rounds) for answer in many)))]
    heads = sum(2 * 8 * (2 + 2 * number) for number in live[1:])
    leaving = sum(8 * (2 + 2 * before) for before, after in zip(live, live[1:], strict=False) if after < before)
    assert total == pytest.approx(rows + heads + leaving, rel=1e-12) and leaving > 0
    trees = sum(item.crossed.to_target for answer in many for item in answer.rounds if item.crossed)
    assert trees == pytest.approx(sum(item.crossed.to_target for answer in alone for item in answer.rounds if item.crossed))


@every_context
def test_a_state_that_was_fed_through_a_link(tiny64: Target, context: dict) -> None:
    """Prompts in chunks, ragged rounds with garbage behind them, a request that leaves: the state fed directly, to rounding."""
    drafter = drafter_with(tiny64, context)
    link, direct = DeviceLink(tiny64, drafter), drafter.open(3, capacity=4)
    apart = Apart(link, 3, capacity=4, config=CONFIGS[0], profile=None, ledger=Ledger())
    generator = torch.Generator().manual_seed(0)

    def taps(*sizes: int) -> Tensor:
        return torch.randn((*sizes, tiny64.tap_size), generator=generator, dtype=torch.float64)

    def same() -> None:
        state = link.side.drafting.state
        assert state.lengths == direct.lengths == apart.lengths
        for one, other in zip(state.stores, direct.stores, strict=True):
            if context["name"] == "full":
                for row, length in enumerate(direct.lengths):
                    torch.testing.assert_close(one[row, :length], other[row, :length], rtol=1e-12, atol=1e-12)
            else:
                torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)

    for request, chunks in enumerate(([3], [5, 4], [9, 1, 2])):
        for number in chunks:
            chunk = taps(1, number)
            apart.append(chunk, [number], [request])
            direct.append(chunk, [number], [request])
    apart.settle()
    same()
    for counts in ([2, 5, 1], [1, 1, 4]):
        rows = taps(3, max(counts))
        direct.append(rows, counts, range(3))
        for row, count in zip(rows, counts, strict=True):
            row[count:] = float("nan")
        apart.append(rows, counts, range(3))
        same()
    kept = torch.tensor([2, 0])
    apart.keep(kept)
    direct.keep(kept)
    same()
    rows = taps(2, 3)
    apart.append(rows, [3, 1], range(2))
    direct.append(rows, [3, 1], range(2))
    same()


def test_what_is_refused(tiny64: Target) -> None:
    drafter = drafter_with(tiny64, LONGSPARK)
    link = DeviceLink(tiny64, drafter)
    drawn: dict[str, Any] = {"config": CONFIGS[0], "acceptance": Acceptance(rule="ratio"), "sampling": Sampling(temperature=1.0)}
    with pytest.raises(ValueError, match="sampler_match alone, not with ratio"):
        generate(tiny64, link, [5], **drawn)
    generate(tiny64, link, [5, 9], config=CONFIGS[0], max_new_tokens=1)
    last, every = read_numbers(drafter, LONGSPARK)
    rows = [torch.zeros((1, last), dtype=torch.float64), torch.zeros((1, every), dtype=torch.float64)]
    with pytest.raises(ValueError, match=r"out of order: the target's prefixes have \[4\] tokens, the drafter's \[3\]"):
        link.tell([ROWS, 0, 1, 4], *rows)
    link.tell([ROWS, 0, 1, 3], *rows)
    with pytest.raises(ValueError, match="serves one"):
        ProcessLink(tiny64, drafter.context, 1).open(2, capacity=4, config=CONFIGS[0])
    with pytest.raises(ValueError, match="candidates is 8: a drafter in another process scores all tokens"):
        ProcessLink(tiny64, drafter.context, 1).open(1, capacity=4, config=DecodeConfig(candidates=8))
    with pytest.raises(ValueError, match="the drafter is on meta, its target on cpu: pass a DeviceLink"):
        generate(tiny64, drafter.to("meta"), [5], config=CONFIGS[0])


@pytest.mark.parametrize("batch", [1, 2])
def test_the_command_says_what_crossed(tiny: Target, tmp_path: Path, batch: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    drafter_with(tiny, LONGSPARK).save_pretrained(tmp_path)
    flags = ["--target", "tiny", "--drafter", str(tmp_path), "--drafter-device", "cpu", "--max-new-tokens", "12", "--compare"]
    flags += ["--prompts", "code", "--limit", "2", "--batch", str(batch)]
    said = {}
    for form in ([], ["--json"]):
        monkeypatch.setattr("sys.argv", ["decode", *flags, *form])
        assert main() == 0
        said[bool(form)] = capsys.readouterr().out
    records = [json.loads(line) for line in said[True].splitlines()]
    assert said[False].count("bytes between target and drafter: ") == len(records) == 2
    for record in records:
        rounds = record["crossed"]["rounds"]
        assert record["identical"] is True and record["drafter_device"] == "cpu" and len(rounds) == record["rounds"]
        mean = sum(item["to_drafter"] for item in rounds) / len(rounds)
        assert f"{record['crossed']['prompt']['to_drafter']:,.0f} of the prompt; a round {mean:,.0f} there" in said[False]


# -- two processes ------------------------------------------------------------------------------------------------------

CASES = [(context, config) for context in ({"name": "full"}, LONGSPARK) for config in CONFIGS]


def join(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=120))


def draft_for_another_process(store: str, report_to: Connection) -> None:
    """The second process: of the target it has what drafters borrow, and no layer."""
    torch.set_num_threads(1)
    join(1, store)
    for context, config in CASES:
        target = load_target("tiny", dtype=torch.float64)
        drafter = drafter_with(target, context)
        target.model.model.layers = None  # pyright: ignore
        report_to.send(astuple(serve(target, drafter, 0, config=config)))
    dist.destroy_process_group()


@pytest.fixture
def other_process(tmp_path: Path) -> Iterator[Connection]:
    spawn = multiprocessing.get_context("spawn")
    receive, send = spawn.Pipe(duplex=False)
    process = spawn.Process(target=draft_for_another_process, args=(str(tmp_path / "store"), send), daemon=True)
    process.start()
    try:
        join(0, str(tmp_path / "store"))
        yield receive
        process.join(30)
        assert process.exitcode == 0
    finally:
        process.kill()
        dist.destroy_process_group()


def test_two_processes_decode_as_one(tiny64: Target, other_process: Connection) -> None:
    """Ids and trees of one process, bytes on the wire known from shapes, the same behind 20 tokens as behind 200."""
    for context, config in CASES:
        drafter = drafter_with(tiny64, context)
        link, here = ProcessLink(tiny64, drafter.context, 1), DeviceLink(tiny64, drafter)
        out = back = 0.0
        by_rows: dict[int, list[set[float]]] = {}
        for place, prompt in enumerate(PROMPTS[1:]):
            found = generate(tiny64, link, prompt, config=config, max_new_tokens=32)
            alone = generate(tiny64, here, prompt, config=config, max_new_tokens=32)
            assert found.ids == generate_plain(tiny64, prompt, max_new_tokens=32).ids
            for one, other in zip(found.rounds, alone.rounds, strict=True):
                assert one.path == other.path and torch.equal(one.tree.tokens, other.tree.tokens) and one.crossed == other.crossed
            check_rounds(found, drafter, context, 8)
            assert found.crossed is not None and alone.crossed is not None
            assert found.crossed.to_drafter == HEAD + alone.crossed.to_drafter  # it has to be told of a request
            crossed = [found.crossed, *(item.crossed for item in found.rounds if item.crossed is not None)]
            out, back = out + sum(item.to_drafter for item in crossed), back + sum(item.to_target for item in crossed)
            for item in found.rounds:
                assert item.crossed is not None
                by_rows.setdefault(len(item.path), [set(), set()])[place].add(item.crossed.to_drafter)
        both = [pair for pair in by_rows.values() if all(pair)]
        assert len(both) > 1 and all(len(pair[0] | pair[1]) == 1 for pair in both)
        link.close()
        assert other_process.recv() == (out + HEAD, back)
