"""The NVFP4 GEMMs that vLLM has, as a table in vLLM's own order of preference, each with what it needs.

`missing` returns "" where the GEMM can run here, else one line: what is needed. It asks the chip first, so that vLLM
is imported only where FP4 tensor cores are.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quads.kernels import support


@dataclass(frozen=True)
class Gemm:
    """`kernel` is vLLM's class for it, `choice` the value of --linear-backend (or --moe-backend) that asks for it.

    run: dense (a, b, scales_a, scales_b, alpha, dtype) -> [M, N]; grouped (out, a, b, scales_a, scales_b, alphas,
    problem_sizes, expert_offsets, scale_offsets), which writes out.
    """

    name: str
    kernel: str
    choice: str
    grouped: bool
    missing: Callable[[], str]
    run: Callable[..., Tensor]


def _missing_cutlass(op: str) -> str:
    missing = support.missing_blackwell() or _missing_vllm()
    if missing:
        return missing
    from vllm import _custom_ops

    if not hasattr(torch.ops._C, op):
        return f"this build of vLLM has no torch.ops._C.{op}"
    major, minor = support.capability() or (0, 0)
    if not _custom_ops.cutlass_scaled_mm_supports_fp4(10 * major + minor):
        return f"this build of vLLM has no FP4 CUTLASS kernels for {support.device_name()}"
    return ""


def _missing_flashinfer(*, cute: bool) -> str:
    missing = support.missing_blackwell() or _missing_vllm()
    if missing:
        return missing
    from vllm.utils.flashinfer import has_flashinfer

    if not has_flashinfer():
        return "needs FlashInfer, with its cubins or nvcc"
    if cute and (support.capability() or (0, 0))[0] != 10:
        return f"FlashInfer's cute-dsl GEMM needs sm_10x; found {support.device_name()}"
    return "" if cute else _missing_cutlass(_DENSE_OP)


def _missing_vllm() -> str:
    return "" if importlib.util.find_spec("vllm") else "needs vLLM (pip install 'quads[vllm]'); it is not installed"


def _cutlass(*operands: Any) -> Tensor:
    from vllm import _custom_ops

    return _custom_ops.cutlass_scaled_fp4_mm(*operands)


def _flashinfer(*operands: Any, backend: str) -> Tensor:
    from vllm.utils.flashinfer import flashinfer_scaled_fp4_mm

    return flashinfer_scaled_fp4_mm(*operands, backend=backend)


def _cutlass_grouped(*operands: Any) -> Tensor:
    from vllm import _custom_ops

    return _custom_ops.cutlass_fp4_moe_mm(*operands)


_DENSE_OP, _GROUPED_OP = "cutlass_scaled_fp4_mm", "cutlass_fp4_group_mm"
GEMMS = (
    Gemm(
        "flashinfer mm_fp4 (cute-dsl)",
        "FlashInferCuteDslNvFp4LinearKernel",
        "flashinfer_cutedsl",
        False,
        partial(_missing_flashinfer, cute=True),
        partial(_flashinfer, backend="cute-dsl"),
    ),
    Gemm(
        "flashinfer mm_fp4 (cutlass)",
        "FlashInferCutlassNvFp4LinearKernel",
        "flashinfer_cutlass",
        False,
        partial(_missing_flashinfer, cute=False),
        partial(_flashinfer, backend="cutlass"),
    ),
    Gemm(
        "vllm cutlass_scaled_fp4_mm",
        "CutlassNvFp4LinearKernel",
        "cutlass",
        False,
        partial(_missing_cutlass, _DENSE_OP),
        _cutlass,
    ),
    Gemm(
        "vllm cutlass_fp4_moe_mm",
        "CutlassExpertsFp4",
        "cutlass",
        True,
        partial(_missing_cutlass, _GROUPED_OP),
        _cutlass_grouped,
    ),
)
