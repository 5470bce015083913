"""Bytes against the emulator: no speed is measured while one of them is wrong.

Comparisons return 0.0 or raise AssertionError with the number of wrong bytes. `whole_tensors` is run once before the
first quantiser of a run; the others look at the first and last rows of what a timed call wrote.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from quads.bench.drawn import poison
from quads.emulation import layout, quantizers, residual
from quads.emulation.dialects import EXACT
from quads.emulation.quantizers import NVFP4Tensor
from quads.kernels import compensate, fake_quant, quantize

ROWS = 32  # at each end of a timed result; a multiple of 16, so that 16x16 tiles stay whole


def unequal(got: Tensor, want: Tensor, name: str = "result") -> float:
    """0.0, or AssertionError with how many bytes of `got` are not those of `want`."""
    a, b = (t.contiguous().view(-1).view(torch.uint8).cpu() for t in (got, want))
    wrong = int((a != b).sum()) if len(a) == len(b) else len(b)
    assert not wrong, f"{name}: {wrong} of {len(b)} bytes differ from the emulator's"
    return 0.0


def ends(m: int) -> list[slice]:
    """The first and the last rows of m."""
    return [slice(0, min(m, ROWS)), slice(max(0, m - ROWS), m)]


def _emulated(x: Tensor, outer: Tensor, rows: slice) -> NVFP4Tensor:
    return quantizers.quantize(x[rows].cpu(), outer[rows].cpu() if outer.ndim else outer.cpu())


def same_as_emulator(x: Tensor, got: quantize.PackedNVFP4, *, layout: quantize.Layout = "linear") -> float:
    """Codes and scales of the end rows, under the outer scales that `got` holds."""
    scales = _linear(got.scales, *x.shape) if layout == "128x4" else got.scales
    for rows in ends(len(x)):
        want = _emulated(x, got.outer, rows)
        unequal(got.packed[rows], want.packed, "codes")
        unequal(scales[rows], want.scales, "block scales")
    return 0.0


def _linear(scales: Tensor, m: int, k: int) -> Tensor:
    return layout.unswizzle(scales.cpu().view(layout.padded_shape(m, k // 16)), m, k // 16)


def same_where_decided(x: Tensor, encode: Tensor, dialect: str, got: quantize.PackedNVFP4) -> float:
    """Like `same_as_emulator` where the bytes do not hang on the bits of rcp.approx."""
    for rows in ends(len(x)):
        block = x[rows].cpu()
        want = quantizers.quantize(block, encode.cpu(), dialect=dialect)
        known = quantizers.decided(block, encode.cpu(), dialect=dialect)
        codes = layout.unpack(got.packed[rows].cpu())
        unequal(codes[known.codes], want.codes[known.codes], "codes")
        unequal(got.scales[rows].cpu()[known.scales], want.scales[known.scales], "block scales")
    return 0.0


def same_residual(x: Tensor, got: compensate.RacOperand) -> float:
    """Codes and scales of the end rows, main and residual, for the blocks that `got` names."""
    for rows in ends(len(x)):
        want = _emulated(x, got.outer, rows)
        lists = _lists_of(got.blocks, rows, len(x)).cpu().long()
        second = residual.quantize_residual(x[rows].cpu(), want, lists)
        unequal(got.packed[rows], torch.cat([want.packed, second.packed], -1), "codes")
        unequal(got.scales[rows], torch.cat([want.scales, second.scales], -1), "block scales")
    return 0.0


def _lists_of(blocks: Tensor, rows: slice, m: int) -> Tensor:
    """Block list of each of `rows`, from one list for all, one for each row or one for each tile of rows."""
    if blocks.ndim == 1 or len(blocks) == m:
        return blocks if blocks.ndim == 1 else blocks[rows]
    return blocks[torch.arange(rows.start, rows.stop, device=blocks.device) // compensate.TILE_ROWS]


def same_values(x: Tensor, outer: Tensor, weight_block: fake_quant.WeightBlock, got: Tensor) -> float:
    """Q(x) of the end rows."""
    dialect = EXACT.replace(tile="16x16") if weight_block == "16x16" else EXACT
    for rows in ends(len(x)):
        want = quantizers.quantize(x[rows].cpu(), outer.cpu(), dialect=dialect)
        unequal(got[rows], quantizers.dequantize(want, x.dtype), "values")
    return 0.0


def whole_tensors() -> Iterator[str]:
    """Every quantiser of a GPU on rows of all magnitudes, zeros and signed zeros; yields what was compared."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for exponent in (0, -9) if dtype == torch.float16 else (0, -40):
            for granularity in ("tensor", "token"):
                x = torch.ldexp(_uneven(), torch.tensor(exponent)).to(dtype)
                _check_quantizers(x, granularity)  # type: ignore[arg-type]
                _check_rac(x, granularity)  # type: ignore[arg-type]
                yield f"{dtype} 2^{exponent} {granularity}"
    pairs = boundary_rows()
    want = quantizers.quantize(pairs, granularity="token")
    got = quantize.quantize(pairs.cuda(), granularity="token")
    unequal(got.packed, want.packed, "codes at the boundaries")
    unequal(got.scales, want.scales, "block scales at the boundaries")
    yield "every bfloat16 pair (amax, block max) of a binade, elements at the boundaries of E2M1"


