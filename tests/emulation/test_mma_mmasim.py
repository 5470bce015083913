"""The model against mmasim 2.1.1 on random raw bits, C included; NaN and Inf included.

The default run compares about 50,000 results of each instruction; `full` a million of each FP4 one.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quads.emulation import fdpa, mma

nv_ptx = pytest.importorskip("mmasim.nv_ptx")

SIDE = 128
RTX, DATACENTER = "RTX Blackwell", "Blackwell"
FP4 = {
    "tcgen05 nvfp4": ("nvfp4", DATACENTER, "m128n128k64.kind::mxf4nvf4.block16.f32.e2m1.e2m1.ue4m3"),
    "tcgen05 mxf4nvf4 ue8m0": ("mxf4_block16", DATACENTER, "m128n128k64.kind::mxf4nvf4.block16.f32.e2m1.e2m1.ue8m0"),
    "tcgen05 mxf4": ("mxf4", DATACENTER, "m128n128k64.kind::mxf4.block32.f32.e2m1.e2m1.ue8m0"),
    "mma.sync nvfp4": ("nvfp4", RTX, "m16n8k64.kind::mxf4nvf4.block16.f32.e2m1.e2m1.f32.ue4m3"),
    "mma.sync mxf4nvf4 ue8m0": ("mxf4_block16", RTX, "m16n8k64.kind::mxf4nvf4.block16.f32.e2m1.e2m1.f32.ue8m0"),
    "mma.sync mxf4": ("mxf4", RTX, "m16n8k64.kind::mxf4.block32.f32.e2m1.e2m1.f32.ue8m0"),
}
_F8F6F4 = ("e5m2", "e4m3", "e3m2", "e2m3", "e2m1")
PRODUCTS = [
    *(("tcgen05_f8f6f4", DATACENTER, f"m128n128k32.kind::f8f6f4.f32.{x}.{y}") for x in _F8F6F4 for y in ("e4m3", x)),
    *(("tcgen05_f8f6f4_f16", DATACENTER, f"m128n128k32.kind::f8f6f4.f16.{x}.{x}") for x in _F8F6F4),
    *(("rtx_blackwell_mma_fp8", RTX, f"m16n8k32.kind::f8f6f4.f32.{x}.{x}.f32") for x in _F8F6F4),
    *(("tcgen05_f16", DATACENTER, f"m128n128k16.kind::f16.f32.{x}.{x}") for x in ("bf16", "f16")),
    ("tcgen05_f16_f16", DATACENTER, "m128n128k16.kind::f16.f16.f16.f16"),
    ("tcgen05_tf32", DATACENTER, "m128n128k8.kind::tf32.f32.tf32.tf32"),
    *(("wgmma_f16", "Hopper", f"m64n128k16.f32.{x}.{x}") for x in ("bf16", "f16")),
    ("wgmma_f16_f16", "Hopper", "m64n128k16.f16.f16.f16"),
    ("wgmma_tf32", "Hopper", "m64n128k8.f32.tf32.tf32"),
    *(("wgmma_fp8", "Hopper", f"m64n128k32.f32.{x}.{y}") for x in ("e4m3", "e5m2") for y in ("e4m3", "e5m2")),
    *(("wgmma_fp8_f16", "Hopper", f"m64n128k32.f16.{x}.{x}") for x in ("e4m3", "e5m2")),
    *(("hopper_mma_f16", "Hopper", f"m16n8k16.f32.{x}.{x}.f32") for x in ("bf16", "f16")),
    ("hopper_mma_f16_f16", "Hopper", "m16n8k16.f16.f16.f16.f16"),
    ("hopper_mma_tf32", "Hopper", "m16n8k8.f32.tf32.tf32.f32"),
    *(("ada_mma_fp8", "Ada Lovelace", f"m16n8k32.f32.{x}.{x}.f32") for x in ("e4m3", "e5m2")),
    *(("ada_mma_fp8_f16", "Ada Lovelace", f"m16n8k32.f16.{x}.{x}.f16") for x in ("e4m3", "e5m2")),
    *(("ampere_mma_f16", "Ampere", f"m16n8k16.f32.{x}.{x}.f32") for x in ("bf16", "f16")),
    ("ampere_mma_f16_f16", "Ampere", "m16n8k16.f16.f16.f16.f16"),
    ("ampere_mma_tf32", "Ampere", "m16n8k8.f32.tf32.tf32.f32"),
    ("volta_mma_f16", "Volta", "m8n8k4.f32.f16.f16.f32"),
    ("volta_mma_f16_f16", "Volta", "m8n8k4.f16.f16.f16.f16"),
]
SCALED = [f"m128n128k32.kind::mxf8f6f4.block32.f32.{x}.{y}.ue8m0" for x in _F8F6F4 for y in ("e4m3", x)]


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Random raw bits."""
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8, generator=generator)
    return raw.view(dtype)


def operation_of(arch: str, shape: str, *, scaled: bool) -> object:
    """mmasim's operation."""
    if shape.startswith("m64"):
        return nv_ptx.WGMMA(arch, shape)
    if arch == DATACENTER:
        return (nv_ptx.TCGen05MMABlockScale if scaled else nv_ptx.TCGen05MMA)(arch, shape)
    return (nv_ptx.MMABlockScale if scaled else nv_ptx.MMA)(arch, shape)


