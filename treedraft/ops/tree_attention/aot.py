"""`python -m treedraft.ops.tree_attention.aot`: compile the kernels for GPUs that are not here, and say what came out.

Registers, spills, shared memory and matrix instructions of every main configuration, for compute capabilities 8.0 and
9.0; ptxas, cuobjdump and nvdisasm ship inside the triton wheel. Exits with 1 if a configuration spills, does not fit, or
runs on Hopper without wgmma although its tile is large enough.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treedraft.ops.tree_attention.dispatch import BackendUnavailable, interpreting
from treedraft.ops.tree_attention.launch import MERGE_ROWS, Tile, block_dim, through_parts, tile_for

SHARED_LIMIT = {80: 166_912, 90: 232_448}  # bytes a program: A100, H100 and H200
_TYPES = {"bf16": "*bf16", "fp16": "*fp16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One specialisation of `attend`."""

    capability: int
    head_dim: int
    tile: Tile
    group: int = 4
    dtype: str = "bf16"
    split: bool = True
    tma: bool = False
    page: int = 0
    num_nodes: bool = True

    @property
    def name(self) -> str:
        extra = "".join(f" {word}" for word, there in (("tma", self.tma), ("paged", self.page), ("unsplit", not self.split)) if there)
        return (f"sm_{self.capability} {self.dtype} D={self.head_dim} G={self.group} "
                f"{self.tile.rows}x64 w{self.tile.warps} s{self.tile.stages}{extra}")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """What the assembler made of a kernel: registers a thread, bytes of spill, bytes of shared memory, instructions."""

    name: str
    registers: int
    spill: int
    shared: int
    wgmma: int
    mma: int
    async_copies: int
    tma_loads: int


