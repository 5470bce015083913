"""Wrappers that put other projects' functions under the protocol; adapters.toml says when each may be used.

Each returns a callable, and imports its library inside. Nothing of a library's arithmetic is repeated here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quads.emulation import layout

Call = Callable[..., Any]
_GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def compressed_tensors() -> Call:
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.quant_scheme import NVFP4
    from compressed_tensors.quantization.utils.helpers import calculate_qparams, generate_gparam

    scheme = QuantizationScheme(targets=["Linear"], **NVFP4)

    def quantize(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gs = generate_gparam(x.amin(), x.amax())
        blocks = x.unflatten(-1, (-1, 16))
        scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights, gs)
        state = {"weight": x.clone(), "weight_scale": scale, "weight_global_scale": gs}
        state = NVFP4PackedCompressor.compress(state, scheme)
        return state["weight_packed"], state["weight_scale"], gs

    return quantize


def modelopt() -> Call:
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    def quantize(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        packed, scales, outer = NVFP4QTensor.quantize(x.clone(), 16)
        return packed._quantized_data, scales, outer

    return quantize


def torchao() -> Call:
    """Two-level: the outer scale is given, as `per_tensor_amax_to_scale` would compute it."""
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

    def quantize(x: Tensor, outer: Tensor) -> tuple[Tensor, Tensor]:
        scales, packed = nvfp4_quantize(x.contiguous(), 16, outer)
        return packed, scales

    return quantize


def torchao_one_level() -> Call:
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

    def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
        scales, packed = nvfp4_quantize(x.contiguous(), 16, None)
        return packed, scales

    return quantize


def fouroversix(rule: str) -> Call:
    from fouroversix.quantize.pytorch.reference import quantize_to_fp4
    from fouroversix.utils import ScaleRule

    def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
        packed, scales, _ = quantize_to_fp4(x, None, scale_rule=ScaleRule(rule), use_blackwell_scale_layout=False)
        return packed.view(torch.uint8), scales.reshape(x.shape[0], -1)

    return quantize


def vllm_reference() -> Call:
    """`ref_nvfp4_quant` returns E2M1 values; NaN has no code among them and becomes code 7."""
    from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import ref_nvfp4_quant

    def quantize(x: Tensor, outer: Tensor) -> tuple[Tensor, Tensor]:
        values, scales = ref_nvfp4_quant(x, outer, 16)
        codes = (values.abs().unsqueeze(-1) == torch.tensor(_GRID)).int().argmax(-1)
        codes = torch.where(values.isnan(), 7, codes | (torch.signbit(values).int() << 3))
        return layout.pack(codes.byte()), scales.to(torch.float8_e4m3fn)

    return quantize


def te_reference() -> Call:
    from transformer_engine.pytorch.custom_recipes import reference_nvfp4, reference_utils

    quantizer = reference_nvfp4.NVFP4QuantizerRef(dtype=reference_utils.Fp4Formats.E2M1, columnwise=False)

    def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
        result = quantizer.quantize(x)
        return result.data, result.scale

    return quantize


def te_quantizer() -> Call:
    """TE pads scales to 128 x 4 tiles, row-major, before its GEMM swizzles them; the padding is cut off here."""
    from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer

    quantizer = NVFP4Quantizer(columnwise=False)

    def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
        result = quantizer(x)
        scales = result._rowwise_scale_inv[: x.shape[0], : x.shape[1] // 16].contiguous()
        return result._rowwise_data, scales

    return quantize


def quads_kernel() -> Call:
    from quads.kernels.quantize import quantize as kernel

    def quantize(x: Tensor, outer: Tensor) -> tuple[Tensor, Tensor]:
        q = kernel(x, outer, layout="128x4")
        return q.packed, q.scales

    return quantize


def vllm_quantizer() -> Call:
    from vllm._custom_ops import scaled_fp4_quant

    return scaled_fp4_quant


def flashinfer_quantizer() -> Call:
    from flashinfer import fp4_quantize

    def quantize(x: Tensor, outer: Tensor) -> tuple[Tensor, Tensor]:
        packed, scales = fp4_quantize(x.contiguous(), outer.reshape(1))
        return packed.view(torch.uint8), scales.view(torch.uint8)

    return quantize


def sglang_quantizer() -> Call:
    from sgl_kernel import scaled_fp4_quant

    return scaled_fp4_quant


def vllm_product() -> Call:
    from vllm._custom_ops import cutlass_scaled_fp4_mm

    return _with_e4m3(cutlass_scaled_fp4_mm)


def sglang_product() -> Call:
    from sgl_kernel import cutlass_scaled_fp4_mm

    return _with_e4m3(cutlass_scaled_fp4_mm)


def _with_e4m3(call: Call) -> Call:
    def product(a: Tensor, sa: Tensor, b: Tensor, sb: Tensor, alpha: Tensor, dtype: torch.dtype) -> Tensor:
        return call(a, b, sa.view(torch.float8_e4m3fn), sb.view(torch.float8_e4m3fn), alpha, dtype)

    return product


def flashinfer_product() -> Call:
    from flashinfer import mm_fp4

    def product(a: Tensor, sa: Tensor, b: Tensor, sb: Tensor, alpha: Tensor, dtype: torch.dtype) -> Tensor:
        return mm_fp4(a, b.T, sa, sb.T, alpha.reshape(1), dtype)

    return product


def torch_product() -> Call:
    """torch has no alpha for FP4: it is multiplied after the cast, as torchao does."""

    def product(a: Tensor, sa: Tensor, b: Tensor, sb: Tensor, alpha: Tensor, dtype: torch.dtype) -> Tensor:
        a4, b4 = (x.view(torch.float4_e2m1fn_x2) for x in (a, b))
        scales = (x.reshape(-1).view(torch.float8_e4m3fn) for x in (sa, sb))
        return torch._scaled_mm(a4, b4.t(), *scales, out_dtype=dtype) * alpha.to(dtype)

    return product
