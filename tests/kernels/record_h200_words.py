"""Record tests/kernels/data/h200_words.safetensors on a Hopper GPU: FP32 words of each kernel over random operands.

    PYTHONPATH=. python tests/kernels/record_h200_words.py FILE

Each case holds its operands, the repeated blocks, `shape` (slices of K, run, kernel as in test_hopper_gemm.py) and `y`.
"""

from __future__ import annotations

import json
import sys

import torch
from safetensors.torch import save_file
from torch import Tensor

from quads import provenance
from quads.kernels.gemm_details import grouped, hopper, wide
from quads.kernels.moe_details import routing
from quads.kernels.prepack import HopperWeight, prepare_hopper
from quads.kernels.quantize import PackedNVFP4


def operand(rows: int, blocks: int, generator: torch.Generator) -> PackedNVFP4:
    packed = torch.randint(0, 256, (rows, blocks * 8), generator=generator).byte().cuda()
    scales = torch.randint(0x20, 0x60, (rows, blocks), generator=generator).byte().cuda()
    return PackedNVFP4(packed, scales, torch.tensor(1.0).cuda())


def product(kernel: str, run: int, slices: int, a: PackedNVFP4, w: HopperWeight, blocks: Tensor | None) -> Tensor:
    if kernel == "decode":
        plan = hopper.Plan(tokens=16, k_warps=4, run=run, splits=slices // 4, row_warps=1)
        return hopper.decode(a, w, plan, blocks=blocks, out_dtype=torch.float32)
    if kernel == "wide":
        groups = wide.WidePlan(tokens=32, row_groups=1, k_groups=1, splits=slices)
        return wide.wide(a, w, groups, blocks=blocks, out_dtype=torch.float32)
    ids = torch.zeros(a.packed.shape[0], 1, dtype=torch.int32, device="cuda")
    one = grouped.GroupedPlan(tokens=16)
    return grouped.grouped(a, w, one, routing.route(ids, 1, 16), blocks=blocks, out_dtype=torch.float32)


CASES = (  # kernel, tokens, rows, K blocks, run, slices, repeated
    ("decode", 16, 64, 32, 4, 4, 0),
    ("decode", 16, 64, 32, 4, 4, 16),
    ("decode", 16, 64, 32, 4, 8, 16),
    ("wide", 32, 128, 40, 2, 1, 0),
    ("wide", 32, 128, 40, 2, 2, 20),
    ("grouped", 16, 64, 32, 1, 1, 0),
    ("grouped", 16, 64, 32, 1, 1, 16),
    ("grouped", 16, 64, 27, 1, 1, 9),
)


def main() -> None:
    words: dict[str, Tensor] = {}
    for index, (kernel, tokens, n, k_blocks, run, slices, extra) in enumerate(CASES):
        generator = torch.Generator().manual_seed(index)
        chosen = torch.randperm(k_blocks, generator=generator)[:extra].sort().values.int()
        a, w = operand(tokens, k_blocks + extra, generator), operand(n, k_blocks, generator)
        y = product(kernel, run, slices, a, prepare_hopper(w), chosen.cuda() if extra else None)
        shape = torch.tensor([slices, run, ("decode", "wide", "grouped").index(kernel)])
        case = {"a_packed": a.packed, "a_scales": a.scales, "w_packed": w.packed, "w_scales": w.scales}
        case |= {"blocks": chosen, "shape": shape, "y": y}
        words |= {f"{kernel}.{index}.{name}": tensor.cpu() for name, tensor in case.items()}
    stamp = json.dumps(provenance.stamp(), default=str)
    label = "measured: float32 words of the Hopper kernels, outer scales 1"
    save_file(words, sys.argv[1], {"label": label, "script": "tests/kernels/record_h200_words.py", "stamp": stamp})


if __name__ == "__main__":
    main()
