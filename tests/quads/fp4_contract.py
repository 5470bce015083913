"""The contract of vLLM's NVFP4 GEMMs in plain torch, to be put in the ops' place where there is no FP4 tensor core.

Written from what the CUDA sources check and address (csrc/libtorch_stable/quantization/fp4 of vLLM, and
flashinfer.mm_fp4), not from quads: the scale of row r and K block b lies, in tiles of 128 rows and 4 blocks, at byte
    512 * (r // 128 * (blocks / 4) + b // 4) + 16 * (r % 32) + 4 * (r % 128 // 32) + b % 4
Sums are exact, and `acc` refuses data whose FP32 sum would depend on its order. FAULTS are misreadings of an operand.

`install` puts them in place. The quantising kernels are the emulator's then: tests/kernels compares their bytes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from quads.emulation import gemm, layout, quantizers, residual
from quads.emulation.quantizers import NVFP4Tensor
from quads.integrations.vllm_plugin import device, weights
from quads.kernels import support
from quads.kernels.compensate import RacOperand
from quads.kernels.quantize import PackedNVFP4
from tests.quads import engine

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
FP8 = torch.float8_e4m3fn
FAULTS = ("linear scales", "swapped nibbles", "inverted alpha")  # nibbles of b alone: of both, K is only reordered


def up(value: int, multiple: int) -> int:
    return (value + multiple - 1) // multiple * multiple


def values(codes: Tensor, scales: Tensor, fault: str = "") -> Tensor:
    """Float64 [rows, K] of packed codes [rows, K/2] and the flat bytes of their block scales."""
    low, high = codes & 15, codes >> 4
    nibbles = torch.stack([high, low] if fault == "swapped nibbles" else [low, high], dim=-1).flatten(1)
    magnitude = E2M1[(nibbles & 7).long()].double() * torch.where(nibbles > 7, -1.0, 1.0)
    rows, blocks = nibbles.shape[0], nibbles.shape[1] // 16
    r, b = torch.arange(rows).unsqueeze(1), torch.arange(blocks).unsqueeze(0)
    at = 512 * (r // 128 * (blocks // 4) + b // 4) + 16 * (r % 32) + 4 * (r % 128 // 32) + b % 4
    at = r * blocks + b if fault == "linear scales" else at
    scale = scales.reshape(-1).view(FP8)[at.reshape(-1)].double().view(rows, blocks)
    return (magnitude.unflatten(1, (-1, 16)) * scale.unsqueeze(-1)).flatten(1)


def acc(a: Tensor, b: Tensor) -> Tensor:
    """A B^T, exact; AssertionError where FP32 could not hold it in every order."""
    terms = a.abs() @ b.abs().t()
    live_a, live_b = a[a != 0].abs(), b[b != 0].abs()
    if live_a.numel() and live_b.numel():
        unit = ulp(live_a) * ulp(live_b)
        assert float(terms.max()) / unit < 2**24, "the data's FP32 sum depends on its order"
    return (a @ b.t()).float()


def ulp(x: Tensor) -> float:
    """The largest power of two that divides every element."""
    return next(2.0**e for e in range(12, -20, -1) if bool((x / 2.0**e == (x / 2.0**e).round()).all()))


def check(codes: Tensor, scales: Tensor, rows: int, columns: int, what: str) -> None:
    assert codes.dtype == torch.uint8 and codes.is_contiguous(), f"{what}: packed uint8, contiguous"
    assert scales.dtype == FP8 and scales.is_contiguous(), f"scales of {what}: float8_e4m3fn, contiguous"
    padded = (up(rows, 128), up(columns // 16, 4))
    assert scales.shape[-2:] == padded, f"scales of {what} must be padded to {padded}, got {tuple(scales.shape)}"


class Gemms:
    """The two products; `calls` are the columns K' of each call."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.calls: list[int] = []

    def dense(self, out: Tensor, a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, alpha: Tensor) -> None:
        """torch.ops._C.cutlass_scaled_fp4_mm: writes out."""
        (m, half), n = a.shape, b.shape[0]
        assert b.shape[1] == half and half * 2 % 32 == 0 and n % 32 == 0, "K and N are multiples of 32"
        assert out.dtype in (torch.bfloat16, torch.float16), "bfloat16 or float16 out"
        check(a, sa, m, half * 2, "a")
        check(b, sb, n, half * 2, "b")
        out.copy_(self._product(a, b, sa, sb, alpha))

    def run(self, *operands: Any) -> Tensor:
        """vllm._custom_ops.cutlass_scaled_fp4_mm."""
        *given, dtype = operands
        out = torch.empty((given[0].shape[0], given[1].shape[0]), dtype=dtype)
        self.dense(out, *given)
        return out

    def flashinfer(
        self, a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, alpha: Tensor, dtype: torch.dtype, **options: Any
    ) -> Tensor:
        """flashinfer.mm_fp4: b and its scales are column-major [K/2, N] and [K/16, N]."""
        assert options["block_size"] == 16 and options["use_nvfp4"] and not options["use_8x4_sf_layout"]
        assert options["backend"] in ("cutlass", "cute-dsl")
        out = torch.empty((a.shape[0], b.shape[1]), dtype=dtype)
        self.dense(out, a, b.t(), sa.view(FP8), sb.t().view(FP8), alpha)
        return out

    def grouped(
        self, out: Tensor, a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, alphas: Tensor, *places: Tensor
    ) -> None:
        """torch.ops._C.cutlass_fp4_group_mm: addresses as __get_group_gemm_starts makes them."""
        sizes, starts, scale_starts = places
        experts, n, half = b.shape
        assert out.dtype == torch.bfloat16 and all(p.dtype == torch.int32 for p in places)
        assert sizes.shape == (experts, 3) and starts.shape == scale_starts.shape == alphas.shape == (experts,)
        assert alphas.dtype == torch.float32 and sa.dtype == sb.dtype == FP8 and sa.ndim == 2 and sb.ndim == 3
        flat_a, flat_b = sa.reshape(-1), sb.reshape(-1)
        for e, (m, n_of, k_of) in enumerate(sizes.tolist()):
            assert (n_of, k_of) == (n, 2 * half)
            first, group = int(starts[e]), k_of // 16
            at_a, at_b = int(scale_starts[e]) * group, e * n * group  # no padding between the experts of b
            assert at_a % 128 == 0 and at_b % 128 == 0, "TMA requires 128-byte alignment"
            assert flat_a.numel() >= at_a + up(m, 128) * group and flat_b.numel() >= at_b + up(n, 128) * group
            rows = slice(first, first + m)
            if m:
                out[rows] = self._product(a[rows], b[e], flat_a[at_a:], flat_b[at_b:], alphas[e]).to(out.dtype)

    def _product(self, a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, alpha: Tensor) -> Tensor:
        assert alpha.dtype == torch.float32 and alpha.numel() == 1
        self.calls.append(2 * a.shape[1])
        scale = 1 / alpha if self.fault == "inverted alpha" else alpha
        x, w = values(a, sa, self.fault.replace("nibbles", "")), values(b, sb, self.fault)
        return acc(x, w) * scale


