"""Quantisers on a Hopper GPU: check bytes against the emulator, time, print the table, write JSON.

    PYTHONPATH=. python3 bench/h200_quantize.py --out results.json [--tune]

Nothing is timed while a byte is wrong. Every figure is a median of triton.testing.do_bench (L2 cleared before each
repetition); bandwidth counts each input byte read once and each output byte written once; ratios are taken within the
run. `--tune` times other tile shapes too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quads.emulation import layout, quantizers, residual
from quads.emulation.dialects import EXACT
from quads.kernels import compensate, fake_quant, quantize
from tests.kernels.test_quantize import amax_and_block_max

M, K = 32768, 8192
GRANULARITIES: tuple[quantize.Granularity, ...] = ("tensor", "token")
WORKERS = 8  # processes that compile beforehand


@dataclass(frozen=True)
class Case:
    """One timed call. moved: bytes an element of x costs at least; goal: share of copy bandwidth, or times `naive`."""

    name: str
    call: Callable[[], Any]
    moved: float
    goal: str = ""
    settings: dict[str, int] = field(default_factory=dict)


MODULES = {"quantize": quantize, "compensate": compensate, "fake_quant": fake_quant}


@contextmanager
def applied(settings: dict[str, int]) -> Iterator[None]:
    """Module constants ("quantize._TILE") changed for the duration."""
    before = {}
    for path, value in settings.items():
        module, _, name = path.partition(".")
        before[path] = getattr(MODULES[module], name)
        setattr(MODULES[module], name, value)
    try:
        yield
    finally:
        for path, value in before.items():
            module, _, name = path.partition(".")
            setattr(MODULES[module], name, value)


def inputs(m: int) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(m, K, device="cuda", dtype=torch.bfloat16)


def cases(m: int, *, tune: bool) -> list[Case]:
    x = inputs(m)
    g = quantize.outer_scale(x)
    rows = quantize.outer_scale(x, "token")
    half = K // 32
    static = torch.arange(0, K // 16, 2, dtype=torch.int32, device="cuda")
    half_precision = x.half()
    single = x[: max(16, m // 2)].float()
    packed = 0.5 + 1 / 16
    rac = 2 + 1.5 * packed

    def q(**kw: Any) -> Callable[[], Any]:
        return lambda: quantize.quantize(x, **kw)

    def comp(scope: compensate.Scope, **kw: Any) -> Callable[[], Any]:
        return lambda: compensate.quantize_rac(x, half, scope, g, **kw)

    found = [
        Case("quantise, per tensor", q(outer=g), 2 + packed, ">= 90 % copy"),
        Case("quantise, per token", q(outer=rows, granularity="token"), 2 + packed, ">= 80 % copy"),
        Case("quantise, per token, amax in the pass", q(granularity="token"), 2 + packed),
        Case("quantise, 128x4 scales", q(outer=g, layout="128x4"), 2 + packed),
        Case("quantise, vllm dialect", q(outer=1 / g, dialect="vllm"), 2 + packed),
        Case("quantise, fp16", lambda: quantize.quantize(half_precision, g), 2 + packed),
        Case("quantise, fp32", lambda: quantize.quantize(single, g), 4 + packed),
        Case("RAC 50 %, static", comp("static", static_blocks=static), rac, "<= 1.3x naive"),
        Case("RAC 50 %, batch", comp("batch"), 2 + packed + 1 + 0.5 * packed, "<= 2.2x naive"),
        Case("RAC 50 %, tile", comp("tile"), 2 + packed + 1 + 0.5 * packed),
        Case("RAC 50 %, token", comp("token"), rac),
        Case("fake-quantise", lambda: fake_quant.fake_quantize(x, g), 4, ">= 85 % copy"),
        Case("fake-quantise, 16x16", lambda: fake_quant.fake_quantize(x, g, weight_block="16x16"), 4),
        Case("outer scale, per tensor", lambda: quantize.outer_scale(x), 2),
    ]
    return found + (tuned(found) if tune else [])


def tuned(found: list[Case]) -> list[Case]:
    """The same calls with other module constants."""
    by_name = {case.name: case for case in found}
    tile = ("_LANES", "_BLOCKS_A_THREAD")
    plan: list[tuple[str, str, tuple[str, ...], list[tuple[int, ...]]]] = [
        ("quantise, per tensor", "quantize", ("_TILE", tile[1]), [(128, 4), (256, 2), (512, 4), (512, 8)]),
        ("quantise, per token", "quantize", ("_TILE", tile[1]), [(512, 4)]),
        ("RAC 50 %, static", "compensate", tile, [(64, 1), (128, 2), (256, 2)]),
        (
            "RAC 50 %, batch",
            "compensate",
            ("_ROWS_A_PROGRAM", *tile),
            [(4, 128, 1), (8, 128, 1), (32, 128, 1), (8, 64, 1)],
        ),
        ("fake-quantise", "fake_quant", tile, [(64, 1), (128, 2), (256, 2)]),
        ("fake-quantise, 16x16", "fake_quant", tile, [(256, 2), (256, 1)]),
    ]
    made = []
    for name, module, constants, settings in plan:
        for values in settings:
            changed = {f"{module}.{c}": v for c, v in zip(constants, values, strict=True)}
            case = by_name[name]
            label = f"{name} [{'/'.join(map(str, values))}]"
            made.append(Case(label, case.call, case.moved, case.goal, changed))
    return made


def poison() -> None:
    """Leave 0xFF in the memory that the next outputs will be given."""
    torch.full((2**29,), 0xFF, dtype=torch.uint8, device="cuda")


def check() -> list[str]:
    """Names of the checks, all of which compared bytes with the emulator (on the CPU) and agreed."""
    torch.manual_seed(1)
    x = torch.randn(517, 1152) * torch.exp(2 * torch.randn(517, 1))
    x *= torch.exp(torch.randn(1, 72)).repeat_interleave(16, 1)
    x[7], x[9, :16], x[:, 5] = 0, -0.0, -0.0
    done = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for exponent in (0, -9) if dtype == torch.float16 else (0, -40):
            for granularity in GRANULARITIES:
                done.append(f"{dtype} 2^{exponent} {granularity}")
                _check_value(torch.ldexp(x, torch.tensor(exponent)).to(dtype), granularity, done[-1])
    done.append("every bfloat16 pair (amax, block max)")
    pairs = amax_and_block_max(1)
    want = quantizers.quantize(pairs, granularity="token")
    got = quantize.quantize(pairs.cuda(), granularity="token")
    _same(got.packed, want.packed, done[-1])
    _same(got.scales, want.scales, done[-1])
    return done


def _check_value(x: Tensor, granularity: quantize.Granularity, name: str) -> None:
    want, on_gpu = quantizers.quantize(x, granularity=granularity), x.cuda()
    outer = want.outer.cuda()
    for given in (None, outer):
        poison()
        got = quantize.quantize(on_gpu, given, granularity=granularity)
        _same(got.packed, want.packed, name)
        _same(got.scales, want.scales, name)
        _same(got.outer, want.outer, name)
    poison()
    qdq = fake_quant.fake_quantize(on_gpu, outer, granularity=granularity)
    _same(qdq, quantizers.dequantize(want, x.dtype), f"{name} fake-quantise")
    if granularity == "tensor":
        square = quantizers.quantize(x[:512], want.outer, dialect=EXACT.replace(tile="16x16"))
        qdq = fake_quant.fake_quantize(on_gpu[:512], outer, weight_block="16x16")
        _same(qdq, quantizers.dequantize(square, x.dtype), f"{name} fake-quantise 16x16")
    poison()
    batch = compensate.quantize_rac(on_gpu, 31, "batch", outer, granularity=granularity)
    scores = residual.block_scores(residual.residual(x, want), want.outer).sum(dim=0)
    _check_rac(batch, x, want, residual.top_blocks(scores, 31), f"{name} batch")
    blocks = torch.arange(1, 63, 2)
    poison()
    static = compensate.quantize_rac(
        on_gpu, 31, "static", outer, granularity=granularity, static_blocks=blocks.int().cuda()
    )
    _check_rac(static, x, want, blocks, f"{name} static")


def _check_rac(got: compensate.RacOperand, x: Tensor, want: quantizers.NVFP4Tensor, blocks: Tensor, name: str) -> None:
    _same(got.blocks.long(), blocks, f"{name}: blocks")
    second = residual.quantize_residual(x, want, blocks)
    _same(got.packed, torch.cat([want.packed, layout.pack(second.codes)], -1), f"{name}: codes")
    _same(got.scales, torch.cat([want.scales, second.scales], -1), f"{name}: scales")


def _same(got: Tensor, want: Tensor, name: str) -> None:
    a, b = got.cpu().contiguous().view(-1), want.contiguous().view(-1)
    wrong = int((a.view(torch.uint8) != b.view(torch.uint8)).sum()) if len(a) == len(b) else -1
    if wrong:
        raise SystemExit(f"{name}: {wrong} of {b.numel() * b.element_size()} bytes differ")


def timed(found: list[Case], x: Tensor) -> list[dict[str, Any]]:
    from triton.testing import do_bench

    target = torch.empty_like(x)
    copy_ms = do_bench(lambda: target.copy_(x), return_mode="median")
    copy = 4 * x.numel() / copy_ms / 1e9
    table = [{"name": "copy", "ms": copy_ms, "TB/s": copy, "of copy": 1.0, "of naive": 0.0, "goal": ""}]
    naive = 0.0
    for case in found:
        with applied(case.settings):
            ms = do_bench(case.call, return_mode="median", warmup=10, rep=60)
        elements = x.numel() / (2 if "fp32" in case.name else 1)
        rate = case.moved * elements / ms / 1e9
        naive = naive or ms
        table.append(
            {
                "name": case.name,
                "ms": ms,
                "TB/s": rate,
                "of copy": rate / copy,
                "of naive": ms / naive,
                "goal": case.goal,
            }
        )
    return table


def compile_share(share: int) -> None:
    for case in cases(256, tune=True)[share::WORKERS]:
        with applied(case.settings):
            case.call()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--share", type=int, default=-1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.share >= 0:
        return compile_share(options.share)
    command = [sys.executable, __file__, "--out", str(options.out), "--share"]
    workers = [subprocess.Popen([*command, str(i)]) for i in range(WORKERS if options.tune else 0)]
    checks = check()
    print(f"{len(checks)} checks equal the emulator byte for byte")
    if any(worker.wait() for worker in workers):
        raise SystemExit("a compile worker failed")
    table = timed(cases(M, tune=options.tune), inputs(M))
    for row in table:
        shares = f"{row['TB/s']:6.2f} TB/s {row['of copy']:6.1%} {row['of naive']:5.2f}x"
        print(f"{row['name']:46s} {row['ms'] * 1e3:8.1f} us {shares}  {row['goal']}")
    device = torch.cuda.get_device_properties(0)
    stamp = {"gpu": device.name, "torch": torch.__version__, "shape": [M, K], "checks": checks}
    options.out.write_text(json.dumps({"stamp": stamp, "rows": table}, indent=1))


if __name__ == "__main__":
    main()
