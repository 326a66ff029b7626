"""Where runs live, what a machine is called, and the one place that seeds globally."""

from __future__ import annotations

import os
import platform
import subprocess
from functools import cache
from pathlib import Path

from treedraft.files import read_json


def runs_folder() -> Path:
    """`runs` in the working directory; TREEDRAFT_RUNS overrides."""
    return Path(os.environ.get("TREEDRAFT_RUNS", "runs"))


def cache_folder() -> Path:
    """What is made once for a machine: converted weights, profiles. $TREEDRAFT_CACHE, else the user's cache folder."""
    import platformdirs

    return Path(os.environ.get("TREEDRAFT_CACHE") or platformdirs.user_cache_dir("treedraft")).expanduser()


def is_measured(folder: Path) -> bool:
    """Whether a cell's folder has a result with all that reports show; one from before they showed it is measured anew."""
    path = folder / "result.json"
    return path.is_file() and "spine" in read_json(path)


def assets_folder() -> Path:
    """What ships inside the package: the pocket model, drafters, prompts, token ids."""
    return Path(__file__).parent / "assets"


def rank_and_world() -> tuple[int, int]:
    """This process's number and how many there are, as torchrun says; (0, 1) without it."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def seed_everything(seed: int) -> None:
    """Initial weights come from torch's global generator; everything else takes a generator or a key of its own."""
    import torch

    torch.manual_seed(seed)


@cache
def hardware() -> str:
    """Processor, cores in use and accelerator, as printed beside numbers."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name(0)
    return f"{_processor()}, {torch.get_num_threads()} threads"


@cache
def commit() -> str:
    """Short commit of the working tree, "+" if it has changes, "unknown" outside a checkout."""
    here = Path(__file__).parent
    try:
        head = _git(here, "rev-parse", "--short", "HEAD")
        return head + ("+" if _git(here, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(folder: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    with (cpuinfo if cpuinfo.exists() else Path(os.devnull)).open(encoding="utf-8") as lines:
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