def main_variants() -> list[Variant]:
    """What `launch` picks for 256, 16 and 4 nodes at every head size, and the rarer forms at head size 128."""
    variants = []
    for capability in (80, 90):
        for head_dim in (64, 80, 96, 128, 256):
            for rows in dict.fromkeys((1024, 64, 16)):
                tile = tile_for(rows, head_dim, capability=capability // 10)
                variants.append(Variant(capability=capability, head_dim=head_dim, tile=tile))
                if capability >= 90 and rows >= 64:
                    variants.append(Variant(capability=capability, head_dim=head_dim, tile=tile, tma=True))
        largest = tile_for(1024, 128, capability=capability // 10)
        paged = tile_for(1024, 128, capability=capability // 10, paged=True)
        variants += [
            Variant(capability=capability, head_dim=dim, tile=tile_for(1024, dim, capability=capability // 10), split=False)
            for dim in (64, 128, 256)
            if not through_parts(1, dim, capability=capability // 10)
        ]
        variants += [
            Variant(capability=capability, head_dim=128, tile=paged, page=64),
            Variant(capability=capability, head_dim=128, tile=largest, dtype="fp16"),
            Variant(capability=capability, head_dim=128, tile=largest, group=1),
            Variant(capability=capability, head_dim=128, tile=largest, group=8),
        ]
    return list(dict.fromkeys(variants))


def compile_attend(variant: Variant) -> Compiled:
    """Compile one specialisation as `launch` would call it with aligned strides. BackendUnavailable without triton."""
    attend = _kernels().attend
    pointer, dim = _TYPES[variant.dtype], block_dim(variant.head_dim)
    described = f"tensordesc<{variant.dtype}[1,1,64,{dim}]>"
    cache = described if variant.tma else pointer
    constants = {
        "H": 32, "GROUP": variant.group, "D": variant.head_dim, "BLOCK_D": dim, "BLOCK_M": variant.tile.rows,
        "SPLIT": variant.split, "HAS_NUM_NODES": variant.num_nodes, "PAGE": variant.page, "TMA": variant.tma,
        "UPCAST": False, "EXACT": False,
    }  # fmt: skip
    absent = [name for name, there in (("num_nodes", variant.num_nodes), ("block_table", variant.page)) if not there]
    signature = {
        "q": pointer, "k": cache, "v": cache, "words": "*i64", "prefix_lens": "*i32", "num_nodes": "*i32", "block_table": "*i32",
        "out": pointer, "lse": "*fp32", "part": "*fp32" if variant.split else pointer, "part_lse": "*fp32", "scale": "fp32",
    }  # fmt: skip
    plain = {"num_rows", "num_splits", "num_words", "words_batch", "table_batch"}
    signature |= {name: signature.get(name, "i32") for name in attend.arg_names if name not in constants}
    constants |= dict.fromkeys(absent)
    signature |= dict.fromkeys(constants, "constexpr")
    aligned = [name for name, kind in signature.items() if (kind.startswith("*") or kind == "i32") and name not in plain]
    options = {"num_warps": variant.tile.warps, "num_stages": variant.tile.stages}
    return _compile(attend, variant.name, signature, constants, aligned, variant.capability, options)


def compile_merge(capability: int, head_dim: int) -> Compiled:
    merge = _kernels().merge
    constants = {"H": 32, "D": head_dim, "BLOCK_D": block_dim(head_dim), "BLOCK_M": MERGE_ROWS}
    signature = {"part": "*fp32", "part_lse": "*fp32", "out": "*bf16", "lse": "*fp32"}
    aligned = list(signature)
    signature |= dict.fromkeys(("num_rows", "num_splits", "num_items"), "i32")
    signature |= dict.fromkeys(constants, "constexpr")
    return _compile(merge, f"sm_{capability} merge D={head_dim}", signature, constants, aligned, capability, {"num_warps": 4})


def problems(compiled: Compiled) -> list[str]:
    """What is wrong with it, in words."""
    capability = int(compiled.name[3:5])
    found = [f"{compiled.name} spills {compiled.spill} bytes"] if compiled.spill else []
    if compiled.shared > SHARED_LIMIT[capability]:
        found.append(f"{compiled.name} takes {compiled.shared} bytes of shared memory, over {SHARED_LIMIT[capability]}")
    rows = re.search(r"(\d+)x64", compiled.name)
    if capability >= 90 and rows and int(rows[1]) >= 64 and not compiled.wgmma:
        found.append(f"{compiled.name} has no wgmma")
    if rows and not compiled.wgmma and not compiled.mma:
        found.append(f"{compiled.name} has no matrix instruction")
    return found


def table(kernels: Sequence[Compiled]) -> str:
    lines = [f"{'configuration':<48} regs spill  shared wgmma  mma async tma"]
    lines += [
        f"{item.name:<48} {item.registers:>4} {item.spill:>5} {item.shared:>7} {item.wgmma:>5} {item.mma:>4} "
        f"{item.async_copies:>5} {item.tma_loads:>3}"
        for item in kernels
    ]
    return "\n".join(lines)


def _kernels() -> Any:
    try:
        from treedraft.ops.tree_attention import kernels
    except ModuleNotFoundError as error:
        raise BackendUnavailable(f"compiling ahead of time needs the package triton: {error}") from error
    if interpreting():
        raise BackendUnavailable("with TRITON_INTERPRET=1 kernels are interpreted, not compiled: unset it")
    return kernels


def _compile(
    function: Any, name: str, signature: dict[str, str], constants: dict[str, Any], aligned: Sequence[str], capability: int,
    options: dict[str, int],
) -> Compiled:  # fmt: skip
    import triton  # pyright: ignore[reportMissingImports]
    from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]
    from triton.compiler import ASTSource  # pyright: ignore[reportMissingImports]

    order = {argument: place for place, argument in enumerate(function.arg_names)}
    attributes = {(order[argument],): [["tt.divisibility", 16]] for argument in aligned}
    source = ASTSource(
        fn=function,
        signature={argument: signature[argument] for argument in function.arg_names},
        constexprs={(order[argument],): value for argument, value in constants.items()},
        attrs=attributes,
    )
    compiled: Any = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    registers, spill, counts = _assembly(compiled.asm["cubin"])
    return Compiled(
        name=name, registers=registers, spill=spill, shared=compiled.metadata.shared,
        wgmma=counts["HGMMA"], mma=counts["HMMA"], async_copies=counts["LDGSTS"], tma_loads=counts["UTMALDG"],
    )  # fmt: skip


def _assembly(cubin: bytes) -> tuple[int, int, Counter[str]]:
    """Registers, bytes of stack (which is what spills go to) and how often each instruction occurs."""
    import triton.backends.nvidia  # pyright: ignore[reportMissingImports]

    tools = Path(triton.backends.nvidia.__path__[0]) / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run([tools / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True, check=True)
        code = subprocess.run([tools / "nvdisasm", file.name], capture_output=True, text=True, check=True)
    found = usage.stdout + usage.stderr
    numbers = [int(re.findall(rf"{word}:(\d+)", found)[-1]) for word in ("REG", "STACK")]
    return numbers[0], numbers[1], Counter(re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9]+)", code.stdout, re.MULTILINE))


def main() -> int:
    argparse.ArgumentParser(
        prog="python -m treedraft.ops.tree_attention.aot", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    kernels = [compile_attend(variant) for variant in main_variants()]
    kernels += [compile_merge(capability, head_dim) for capability in (80, 90) for head_dim in (128, 256)]
    import triton  # pyright: ignore[reportMissingImports]

    print(f"triton {triton.__version__}")
    print(table(kernels))
    wrong = [problem for item in kernels for problem in problems(item)]
    print("\n".join(wrong) or "no spills, everything fits, wgmma wherever a tile has 64 rows on sm_90")
    return int(bool(wrong))


if __name__ == "__main__":
    from treedraft.cli import run_cli

    run_cli(main)
