"""Other projects' NVFP4 quantisers and fake-quantisers, as (package, function from x to the call that is timed).

`x` is bfloat16 [M, K]. Each derives its own scales and rounds in its own dialect (docs/dialects.md): the results are
not ours bit for bit, the work is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

Make = Callable[[Tensor], Callable[[], Any]]


def modelopt_quantize(x: Tensor) -> Callable[[], Any]:
    """NVFP4QTensor.quantize, which fake-quantises nothing: packed codes and scales."""
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    return lambda: NVFP4QTensor.quantize(x, 16)


def modelopt_fake_quantize(x: Tensor) -> Callable[[], Any]:
    """On a CPU ModelOpt's own way is to quantise and dequantise: its fused operator is for CUDA."""
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    def call() -> Any:
        q, scales, outer = NVFP4QTensor.quantize(x, 16)
        return q.dequantize(x.dtype, scale=scales, double_scale=outer, block_sizes={-1: 16})

    return call


def modelopt_fused(x: Tensor) -> Callable[[], Any]:
    """ModelOpt's Triton kernel, which its quantisers call in training on CUDA."""
    from modelopt.torch.kernels.quantization.gemm import fp4_fake_quant_block

    amax = x.abs().amax().float()
    return lambda: fp4_fake_quant_block(x, amax)


def fouroversix_quantize(x: Tensor) -> Callable[[], Any]:
    """fouroversix without its second candidate (scale rule static_6): plain NVFP4."""
    from fouroversix import QuantizationConfig, quantize_to_fp4

    config = QuantizationConfig(scale_rule="static_6", backend="pytorch")  # type: ignore[arg-type]
    return lambda: quantize_to_fp4(x, config)


def fouroversix_fake_quantize(x: Tensor) -> Callable[[], Any]:
    """Its quantiser, then its dequantiser."""
    from fouroversix import QuantizationConfig, dequantize, quantize_to_fp4

    config = QuantizationConfig(scale_rule="static_6", backend="pytorch")  # type: ignore[arg-type]
    return lambda: dequantize(quantize_to_fp4(x, config), x.dtype)


def vllm_fake_quantize(x: Tensor) -> Callable[[], Any]:
    """The quantise-dequantise of vLLM's NVFP4 emulation (a Triton kernel on CUDA)."""
    from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import ref_nvfp4_quant_dequant

    encode = 2688.0 / x.abs().amax().float()
    return lambda: ref_nvfp4_quant_dequant(x, encode, 16)


QUANTIZERS: dict[str, tuple[str, Make]] = {
    "modelopt": ("modelopt", modelopt_quantize),
    "fouroversix": ("fouroversix", fouroversix_quantize),
}
FAKE_QUANTIZERS: dict[str, dict[str, tuple[str, Make]]] = {
    "cpu": {
        "modelopt": ("modelopt", modelopt_fake_quantize),
        "fouroversix": ("fouroversix", fouroversix_fake_quantize),
        "vllm.emulation": ("vllm", vllm_fake_quantize),
    },
    "cuda": {
        "modelopt": ("modelopt", modelopt_fused),
        "fouroversix": ("fouroversix", fouroversix_fake_quantize),
        "vllm.emulation": ("vllm", vllm_fake_quantize),
    },
}
