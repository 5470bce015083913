"""NVFP4 matrix products as the tensor cores do them: K order, split-K, alpha, output rounding, RAC's extra columns.

Accumulator: K in 64-steps, ascending, each rounded toward zero (mma.Model "nvfp4"); K is padded with zero codes to a
multiple of 64. Split-K s: s contiguous ranges of whole steps, each from zero; the partial FP32 sums are then added in
ascending order, round to nearest. Output: RNE_dtype(fl(alpha * acc)), alpha = g_x * g_w an FP32 input.
RAC: the selected residual columns follow the K columns, with the weight's own codes and block scales of the same
blocks: [Q(X), Q(R_S)] [Q(W), Q(W)_S]^T. Sources: numerics of CUTLASS, vLLM, FlashInfer epilogues; mmasim 2.1.1.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch
from torch import Tensor

from quads.emulation import exact_chain, mma
from quads.emulation.quantizers import BLOCK, Granularity, NVFP4Tensor, quantize
from quads.emulation.residual import gather_blocks, quantize_residual

NVFP4 = mma.model("nvfp4")


@dataclass(frozen=True)
class Prepared:
    """A quantised matrix [rows, K] checked, padded and, on a CPU, decoded once for many products; see `prepare`."""

    q: NVFP4Tensor
    operand: mma.Operand
    decoded: exact_chain.Decoded | None


def prepare(q: NVFP4Tensor) -> Prepared:
    """Ready `q` (codes [rows, K], K a multiple of 16) for many calls of `matmul` (a weight, say).

    Raises ValueError on a shape that is not two-dimensional, empty, or whose scales do not match.
    """
    operand = mma.Operand(q.codes, q.scales)
    mma.check_operands(operand, operand, NVFP4)
    if q.codes.ndim != 2:
        raise ValueError(f"codes of shape {tuple(q.codes.shape)}: expected [rows, K]")
    return _ready(q, exact_chain.padded(operand))


def _ready(q: NVFP4Tensor, operand: mma.Operand) -> Prepared:
    on_gpu = operand.codes.is_cuda and importlib.util.find_spec("triton") is not None
    return Prepared(q, operand, None if on_gpu else exact_chain.decode(operand))


def matmul(
    a: NVFP4Tensor | Prepared, b: NVFP4Tensor | Prepared, *, model: mma.Model = NVFP4, split_k: int = 1
) -> Tensor:
    """FP32 accumulator [M, N] of A B^T, before alpha: codes and block scales only, outer scales unused.

    a: codes [M, K]; b: codes [N, K]. Bit for bit the result of `mma.chain`; `exact_chain` says how it is this fast.
    """
    a, b = (x if isinstance(x, Prepared) else prepare(x) for x in (a, b))
    if a.q.codes.shape[-1] != b.q.codes.shape[-1]:
        raise ValueError(f"K differs: a has {a.q.codes.shape[-1]}, b has {b.q.codes.shape[-1]}")
    if (model.scale, model.group, model.output) != (NVFP4.scale, NVFP4.group, NVFP4.output):
        raise ValueError(f"model {model.name} is no variant of nvfp4: use mma.chain")
    parts = [_chain(x, y, model) for x, y in _split(a, b, split_k)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _chain(a: Prepared, b: Prepared, model: mma.Model) -> Tensor:
    if a.decoded is not None and b.decoded is not None:
        return exact_chain.chain(a.decoded, b.decoded, model)
    from quads.emulation import chain_gpu

    return chain_gpu.chain(a.operand, b.operand, model)


def matmul_wgmma(a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    """FP32 accumulator [M, N] of C + A B^T as a chain of Hopper wgmma instructions, K steps of 32 bytes ascending.

    a [M, K], b [N, K] both bfloat16, float16, float8_e4m3fn or float8_e5m2; c float32 [M, N], zeros if None.
    """
    x, y = mma.floating(a), mma.floating(b)
    name = "wgmma_fp8" if a.element_size() == 1 else "wgmma_f16"
    bits = None if c is None else c.contiguous().view(torch.int32)
    return mma.chain(x, y, mma.model(name), bits).view(torch.float32)


def _split(a: Prepared, b: Prepared, split_k: int) -> list[tuple[Prepared, Prepared]]:
    k = a.operand.codes.shape[-1]
    steps = k // exact_chain.STEP
    if not 1 <= split_k <= steps:
        raise ValueError(f"split_k = {split_k} is not between 1 and the {steps} steps of 64 in K")
    if split_k == 1:
        return [(a, b)]
    share = -(-steps // split_k) * exact_chain.STEP
    return [(_columns(a, i, min(i + share, k)), _columns(b, i, min(i + share, k))) for i in range(0, k, share)]


def _columns(x: Prepared, start: int, stop: int) -> Prepared:
    return _ready(x.q, x.operand.chunk(start, stop, BLOCK))


def epilogue(acc: Tensor, alpha: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """RNE_dtype(fl(alpha * acc)): `acc` [M, N] float32, `alpha` float32 [] or [M, 1]."""
    return (acc * alpha).to(dtype)


def linear(
    x: Tensor,
    w: NVFP4Tensor | Prepared,
    *,
    granularity: Granularity = "token",
    rac_blocks: Tensor | None = None,
    model: mma.Model = NVFP4,
    split_k: int = 1,
) -> Tensor:
    """A whole NVFP4 linear layer: `x` [..., K] (bfloat16, float16 or float32) to [..., N] in the dtype of `x`.

    w: codes [N, K], one outer scale. rac_blocks: ascending 16-block indices (int64 [S]) that every row compensates.
    """
    rows = x.reshape(-1, x.shape[-1])
    q = quantize(rows, granularity=granularity)
    return product(rows, q, w, rac_blocks=rac_blocks, model=model, split_k=split_k).unflatten(0, x.shape[:-1])


def product(
    x: Tensor,
    q: NVFP4Tensor,
    w: NVFP4Tensor | Prepared,
    *,
    rac_blocks: Tensor | None = None,
    model: mma.Model = NVFP4,
    split_k: int = 1,
) -> Tensor:
    """`linear` for `x` [M, K] that is already quantised as `q`."""
    weight = w.q if isinstance(w, Prepared) else w
    if rac_blocks is None or rac_blocks.numel() == 0:
        acc = matmul(q, w, model=model, split_k=split_k)
    else:
        wide = concat_k(q, quantize_residual(x, q, rac_blocks))
        acc = matmul(wide, concat_k(weight, select_blocks(weight, rac_blocks)), model=model, split_k=split_k)
    return epilogue(acc, q.outer * weight.outer, x.dtype)


def select_blocks(q: NVFP4Tensor, blocks: Tensor) -> NVFP4Tensor:
    """The same codes and block scales of the 16-blocks `blocks`, bit for bit."""
    return NVFP4Tensor(gather_blocks(q.codes, blocks), q.scales[..., blocks], q.outer)


def concat_k(q: NVFP4Tensor, extra: NVFP4Tensor) -> NVFP4Tensor:
    """`extra` appended along K, with the outer scale of `q`; no padding in between, `matmul` pads the end."""
    return NVFP4Tensor(torch.cat([q.codes, extra.codes], dim=-1), torch.cat([q.scales, extra.scales], dim=-1), q.outer)