def operand(raw: Tensor, name: str, scales: Tensor | None) -> mma.Operand:
    """Our operand of mmasim's container: FP6 and FP4 lie left-aligned in six bits of a byte."""
    if raw.dtype != torch.uint8:
        return mma.Operand(mma.floating(raw).codes, scales, name)
    return mma.Operand((raw & 0x3F) >> (6 - fdpa.FIELDS[name].bits), scales, name)


def nibbles(raw: Tensor, scales: Tensor) -> mma.Operand:
    """mmasim takes the high nibble first; both operands alike, and a group's sum is exact in any order."""
    return mma.Operand(torch.stack([raw >> 4, raw & 0xF], dim=-1).flatten(-2), scales)


def mismatches(name: str, operation: object, seed: int, *, packed: bool = False) -> tuple[int, int]:
    """(differing results, finite results) of SIDE x SIDE outputs."""
    g = torch.Generator().manual_seed(seed)
    op = operation
    k = op.k // (2 if packed else 1)  # type: ignore[attr-defined]
    a, b = (random_tensor((SIDE, k), t, g) for t in (op.a_type, op.b_type))  # type: ignore[attr-defined]
    c = random_tensor((SIDE, SIDE), op.c_type, g)  # type: ignore[attr-defined]
    extra: list[Tensor] = []
    if hasattr(op, "s_type"):
        extra = [random_tensor((SIDE, op.k // op.block_size), op.s_type, g) for _ in range(2)]  # type: ignore
    theirs = op(a, b.T, c, *(extra[:1] + [x.T for x in extra[1:]]))  # type: ignore[operator]
    scales = [x.view(torch.uint8) for x in extra] or [None, None]
    if packed:
        ours_a, ours_b = nibbles(a, scales[0]), nibbles(b, scales[1])
    else:
        names = (op.a_type_ptx, op.b_type_ptx)  # type: ignore[attr-defined]
        ours_a, ours_b = (
            operand(x, {"f16": "fp16"}.get(n, n), s) for x, n, s in zip((a, b), names, scales, strict=True)
        )
    integer = torch.int16 if c.dtype == torch.float16 else torch.int32
    ours = mma.chain(ours_a, ours_b, mma.model(name), c.view(integer))
    return int((ours != theirs.view(integer)).sum()), int(theirs.isfinite().sum())


def total(name: str, operation: object, rounds: int, *, packed: bool = False) -> int:
    """Finite results compared; fails at the first mismatch."""
    finite = 0
    for seed in range(rounds):
        wrong, some = mismatches(name, operation, seed, packed=packed)
        assert wrong == 0, f"{wrong} of {SIDE * SIDE} results differ, seed {seed}"
        finite += some
    return finite


@pytest.mark.parametrize("instruction", FP4)
def test_fp4_results_equal_mmasim_on_raw_bits(instruction: str) -> None:
    name, arch, shape = FP4[instruction]
    assert total(name, operation_of(arch, shape, scaled=True), 3, packed=True) > 20_000


@pytest.mark.full
@pytest.mark.parametrize("instruction", FP4)
def test_a_million_fp4_results_equal_mmasim_on_raw_bits(instruction: str) -> None:
    name, arch, shape = FP4[instruction]
    finite = total(name, operation_of(arch, shape, scaled=True), 64, packed=True)
    print(f"{instruction}: {64 * SIDE * SIDE} results, {finite} finite, 0 mismatches")


@pytest.mark.parametrize("change", [{"fraction_bits": 25}, {"fraction_bits": 34}, {"fraction_bits": 36}])
def test_these_raw_bits_tell_other_fp4_models_apart(change: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    _, arch, shape = FP4["tcgen05 nvfp4"]
    wrong_model = mma.model("nvfp4").replace(**change)
    monkeypatch.setattr(mma, "model", lambda name: wrong_model)
    assert mismatches("nvfp4", operation_of(arch, shape, scaled=True), 0, packed=True)[0] > 0


@pytest.mark.parametrize(("name", "arch", "shape"), PRODUCTS, ids=[f"{n} {s}" for n, _, s in PRODUCTS])
def test_product_instructions_equal_mmasim_on_raw_bits(name: str, arch: str, shape: str) -> None:
    assert total(name, operation_of(arch, shape, scaled=False), 1) > 0


@pytest.mark.parametrize("shape", SCALED)
def test_mxf8f6f4_equals_mmasim_on_raw_bits(shape: str) -> None:
    assert total("mxf8f6f4", operation_of(DATACENTER, shape, scaled=True), 1) > 0


# FP16 results of raw bits hide F; test_mma.py has the data that shows it.
SHOWING_F = [p for p in PRODUCTS if p[0] in ("tcgen05_f8f6f4", "wgmma_f16", "wgmma_tf32", "wgmma_fp8")]


@pytest.mark.parametrize(("name", "arch", "shape"), SHOWING_F)
def test_raw_bits_tell_one_truncated_bit_apart(
    name: str, arch: str, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong_model = mma.model(name).replace(fraction_bits=mma.model(name).fraction_bits - 1)
    monkeypatch.setattr(mma, "model", lambda _: wrong_model)
    assert mismatches(name, operation_of(arch, shape, scaled=False), 0)[0] > 0
