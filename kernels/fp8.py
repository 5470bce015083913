"""The FP8 baseline: E4M3 with one FP32 scale per 1x128 of activations and per 128x128 of weights.

    scale = fl(amax / 448), 1 where that is 0;  code = e4m3_sat(fl(x / scale))
    Y     = sum over groups g of 128 columns, in order, of (A_g B_g^T) * fl(a_scale * b_scale), FP32
torch.float8_e4m3fn codes and the scale shapes of DeepSeek-V3 checkpoints. `matmul` is for where neither torch
(`torch._scaled_mm` with 1x128 scales) nor vLLM offers the product; its speed is a floor for the baseline, not a peer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quads.kernels import support

GROUP = 128


@dataclass(frozen=True)
class Fp8Tensor:
    """Codes float8_e4m3fn [M, K]; scales float32 [M, ceil(K/128)], or [ceil(M/128), ceil(K/128)] for weights."""

    codes: Tensor
    scales: Tensor


def quantize_activation(x: Tensor) -> Fp8Tensor:
    """Quantise `x` [..., K] (float32, bfloat16, float16), leading dimensions flattened, a scale per 1x128."""
    return _quantize(x.reshape(-1, x.shape[-1]) if x.ndim else x, "x", shared=False)


def quantize_weight(w: Tensor) -> Fp8Tensor:
    """Quantise `w` [N, K], a scale per 128x128; ragged edges are smaller tiles."""
    return _quantize(w, "w", shared=True)


def matmul(a: Fp8Tensor, b: Fp8Tensor, *, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A B^T [M, N] of `quantize_activation` and `quantize_weight` results; ValueError where shapes do not fit."""
    (m, k), (n, k_b) = a.codes.shape, b.codes.shape
    groups = -(-k // GROUP)
    if k != k_b:
        raise ValueError(f"b.codes of shape {(n, k_b)}: K is {k_b}, but a has {k}")
    if a.scales.shape != (m, groups) or b.scales.shape != (-(-n // GROUP), groups):
        raise ValueError(f"scales {tuple(a.scales.shape)} and {tuple(b.scales.shape)} are not 1x128 and 128x128")
    support.check_launch(a.codes, "fp8.matmul")
    from quads.kernels.fp8_details.fp8_jit import fp8_matmul_kernel

    out = torch.empty(m, n, dtype=out_dtype, device=a.codes.device)
    tile = {"BM": 16 if m <= 16 else 64, "BN": 128}
    if out.numel():
        fp8_matmul_kernel[(-(-m // tile["BM"]), -(-n // tile["BN"]))](
            a.codes.contiguous().view(torch.uint8), b.codes.contiguous().view(torch.uint8), a.scales.contiguous(),
            b.scales.contiguous(), out, m, n, k, GROUPS=groups, **tile, NATIVE=support.native_level(),
            num_warps=4 if m <= 16 else 8, num_stages=3, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def _quantize(x: Tensor, name: str, *, shared: bool) -> Fp8Tensor:
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"{name} has dtype {x.dtype}: FP8 quantisation takes float32, bfloat16 or float16")
    if x.ndim != 2 or x.shape[1] == 0:
        raise ValueError(f"{name} of shape {tuple(x.shape)}: needs rows of at least one element")
    support.check_launch(x, "fp8.quantize")
    from quads.kernels.fp8_details.fp8_jit import fp8_quantize_kernel

    x = x if x.stride(1) == 1 else x.contiguous()
    rows, groups = GROUP if shared else 16, -(-x.shape[1] // GROUP)
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scales = torch.empty(-(-x.shape[0] // rows) if shared else x.shape[0], groups, dtype=torch.float32, device=x.device)
    if x.shape[0]:
        fp8_quantize_kernel[(-(-x.shape[0] // rows), groups)](
            x, codes, scales, x.shape[0], x.shape[1], x.stride(0), groups, ROWS=rows, SHARED=shared,
            NATIVE=support.native_level(), num_warps=8 if shared else 4, enable_fp_fusion=False,
        )  # fmt: skip
    return Fp8Tensor(codes.view(torch.float8_e4m3fn), scales)
