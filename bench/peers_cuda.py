"""Matrix products and expert layers that others would run on this GPU, each the way its own project calls it.

Dense builders take weights ([N, K], one per set) and return `run(x, i)`; expert builders return `run(x, ids, weights)`.
FP8 activations are quantised beforehand where the name says nothing else, as ours are in the same group.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from quads.emulation import layout
from quads.kernels.quantize import PackedNVFP4

E4M3 = torch.float8_e4m3fn
Product = Callable[[Tensor, int], Tensor]
Layer = Callable[[Tensor, Tensor, Tensor], Any]


def deep_gemm() -> ModuleType:
    """DeepGEMM, its own package or the copy in vLLM's wheel. ImportError where there is neither."""
    try:
        return importlib.import_module("deep_gemm")
    except ImportError:
        return importlib.import_module("vllm.third_party.deep_gemm")


def per_channel(w: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 [N, K] with one scale a row, float32 [N, 1]."""
    scale = w.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / 448.0
    return (w.float() / scale).to(E4M3), scale


def per_group(x: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """FP8 [M, K] with one float32 scale for each `rows` x 128 tile."""
    tiles = x.float().unflatten(1, (-1, 128)).unflatten(0, (-1, rows))
    scale = tiles.abs().amax((1, 3), keepdim=True).clamp(min=1e-12) / 448.0
    return (tiles / scale).to(E4M3).flatten(0, 1).flatten(1), scale[:, 0, :, 0].contiguous()


def scaled_mm(weights: Sequence[Tensor]) -> Callable[[Tensor], list[Callable[[], Tensor]]]:
    """cuBLASLt FP8 through torch: row-wise scales, fast accumulation."""
    held = [per_channel(w) for w in weights]

    def calls(x: Tensor) -> list[Callable[[], Tensor]]:
        q, scale = per_channel(x)
        return [partial(_scaled, q, scale, w, s) for w, s in held]

    return calls


def _scaled(q: Tensor, scale: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return torch._scaled_mm(q, w.t(), scale_a=scale, scale_b=s.t(), out_dtype=torch.bfloat16, use_fast_accum=True)


def scaled_mm_nvfp4(weights: Sequence[PackedNVFP4]) -> Callable[[PackedNVFP4], list[Callable[[], Tensor]]]:
    """cuBLASLt NVFP4 through torch, on our bytes, without outer scales; 128 rows or more (never run: no Blackwell)."""

    def operand(q: PackedNVFP4) -> tuple[Tensor, Tensor]:
        return q.packed.view(torch.float4_e2m1fn_x2), layout.swizzle(q.scales).flatten().view(E4M3)

    def call(a: tuple[Tensor, Tensor], w: tuple[Tensor, Tensor]) -> Tensor:
        return torch._scaled_mm(a[0], w[0].t(), scale_a=a[1], scale_b=w[1], out_dtype=torch.bfloat16)

    held = [operand(w) for w in weights]
    return lambda q: [partial(call, operand(q), w) for w in held]


def vllm_fp8(weights: Sequence[Tensor], *, quantize: bool) -> Callable[[Tensor], list[Callable[[], Tensor]]]:
    """vLLM's CUTLASS FP8 linear, a scale a token and a channel; `quantize`: from bfloat16, with its own quantiser."""
    from vllm import _custom_ops as ops

    held = [per_channel(w) for w in weights]

    def calls(x: Tensor) -> list[Callable[[], Tensor]]:
        before = ops.scaled_fp8_quant(x, use_per_token_if_dynamic=True)

        def call(w: Tensor, s: Tensor) -> Tensor:
            q, scale = ops.scaled_fp8_quant(x, use_per_token_if_dynamic=True) if quantize else before
            return ops.cutlass_scaled_mm(q, w.t(), scale, s, out_dtype=torch.bfloat16)

        return [partial(call, w, s) for w, s in held]

    return calls


def deep_gemm_fp8(weights: Sequence[Tensor]) -> Callable[[Tensor], list[Callable[[], Tensor]]]:
    """DeepGEMM: 128x128 weight blocks, activations in groups of 128."""
    module = deep_gemm()
    held = [per_group(w, 128) for w in weights]

    def calls(x: Tensor) -> list[Callable[[], Tensor]]:
        q, scale = per_group(x, 1)
        a = (q, module.utils.layout.get_mn_major_tma_aligned_tensor(scale))

        def call(b: tuple[Tensor, Tensor]) -> Tensor:
            y = torch.empty(len(x), len(b[0]), dtype=torch.bfloat16, device="cuda")
            module.fp8_gemm_nt(a, b, y)
            return y

        return [partial(call, b) for b in held]

    return calls


def marlin(weights: Sequence[PackedNVFP4]) -> Callable[[Tensor], list[Callable[[], Tensor]]]:
    """vLLM's weight-only NVFP4 linear (bfloat16 activations), on the same weights as ours."""
    from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4 as fp4

    layers = []
    for w in weights:
        layer: Any = torch.nn.Module()
        layer.output_size_per_partition, layer.input_size_per_partition = len(w.packed), 2 * w.packed.shape[1]
        layer.params_dtype = torch.bfloat16
        layer.weight = torch.nn.Parameter(w.packed.clone(), requires_grad=False)
        layer.weight_scale = torch.nn.Parameter(w.scales.view(E4M3).clone(), requires_grad=False)
        layer.weight_global_scale = torch.nn.Parameter(w.outer.clone().reshape(1), requires_grad=False)
        fp4.prepare_fp4_layer_for_marlin(layer)
        layers.append(layer)
    n, k = len(weights[0].packed), 2 * weights[0].packed.shape[1]

    def call(x: Tensor, v: Any) -> Tensor:
        return fp4.apply_fp4_marlin_linear(x, v.weight, v.weight_scale, v.weight_global_scale, v.workspace, n, k)

    return lambda x: [partial(call, x, v) for v in layers]


def fp8_experts(w13: Tensor, w2: Tensor) -> Layer:
    """vLLM's fused Triton experts, FP8 in 128x128 blocks, activations quantised per 128."""
    from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

    held = [[torch.stack(part) for part in zip(*(per_group(e, 128) for e in w), strict=True)] for w in (w13, w2)]
    config = fp8_w8a8_moe_quant_config(w1_scale=held[0][1], w2_scale=held[1][1], block_shape=[128, 128])
    return lambda x, ids, weights: fused_experts(x, held[0][0], held[1][0], weights, ids, quant_config=config)


def bf16_experts(w13: Tensor, w2: Tensor) -> Layer:
    """vLLM's fused Triton experts in bfloat16."""
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

    return lambda x, ids, weights: fused_experts(x, w13, w2, weights, ids)


def marlin_experts(w13: PackedNVFP4, w2: PackedNVFP4) -> Layer:
    """vLLM's Marlin layer on the same weights; one global scale an expert, so the gate's stands for both."""
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe
    from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4 as fp4
    from vllm.scalar_type import scalar_types

    experts, hidden, inner = len(w2.packed), w2.packed.shape[1], 2 * w2.packed.shape[2]
    layer = SimpleNamespace(
        num_experts=experts, hidden_size=hidden, intermediate_size_per_partition=inner, params_dtype=torch.bfloat16
    )
    p = fp4.prepare_nvfp4_moe_layer_for_marlin(
        layer, w13.packed.clone(), w13.scales.view(E4M3).clone(), w13.outer[:, 0].clone(),
        w2.packed.clone(), w2.scales.view(E4M3).clone(), w2.outer.clone(), is_act_and_mul=True,
    )  # fmt: skip
    kind = scalar_types.float4_e2m1f.id
    return lambda x, ids, weights: fused_marlin_moe(
        x, p[0], p[3], None, None, p[1], p[4], weights, ids, kind,
        global_num_experts=experts, global_scale1=p[2], global_scale2=p[5], workspace=layer.workspace,
    )  # fmt: skip


def emulated_experts(w13: PackedNVFP4, w2: PackedNVFP4, top_k: int) -> Layer:
    """vLLM's W4A4 emulation layer: activations quantised and dequantised, weights dequantised inside the product."""
    from vllm.model_executor.layers.fused_moe import config as fused
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.experts import nvfp4_emulation_moe as emulation

    experts, hidden, inner = len(w2.packed), w2.packed.shape[1], 2 * w2.packed.shape[2]
    one = torch.tensor(448.0, device="cuda")
    moe_config = fused.FusedMoEConfig(
        num_experts=experts, experts_per_token=top_k, hidden_dim=hidden, intermediate_size=inner,
        num_local_experts=experts, num_logical_experts=experts, activation=MoEActivation.SILU, device="cuda",
        routing_method=fused.RoutingMethodType.Renormalize, in_dtype=torch.bfloat16,
        moe_parallel_config=fused.FusedMoEParallelConfig.make_no_parallel(),
    )  # fmt: skip
    quant_config = fused.nvfp4_moe_quant_config(
        g1_alphas=w13.outer[:, 0].contiguous(), g2_alphas=w2.outer, a1_gscale=one, a2_gscale=one,
        w1_scale=w13.scales, w2_scale=w2.scales,
    )  # fmt: skip
    layer = emulation.Nvfp4QuantizationEmulationTritonExperts(moe_config, quant_config)

    def run(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        m, wide = len(x), max(2 * inner, hidden)
        spaces = [torch.empty(m * top_k * wide, dtype=x.dtype, device="cuda") for _ in range(2)]
        y = torch.empty_like(x)
        layer.apply(
            y, x, w13.packed, w2.packed, weights, ids, MoEActivation.SILU, experts, None, None, None, *spaces, None,
            False,
        )  # fmt: skip
        return y

    return run
