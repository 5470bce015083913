"""Routed W4A4 layers on a GPU beside vLLM's: FP8, bfloat16, NVFP4 Marlin, NVFP4 emulation; by tokens, experts and size.

Decoding steps, and prompts of thousands of tokens. Everything that runs in an engine is timed: routing tables, both
quantisations, both products, SwiGLU, the weighted sum. Routing decisions are inputs, and rotate. RAC compensates half
of the K blocks of both products: every other one (`static`), or those of the largest residual of the batch (`batch`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial

import torch
from torch import Tensor

from quads.bench import counts, drawn, peers, peers_cuda
from quads.bench.cases import Case, Goal, Group, Ready
from quads.bench.cases_gemm import OURS, peak_of_nvfp4
from quads.bench.peers_cuda import Layer
from quads.kernels import compensate, gemm, moe, support
from quads.kernels.prepack import PreparedWeight, Quantized
from quads.kernels.quantize import PackedNVFP4

TOKENS = (1, 16, 64, 256)
MORE_TOKENS = (4, 128, 512)
PROMPTS = (2048, 8192)
SETS = 4  # of routes; one for prompts, whose working set is many times L2
BOUND = 3e-3  # relative error of the layer; bfloat16's rounding alone gives about 1.7e-3
PEER_BOUNDS = {"bf16": 0.02, "w4a16": 0.02, "fp8_block": 0.1, "nvfp4": 0.4}  # that a peer computes the same layer


@dataclass(frozen=True)
class Size:
    """A layer; the default is Qwen3-30B-A3B's."""

    tokens: int
    hidden: int = 2048
    inner: int = 768
    experts: int = 128
    top_k: int = 8

    def shape(self) -> dict[str, int]:
        return {
            "tokens": self.tokens, "hidden": self.hidden, "inner": self.inner, "experts": self.experts,
            "top_k": self.top_k,
        }  # fmt: skip


@dataclass(frozen=True)
class Inputs:
    """Tokens, rotating routes and the layer's weights."""

    size: Size
    x: Tensor
    routes: list[tuple[Tensor, Tensor]]
    w13: PackedNVFP4
    w2: PackedNVFP4
    prepared: tuple[PreparedWeight, PreparedWeight]


def groups(device: str) -> Iterator[Group]:
    """Tokens of the default layer, prompts among them; numbers of experts and larger models' layers, at 16 tokens."""
    if device != "cuda":
        return
    for tokens in (*TOKENS, *PROMPTS, *MORE_TOKENS):
        yield _group(Size(tokens), quick=tokens in TOKENS)
    for experts in (8, 32, 64):
        yield _group(Size(16, experts=experts), quick=False)
    for hidden, inner in ((4096, 1536), (7168, 2048)):
        yield _group(Size(16, hidden=hidden, inner=inner, experts=32), quick=False)


def _group(size: Size, *, quick: bool) -> Group:
    inputs = partial(_inputs, size)
    return Group(op="moe", shape=size.shape(), device="cuda", cases=_cases(size), inputs=inputs, quick=quick)


def _cases(size: Size) -> tuple[Case, ...]:
    ours = partial(Case, implementation=OURS, missing=_missing_ours)
    prompt = size.tokens in PROMPTS  # where, as in dense products, bfloat16's rate bounds ours on Hopper
    fp8 = None if prompt else Goal(text="fp8 / ours >= 1.16", at_least=1.16)
    bf16 = Goal(text="bf16 / ours >= 0.90", at_least=0.9) if prompt else None
    marlin = Goal(text="Marlin / ours >= 1.0", at_least=1.0)
    vllm = partial(Case, missing=peers.missing_vllm)
    return (
        ours(numerics="nvfp4", ready=partial(_ours, moe.quantize_rows, 0.0)),
        ours(numerics="quads", variant="50 % static", ready=partial(_ours, static_half, 0.5)),
        ours(numerics="quads", variant="50 % batch", ready=partial(_ours, batch_half, 0.5)),
        vllm(numerics="fp8_block", implementation="vllm.triton", ready=_fp8, goal=fp8),
        vllm(numerics="w4a16", implementation="vllm.marlin", ready=_marlin, goal=marlin),
        vllm(numerics="bf16", implementation="vllm.triton", ready=_bf16, goal=bf16),
        vllm(numerics="nvfp4", implementation="vllm.emulation", ready=_emulated),
    )


