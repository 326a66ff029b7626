"""The token store: what a target answered, as token ids with their provenance.

A folder holds manifest.json and shard-00000.npz, shard-00001.npz, ... Every file appears by rename, and the manifest
lists a shard's sha256 and counts only once the shard is there, so a killed writer leaves a store that opens.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from treedraft import files

if TYPE_CHECKING:
    from treedraft.targets.hf import Target

MANIFEST = "manifest.json"
FORMAT = 1
SHIPPED = Path(__file__).parent.parent / "assets" / "tokens"
_DROPS = ("duplicate", "loop", "undecodable", "unfinished", "prompt_length", "empty", "evaluation")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """One conversation: `ids` [T] = prompt then response, the first `prompt_length` being the prompt."""

    ids: np.ndarray
    prompt_length: int
    domain: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """What made a store. Two runs with equal provenance make the same shards.

    `rope_scaling` is None where the target ran as it is; older manifests do not have it.
    """

    target: str
    fingerprint: str
    template_hash: str
    mask_token_id: int
    dtype: str
    prompts: str
    seed: int
    temperatures: tuple[float, ...]
    top_p: float | None
    max_new_tokens: int
    prompts_per_shard: int
    batch_size: int
    domains: tuple[str, ...]
    rope_scaling: str | None = None


class TokenStore:
    """A validated store, all in memory (a million tokens are 2 MB): indexable, iterable, in shard order."""

    def __init__(self, folder: Path, manifest: dict[str, Any], sequences: list[Conversation]) -> None:
        self.folder = folder
        self.manifest = manifest
        self.sequences = sequences
        self.provenance = _provenance(folder, manifest)

    @classmethod
    def open(cls, folder: str | Path) -> TokenStore:
        """Read and check every shard. ValueError names a file that is missing, damaged or not as the manifest says."""
        folder = Path(folder)
        manifest = read_manifest(folder)
        domains = manifest["provenance"]["domains"]
        sequences = [sequence for entry in manifest["shards"] for sequence in _read_shard(folder, entry, domains)]
        return cls(folder, manifest, sequences)

    @classmethod
    def shipped(cls, target: str) -> TokenStore:
        """The store that comes with the package for a target; ValueError names the targets that have one."""
        known = sorted(path.name for path in SHIPPED.glob("*") if (path / MANIFEST).is_file())
        if target not in known:
            raise ValueError(f"no token store ships for target {target!r}; shipped: {', '.join(known) or 'none'}")
        return cls.open(SHIPPED / target)

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> Conversation:
        return self.sequences[index]

    def __iter__(self) -> Iterator[Conversation]:
        return iter(self.sequences)

    @property
    def counts(self) -> dict[str, int]:
        """Sequences, prompt tokens, response tokens, and what was dropped and why, over all shards."""
        return total_counts(self.manifest["shards"])

    def check(self, target: Target) -> None:
        """ValueError unless this target, with this tokenizer, chat template and rotary scaling, made the store."""
        made = self.provenance
        for what, expected, loaded in (
            ("weights and tokenizer", made.fingerprint, target.fingerprint()),
            ("chat template", made.template_hash, target.template_hash()),
            ("rope scaling", made.rope_scaling or "none", target.rope_scaling or "none"),
        ):
            if expected != loaded:
                raise ValueError(
                    f"{self.folder} was made for {made.target} with {what} {expected}; "
                    f"loaded is {target.name} with {loaded}: regenerate the data for it"
                )


def write_shard(
    folder: Path,
    index: int,
    sequences: Sequence[Conversation],
    *,
    domains: Sequence[str],
    dropped: dict[str, int],
    temperatures: Sequence[float],
    seconds: float,
) -> dict[str, Any]:
    """Write shard `index` and return its manifest entry. Ids are uint16 when they fit, uint32 otherwise."""
    lengths = [len(sequence.ids) for sequence in sequences]
    ids = np.concatenate([sequence.ids for sequence in sequences]) if sequences else np.zeros(0, np.int64)
    small = ids.size == 0 or int(ids.max()) < 2**16
    path = folder / f"shard-{index:05d}.npz"
    with files.replacing(path) as temporary:
        np.savez_compressed(
            temporary,
            ids=ids.astype(np.uint16 if small else np.uint32),
            offsets=np.cumsum([0, *lengths]).astype(np.uint32),
            prompt_lengths=np.array([sequence.prompt_length for sequence in sequences], np.uint32),
            domains=np.array([list(domains).index(sequence.domain) for sequence in sequences], np.uint8),
        )
    prompt_tokens = sum(sequence.prompt_length for sequence in sequences)
    return {
        "file": path.name,
        "sha256": files.sha256(path),
        "sequences": len(sequences),
        "prompt_tokens": prompt_tokens,
        "response_tokens": sum(lengths) - prompt_tokens,
        "dropped": {reason: dropped.get(reason, 0) for reason in _DROPS},
        "temperatures": list(temperatures),
        "seconds": round(seconds, 1),
    }


def write_manifest(
    folder: Path, provenance: Provenance, shards: Sequence[dict[str, Any]], *, template: str, hardware: str, command: str
) -> None:
    manifest = {
        "format": FORMAT,
        "provenance": asdict(provenance),
        "template": template,
        "hardware": hardware,
        "command": command,
        "counts": total_counts(shards),
        "shards": list(shards),
    }
    files.write_json(folder / MANIFEST, manifest)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a store, its fields checked; ValueError names the file."""
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(f"{folder} is not a token store: it has no {MANIFEST}")
    manifest = files.read_json(path)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError(f"{path}: not a token store of format {FORMAT}")
    for name, kind in (("provenance", dict), ("shards", list), ("counts", dict)):
        if not isinstance(manifest.get(name), kind):
            raise ValueError(f"{path}: field {name!r} is missing or not a {kind.__name__}")
    _provenance(folder, manifest)
    return manifest


