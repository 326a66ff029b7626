"""Several arms at once, one process and an equal share of the cores each: on CPUs that beats more threads a product."""

from __future__ import annotations

import io
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor

import torch
from tqdm import tqdm

from treedraft.cells import Workbench, cell_folder, is_done, steps_done, train_folder
from treedraft.grid import Cell
from treedraft.run import is_measured

_CELL_STEPS = 40  # measuring a cell takes about as long as that many training steps

_bench: Workbench | None = None


def run_side_by_side(bench: Workbench, groups: Sequence[Sequence[Cell]], jobs: int | None) -> dict[str, str]:
    """Train and measure groups of cells, each group one arm; returns the reason of every cell that failed.

    What all arms share (training text, features, recorded decodings) is made first, here.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    wanted = jobs if jobs is not None else (1 if bench.target.device.type == "cuda" else cores)
    # Not of how many arms are left: sums round otherwise with other threads, and a resumed grid has to end the same.
    threads = max(1, cores // wanted)
    wanted = min(wanted, len(groups))
    for group in groups:
        if not is_done(train_folder(group[0].arm)):
            bench.features(group[0].arm.data, group[0].arm.drafter)
    for evaluate, temperature in dict.fromkeys((cell.evaluate, cell.decode.temperature) for group in groups for cell in group):
        bench.replay(evaluate, temperature)
    failures: dict[str, str] = {}
    with tqdm(total=sum(map(_work, groups)), desc="steps", unit="step", disable=None, smoothing=0.1) as bar:
        before = sum(map(_done, groups))
        if wanted == 1:
            own = torch.get_num_threads()
            torch.set_num_threads(threads)
            for group in groups:
                failures |= run_group(bench, group)
                bar.update(sum(map(_done, groups)) - before - bar.n)
            torch.set_num_threads(own)  # clocks are read with all of them
            return failures
        setup = bench.settings, threads, os.getpid()
        pool = ProcessPoolExecutor(wanted, multiprocessing.get_context("spawn"), _start, setup)
        try:
            futures = [pool.submit(_run_in_worker, list(group)) for group in groups]
            while not all(future.done() for future in futures):
                time.sleep(0.5)
                bar.update(sum(map(_done, groups)) - before - bar.n)
            for group, future in zip(groups, futures, strict=True):
                failures |= _outcome(group, future)
        finally:
            pool.shutdown(cancel_futures=True)
    return failures


def _work(group: Sequence[Cell]) -> int:
    """What is still to do for an arm, in steps of its training; a cell counts as _CELL_STEPS of them."""
    return group[0].arm.train.steps + _CELL_STEPS * len(group) - _done(group)


def _done(group: Sequence[Cell]) -> int:
    measured = sum(is_measured(cell_folder(cell)) for cell in group)
    return steps_done(group[0].arm) + _CELL_STEPS * measured


def run_group(bench: Workbench, group: Sequence[Cell]) -> dict[str, str]:
    """One arm: train it, then measure its cells. A failure is reported and does not stop the others."""
    failures: dict[str, str] = {}
    try:
        bench.train(group[0].arm)
    except Exception as error:
        traceback.print_exc()
        return {cell.cell_id: _reason(error) for cell in group}
    for cell in group:
        failures |= attempt(cell.cell_id, lambda cell=cell: bench.evaluate(cell))
    return failures


def attempt(name: str, work: Callable[[], object]) -> dict[str, str]:
    """Empty, or the reason why it failed."""
    try:
        work()
    except Exception as error:
        traceback.print_exc()
        return {name: _reason(error)}
    return {}


def _outcome(group: Sequence[Cell], future: Future[dict[str, str]]) -> dict[str, str]:
    try:
        return future.result()
    except Exception as error:  # a worker that died takes its pool with it
        return {cell.cell_id: _reason(error) for cell in group if not is_measured(cell_folder(cell))}


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _start(settings: dict[str, object], threads: int, parent: int) -> None:
    """Prepare a worker: its share of the cores, no bars of its own, and an end when the parent is gone."""
    sys.stderr = _NoTerminal(sys.stderr.buffer, line_buffering=True)
    torch.set_num_threads(threads)
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()
    global _bench
    _bench = Workbench(**settings)  # pyright: ignore[reportArgumentType]


class _NoTerminal(io.TextIOWrapper):
    """Standard error without bars: the parent's would be overwritten."""

    def isatty(self) -> bool:
        return False


def _leave_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)


def _run_in_worker(group: list[Cell]) -> dict[str, str]:
    assert _bench is not None
    return run_group(_bench, group)
