"""The routed W4A4 layer on a Hopper GPU: check, time against vLLM's FP8 and NVFP4 Marlin layers, write the table.

    PYTHONPATH=. python3 bench/h200_moe.py --out results.json --sha REVISION

Shape of Qwen3-30B-A3B's layers: hidden 2048, 128 experts, top 8, intermediate 768. Everything that runs at decoding is
timed (routing, both quantisations, both products, SwiGLU, the weighted sum); routing decisions are inputs. Peers are
timed where vLLM can be imported: its fused Triton layer with FP8 128x128 blocks (it ships a tuned configuration for
this shape and chip) and its Marlin layer on the same NVFP4 weights.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quads.bench.h200_gemm import drawn, values
from quads.bench.h200_timing import Row, publish, stamp, timed
from quads.kernels import compensate, gemm, moe
from quads.kernels.prepack import PreparedWeight, Quantized
from quads.kernels.quantize import PackedNVFP4, quantize

HIDDEN, INNER, EXPERTS, TOP_K = 2048, 768, 128, 8
TOKENS = (1, 4, 16, 64, 128, 256)
SETS = 4
GOALS = {"vLLM FP8": ">= 1.16x FP8", "vLLM Marlin NVFP4": ">= 1.0x Marlin"}


def experts_weight(n: int, k: int, parts: int) -> PackedNVFP4:
    q = drawn(EXPERTS * n, k // 16, per_row=False)
    outer = (torch.rand(EXPERTS, parts, device="cuda") + 0.5) * 2e-4
    return PackedNVFP4(q.packed.view(EXPERTS, n, -1), q.scales.view(EXPERTS, n, -1), outer.squeeze(1))


def static_half(x: Tensor) -> tuple[Quantized, Tensor | None]:
    """Every other block, known beforehand."""
    blocks = _every_other(x.shape[1])
    q = compensate.quantize_rac(x, len(blocks), "static", granularity="token", static_blocks=blocks)
    return q, q.blocks


@cache
def _every_other(k: int) -> Tensor:
    return torch.arange(0, k // 16, 2, dtype=torch.int32, device="cuda")


def batch_half(x: Tensor) -> tuple[Quantized, Tensor | None]:
    """Half of the blocks of the batch, chosen at every call."""
    q = compensate.quantize_rac(x, x.shape[1] // 32, "batch", granularity="token")
    return q, q.blocks


def routing(tokens: int) -> tuple[Tensor, Tensor]:
    ids = torch.rand(tokens, EXPERTS, device="cuda").argsort(1)[:, :TOP_K].int()
    return ids, torch.softmax(torch.randn(tokens, TOP_K, device="cuda"), -1)


def reference(x: Tensor, ids: Tensor, weights: Tensor, w13: PackedNVFP4, w2: PackedNVFP4) -> Tensor:
    """The layer in float64 with the same rounding points, one expert at a time."""
    out = torch.zeros(x.shape[0], HIDDEN, dtype=torch.float64, device="cuda")
    a = quantize(x, granularity="token")
    xq = values(a) * a.outer.double()
    for e in range(EXPERTS):
        token, slot = (ids == e).nonzero(as_tuple=True)
        if not len(token):
            continue
        first, second = (values(PackedNVFP4(w.packed[e], w.scales[e], w.outer[e])) for w in (w13, w2))
        both = (xq[token] @ first.T) * w13.outer[e].double().repeat_interleave(INNER)
        gate, up = both.bfloat16().float().chunk(2, -1)
        h = quantize((gate / (1 + torch.exp(-gate)) * up).bfloat16(), granularity="token")
        y = ((values(h) * h.outer.double()) @ second.T * w2.outer[e].double()).bfloat16().double()
        out.index_add_(0, token, weights[token, slot].double().unsqueeze(1) * y)
    return out


def check(w13: PackedNVFP4, w2: PackedNVFP4, prepared: tuple[PreparedWeight, PreparedWeight]) -> dict[str, float]:
    """Relative error by number of tokens; bfloat16 rounding alone gives about 1.7e-3."""
    errors = {}
    for tokens in (1, 5, 64, 256):
        x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
        ids, weights = routing(tokens)
        want = reference(x, ids, weights, w13, w2)
        torch.full((2**26,), 0xFF, dtype=torch.uint8, device="cuda")
        got = moe.moe(x, ids, weights, *prepared).double()
        errors[str(tokens)] = float((got - want).norm() / want.norm())
        if not errors[str(tokens)] < 3e-3:
            raise SystemExit(f"{tokens} tokens: relative error {errors[str(tokens)]:.2e}")
    return errors


Peer = Callable[[Tensor, Tensor, Tensor], Any]


def fp8_peer() -> Peer:
    """vLLM's fused Triton experts, FP8 in 128x128 blocks, activations quantised per 128."""
    from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

    w13 = torch.randn(EXPERTS, 2 * INNER, HIDDEN, device="cuda").to(torch.float8_e4m3fn)
    w2 = torch.randn(EXPERTS, HIDDEN, INNER, device="cuda").to(torch.float8_e4m3fn)
    scales = [torch.rand(EXPERTS, w.shape[1] // 128, w.shape[2] // 128, device="cuda") * 1e-2 for w in (w13, w2)]
    config = fp8_w8a8_moe_quant_config(w1_scale=scales[0], w2_scale=scales[1], block_shape=[128, 128])
    return lambda x, ids, weights: fused_experts(x, w13, w2, weights, ids, quant_config=config)


def marlin_peer(w13: PackedNVFP4, w2: PackedNVFP4) -> Peer:
    """vLLM's Marlin layer on the same weights; one global scale an expert, so the gate's stands for both."""
    from types import SimpleNamespace

    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe
    from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4 as fp4
    from vllm.scalar_type import scalar_types

    layer = SimpleNamespace(
        num_experts=EXPERTS, hidden_size=HIDDEN, intermediate_size_per_partition=INNER, params_dtype=torch.bfloat16
    )
    e4m3 = torch.float8_e4m3fn
    p = fp4.prepare_nvfp4_moe_layer_for_marlin(
        layer, w13.packed.clone(), w13.scales.view(e4m3).clone(), w13.outer[:, 0].clone(),
        w2.packed.clone(), w2.scales.view(e4m3).clone(), w2.outer.clone(), is_act_and_mul=True,
    )  # fmt: skip
    kind = scalar_types.float4_e2m1f.id
    return lambda x, ids, weights: fused_marlin_moe(
        x, p[0], p[3], None, None, p[1], p[4], weights, ids, kind,
        global_num_experts=EXPERTS, global_scale1=p[2], global_scale2=p[5], workspace=layer.workspace,
    )  # fmt: skip


def peers(w13: PackedNVFP4, w2: PackedNVFP4) -> dict[str, Peer]:
    found: dict[str, Peer] = {}
    x, (ids, weights) = torch.randn(2, HIDDEN, device="cuda").bfloat16(), routing(2)
    for name, make in (("vLLM FP8", fp8_peer), ("vLLM Marlin NVFP4", lambda: marlin_peer(w13, w2))):
        try:
            peer = make()
            peer(x, ids, weights)
            found[name] = peer
        except Exception as error:
            print(f"{name} left out: {type(error).__name__}: {str(error)[:300]}", flush=True)
    return found


def rows_for(tokens: int, prepared: tuple[PreparedWeight, PreparedWeight], others: dict[str, Peer]) -> list[Row]:
    x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
    routes = [routing(tokens) for _ in range(SETS)]

    def times(run: Peer) -> tuple[float, float]:
        return timed([partial(run, x, *route) for route in routes])

    measured = {name: times(peer) for name, peer in others.items()}
    naive = times(lambda x, ids, weights: moe.moe(x, ids, weights, *prepared))

    def with_rac(quantizer: moe.Quantizer) -> tuple[float, float]:
        def layer(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            return moe.moe(x, ids, weights, *prepared, quantize_x=quantizer, quantize_h=quantizer)

        return times(layer)

    static, batch = with_rac(static_half), with_rac(batch_half)
    goals = ", ".join(GOALS[name] for name in measured)
    return [
        Row("MoE layer", tokens, "grouped decode", *naive, measured, goals),
        Row("MoE layer, RAC 50 % static", tokens, "grouped decode", *static, {"naive": naive, **measured}),
        Row("MoE layer, RAC 50 % batch", tokens, "grouped decode", *batch, {"naive": naive, **measured}),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sha", default="unknown")
    options = parser.parse_args()
    torch.manual_seed(0)
    w13, w2 = experts_weight(2 * INNER, HIDDEN, 2), experts_weight(HIDDEN, INNER, 1)
    prepared = gemm.prepare_weight(w13, interleave=True), gemm.prepare_weight(w2)
    errors = check(w13, w2, prepared)
    others = peers(w13, w2)
    rows = [row for tokens in TOKENS for row in rows_for(tokens, prepared, others)]
    head = {**stamp("bench/h200_moe.py --out ... --sha ...", options.sha), "relative error": str(errors)}
    publish(options.out, {**head, "shape": f"hidden {HIDDEN}, {EXPERTS} experts, top {TOP_K}, {INNER}"}, rows)


if __name__ == "__main__":
    main()