def _uneven() -> Tensor:
    """Float32 [517, 1152]: rows and blocks of many sizes, a row of zeros, negative zeros."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(517, 1152, generator=generator) * torch.exp(2 * torch.randn(517, 1, generator=generator))
    x *= torch.exp(torch.randn(1, 72, generator=generator)).repeat_interleave(16, 1)
    x[7], x[9, :16], x[:, 5] = 0, -0.0, -0.0
    return x


def boundary_rows() -> Tensor:
    """bfloat16 [128, ...]: a row for each amax of [2, 4), in it a block for each block maximum of eleven binades.

    The elements are v/6 times the seven boundaries between E2M1 values, and just beside them.
    """
    significands = torch.arange(128, 256).float()
    v = torch.cat([torch.ldexp(significands, torch.tensor(e - 7)) for e in range(-9, 2)]).unsqueeze(1)
    boundaries = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    blocks = torch.cat([v, v / 6 * boundaries, -v / 6 * boundaries * (1 + 2**-8), torch.zeros_like(v)], 1)
    amaxes = torch.ldexp(significands, torch.tensor(-6))
    first = torch.zeros(len(amaxes), 16)
    first[:, 0] = amaxes
    limits = amaxes.view(-1, 1, 1)
    return (
        torch.cat([first.unsqueeze(1), torch.minimum(torch.maximum(blocks, -limits), limits)], 1).flatten(1).bfloat16()
    )


def _check_quantizers(x: Tensor, granularity: quantize.Granularity) -> None:
    want, on_gpu = quantizers.quantize(x, granularity=granularity), x.cuda()
    outer = want.outer.cuda()
    for given in (None, outer):
        poison(on_gpu.device)
        got = quantize.quantize(on_gpu, given, granularity=granularity)
        for part in ("packed", "scales", "outer"):
            unequal(getattr(got, part), getattr(want, part), part)
    poison(on_gpu.device)
    values = fake_quant.fake_quantize(on_gpu, outer, granularity=granularity)
    unequal(values, quantizers.dequantize(want, x.dtype), "fake-quantise")
    if granularity == "tensor":
        square = quantizers.quantize(x[:512], want.outer, dialect=EXACT.replace(tile="16x16"))
        values = fake_quant.fake_quantize(on_gpu[:512], outer, weight_block="16x16")
        unequal(values, quantizers.dequantize(square, x.dtype), "fake-quantise 16x16")


def _check_rac(x: Tensor, granularity: quantize.Granularity, count: int = 31) -> None:
    """A list chosen by the batch, and a known one: with the outer scales given, and (in one launch) derived."""
    want, on_gpu = quantizers.quantize(x, granularity=granularity), x.cuda()
    scores = residual.block_scores(residual.residual(x, want), want.outer).sum(dim=0)
    static, outer = torch.arange(1, 2 * count, 2), want.outer.cuda()
    _same_rac(x, want, residual.top_blocks(scores, count), _rac(on_gpu, "batch", outer, granularity, None, count))
    for given in (outer, None):
        _same_rac(x, want, static, _rac(on_gpu, "static", given, granularity, static.int().cuda(), count))


def _rac(
    x: Tensor, scope: compensate.Scope, outer: Tensor | None, granularity: quantize.Granularity,
    static: Tensor | None, count: int,
) -> compensate.RacOperand:  # fmt: skip
    poison(x.device)
    return compensate.quantize_rac(x, count, scope, outer, granularity=granularity, static_blocks=static)


def _same_rac(x: Tensor, want: NVFP4Tensor, blocks: Tensor, got: compensate.RacOperand) -> None:
    unequal(got.blocks.long(), blocks, "RAC: blocks")
    unequal(got.outer, want.outer, "RAC: outer scales")
    second = residual.quantize_residual(x, want, blocks)
    unequal(got.packed, torch.cat([want.packed, second.packed], -1), "RAC: codes")
    unequal(got.scales, torch.cat([want.scales, second.scales], -1), "RAC: block scales")
