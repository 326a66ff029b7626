"""Several arms at once, one process and an equal share of the cores each: on CPUs that beats more threads a product."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor

import torch
from tqdm import tqdm

from treedraft.cells import Workbench, cell_folder, is_done, train_folder
from treedraft.grid import Cell

_bench: Workbench | None = None


def run_side_by_side(bench: Workbench, groups: Sequence[Sequence[Cell]], jobs: int | None) -> dict[str, str]:
    """Train and measure groups of cells, each group one arm; returns the reason of every cell that failed.

    What all arms share (training text, features, recorded decodings) is made first, here.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    wanted = jobs if jobs is not None else (1 if bench.target.device.type == "cuda" else cores)
    wanted = min(wanted, len(groups))
    for group in groups:
        if not is_done(train_folder(group[0].arm)):
            bench.features(group[0].arm.data, group[0].arm.drafter)
        for cell in group:
            bench.replay(cell.evaluate, cell.decode.temperature)
    cells = [cell for group in groups for cell in group]
    failures: dict[str, str] = {}
    with tqdm(total=len(cells), desc="cells", unit="cell", disable=None, smoothing=0.1) as bar:
        if wanted == 1:
            for group in groups:
                failures |= run_group(bench, group)
                bar.update(len(group))
            return failures
        with ProcessPoolExecutor(
            wanted, multiprocessing.get_context("spawn"), _start, (bench.settings, max(1, cores // wanted), os.getpid())
        ) as pool:
            futures = [pool.submit(_run_in_worker, list(group)) for group in groups]
            while not all(future.done() for future in futures):
                time.sleep(0.5)
                bar.update(sum(is_done(cell_folder(cell)) for cell in cells) - bar.n)
            for group, future in zip(groups, futures, strict=True):
                failures |= _outcome(group, future)
    return failures


def run_group(bench: Workbench, group: Sequence[Cell]) -> dict[str, str]:
    """One arm: train it, then measure its cells. A failure is reported and does not stop the others."""
    failures: dict[str, str] = {}
    try:
        bench.train(group[0].arm)
    except Exception as error:
        traceback.print_exc()
        return {cell.cell_id: _reason(error) for cell in group}
    for cell in group:
        try:
            bench.evaluate(cell)
        except Exception as error:
            traceback.print_exc()
            failures[cell.cell_id] = _reason(error)
    return failures


def _outcome(group: Sequence[Cell], future: Future[dict[str, str]]) -> dict[str, str]:
    try:
        return future.result()
    except Exception as error:  # a worker that died takes its pool with it
        return {cell.cell_id: _reason(error) for cell in group if not is_done(cell_folder(cell))}


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _start(settings: dict[str, object], threads: int, parent: int) -> None:
    """Prepare a worker: its share of the cores, no bars of its own, and an end when the parent is gone."""
    os.environ["TQDM_DISABLE"] = "1"
    torch.set_num_threads(threads)
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()
    global _bench
    _bench = Workbench(**settings)  # pyright: ignore[reportArgumentType]


def _leave_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)


def _run_in_worker(group: list[Cell]) -> dict[str, str]:
    assert _bench is not None
    return run_group(_bench, group)
