"""The installed quantisers of other projects, each as (x, outer) -> (codes [M, K], scale bytes [M, K/16]).

Codes are nibbles, unpacked here by hand so that no project code takes part. `outer` is the library's own outer
scale in its own direction; None lets the library derive it from `x`. A library that is missing skips with its reason.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import types
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

Quantized = tuple[Tensor, Tensor]


def unpack(packed: Tensor) -> Tensor:
    """Low nibble first."""
    packed = packed.view(torch.uint8)
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)


def compressed_tensors(x: Tensor, outer: Tensor | None = None) -> Quantized:
    pytest.importorskip("compressed_tensors", reason="needs compressed-tensors (extra: oracles)")
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.quant_scheme import NVFP4
    from compressed_tensors.quantization.utils.helpers import calculate_qparams, generate_gparam

    scheme = QuantizationScheme(targets=["Linear"], **NVFP4)
    gs = generate_gparam(x.amin(), x.amax()) if outer is None else outer.reshape(1)
    blocks = x.unflatten(-1, (-1, 16))
    scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights, gs)
    state = {"weight": x.clone(), "weight_scale": scale, "weight_global_scale": gs}
    state = NVFP4PackedCompressor.compress(state, scheme)
    return unpack(state["weight_packed"]), state["weight_scale"].view(torch.uint8)


def modelopt(x: Tensor, outer: Tensor | None = None) -> Quantized:
    pytest.importorskip("modelopt", reason="needs nvidia-modelopt (extra: oracles)")
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    packed, scales, _ = NVFP4QTensor.quantize(x.clone(), 16, weights_scaling_factor_2=outer)
    return unpack(packed._quantized_data), scales.view(torch.uint8)


def torchao(x: Tensor, outer: Tensor | None = None, *, levels: int = 2) -> Quantized:
    pytest.importorskip("torchao", reason="needs torchao (extra: oracles)")
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

    if levels == 2 and outer is None:
        outer = per_tensor_amax_to_scale(x.abs().amax())
    scales, packed = nvfp4_quantize(x, 16, outer if levels == 2 else None)
    return unpack(packed), scales.view(torch.uint8)


def fouroversix(x: Tensor, outer: Tensor | None = None, *, rule: str, two_d: bool = False) -> Quantized:
    """`outer` is x_amax, as the library takes it."""
    pytest.importorskip("fouroversix", reason="needs fouroversix (SKIP_CUDA_BUILD=1 pip install --no-build-isolation)")
    from fouroversix.quantize.pytorch.reference import quantize_to_fp4
    from fouroversix.utils import ScaleRule

    packed, scales, _ = quantize_to_fp4(
        x, outer, scale_rule=ScaleRule(rule), block_scale_2d=two_d, use_blackwell_scale_layout=False
    )
    return unpack(packed), scales.view(torch.uint8).reshape(x.shape[0], -1)


def vllm_reference(x: Tensor, outer: Tensor | None = None) -> Quantized:
    """The library returns E2M1 values, not codes; NaN stays NaN there and has no code."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("needs vLLM (the CPU build will do)")
    from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import ref_nvfp4_quant

    gs = torch.tensor(2688.0) / x.abs().amax().float() if outer is None else outer  # an input there: our choice
    values, scales = ref_nvfp4_quant(x, gs, 16)
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    codes = (values.abs().unsqueeze(-1) == grid).int().argmax(-1)
    codes = torch.where(values.isnan(), 7, codes | (torch.signbit(values).int() << 3))
    return codes.byte(), scales.to(torch.float8_e4m3fn).view(torch.uint8)


def te_reference(x: Tensor, outer: Tensor | None = None, **options: Any) -> Quantized:
    assert outer is None, "Transformer Engine derives the outer scale itself"
    module = _te_reference_module()
    quantizer = module.NVFP4QuantizerRef(dtype=module.reference_utils.Fp4Formats.E2M1, columnwise=False, **options)
    result = quantizer.quantize(x)
    return unpack(result.data), result.scale.view(torch.uint8)


@cache
def _te_reference_module() -> types.ModuleType:
    """reference_nvfp4.py out of the published wheel, on its own: the package's __init__ loads a CUDA library.

    Only its imports are stood in for: the base class `Quantizer` (keeps two flags) and the GEMM helper (not called).
    The wheel is read, not installed: transformers stops importing beside an installed one without CUDA.
    """
    wheel = os.environ.get("QUADS_TE_WHEEL")
    if not wheel or not Path(wheel).is_file():
        pytest.skip("needs QUADS_TE_WHEEL, the path of a wheel (pip download --no-deps transformer-engine==2.20.2)")
    gemm, base = types.ModuleType("gemm"), types.ModuleType("quantized_tensor")
    vars(gemm).update(MMParams=object, GEMMType=types.SimpleNamespace(FPROP=0))
    vars(base).update(Quantizer=_TeQuantizer, QuantizedTensorStorage=object)
    recipes = types.ModuleType("custom_recipes")
    vars(recipes).update(gemm=gemm)
    stand_ins = {
        "transformer_engine": types.ModuleType("transformer_engine"),
        "transformer_engine.pytorch": types.ModuleType("pytorch"),
        "transformer_engine.pytorch.custom_recipes": recipes,
        "transformer_engine.pytorch.quantized_tensor": base,
    }
    with zipfile.ZipFile(wheel) as files, pytest.MonkeyPatch.context() as patch:
        for name, module in stand_ins.items():
            patch.setitem(sys.modules, name, module)
        for name in ("reference_utils", "reference_nvfp4"):
            path = f"transformer_engine/pytorch/custom_recipes/{name}.py"
            module = types.ModuleType(f"transformer_engine.pytorch.custom_recipes.{name}")
            patch.setitem(sys.modules, module.__name__, module)
            setattr(recipes, name, module)
            exec(compile(files.read(path), path, "exec"), vars(module))
    return module


class _TeQuantizer:
    def __init__(self, *, rowwise: bool, columnwise: bool) -> None:
        self.rowwise_usage, self.columnwise_usage = rowwise, columnwise


Library = Callable[[Tensor, Tensor | None], Quantized]
