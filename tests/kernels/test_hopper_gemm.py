"""The Hopper products against Hopper's arithmetic: stored words of an H200, and the GPU where there is one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from quads.emulation import formats, gemm, layout
from quads.kernels import support
from quads.kernels.gemm_details import grouped, hopper, nvrtc, wide
from quads.kernels.gemm_details.order import Kernel, columns
from quads.kernels.moe_details import routing
from quads.kernels.prepack import prepare_hopper
from quads.kernels.quantize import PackedNVFP4

WORDS = load_file(Path(__file__).parent / "data" / "h200_words.safetensors")
KERNELS: tuple[Kernel, ...] = ("decode", "wide", "grouped")  # as the third number of a case's shape names them
CASES = sorted({name.rsplit(".", 1)[0] for name in WORDS})
HOPPER = pytest.mark.skipif(bool(support.missing_hopper()), reason=support.missing_hopper() or "runs")


def values(packed: Tensor, scales: Tensor) -> Tensor:
    """code * block scale, float32: exact in bfloat16 too."""
    code = formats.decode(layout.unpack(packed), formats.E2M1).unflatten(-1, (-1, 16))
    return (code * formats.decode(scales, formats.E4M3).unsqueeze(-1)).flatten(-2)


def model(case: dict[str, Tensor], reverse: bool = False) -> Tensor:
    """The accumulator that the wgmma model gives in the kernel's order of K; `reverse` plants another order."""
    slices, run, kernel = case["shape"].tolist()
    a, w = values(case["a_packed"], case["a_scales"]), values(case["w_packed"], case["w_scales"])
    blocks = case["blocks"].tolist()
    w = torch.cat([w, w.unflatten(1, (-1, 16))[:, blocks].flatten(1)], dim=1)
    a, w = (torch.nn.functional.pad(x, (0, 1)).bfloat16() for x in (a, w))
    total = torch.zeros(a.shape[0], w.shape[0])
    for order in columns(case["w_scales"].shape[1], blocks, run=run, slices=slices, kernel=KERNELS[kernel]):
        if order:
            index = torch.tensor(order[::-1] if reverse else order)
            total = total + gemm.matmul_wgmma(a[:, index], w[:, index])
    return total


def stored(name: str) -> dict[str, Tensor]:
    return {key.rsplit(".", 1)[1]: value for key, value in WORDS.items() if key.startswith(name + ".")}


@pytest.mark.parametrize("name", CASES)
def test_words_of_the_h200_equal_the_model_bit_for_bit(name: str) -> None:
    case = stored(name)
    assert torch.equal(model(case).view(torch.int32), case["y"].view(torch.int32))


@pytest.mark.parametrize("name", CASES)
def test_another_order_of_k_gives_other_words(name: str) -> None:
    case = stored(name)
    assert not torch.equal(model(case, reverse=True), case["y"])


def test_the_order_names_every_column_once() -> None:
    for k_blocks, run, slices in ((1, 1, 4), (3, 2, 2), (72, 1, 16), (18, 4, 3)):
        repeated = list(range(0, k_blocks, 2))
        found = [c for order in columns(k_blocks, repeated, run=run, slices=slices) for c in order if c >= 0]
        assert sorted(found) == list(range(16 * (k_blocks + len(repeated))))


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("tokens", [8, 16, 32])
def test_decode_kernel_compiles_without_a_gpu(tokens: int, residual: bool, grouped: bool) -> None:
    if nvrtc.unavailable():
        pytest.skip(nvrtc.unavailable() or "")
    plan = hopper.Plan(tokens=tokens, k_warps=4)
    source = _text("e2m1.cuh", "decode.cu")
    assert nvrtc.compile_cubin(source, "sm_90a", dict(hopper.decode_defines(plan, residual, grouped, grouped, False)))


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("tokens", [8, 16, 24, 32])
def test_grouped_kernel_compiles_without_a_gpu(tokens: int, residual: bool) -> None:
    if nvrtc.unavailable():
        pytest.skip(nvrtc.unavailable() or "")
    plan, source = grouped.GroupedPlan(tokens=tokens), _text("e2m1.cuh", "grouped.cu")
    assert nvrtc.compile_cubin(source, "sm_90a", dict(plan.defines(residual, True, False)))