def _missing_ours() -> str:
    return support.missing_triton() or support.missing_gpu() or support.missing_ampere()


def _inputs(size: Size) -> Inputs:
    w13, w2, prepared = weights(size.experts, size.hidden, size.inner)
    x = drawn.activations(size.tokens, size.hidden)
    sets = 1 if size.tokens in PROMPTS else SETS
    return Inputs(size, x, [routing(size) for _ in range(sets)], w13, w2, prepared)


@lru_cache(maxsize=1)
def weights(
    experts: int, hidden: int, inner: int
) -> tuple[PackedNVFP4, PackedNVFP4, tuple[PreparedWeight, PreparedWeight]]:
    """w13 (gate and up with outer scales of their own) and w2, and both in the kernels' order."""
    w13, w2 = (experts_weight(experts, *shape) for shape in ((2 * inner, hidden, 2), (hidden, inner, 1)))
    return w13, w2, (gemm.prepare_weight(w13, interleave=True), gemm.prepare_weight(w2))


def experts_weight(experts: int, n: int, k: int, parts: int, device: str = "cuda") -> PackedNVFP4:
    """Marlin holds one outer scale an expert, so gate and up share theirs here."""
    q = drawn.packed(experts * n, k // 16, per_row=False, device=device)
    outer = ((torch.rand(experts, 1, device=device) + 0.5) * 2e-4).expand(experts, parts).contiguous()
    return PackedNVFP4(q.packed.view(experts, n, -1), q.scales.view(experts, n, -1), outer.squeeze(1))


@lru_cache(maxsize=1)
def wide(experts: int, hidden: int, inner: int) -> tuple[Tensor, Tensor]:
    """The same weights in bfloat16, dequantised; one expert at a time, for its float64 values are large."""
    w13, w2, _ = weights(experts, hidden, inner)
    return tuple(torch.stack([_expert(w, e).bfloat16() for e in range(experts)]) for w in (w13, w2))  # type: ignore[return-value]


def _expert(w: PackedNVFP4, e: int) -> Tensor:
    """Weight of expert `e` in float64."""
    values = drawn.values(PackedNVFP4(w.packed[e], w.scales[e], w.outer[e]))
    parts = w.outer[e].double().reshape(-1, 1)
    return values * parts.repeat_interleave(len(values) // len(parts), 0)


def routing(size: Size) -> tuple[Tensor, Tensor]:
    """Random distinct experts int32 and softmax weights, both [tokens, top_k]."""
    ids = torch.rand(size.tokens, size.experts, device="cuda").argsort(1)[:, : size.top_k].int()
    return ids, torch.softmax(torch.randn(size.tokens, size.top_k, device="cuda"), -1)


def static_half(x: Tensor) -> tuple[Quantized, Tensor | None]:
    """Every other block, known beforehand."""
    blocks, places = _every_other(x.shape[1])
    q = compensate.quantize_rac(
        x, len(blocks), "static", granularity="token", static_blocks=blocks, static_ranks=places
    )
    return q, q.blocks


@cache
def _every_other(k: int) -> tuple[Tensor, Tensor]:
    blocks = torch.arange(0, k // 16, 2, dtype=torch.int32, device="cuda")
    return blocks, compensate.ranks(blocks, k // 16)


def batch_half(x: Tensor) -> tuple[Quantized, Tensor | None]:
    """Half of the blocks of the batch, chosen at every call."""
    q = compensate.quantize_rac(x, x.shape[1] // 32, "batch", granularity="token")
    return q, q.blocks


def reference(i: Inputs, quantizer: moe.Quantizer | None) -> Tensor:
    """The layer in float64 with our rounding points, for the first routes; None: activations not quantised."""
    ids, weights = i.routes[0]
    top_k = ids.shape[1]
    both = _grouped(i.x.repeat_interleave(top_k, 0), ids.flatten(), i.w13, quantizer, i.x)
    gate, up = both.bfloat16().float().chunk(2, -1)
    h = (gate / (1 + torch.exp(-gate)) * up).bfloat16()
    y = _grouped(h, ids.flatten(), i.w2, quantizer, h).bfloat16().double()
    return (y.unflatten(0, (-1, top_k)) * weights.double().unsqueeze(-1)).sum(1)


def _grouped(rows: Tensor, experts: Tensor, w: PackedNVFP4, quantizer: moe.Quantizer | None, source: Tensor) -> Tensor:
    """rows[p] times the weight of experts[p]; `source`: the rows before they were repeated, quantised as one batch."""
    blocks, a = None, rows.double()
    if quantizer is not None:
        q, blocks = quantizer(source)
        a = (drawn.values(q) * q.outer.double()).repeat_interleave(len(rows) // len(source), 0)
    out = torch.empty(len(rows), w.packed.shape[1], dtype=torch.float64, device=rows.device)
    for e in experts.unique().tolist():
        weight = _expert(w, e)
        if blocks is not None:
            weight = torch.cat([weight, weight.unflatten(1, (-1, 16))[:, blocks.long()].flatten(1)], 1)
        out[experts == e] = a[experts == e] @ weight.T
    return out


def error(i: Inputs, run: Layer, quantizer: moe.Quantizer | None, bound: float) -> float:
    """Relative error of `run` on the first routes, over `bound`."""
    drawn.poison(i.x.device)
    return drawn.relative_error(lambda: run(i.x, *i.routes[0]), reference(i, quantizer), bound)


def _ready(i: Inputs, run: Layer, activations: str, numerics: str, peak: str, ratio: float = 0.0) -> Ready:
    s = i.size
    used = sum(len(ids.unique()) for ids, _ in i.routes) / len(i.routes)
    moved, flops = counts.moe(s.tokens, s.top_k, used, s.hidden, s.inner, numerics, ratio=ratio)
    check = partial(error, i, run, None, PEER_BOUNDS[activations])
    return Ready(calls=[partial(run, i.x, *r) for r in i.routes], bytes=moved, flops=flops, peak=peak, check=check)


def layer_of(i: Inputs, quantizer: moe.Quantizer) -> Layer:
    """Our layer on prepared weights, both quantisations by `quantizer`."""

    def layer(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return moe.moe(x, ids, weights, *i.prepared, quantize_x=quantizer, quantize_h=quantizer)

    return layer


def _ours(quantizer: moe.Quantizer, ratio: float, i: Inputs) -> Ready:
    layer = layer_of(i, quantizer)
    ready = _ready(i, layer, "nvfp4", "nvfp4", peak_of_nvfp4(), ratio)
    way = moe.choose(i.size.tokens * i.size.top_k, i.prepared[0])
    return replace(ready, check=partial(error, i, layer, quantizer, BOUND), way=way)


def _fp8(i: Inputs) -> Ready:
    w13, w2 = wide(i.size.experts, i.size.hidden, i.size.inner)
    return _ready(i, peers_cuda.fp8_experts(w13, w2), "fp8_block", "fp8_block", "fp8")


def _bf16(i: Inputs) -> Ready:
    w13, w2 = wide(i.size.experts, i.size.hidden, i.size.inner)
    return _ready(i, peers_cuda.bf16_experts(w13, w2), "bf16", "bf16", "bf16")


def _marlin(i: Inputs) -> Ready:
    return _ready(i, peers_cuda.marlin_experts(i.w13, i.w2), "w4a16", "w4a16", "bf16")


def _emulated(i: Inputs) -> Ready:
    return _ready(i, peers_cuda.emulated_experts(i.w13, i.w2, i.size.top_k), "nvfp4", "nvfp4", "bf16")