class Emulated(Gemms):
    """The contract with the emulator's accumulator."""

    def _product(self, a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, alpha: Tensor) -> Tensor:
        self.calls.append(2 * a.shape[1])
        x, w = (self._operand(codes, scales) for codes, scales in ((a, sa), (b, sb)))
        return gemm.matmul(x, w) * alpha

    def _operand(self, codes: Tensor, scales: Tensor) -> NVFP4Tensor:
        rows, blocks = codes.shape[0], codes.shape[1] // 8
        size = up(rows, 128) * blocks
        flat = scales.view(torch.uint8).reshape(-1)[:size].view(-1, blocks)
        return NVFP4Tensor(layout.unpack(codes), layout.unswizzle(flat, rows, blocks), torch.ones(()))


def emulated_rac(x: Tensor, count: int, scope: str, **given: Any) -> RacOperand:
    """`compensate.quantize_rac` by the emulator."""
    x = x.nan_to_num(0.0, 0.0, 0.0)  # as the kernels, which do not look for NaN: a warm-up has some
    q = quantizers.quantize(x, granularity=given["granularity"])
    r = residual.residual(x, q)
    if scope == "token":
        blocks = residual.top_blocks(residual.block_scores(r, q.outer.expand(len(x), 1), shared=False), count)
    elif scope == "batch":
        blocks = residual.top_blocks(residual.block_scores(r, q.outer).sum(dim=0), count)
    else:
        blocks = given["static_blocks"].long()
    extra = residual.quantize_residual(x, q, blocks)
    packed = layout.pack(torch.cat([q.codes, extra.codes], dim=1))
    return RacOperand(packed, torch.cat([q.scales, extra.scales], dim=1), q.outer, blocks.int())


def emulated(x: Tensor, *, granularity: Any) -> PackedNVFP4:
    q = quantizers.quantize(x, granularity=granularity)
    return PackedNVFP4(layout.pack(q.codes), q.scales, q.outer)


def install(patch: pytest.MonkeyPatch, gemms: Gemms) -> Gemms:
    """`gemms` as torch.ops._C's and FlashInfer's ops, on a machine that says it is a B200."""
    import vllm.utils.flashinfer as vllm_flashinfer

    patch.setattr(torch.ops._C, "cutlass_scaled_fp4_mm", gemms.dense, raising=False)
    patch.setattr(torch.ops._C, "cutlass_fp4_group_mm", gemms.grouped, raising=False)
    patch.setattr(torch.ops._C, "cutlass_scaled_mm_supports_fp4", lambda chip: 100 <= chip < 130, raising=False)
    patch.setattr(vllm_flashinfer, "flashinfer_mm_fp4", gemms.flashinfer, raising=False)
    chip(patch, 10, 0)
    patch.setattr(device, "quantize", emulated)
    patch.setattr(device.compensate, "quantize_rac", emulated_rac)
    patch.setattr(weights, "order_on", lambda device: engine.ORDERS["native"])
    return gemms


def chip(patch: pytest.MonkeyPatch, major: int, minor: int) -> None:
    patch.setattr(support, "capability", lambda device=0: (major, minor))
    patch.setattr(support, "device_name", lambda device=0: f"a patched GPU, sm_{major}{minor}")