def test_compiled_code_is_kept_in_a_folder_by_what_it_was_compiled_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if nvrtc.unavailable():
        pytest.skip(nvrtc.unavailable() or "")
    monkeypatch.setenv("QUADS_CUBIN_CACHE", str(tmp_path))
    source = 'extern "C" __global__ void f(int* x) { *x = VALUE; }'
    first = nvrtc.compile_cubin(source, "sm_90a", {"VALUE": 1})
    assert nvrtc.compile_cubin(source, "sm_90a", {"VALUE": 2}) != first
    assert len(list(tmp_path.iterdir())) == 2
    monkeypatch.setattr(nvrtc, "_compiled", lambda source, options: b"compiled again")
    assert nvrtc.compile_cubin(source, "sm_90a", {"VALUE": 1}) == first


@pytest.mark.parametrize("residual", [False, True])
def test_wide_kernel_compiles_without_a_gpu(residual: bool) -> None:
    if nvrtc.unavailable():
        pytest.skip(nvrtc.unavailable() or "")
    plan = wide.WidePlan(tokens=32)
    source = wide.instruction(plan.tokens) + _text("e2m1.cuh", "wide.cu")
    assert nvrtc.compile_cubin(source, "sm_90a", dict(plan.defines(residual, False)))


def _text(*names: str) -> str:
    return "\n".join((Path(hopper.__file__).parent / name).read_text() for name in names)


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("shape", [(1, 64, 16), (5, 100, 48), (33, 192, 1152), (130, 640, 4096)])
def test_products_stay_within_the_bound_of_their_sums(shape: tuple[int, int, int], residual: bool) -> None:
    """|y - exact| <= 5.25 n 2^-23 sum |a w| for n fused steps and additions (NOTES-gemm.md)."""
    m, n, k = shape
    generator = torch.Generator().manual_seed(k)
    draw = lambda rows, blocks: PackedNVFP4(  # noqa: E731
        torch.randint(0, 256, (rows, blocks * 8), generator=generator).byte().cuda(),
        torch.randint(0, 0x7F, (rows, blocks), generator=generator).byte().cuda(),
        torch.tensor(1.0).cuda(),
    )
    blocks = torch.arange(0, k // 16, 2, dtype=torch.int32).cuda() if residual else None
    extra = 0 if blocks is None else len(blocks)
    a, w = draw(m, k // 16 + extra), draw(n, k // 16)
    wide_w = values(w.packed, w.scales).double()
    if blocks is not None:
        wide_w = torch.cat([wide_w, wide_w.unflatten(1, (-1, 16))[:, blocks.long()].flatten(1)], dim=1)
    exact, size = (
        values(a.packed, a.scales).double() @ wide_w.T,
        values(a.packed, a.scales).double().abs() @ wide_w.abs().T,
    )
    prepared = prepare_hopper(w)
    torch.full((2**24,), 0xFF, dtype=torch.uint8, device="cuda")  # poison what the outputs will be given
    outputs = [
        hopper.decode(a, prepared, plan, blocks=blocks, out_dtype=torch.float32)
        for plan in (
            hopper.Plan(tokens=16),
            hopper.Plan(tokens=8, k_warps=1, row_warps=4, run=1),
            hopper.Plan(tokens=32, run=1, splits=3),
        )
    ]
    outputs.append(wide.wide(a, prepared, wide.WidePlan(tokens=64, splits=2), blocks=blocks, out_dtype=torch.float32))
    one_expert = routing.route(torch.zeros(m, 1, dtype=torch.int32, device="cuda"), 1, 8)
    few = grouped.GroupedPlan(tokens=8)
    outputs.append(grouped.grouped(a, prepared, few, one_expert, blocks=blocks, out_dtype=torch.float32))
    steps = (2 if residual else 1) * (k // 16 + 8) + 32
    bound = 5.25 * 2.0**-23 * steps * size
    for y in outputs:
        assert ((y.double() - exact).abs() <= bound).all()