def total_counts(shards: Sequence[dict[str, Any]]) -> dict[str, int]:
    sums = {name: sum(shard[name] for shard in shards) for name in ("sequences", "prompt_tokens", "response_tokens")}
    return sums | {f"dropped_{reason}": sum(shard["dropped"][reason] for shard in shards) for reason in _DROPS}


def _provenance(folder: Path, manifest: dict[str, Any]) -> Provenance:
    given = manifest["provenance"]
    wanted = {field.name for field in fields(Provenance)}
    needed = {field.name for field in fields(Provenance) if field.default is MISSING}
    if not needed <= set(given) <= wanted:
        odd = sorted((needed - set(given)) | (set(given) - wanted))
        raise ValueError(f"{folder / MANIFEST}: provenance lacks or does not know {', '.join(odd)}")
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    return Provenance(**values)


def _read_shard(folder: Path, entry: dict[str, Any], domains: Sequence[str]) -> list[Conversation]:
    path = folder / str(entry.get("file"))
    if not path.is_file():
        raise ValueError(f"{path}: listed in {MANIFEST} but missing")
    if files.sha256(path) != entry.get("sha256"):
        raise ValueError(f"{path}: damaged or truncated (its sha256 is not the one in {MANIFEST})")
    try:
        with np.load(path, allow_pickle=False) as arrays:
            ids, offsets, prompts, kinds = (arrays[name] for name in ("ids", "offsets", "prompt_lengths", "domains"))
    except (KeyError, ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path}: not a shard of a token store ({error})") from error
    lengths = np.diff(offsets.astype(np.int64))
    consistent = len(offsets) == len(prompts) + 1 == len(kinds) + 1 == entry["sequences"] + 1
    if (
        not consistent
        or offsets[0] != 0
        or offsets[-1] != len(ids)
        or (lengths < prompts).any()
        or (kinds >= len(domains)).any()
    ):
        raise ValueError(f"{path}: its offsets, prompt lengths and domains do not fit its ids")
    return [
        Conversation(ids=part.astype(np.int64), prompt_length=int(prompt), domain=domains[int(kind)])
        for part, prompt, kind in zip(np.split(ids, offsets[1:-1]) if len(prompts) else [], prompts, kinds, strict=True)
    ]
