"""What the compiled quantisers hold on each chip, as JSON: modelled, no GPU was used.

    python bench/modelled_quantize.py docs/results/kernels-modelled/quantize.json

Bytes are those an element of x costs at least (bfloat16 in; RAC compensates half the blocks). SASS counts are static:
the fast path, the slow path (outer scales outside 2^-32 .. 2^60) and division subroutines together.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from quads.kernels.crosscompile import Report, compile_jobs
from quads.kernels.quantize_details.compiled import KERNELS, job

CHIPS = ("sm_90a", "sm_100a", "sm_103a", "sm_120a", "sm_121a")
PACKED = 0.5 + 1 / 16
BYTES = {
    "RAC known list": 2 + 1.5 * PACKED,
    "RAC second pass": 0.5 * (2 + PACKED),
    "RAC first pass": 2 + PACKED,
    "RAC token": 2 + 1.5 * PACKED,
    "fake-quantize": 4.0,
    "fake-quantize 16x16": 4.0,
}


def row(name: str, report: Report) -> dict[str, Any]:
    constants, warps = KERNELS[name][2], KERNELS[name][3]
    lanes = constants.get("B") or constants["ROWS"] * (constants.get("BLOCKS") or constants["ITEMS"])
    threads = 32 * warps
    by_registers = 65536 // max(1, threads * -(-report.registers // 8) * 8)
    return {
        "kernel": name,
        "chip": report.chip,
        "label": "modelled",
        "problems": report.problems(),
        "threads": threads,
        "blocks_a_thread": lanes / threads,
        "registers": report.registers,
        "warps_an_sm_by_registers": min(64, by_registers * warps),
        "shared_bytes": report.shared_bytes,
        "bytes_an_element": BYTES.get(name, 2 + PACKED),
        "native_e2m1_conversions": report.count("cvt.rn.satfinite.e2m1x2.f32"),
        "ptx_instructions": report.instructions,
        "sass_instructions": sum(report.sass_opcodes.values()),
        "wide_loads": report.count("ld.global.v4.b32"),
        "wide_stores": report.count("st.global.v2.b32") + report.count("st.global.v4.b32"),
    }


def main() -> None:
    wanted = [(name, chip) for name in KERNELS for chip in CHIPS]
    reports = compile_jobs([job(*key) for key in wanted])
    rows = [row(name, report) for (name, _), report in zip(wanted, reports, strict=True)]
    Path(sys.argv[1]).write_text(json.dumps(rows, indent=1) + "\n")
    print(f"{len(rows)} rows, {sum(bool(r['problems']) for r in rows)} with problems")


if __name__ == "__main__":
    main()
