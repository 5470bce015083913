"""What the compiled kernels issue on each chip, as data (compiled.json): modelled, no GPU was used to make it.

    python -m quads.bench.compiled        # compile everything again for every target and rewrite compiled.json

Quantisers: instructions an element of x (quads.bench.issue: the shortest path through a store, and the longest for
kernels whose programs are of two kinds, with a residual and without). Products: instructions of a warp for a step of K,
`rows` x `k` of a thread block's (or program's) `warps`. `repeated`, with RAC: of a step over repeated blocks, which
follows the others where the way is native, and takes the place of one where it is grouped.
Triton 3.6's disassembler does not know sm_103a and sm_121a: their counts are those of sm_100a and sm_120a.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quads.kernels.prepack import HopperWeight

FILE = "compiled.json"
ALIKE = {"sm_103a": "sm_100a", "sm_121a": "sm_120a"}
TARGETS = ("sm_90a", "sm_100a", "sm_103a", "sm_120a", "sm_121a")
HOPPER_WIDTHS = (8, 16, 24, 32)
LENGTHS = (512, 4096)  # of K, a short and a long one, to which quads.kernels.moe gives plans of their own
Row = dict[str, Any]


@cache
def _document() -> dict[str, list[Row]]:
    return dict(json.loads(resources.files("quads.bench").joinpath(FILE).read_text("utf-8")))


@cache
def quantizer(kernel: str, target: str) -> Row:
    """The row of a quantiser for a compile target. ValueError names the known kernels."""
    for row in _document()["quantizers"]:
        if row["kernel"] == kernel and row["target"] == ALIKE.get(target, target):
            return row
    known = sorted({row["kernel"] for row in _document()["quantizers"]})
    raise ValueError(f"kernel '{kernel}' was not compiled for {target} (known: {', '.join(known)})")


@cache
def product(
    way: str, target: str, tokens: int, *, residual: bool, grouped: bool = False, warps: int | None = None
) -> Row:
    """The row of a product: `way` as in quads.kernels.gemm.choose or moe.choose, for blocks of `tokens` rows.

    warps: of a thread block, where there are several kinds.
    """
    wanted = {"way": way, "target": ALIKE.get(target, target), "residual": residual, "grouped": grouped}
    wanted |= {} if warps is None else {"warps": warps}
    rows = [row for row in _document()["products"] if wanted.items() <= row.items()]
    if not rows:
        raise ValueError(f"no {way} product was compiled for {target}")
    return min(rows, key=lambda row: (row["tokens"] < tokens, abs(row["tokens"] - tokens)))


def shape_of(experts: int, n: int, k: int) -> HopperWeight:
    """A weight without memory, to ask quads.kernels which way and plan it takes."""
    import torch

    from quads.kernels.prepack import TILE, HopperWeight

    blocks = experts, -(-n // TILE), k // 16
    codes, scales = (torch.empty((*blocks, size), dtype=torch.uint8, device="meta") for size in (512, 64))
    return HopperWeight(codes, scales, torch.empty(experts, device="meta"), n, k, interleaved=False)


def compile_all() -> dict[str, list[Row]]:
    """Every row, compiled here; needs triton and NVRTC, and no GPU. Minutes of one core."""
    return {"quantizers": list(_quantizers()), "products": [*_hopper_products(), *_native_products()]}


def _quantizers() -> Iterator[Row]:
    from quads.bench import issue
    from quads.kernels.crosscompile import compile_jobs
    from quads.kernels.quantize_details.compiled import KERNELS, job

    wanted = [(kernel, target) for kernel in KERNELS for target in TARGETS]
    for (kernel, target), report in zip(wanted, compile_jobs([job(*key) for key in wanted]), strict=True):
        _, _, constants, warps = KERNELS[kernel]
        lanes = constants.get("B") or constants["ROWS"] * (constants.get("BLOCKS") or constants["ITEMS"])
        elements = 16 * lanes / (32 * warps)  # of one thread; a thread's instruction is its warp's
        paths = issue.through_stores(report.sass) if report.sass_opcodes else []
        yield {
            "kernel": kernel,
            "target": target,
            "problems": report.problems(),
            "registers": report.registers,
            "shared_bytes": report.shared_bytes,
            "native_e2m1_conversions": report.count("cvt.rn.satfinite.e2m1x2.f32"),
            "sass_instructions": sum(report.sass_opcodes.values()),
            "instructions_an_element": round(paths[0] / elements, 2) if paths else None,
            "longest_an_element": round(paths[-1] / elements, 2) if paths else None,
        }


def _hopper_products() -> Iterator[Row]:
    """decode.cu (a warp's 64 rows by 64 of K), wide.cu (a warpgroup's 64 by 128) and grouped.cu."""
    from quads.bench import issue
    from quads.kernels import moe
    from quads.kernels.gemm_details import hopper, wide

    for residual in (False, True):
        for tokens in HOPPER_WIDTHS:
            for grouped in (False, True):
                split = moe.split_plan(tokens, shape_of(1, 64, LENGTHS[1]))
                plan = split if grouped else hopper.Plan(tokens=tokens, run=1)
                defines = hopper.decode_defines(plan, residual, grouped, grouped, False)
                count = max(issue.multiplying_loops(_hopper_sass("decode.cu", defines)))
                yield _product("decode", "sm_90a", tokens, residual, grouped, count, rows=64, k=64, warps=1)
            yield from _rounds(tokens, residual)
        for tokens in (32, 64):
            wide_plan = wide.WidePlan(tokens=tokens)
            sass = _hopper_sass("wide.cu", wide_plan.defines(residual, False), wide.instruction(tokens))
            count = max(issue.multiplying_loops(sass))
            yield _product("wide", "sm_90a", tokens, residual, False, count, rows=64, k=128, warps=4)


def _rounds(tokens: int, residual: bool) -> Iterator[Row]:
    """grouped.cu, a step of all warps of a thread block: a chunk of 64 along K.

    Its loop, and its share of the round in which each warp decodes activations for all: a round has a chunk for each
    warp, or half as many where their blocks are repeated, which is a loop of its own.
    """
    from quads.bench import issue
    from quads.kernels import moe

    for plan in dict.fromkeys(moe.rows_plan(tokens, k) for k in LENGTHS):
        sass = _hopper_sass("grouped.cu", plan.defines(residual, True, False))
        loops, around = sorted(issue.multiplying_loops(sass)), issue.between_multiplying_loops(sass)
        warps = plan.row_warps
        row = _product(
            "grouped", "sm_90a", tokens, residual, True, round(loops[0] + around / warps, 1),
            rows=64 * warps, k=64, warps=warps,
        )  # fmt: skip
        yield row | {"repeated": round(loops[1] + 2 * around / warps, 1) if residual else None}


def _hopper_sass(file: str, defines: tuple[tuple[str, int], ...], preamble: str = "") -> str:
    from quads.kernels.gemm_details import hopper, nvrtc

    sources = (Path(hopper.__file__).parent / name for name in ("e2m1.cuh", file))
    text = "\n".join([preamble, *(source.read_text() for source in sources)])
    return disassembled(nvrtc.compile_cubin(text, "sm_90a", dict(defines)))


def _native_products() -> Iterator[Row]:
    """native_jit.py: a program's step; with RAC the steps over repeated blocks are a loop of their own."""
    from quads.bench import issue
    from quads.kernels.crosscompile import compile_jobs
    from quads.kernels.gemm_details import compiled as native_jobs

    cases = [case for case in native_jobs.CASES if case.chip not in ALIKE]
    for case, report in zip(cases, compile_jobs([case.job() for case in cases]), strict=True):
        loops = issue.multiplying_loops(report.sass)
        row = _product(
            "native", case.chip, case.tile.tokens, case.extra > 0, case.grouped, loops[0],
            rows=case.tile.rows, k=16 * case.tile.blocks, warps=case.tile.warps,
        )  # fmt: skip
        yield row | {"repeated": loops[1] if case.extra else None, "stages": case.tile.stages}


def _product(
    way: str, target: str, tokens: int, residual: bool, grouped: bool, count: float, *, rows: int, k: int, warps: int
) -> Row:
    return {
        "way": way, "target": target, "tokens": tokens, "residual": residual, "grouped": grouped,
        "rows": rows, "k": k, "warps": warps, "instructions_a_step": count,
    }  # fmt: skip


def disassembled(cubin: bytes) -> str:
    """SASS of machine code, by Triton's cuobjdump."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-sass", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main() -> None:
    import triton

    from quads.compare.records import write_json

    head = {"label": "modelled", "command": "python -m quads.bench.compiled", "triton": triton.__version__}
    found = compile_all()
    write_json(Path(__file__).with_name(FILE), head | found)
    faulty = sum(bool(row["problems"]) for row in found["quantizers"])
    print(f"{len(found['quantizers'])} quantisers, {len(found['products'])} products, {faulty} with problems")


if __name__ == "__main__":
    main()
