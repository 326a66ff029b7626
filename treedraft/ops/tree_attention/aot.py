"""`python -m treedraft.ops.tree_attention.aot`: compile the kernels for GPUs that are not here, and say what came out.

Registers, spills, shared memory and matrix instructions of what `launch` picks on an A100 and on an H200, for compute
capabilities 8.0 and 9.0; ptxas, cuobjdump and nvdisasm ship inside the triton wheel. Exits with 1 if a configuration spills, does not fit, or
runs on Hopper without wgmma although its tile is large enough.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from treedraft.ops.tree_attention.dispatch import BackendUnavailable, interpreting
from treedraft.ops.tree_attention.launch import A100, H200, MERGE_ROWS, Device, Tile, block_dim, plan, shared_bytes

HEAD_DIMS = (64, 80, 96, 128, 256)
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


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
        marks = {"tma": self.tma, "paged": self.page, "unsplit": not self.split, "unpadded": not self.num_nodes}
        extra = "".join(f" {mark}" for mark, there in marks.items() if there)
        return (f"sm_{self.capability} {self.dtype} D={self.head_dim} G={self.group} "
                f"{self.tile.rows}x64 w{self.tile.warps} s{self.tile.stages}{extra}")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """What the assembler made of a kernel: registers a thread, bytes of spill, bytes of shared memory, instructions.

    `expected` are the bytes of shared memory that `shared_bytes`, by which tiles are chosen, allows it.
    """

    name: str
    registers: int
    spill: int
    shared: int
    expected: int
    wgmma: int
    mma: int
    async_copies: int
    tma_loads: int


def planned(device: Device, *, num_nodes: int = 256, prefix: int = 1024, batch: int = 1, kv_heads: int = 8, group: int = 4,
            head_dim: int = 128, dtype: str = "bf16", padded: bool = True, paged: bool = False, aligned: bool = True) -> Variant:  # fmt: skip
    """What `launch` runs for a call of these sizes on that device."""
    chosen = plan(
        batch=batch, kv_heads=kv_heads, group=group, num_nodes=num_nodes, head_dim=head_dim, max_prefix=prefix,
        dtype=_DTYPES[dtype], device=device, paged=paged, aligned=aligned,
    )  # fmt: skip
    return Variant(
        capability=device.capability * 10, head_dim=head_dim, tile=chosen.tile, group=group, dtype=dtype, split=chosen.parts,
        tma=chosen.tma, page=64 if paged else 0, num_nodes=padded,
    )  # fmt: skip


def short_variants() -> list[Variant]:
    """The largest tree behind 1024 tokens at every head size on both, and one each of small, unsplit, exact and paged."""
    found = [planned(device, head_dim=head_dim) for device in (A100, H200) for head_dim in HEAD_DIMS]
    for device in (A100, H200):
        found += [planned(device, num_nodes=4), planned(device, batch=8), planned(device, dtype="fp32")]
    return list(dict.fromkeys([*found, planned(H200, paged=True)]))


def main_variants() -> list[Variant]:
    """What `launch` picks for 256, 16, 8 and 4 nodes at every head size, split and whole, and the rarer forms at head size 128.

    A tree of `verify` is padded where CUDA graphs run it, and is not where they do not.
    """
    found = short_variants()
    for device in (A100, H200):
        for head_dim in HEAD_DIMS:
            # Eight requests of a large tree fill a GPU without splits; a small tree is whole where there is little to read.
            found += [planned(device, head_dim=head_dim, batch=batch) for batch in (1, 8)]
            found += [planned(device, head_dim=head_dim, num_nodes=nodes, prefix=prefix) for nodes in (16, 8, 4) for prefix in (32768, 1)]
        found += [planned(device, padded=False, batch=batch, num_nodes=nodes) for nodes in (256, 4) for batch in (1, 8)]
        found += [planned(device, paged=True, batch=batch) for batch in (1, 8)]
        found += [planned(device, paged=True, num_nodes=nodes) for nodes in (16, 8, 4)]
        found += [planned(device, group=group) for group in (1, 2, 3, 5, 6, 7, 8)]
        found += [planned(device, dtype="fp16")]
        found += [planned(device, dtype="fp32", head_dim=head_dim, prefix=prefix, num_nodes=4) for head_dim in (16, 64, 128) for prefix in (32768, 1)]
        found += [planned(device, aligned=False, batch=batch) for batch in (1, 8)]
    return list(dict.fromkeys(found))


def compile_attend(variant: Variant) -> Compiled:
    """Compile one specialisation as `launch` would call it with aligned strides. BackendUnavailable without triton."""
    attend = _kernels().attend
    pointer, dim = f"*{variant.dtype}", block_dim(variant.head_dim)
    described = f"tensordesc<{variant.dtype}[1,1,64,{dim}]>"
    cache = described if variant.tma else pointer
    constants = {
        "H": 32, "GROUP": variant.group, "D": variant.head_dim, "BLOCK_D": dim, "BLOCK_M": variant.tile.rows,
        "SPLIT": variant.split, "HAS_NUM_NODES": variant.num_nodes, "PAGE": variant.page, "TMA": variant.tma,
        "UPCAST": False, "EXACT": variant.dtype == "fp32",
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
    itemsize = _DTYPES[variant.dtype].itemsize
    expected = shared_bytes(variant.tile, variant.head_dim, itemsize=itemsize)
    compiled = _compile(attend, variant.name, signature, constants, aligned, variant.capability, options)
    return replace(compiled, expected=expected)


def compile_merge(capability: int, head_dim: int) -> Compiled:
    merge = _kernels().merge
    constants = {"H": 32, "D": head_dim, "BLOCK_D": block_dim(head_dim), "BLOCK_M": MERGE_ROWS}
    signature = {"part": "*fp32", "part_lse": "*fp32", "out": "*bf16", "lse": "*fp32"}
    aligned = list(signature)
    signature |= dict.fromkeys(("num_rows", "num_splits", "num_items"), "i32")
    signature |= dict.fromkeys(constants, "constexpr")
    return _compile(merge, f"sm_{capability} merge D={head_dim}", signature, constants, aligned, capability, {"num_warps": 4})


def compile_onepass(capability: int) -> Compiled:
    """The kernel that `bench gpu` compares with, at head size 128."""
    from treedraft.ops.tree_attention.onepass import attend

    constants = {"H": 32, "GROUP": 4, "D": 128, "BLOCK_M": 64, "UPCAST": False}
    signature = {"q": "*bf16", "k": "*bf16", "v": "*bf16", "mask": "*u8", "out": "*bf16", "scale": "fp32"}
    signature |= {name: signature.get(name, "i32") for name in attend.arg_names if name not in constants}
    signature |= dict.fromkeys(constants, "constexpr")
    aligned = [name for name, kind in signature.items() if kind.startswith("*") or kind == "i32"]
    return _compile(attend, f"sm_{capability} one pass 64x64 w4", signature, constants, aligned, capability, {"num_warps": 4})


def problems(compiled: Compiled) -> list[str]:
    """What is wrong with it, in words."""
    capability, exact = int(compiled.name[3:5]), " fp32 " in compiled.name
    found = [f"{compiled.name} spills {compiled.spill} bytes"] if compiled.spill else []
    if compiled.shared > compiled.expected:
        found.append(f"{compiled.name} takes {compiled.shared} bytes of shared memory, over {compiled.expected}")
    rows = re.search(r"(\d+)x64", compiled.name)
    if capability >= 90 and rows and int(rows[1]) >= 64 and not compiled.wgmma:
        found.append(f"{compiled.name} has no wgmma")
    if rows and not exact and not compiled.wgmma and not compiled.mma:
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
        expected=(A100 if capability < 90 else H200).shared, wgmma=counts["HGMMA"], mma=counts["HMMA"], async_copies=counts["LDGSTS"], tma_loads=counts["UTMALDG"],
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
    parser = argparse.ArgumentParser(
        prog="python -m treedraft.ops.tree_attention.aot", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--short", action="store_true", help="a fifth of the configurations, as the tests do")
    short = parser.parse_args().short
    kernels = [compile_attend(variant) for variant in (short_variants() if short else main_variants())]
    kernels += [compile_merge(capability, head_dim) for capability in (80, 90) for head_dim in ((128,) if short else HEAD_DIMS)]
    if not short:
        kernels.append(compile_onepass(90))
    import triton  # pyright: ignore[reportMissingImports]

    print(f"triton {triton.__version__}")
    print(table(kernels))
    wrong = [problem for item in kernels for problem in problems(item)]
    print("\n".join(wrong) or "no spills, everything fits, wgmma wherever a tile has 64 rows on sm_90")
    return int(bool(wrong))


if __name__ == "__main__":
    from treedraft.cli import run_cli

    run_cli(main)
