"""Random operands of the products on a GPU, and how far a product may be from the exact one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quads.kernels.prepack import Quantized
from quads.kernels.quantize import PackedNVFP4

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def packed(rows: int, blocks: int, *, per_row: bool, device: str = "cuda") -> PackedNVFP4:
    """Random codes, block scales over eight octaves, outer scale per row or one."""
    outer = torch.rand(rows, 1, device=device) + 0.5 if per_row else torch.tensor(0.0123, device=device)
    codes = torch.randint(0, 256, (rows, blocks * 8), dtype=torch.uint8, device=device)
    scales = torch.randint(0x18, 0x58, (rows, blocks), dtype=torch.uint8, device=device)
    return PackedNVFP4(codes, scales, outer)


def activations(rows: int, k: int) -> Tensor:
    """Gaussian bfloat16 [rows, K]; never zeros, which draw less power."""
    return torch.randn(rows, k, dtype=torch.bfloat16, device="cuda")


def half_of(k: int, device: str = "cuda") -> Tensor:
    """Half of the K blocks, at random, ascending, int32."""
    return torch.randperm(k // 16, device=device)[: k // 32].sort().values.int()


def values(q: Quantized) -> Tensor:
    """code * block scale as float64 [..., K]."""
    table = torch.tensor(_MAGNITUDES, dtype=torch.float64, device=q.packed.device)
    codes = torch.stack([q.packed & 15, q.packed >> 4], -1).flatten(-2)
    magnitudes = table[(codes & 7).long()]
    signed = torch.where(codes > 7, -magnitudes, magnitudes)
    return (signed.unflatten(-1, (-1, 16)) * q.scales.view(torch.float8_e4m3fn).double().unsqueeze(-1)).flatten(-2)


def product_error(a: Quantized, w: Quantized, blocks: Tensor | None, call: Callable[[], Tensor]) -> float:
    """Largest |y - exact| over its bound 5.25 n 2^-23 sum |a w| (kernels/NOTES-gemm.md), bfloat16's rounding added.

    n is twice the number of 16-element steps plus 40; y is the very call that is timed, its memory poisoned before.
    """
    full = values(w)
    if blocks is not None:
        full = torch.cat([full, full.unflatten(1, (-1, 16))[:, blocks.long()].flatten(1)], 1)
    poison(a.packed.device)
    y = call()
    x, alpha = values(a), (a.outer * w.outer).double()
    exact = (x @ full.T) * alpha
    bound = 5.25 * 2.0**-23 * (2 * (full.shape[1] // 16 + 8) + 40) * (x.abs() @ full.abs().T) * alpha
    if y.dtype == torch.bfloat16:
        bound += 2.0**-8 * (exact.abs() + bound)
    return float(((y.double() - exact).abs() / bound).nan_to_num(nan=torch.inf).max())


def relative_error(call: Callable[[], Tensor], reference: Tensor, bound: float) -> float:
    """|y - reference| / |reference| in the Frobenius norm, over `bound`: that a peer computes the same product."""
    reference = reference.double()
    return float((call().double() - reference).norm() / reference.norm()) / bound


def poison(device: torch.device) -> None:
    """Leave 0xFF in the memory that the next outputs will be given (a GPU's allocator hands it out again)."""
    if device.type == "cuda":
        torch.full((2**26,), 0xFF, dtype=torch.uint8, device=device)
