"""The kernels of this folder as cross-compile jobs: what CI checks and quads.bench models."""

from __future__ import annotations

from typing import Any

from quads.kernels.crosscompile import CHIPS, Job

_FOLDER = "quads.kernels.quantize_details"
_TYPES = {"x": "*bf16", "out": "*bf16", "packed": "*i32", "scales": "*u8", "outer": "*fp32", "largest": "*fp32"} | {
    "scores": "*i64", "order": "*i32", "rank": "*i32", "lists": "*i32", "listed": "*i32", "member": "*i32",
}  # fmt: skip
_ALIGNED = {"x", "out", "packed", "scales", "outer", "stride", "blocks", "columns", "scale_columns", "count"}
_QUANTIZE = "x packed scales outer rows blocks scale_rows scale_columns stride"
_LISTED = "x packed scales outer order rows blocks count columns stride tile_rows order_stride"
_PLAIN = {"TOKEN": False, "AMAX": False, "SWIZZLED": False, "VLLM": False}

# name -> (kernel, arguments, constants, warps)
KERNELS: dict[str, tuple[str, str, dict[str, Any], int]] = {
    "quantize": ("quantize_jit:quantize_kernel", _QUANTIZE, {"ROWS": 1, "BLOCKS": 256, **_PLAIN}, 2),
    "quantize 128x4": (
        "quantize_jit:quantize_kernel", _QUANTIZE, {"ROWS": 1, "BLOCKS": 256, **_PLAIN, "SWIZZLED": True}, 2,
    ),
    "quantize token, amax in the pass": (
        "quantize_jit:quantize_kernel", _QUANTIZE, {"ROWS": 1, "BLOCKS": 512, **_PLAIN, "TOKEN": True, "AMAX": True}, 4,
    ),
    "quantize vllm": ("quantize_jit:quantize_kernel", _QUANTIZE, {"ROWS": 1, "BLOCKS": 256, **_PLAIN, "VLLM": True}, 2),
    "RAC known list": (
        "compensate_jit:listed_kernel", _LISTED, {"ROWS": 1, "ITEMS": 128, "TOKEN": False, "MAIN": True}, 4,
    ),
    "RAC second pass": (
        "compensate_jit:listed_kernel", _LISTED, {"ROWS": 1, "ITEMS": 128, "TOKEN": False, "MAIN": False}, 4,
    ),
    "RAC first pass": (
        "compensate_jit:scores_kernel", "x packed scales outer largest scores rows blocks columns stride tile_rows",
        {"B": 128, "STEPS": 16, "TOKEN": False}, 4,
    ),
    "RAC token": (
        "compensate_jit:token_kernel", "x packed scales outer lists blocks count columns stride",
        {"B": 512, "TOKEN": False}, 4,
    ),
    "RAC known list, a row a program": (
        "compensate_jit:listed_row_kernel", "x packed scales outer rank blocks columns stride", {"B": 128}, 4,
    ),
    "fake-quantize": (
        "fake_quant_jit:fake_quantize_kernel", "x out outer rows blocks stride rows_of_outer",
        {"ROWS": 1, "BLOCKS": 128, "SQUARE": False, "MANY": False}, 4,
    ),
    "fake-quantize 16x16": (
        "fake_quant_jit:fake_quantize_kernel", "x out outer rows blocks stride rows_of_outer",
        {"ROWS": 16, "BLOCKS": 8, "SQUARE": True, "MANY": False}, 4,
    ),
}  # fmt: skip


def job(name: str, chip: str, element: str = "bf16") -> Job:
    """The job of kernel `name` for `chip`, x of Triton type `element`."""
    kernel, arguments, constants, warps = KERNELS[name]
    names = arguments.split()
    signature = {argument: _TYPES.get(argument, "i32") for argument in names} | {"x": f"*{element}"}
    if "out" in signature:
        signature["out"] = f"*{element}"
    return Job(
        kernel=f"{_FOLDER}.{kernel}",
        chip=chip,
        signature=signature,
        constants=constants | {"NATIVE": 100 if CHIPS[chip].capability >= 100 else 89},
        divisible=tuple(argument for argument in names if argument in _ALIGNED),
        options={"num_warps": warps, "enable_fp_fusion": False},
    )
