"""`quads emulate quantize|gemm` and `quads explain`: files or values in, exact bytes out."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from quads.emulation import explain, files, gemm, layout, quantizers
from quads.emulation.quantizers import NVFP4Tensor

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SCALE_LAYOUTS = {"linear": None, **layout.LAYOUTS}


def quantize_file(
    source: Path, out: Path, *, name: str = "", dialect: str = "exact", granularity: str = "", scales: str = "linear"
) -> NVFP4Tensor:
    """Quantise one tensor of `source` and write codes, block scales (in layout `scales`) and outer scale to `out`."""
    if scales not in SCALE_LAYOUTS:
        raise ValueError(f"scale layout '{scales}' is not one of {', '.join(SCALE_LAYOUTS)}")
    if granularity not in ("", "tensor", "token"):
        raise ValueError(f"granularity '{granularity}' is not one of tensor, token")
    x = files.read_tensor(source, name or None)
    q = quantizers.quantize(x, granularity=granularity or None, dialect=dialect)  # type: ignore[arg-type]
    label = name or "tensor"
    tensors = files.quantized_tensors(q, label)
    scale_layout = SCALE_LAYOUTS[scales]
    if scale_layout is not None:
        tensors[f"{label}.scales"] = layout.swizzle(q.scales.flatten(0, -2), scale_layout)
    shape = "x".join(str(n) for n in x.shape)
    files.write_safetensors(out, tensors, {"dialect": dialect, "scales": scales, "shape": shape})
    return q


def gemm_files(a: Path, b: Path, out: Path, *, a_name: str = "", b_name: str = "", dtype: str = "bfloat16") -> Tensor:
    """Y = Q(A) Q(B)^T through the modelled FP4 tensor core; writes `accumulator` (float32, before alpha) and `y`.

    A [M, K] is quantised per token, B [N, K] per tensor. Returns y [M, N] in `dtype`.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype '{dtype}' is not one of {', '.join(DTYPES)}")
    x, w = (_matrix(path, name) for path, name in ((a, a_name), (b, b_name)))
    if x.shape[1] != w.shape[1]:
        raise ValueError(f"{a} has K = {x.shape[1]}, {b} has K = {w.shape[1]}: they must agree")
    qx, qw = quantizers.quantize(x, granularity="token"), quantizers.quantize(w)
    accumulator = gemm.matmul(qx, qw)
    y = gemm.epilogue(accumulator, qx.outer * qw.outer, DTYPES[dtype])
    files.write_safetensors(out, {"accumulator": accumulator, "y": y})
    return y


def explain_text(values: list[float], dialect: str, amax: float | None, dtype: str) -> str:
    """Every rounding of one value or one block of up to 16 values under `dialect`, and who disagrees."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype '{dtype}' is not one of {', '.join(DTYPES)}")
    return explain.render(explain.explain_block(values, dialect, amax=amax, dtype=DTYPES[dtype]))


def _matrix(path: Path, name: str) -> Tensor:
    tensor = files.read_tensor(path, name or None)
    if tensor.ndim != 2:
        raise ValueError(f"{path} holds a tensor of shape {tuple(tensor.shape)}: a matrix product takes two dimensions")
    return tensor
