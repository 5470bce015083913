"""The grouped product for many rows: the emulator's bits on the interpreter, sound code for Hopper, the H200 itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from quads.emulation import formats, gemm, layout
from quads.emulation.quantizers import NVFP4Tensor, quantize
from quads.kernels import gemm as dense
from quads.kernels import prepack, support
from quads.kernels.crosscompile import Job, compile_jobs
from quads.kernels.gemm_details import expand, hopper, nvrtc, prefill
from quads.kernels.gemm_details.grouping import Grouping
from quads.kernels.moe_details import routing
from quads.kernels.quantize import PackedNVFP4

Launch = Callable[..., Any]
EXPERTS = 4
HOPPER = pytest.mark.skipif(bool(support.missing_hopper()), reason=support.missing_hopper() or "runs")


def values(packed: Tensor, scales: Tensor) -> Tensor:
    """code * block scale, float32: exact in bfloat16 too."""
    code = formats.decode(layout.unpack(packed), formats.E2M1).unflatten(-1, (-1, 16))
    return (code * formats.decode(scales, formats.E4M3).unsqueeze(-1)).flatten(-2)


def gathered(x: Tensor, grouping: Grouping) -> Tensor:
    """What `expand_routed` gives, of decoded rows: slot order, zeros where a slot is empty."""
    rows = torch.where(grouping.slots >= 0, grouping.slots // grouping.share, 0)
    return torch.where((grouping.slots >= 0)[:, None], x[rows], 0.0)


def alternating(w: Tensor) -> Tensor:
    """[experts, gate rows then up rows, K] as rows that alternate."""
    return w.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2).contiguous()


def routed_ids(rows: int, top_k: int = 2) -> Tensor:
    """Ids [rows, top_k]: expert 2 gets none, one pair has none."""
    draw = torch.rand(rows, EXPERTS - 1, generator=torch.Generator().manual_seed(rows)).argsort(1)[:, :top_k]
    ids = torch.tensor([0, 1, 3])[draw].int()
    ids[0, 1] = -1
    return ids


def quantized(n: int, k: int, rows: int) -> tuple[NVFP4Tensor, NVFP4Tensor]:
    generator = torch.Generator().manual_seed(n)
    parts = [quantize(torch.randn(n, k, generator=generator) * (e + 1)) for e in range(EXPERTS)]
    w = NVFP4Tensor(*(torch.stack([getattr(q, f) for q in parts]) for f in ("codes", "scales", "outer")))
    return quantize(torch.randn(rows, k, generator=generator), granularity="token"), w


def expected(a: NVFP4Tensor, w: NVFP4Tensor, ids: Tensor, outer: Tensor) -> Tensor:
    """Each pair's row of bf16(alpha * acc), zeros without an expert; outer [experts, N]."""
    out = torch.zeros(ids.numel(), w.codes.shape[1], dtype=torch.bfloat16)
    for pair, e in enumerate(ids.flatten().tolist()):
        if e >= 0:
            row = slice(pair // ids.shape[1], pair // ids.shape[1] + 1)
            one = NVFP4Tensor(a.codes[row], a.scales[row], a.outer[row])
            acc = gemm.matmul(one, NVFP4Tensor(w.codes[e], w.scales[e], w.outer[e]))
            out[pair] = gemm.epilogue(acc, one.outer * outer[e])[0]
    return out


def silu_product(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate / (1 + torch.exp(-gate)) * up).bfloat16()


def routed_only(y: Tensor, ids: Tensor) -> Tensor:
    """Zeros in the rows that have no expert, which a grouped product does not write."""
    return torch.where((ids.flatten() >= 0)[:, None], y, 0.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's operands are FP32")
@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize("per_row", [False, True])
def test_grouped_product_equals_the_emulator(launch: Launch, swiglu: bool, per_row: bool) -> None:
    """N and K are no multiples of a tile, expert 3 has two row blocks (one of them half empty), expert 2 none."""
    n, k, rows = 88, 48, 150
    a, w = quantized(n, k, rows)
    if not per_row:
        a = NVFP4Tensor(a.codes, a.scales, torch.tensor(0.37).expand(rows, 1))
    ids = routed_ids(rows)
    grouping = routing.route(ids, EXPERTS, prefill.ROWS)
    outer = torch.stack([w.outer.flatten(), w.outer.flatten() * 1.25], 1)
    x, decoded = gathered(values(a.packed, a.scales), grouping), values(w.packed, w.scales)
    got = launch(
        prefill.grouped_product,
        x,
        alternating(decoded) if swiglu else decoded,
        a.outer.contiguous() if per_row else torch.tensor(0.37),
        outer if swiglu else outer[:, 0].contiguous(),
        grouping,
        swiglu=swiglu,
        tile=prefill.Tile(columns=32, depth=32),
    )
    wide = outer.repeat_interleave(n // 2, 1) if swiglu else outer[:, :1].expand(EXPERTS, n)
    want = expected(a, w, ids, wide)
    assert torch.equal(routed_only(got, ids), silu_product(want) if swiglu else want)


def test_other_row_blocks_than_its_own_and_a_weight_of_the_other_kind_are_refused() -> None:
    ids = routed_ids(20)
    a, w = quantized(64, 32, 20)
    packed = PackedNVFP4(w.packed, w.scales, w.outer)
    operand = PackedNVFP4(a.packed, a.scales, a.outer)
    with pytest.raises(ValueError, match=r"grouping: blocks of 32\.0 slots, not 128"):
        prefill.grouped(operand, prepack.prepare_hopper(packed), routing.route(ids, EXPERTS, 32), None, swiglu=False)
    with pytest.raises(ValueError, match="weight: interleaved is False, swiglu True"):
        prefill.grouped(operand, prepack.prepare_hopper(packed), routing.route(ids, EXPERTS, 128), None, swiglu=True)


def test_it_is_taken_from_a_mean_number_of_rows_of_an_expert_on_hopper_only() -> None:
    _, w = quantized(64, 32, 1)
    packed, enough = PackedNVFP4(w.packed, w.scales, w.outer), prefill.CROSSOVER * EXPERTS
    assert prefill.takes(enough, prepack.prepare_hopper(packed))
    assert not prefill.takes(enough - 1, prepack.prepare_hopper(packed))
    assert not prefill.takes(enough, prepack.prepare_native(packed))


def test_passes_compile_without_a_gpu() -> None:
    if nvrtc.unavailable():
        pytest.skip(nvrtc.unavailable() or "")
    source = "\n".join((expand._HERE / name).read_text() for name in ("e2m1.cuh", "expand.cu"))
    cubin = nvrtc.compile_cubin(source, "sm_90a", {})
    for name in (b"expand_tokens", b"expand_routed", b"expand_weight"):
        assert name in cubin


SIGNATURE = {
    "x_desc": "tensordesc<bf16[128, 64]>", "x_half_desc": "tensordesc<bf16[64, 64]>",
    "w_desc": "tensordesc<bf16[256, 64]>", "out": "*bf16",
    "slots": "*i32", "groups": "*i32", "x_outer": "*fp32", "w_outer": "*fp32",
    **dict.fromkeys(("n", "share"), "i32"),
}  # fmt: skip


@pytest.mark.slow
def test_grouped_product_compiles_to_asynchronous_wgmma_and_fits_hopper() -> None:
    tile = prefill.Tile()
    jobs = [
        Job(
            kernel="quads.kernels.gemm_details.prefill_jit:grouped_product",
            chip="sm_90a",
            signature=SIGNATURE,
            divisible=("out", "slots", "groups", "x_outer", "w_outer", "n"),
            constants={
                "STEPS": 32, "OUTER_PER_ROW": True, "SWIGLU": swiglu, "BM": prefill.ROWS, "BN": tile.columns,
                "BK": tile.depth, "BAND": tile.band,
            },
            options={"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": False},
        )
        for swiglu in (False, True)
    ]  # fmt: skip
    for report in compile_jobs(jobs):
        assert report.problems() == []
        assert report.count("wgmma.mma_async", "m64n256k16") == 4
        assert "wgmma.wait_group.sync.aligned 1;" in report.ptx  # one product runs while the next is issued
        assert report.count("cp.async.bulk.tensor.2d") > 0 and report.count("st.global.v4") > 0


def random_operand(*shape: int) -> PackedNVFP4:
    """Codes and scales at random, K = last of shape."""
    *rows, k = shape
    codes = torch.randint(0, 256, (*rows, k // 2), dtype=torch.uint8, device="cuda")
    scales = torch.randint(0x30, 0x50, (*rows, k // 16), dtype=torch.uint8, device="cuda")
    return PackedNVFP4(codes, scales, torch.full((rows[0],), 2.0**-6, device="cuda"))


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("lists", ["none", "shared", "per expert"])
def test_decoded_operands_equal_the_formats_tables(interleaved: bool, lists: str) -> None:
    n, k, rows = 104, 304, 150
    w, a = random_operand(EXPERTS, n, k), random_operand(rows, k)
    generator = torch.Generator().manual_seed(0)
    orders = torch.stack([torch.randperm(k // 16, generator=generator)[:5] for _ in range(EXPERTS)]).int()
    per_expert = orders if lists == "per expert" else orders[:1].expand(EXPERTS, 5)
    blocks = {"none": None, "shared": orders[0].cuda(), "per expert": orders.cuda()}[lists]
    want = values(w.packed.cpu(), w.scales.cpu())
    if lists != "none":
        more = [x.unflatten(1, (-1, 16))[:, order.long()].flatten(1) for x, order in zip(want, per_expert, strict=True)]
        want = torch.cat([want, torch.stack(more)], dim=2)
    prepared = prepack.prepare_hopper(w, interleave=interleaved)
    got = expand.expand_weight(prepared, blocks).cpu()
    assert torch.equal(got, (alternating(want) if interleaved else want).bfloat16())
    grouping = routing.route(routed_ids(rows).cuda(), EXPERTS, prefill.ROWS)
    some = expand.expand_weight(prepared, blocks, grouping.groups).cpu()
    assert torch.equal(some[[0, 1, 3]], got[[0, 1, 3]])
    on_cpu = Grouping(grouping.slots.cpu(), grouping.groups.cpu(), grouping.share, grouping.rows_out)
    used = int((on_cpu.groups >= 0).sum()) * prefill.ROWS
    x = gathered(values(a.packed.cpu(), a.scales.cpu()), on_cpu).bfloat16()
    assert torch.equal(expand.expand_routed(a, grouping)[:used].cpu(), x[:used])


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize("residual", [False, True])
def test_dense_product_stays_within_the_bound_of_its_sums(residual: bool) -> None:
    """|y - exact| <= 5.25 n 2^-23 sum |a w| for n fused steps of 16 (NOTES-gemm.md)."""
    m, n, k = 300, 104, 304
    blocks = torch.randperm(k // 16)[:5].int().cuda() if residual else None
    w, a = random_operand(1, n, k), random_operand(m, k + (80 if residual else 0))
    assert dense.hopper_way(m, residual=residual) == "prefill"
    wide = values(w.packed[0].cpu(), w.scales[0].cpu()).double()
    if blocks is not None:
        wide = torch.cat([wide, wide.unflatten(1, (-1, 16))[:, blocks.cpu().long()].flatten(1)], dim=1)
    x = values(a.packed.cpu(), a.scales.cpu()).double()
    y = dense.gemm(a, prepack.prepare_hopper(w), blocks=blocks, out_dtype=torch.float32).cpu().double() * 2.0**12
    steps = x.shape[1] // 16 + 1
    assert ((y - x @ wide.T).abs() <= 5.25 * 2.0**-23 * steps * (x.abs() @ wide.abs().T)).all()


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("swiglu", [False, True])
def test_grouped_product_agrees_with_the_decode_kernel(swiglu: bool, residual: bool) -> None:
    """Two orders of K: each product lies within 5.25 n 2^-23 sum |a w| of the exact one, then alpha and bf16 round."""
    n, k, rows = 1568, 768, 2100  # a last band that is not full
    extra = k // 32 if residual else 0
    w, a = random_operand(EXPERTS, n, k), random_operand(rows, k + 16 * extra)
    lists = torch.stack([torch.randperm(k // 16)[:extra] for _ in range(EXPERTS)]).int().cuda()
    blocks = lists if residual else None
    prepared = prepack.prepare_hopper(w, interleave=swiglu)
    ids = routed_ids(rows).cuda()
    plan = hopper.Plan(tokens=32, k_warps=1, row_warps=4, stages=3, run=1)
    torch.full((2**24,), 0xFF, dtype=torch.uint8, device="cuda")  # poison what the outputs will be given
    got = prefill.grouped(a, prepared, routing.route(ids, EXPERTS, prefill.ROWS), blocks, swiglu=swiglu)
    other = hopper.decode(a, prepared, plan, blocks=blocks, grouping=routing.route(ids, EXPERTS, 32), swiglu=swiglu)
    got, other = routed_only(got, ids).float(), routed_only(other, ids).float()
    assert got.isfinite().all()
    assert (got != other).float().mean() < 0.02
    if not swiglu:
        assert ((got - other).abs() <= bound(a, w, blocks, ids) + 2.0**-7 * other.abs()).all()


@pytest.mark.gpu
@HOPPER
@pytest.mark.parametrize("tile", [prefill.Tile(band=1), prefill.Tile(columns=128, warps=4, stages=3)], ids=str)
@pytest.mark.parametrize("swiglu", [False, True])
def test_no_tile_changes_a_bit(tile: prefill.Tile, swiglu: bool) -> None:
    n, k, rows = 1568, 768, 2100
    grouping = routing.route(routed_ids(rows).cuda(), EXPERTS, prefill.ROWS)
    x = expand.expand_routed(random_operand(rows, k), grouping)
    w = expand.expand_weight(prepack.prepare_hopper(random_operand(EXPERTS, n, k), interleave=swiglu))
    outer = torch.rand(EXPERTS * (2 if swiglu else 1), device="cuda") * 2.0**-6
    default, other = (
        routed_only(
            prefill.grouped_product(x, w, torch.ones((), device="cuda"), outer, grouping, swiglu=swiglu, tile=t),
            routed_ids(rows).cuda(),
        )
        for t in (prefill.Tile(), tile)
    )
    assert default.abs().sum() > 0 and torch.equal(default, other)


def bound(a: PackedNVFP4, w: PackedNVFP4, blocks: Tensor | None, ids: Tensor) -> Tensor:
    """Twice 5.25 n 2^-23 alpha sum |a w|, for each pair and row of its expert's weight."""
    x, wide = (values(q.packed.cpu(), q.scales.cpu()).abs().cuda() for q in (a, w))
    if blocks is not None:
        more = [e.unflatten(1, (-1, 16))[:, b.long()].flatten(1) for e, b in zip(wide, blocks, strict=True)]
        wide = torch.cat([wide, torch.stack(more)], dim=2)
    sizes = torch.stack([x @ e.T for e in wide])[ids.flatten().long(), torch.arange(ids.numel()).cuda() // ids.shape[1]]
    return 2 * 5.25 * 2.0**-23 * (x.shape[1] // 16 + 1) * 2.0**-12 * sizes
