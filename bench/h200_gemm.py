"""Dense W4A4 products on a Hopper GPU: check, time against cuBLAS bf16, FP8 and Marlin, print the table, write JSON.

    PYTHONPATH=. python3 bench/h200_gemm.py --out results.json --sha REVISION

Nothing is timed while a product is outside its bound. Marlin is timed where vLLM can be imported. Weights rotate over
eight sets (300 MB in four bits), so that they are cold in L2. Activations are random codes and scales, quantised
beforehand (`noquant`); `expanded` leaves out decoding the weight, for callers that keep it in bfloat16.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quads.bench.h200_timing import Row, publish, stamp, timed
from quads.kernels import gemm
from quads.kernels.gemm_details import hopper, prefill
from quads.kernels.prepack import HopperWeight, prepare_hopper
from quads.kernels.quantize import PackedNVFP4

N = K = 8192
SETS = 8
DECODE = (1, 8, 16, 32, 64)
GOALS = {"cuBLAS bf16": ">= 2.2x bf16", "FP8": ">= 1.5x FP8", "Marlin NVFP4": ">= 1.0x Marlin", "naive": ">= 1/1.15"}


def drawn(rows: int, blocks: int, *, per_row: bool) -> PackedNVFP4:
    """Random codes, block scales over eight octaves, outer scale per row or one."""
    outer = torch.rand(rows, 1, device="cuda") + 0.5 if per_row else torch.tensor(0.0123, device="cuda")
    codes = torch.randint(0, 256, (rows, blocks * 8), dtype=torch.uint8, device="cuda")
    scales = torch.randint(0x18, 0x58, (rows, blocks), dtype=torch.uint8, device="cuda")
    return PackedNVFP4(codes, scales, outer)


def half_of(k: int) -> Tensor:
    """Half of the K blocks, at random, ascending."""
    return torch.randperm(k // 16, device="cuda")[: k // 32].sort().values.int()


def values(q: PackedNVFP4) -> Tensor:
    """code * block scale as float64."""
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64, device="cuda")
    codes = torch.stack([q.packed & 15, q.packed >> 4], -1).flatten(-2)
    signed = torch.where(codes > 7, -table[(codes & 7).long()], table[(codes & 7).long()])
    return (signed.unflatten(-1, (-1, 16)) * q.scales.view(torch.float8_e4m3fn).double().unsqueeze(-1)).flatten(-2)


def check() -> list[str]:
    """Shapes whose products were compared with float64: |y - exact| <= 5.25 n 2^-23 sum |a w| (NOTES-gemm.md)."""
    done = []
    for m in (1, 7, 16, 31, 64, 100, 300):
        for n, k in ((512, 1152), (100, 48), (640, 4096)):
            for rac in (False, True):
                _check(m, n, k, rac)
                done.append(f"M={m} N={n} K={k} rac={rac}")
    return done


def _check(m: int, n: int, k: int, rac: bool) -> None:
    blocks = half_of(k) if rac else None
    a, w = drawn(m, k // 16 + (k // 32 if rac else 0), per_row=True), drawn(n, k // 16, per_row=False)
    full = values(w)
    if blocks is not None:
        full = torch.cat([full, full.unflatten(1, (-1, 16))[:, blocks.long()].flatten(1)], 1)
    torch.full((2**26,), 0xFF, dtype=torch.uint8, device="cuda")
    y = gemm.gemm(a, w, blocks=blocks, out_dtype=torch.float32).double()
    x, alpha = values(a), (a.outer * w.outer).double()
    bound = 5.25 * 2.0**-23 * (2 * (k // 16 + 8) + 40) * (x.abs() @ full.abs().T) * alpha
    worst = ((y - (x @ full.T) * alpha).abs() / bound).max()
    if not worst <= 1:
        raise SystemExit(f"M={m} N={n} K={k} rac={rac}: {float(worst):.2f} times the bound")


def few_tokens(m: int, weights: list[HopperWeight], peers: dict[str, Callable[[int], list[Any]]]) -> list[Row]:
    blocks = half_of(K)
    plain, rac = drawn(m, K // 16, per_row=True), drawn(m, K // 16 + len(blocks), per_row=True)
    others = {name: timed(calls(m)) for name, calls in peers.items()}
    naive = timed([partial(gemm.gemm, plain, w) for w in weights])
    more = timed([partial(gemm.gemm, rac, w, blocks=blocks) for w in weights])
    ways = [gemm.choose(m, weights[0], residual=residual) for residual in (False, True)]
    return [
        Row("decode", m, ways[0], *naive, others, ", ".join(GOALS[name] for name in others)),
        Row("decode, RAC 50 %", m, ways[1], *more, {"naive": naive}, "<= 1.15x naive"),
    ]


def many_tokens(weights: list[HopperWeight], bf16: list[Tensor]) -> list[Row]:
    m, blocks = 8192, half_of(K)
    plain, rac = drawn(m, K // 16, per_row=True), drawn(m, K // 16 + len(blocks), per_row=True)
    x = torch.randn(m, K, dtype=torch.bfloat16, device="cuda")
    peers = {"cuBLAS bf16": timed([partial(torch.mm, x, w.t()) for w in bf16[:2]])}
    naive = timed([partial(gemm.gemm, plain, w) for w in weights[:2]])
    rows = [Row("prefill", m, gemm.choose(m, weights[0]), *naive, peers, ">= 0.90x bf16")]

    def from_expanded(w: HopperWeight, expanded: Tensor) -> Tensor:
        return prefill.product(hopper.expand_tokens(plain), expanded, plain.outer, w.outer, torch.bfloat16)

    kept = timed([partial(from_expanded, w, hopper.expand_weight(w)) for w in weights[:2]])
    rows.append(Row("prefill, expanded weight kept", m, "prefill", *kept, peers))
    more = timed([partial(gemm.gemm, rac, w, blocks=blocks) for w in weights[:2]])
    rows.append(Row("prefill, RAC 50 %", m, "prefill", *more, {"naive": naive}, "<= 1.45x naive"))
    return rows


def dense_peers(bf16: list[Tensor], weights: list[PackedNVFP4]) -> dict[str, Callable[[int], list[Any]]]:
    fp8 = [w.to(torch.float8_e4m3fn) for w in bf16]
    ones = torch.ones(1, N, device="cuda")

    def cublas(m: int) -> list[Any]:
        x = torch.randn(m, K, dtype=torch.bfloat16, device="cuda")
        return [lambda w=w: torch.mm(x, w.t()) for w in bf16]

    def scaled(m: int) -> list[Any]:
        x = torch.randn(max(m, 16), K, device="cuda").to(torch.float8_e4m3fn)
        row = torch.ones(len(x), 1, device="cuda")
        kw = {"scale_a": row, "scale_b": ones, "out_dtype": torch.bfloat16, "use_fast_accum": True}
        return [lambda w=w: torch._scaled_mm(x, w.t(), **kw) for w in fp8]

    peers: dict[str, Callable[[int], list[Any]]] = {"cuBLAS bf16": cublas, "FP8": scaled}
    try:
        peers["Marlin NVFP4"] = marlin(weights)
    except Exception as error:
        print(f"Marlin left out: {type(error).__name__}: {error}", flush=True)
    return peers


def marlin(weights: list[PackedNVFP4]) -> Callable[[int], list[Any]]:
    """vLLM's weight-only NVFP4 linear (bf16 activations), on the same weights."""
    from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4 as fp4

    layers = []
    for w in weights:
        layer = torch.nn.Module()
        layer.output_size_per_partition, layer.input_size_per_partition = N, K
        layer.params_dtype = torch.bfloat16
        layer.weight = torch.nn.Parameter(w.packed.clone(), requires_grad=False)
        layer.weight_scale = torch.nn.Parameter(w.scales.view(torch.float8_e4m3fn).clone(), requires_grad=False)
        layer.weight_global_scale = torch.nn.Parameter(w.outer.clone().reshape(1), requires_grad=False)
        fp4.prepare_fp4_layer_for_marlin(layer)
        layers.append(layer)

    def calls(m: int) -> list[Any]:
        x = torch.randn(m, K, dtype=torch.bfloat16, device="cuda")
        return [
            lambda v=v: fp4.apply_fp4_marlin_linear(
                x, v.weight, v.weight_scale, v.weight_global_scale, v.workspace, N, K
            )
            for v in layers
        ]

    calls(16)[0]()
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sha", default="unknown")
    options = parser.parse_args()
    torch.manual_seed(0)
    checked = check()
    print(f"{len(checked)} products within their bound", flush=True)
    weights = [drawn(N, K // 16, per_row=False) for _ in range(SETS)]
    prepared = [prepare_hopper(w) for w in weights]
    bf16 = [torch.randn(N, K, dtype=torch.bfloat16, device="cuda") for _ in range(SETS)]
    peers = dense_peers(bf16, weights)
    rows = [row for m in DECODE for row in few_tokens(m, prepared, peers)] + many_tokens(prepared, bf16)
    head = {
        **stamp("bench/h200_gemm.py --out ... --sha ...", options.sha),
        "shape": f"N = K = {N}",
        "checked": len(checked),
    }
    publish(options.out, head, rows)


if __name__ == "__main__":
    main()
