"""Mutation tests: each known fault of a quantiser, planted in code that shares nothing with the emulator, is named.

A mutant exchanges one part of `tests.quads.conformance_kernels.Kernel`. The harness is told only the dialect that the
kernel means to speak.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quads.conformance import faults
from quads.conformance.check import check_callable
from quads.conformance.result import TargetReport
from quads.conformance.settings import Settings
from tests.quads.conformance_kernels import GRID, MIDDLE, Kernel, e4m3, nearest_even, tiles

RIGHT = Kernel()
SWIZZLED = RIGHT.but(place=tiles)
LEAN = Settings(dialect="exact", first_amaxes=1, amaxes=1, examples=5)


def truncated_e4m3(value: Tensor) -> Tensor:
    byte = value.clamp(max=448).to(torch.float8_e4m3fn)
    return byte.view(torch.uint8) - (byte.float() > value).to(torch.uint8)


def raised_e4m3(value: Tensor) -> Tensor:
    byte = value.clamp(max=448).to(torch.float8_e4m3fn)
    return byte.view(torch.uint8) + ((byte.float() < value) & (value < 448)).to(torch.uint8)


def power_of_two(value: Tensor) -> Tensor:
    exponent = torch.ceil(torch.log2(value.double())).float()
    return torch.where(value > 0, torch.exp2(exponent), 0.0).clamp(max=448).to(torch.float8_e4m3fn).view(torch.uint8)


def e5m2(value: Tensor) -> Tensor:
    return value.clamp(max=57344).to(torch.float8_e5m2).view(torch.uint8)


def pairs_max(blocks: Tensor) -> Tensor:
    v = blocks.abs().amax(-1)
    for left in range(0, v.shape[-1] - 1, 2):
        v[..., left : left + 2] = v[..., left : left + 2].amax(-1, keepdim=True)
    return v


def zeroed(columns: int) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    def finish(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        kept = codes.shape[1] - codes.shape[1] % columns
        codes[:, kept:], scales[:, kept // 16 :] = 0, 0
        return codes, scales

    return finish


def zeroed_rows(rows: int) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    def finish(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        kept = len(codes) - len(codes) % rows
        codes[kept:], scales[kept:] = 0, 0
        return codes, scales

    return finish


def halves(codes: Tensor) -> Tensor:
    low, high = codes[:, : codes.shape[1] // 2], codes[:, codes.shape[1] // 2 :]
    return low + 16 * high


def padded(scales: Tensor) -> Tensor:
    m, b = scales.shape
    out = torch.zeros(-(-m // 128) * 128, -(-b // 4) * 4, dtype=torch.uint8)
    out[:m, :b] = scales
    return out


def at_the_start(scales: Tensor) -> Tensor:
    out = torch.zeros_like(padded(scales)).reshape(-1)
    out[: scales.numel()] = scales.reshape(-1)
    return out


def poisoned(scales: Tensor) -> Tensor:
    out = torch.full_like(padded(scales), 0x7F)
    ones = tiles(torch.ones_like(scales))
    return torch.where(ones == 1, tiles(scales), out)


def small_tiles(scales: Tensor) -> Tensor:
    raw = tiles(scales, 8).reshape(-1)
    out = torch.zeros(padded(scales).numel(), dtype=torch.uint8)
    out[: raw.numel()] = raw
    return out


def shuffled_linear(scales: Tensor) -> Tensor:
    return tiles(scales).reshape(-1)[: scales.numel()].reshape(scales.shape)


def shuffled_small(scales: Tensor) -> Tensor:
    return tiles(scales, 8).reshape(-1)[: scales.numel()].reshape(scales.shape)


MUTANTS: dict[str, Kernel] = {
    "code-ties-away": RIGHT.but(magnitude=lambda y: (y.abs().unsqueeze(-1) >= MIDDLE).sum(-1)),
    "code-ties-toward": RIGHT.but(magnitude=lambda y: (y.abs().unsqueeze(-1) - GRID).abs().argmin(-1)),
    "code-truncated": RIGHT.but(magnitude=lambda y: (y.abs().unsqueeze(-1) >= GRID[1:]).sum(-1)),
    "code-sign-lost": RIGHT.but(sign=lambda magnitude, y: magnitude),
    "code-sign-low": RIGHT.but(sign=lambda magnitude, y: 2 * magnitude + torch.signbit(y).long()),
    "code-two-complement": RIGHT.but(sign=lambda magnitude, y: torch.where(y < 0, -magnitude, magnitude) & 15),
    "scale-truncated": RIGHT.but(cast=truncated_e4m3),
    "scale-rounded-up": RIGHT.but(cast=raised_e4m3),
    "scale-unsaturated": RIGHT.but(cast=lambda value: torch.where(value > 464, 0x7F, e4m3(value))),
    "scale-power-of-two": RIGHT.but(cast=power_of_two),
    "scale-e5m2": RIGHT.but(cast=e5m2),
    "codes-from-unrounded-scale": RIGHT.but(decode=lambda byte, wanted: wanted),
    "signed-block-max": RIGHT.but(block_max=lambda blocks: blocks.amax(-1).clamp(min=0) + 0.0),
    "block-of-32": RIGHT.but(block_max=pairs_max),
    "outer-inverse": RIGHT.but(outer=lambda g: 1 / g),
    "outer-missing": RIGHT.but(outer=torch.ones_like),
    "outer-without-6": RIGHT.but(outer=lambda g: g * 6),
    "outer-without-448": RIGHT.but(outer=lambda g: g * 448),
    "nibbles-swapped": RIGHT.but(pack=lambda codes: codes[:, 1::2] + 16 * codes[:, 0::2]),
    "nibbles-planar": RIGHT.but(pack=halves),
    "scale-of-neighbour": RIGHT.but(place=lambda scales: torch.cat([scales[:, -1:], scales[:, :-1]], dim=1)),
    "scales-column-major": RIGHT.but(place=lambda scales: scales.T.contiguous().view(scales.shape)),
    "scales-linear": SWIZZLED.but(place=padded),
    "scales-linear-unpadded": SWIZZLED.but(place=at_the_start),
    "scales-swizzled-twice": SWIZZLED.but(place=lambda scales: tiles(tiles(scales))),
    "scales-128x4": RIGHT.but(place=shuffled_linear),
    "scales-8x4": SWIZZLED.but(place=small_tiles),
    "stale-padding": SWIZZLED.but(place=poisoned),
    "tail-32-dropped": RIGHT.but(finish=zeroed(32)),
    "tail-64-dropped": RIGHT.but(finish=zeroed(64)),
    "tail-128-dropped": RIGHT.but(finish=zeroed(128)),
    "rows-32-dropped": RIGHT.but(finish=zeroed_rows(32)),
    "rows-128-dropped": RIGHT.but(finish=zeroed_rows(128)),
    "input-as-float16": RIGHT.but(prepare=lambda x: x.half()),
    "input-as-bfloat16": RIGHT.but(prepare=lambda x: x.bfloat16()),
}
FIELDS: dict[str, Kernel] = {
    "zero_scale=one": RIGHT.but(wanted=lambda v, g: torch.where(v == 0, 1.0, v / torch.tensor(6.0) / g)),
    "zero_sign=dropped": RIGHT.but(sign=lambda magnitude, y: magnitude + 8 * (y < 0).long()),
    "pre_round=bf16": RIGHT.but(magnitude=lambda y: nearest_even(y.bfloat16().float())),
    "scale_floor=0.015625": RIGHT.but(wanted=lambda v, g: (v / torch.tensor(6.0) / g).clamp(min=2**-6)),
    "scale_floor=0.001953125": RIGHT.but(wanted=lambda v, g: (v / torch.tensor(6.0) / g).clamp(min=2**-9)),
    "scale=v/(6*g)": RIGHT.but(wanted=lambda v, g: v / (6 * g)),
    "scale=v/6*gs": RIGHT.but(wanted=lambda v, g: v / torch.tensor(6.0) * (1 / g)),
    "multiplier=x*rcp(s*rcp(gs))": RIGHT.but(scale=lambda x, s, g: x * (1 / (s * g))),
    "multiplier=x*(gs/s)": RIGHT.but(scale=lambda x, s, g: x * ((1 / g) / s)),
    "underflow=none": RIGHT.but(nothing=lambda x, s: x / s),
}


# The rest shows in bfloat16, which is half the work.
SHOWN_IN_FLOAT32 = {"input-as-bfloat16", "pre_round=bf16", *(name for name in FIELDS if name.startswith("multiplier"))}


def check(kernel: Kernel, *dtypes: str) -> TargetReport:
    layout = "linear" if kernel.place not in SWIZZLED_PLACES else "128x4"
    return check_callable(kernel, "quantizer", settings=LEAN, layout=layout, dtypes=dtypes)


SWIZZLED_PLACES = {tiles, padded, at_the_start, poisoned, small_tiles, MUTANTS["scales-swizzled-twice"].place}


@pytest.mark.parametrize("kernel", [RIGHT, SWIZZLED], ids=["linear", "128x4"])
def test_the_correct_kernel_conforms_without_a_finding(kernel: Kernel) -> None:
    report = check(kernel, "bfloat16", "float32")
    assert report.passed
    assert not report.findings


def test_every_fault_of_the_table_has_a_mutant() -> None:
    assert set(MUTANTS) == set(faults.table()["quantizer"])


@pytest.mark.parametrize("name", [*MUTANTS, *FIELDS])
def test_a_planted_fault_is_found_and_named(name: str) -> None:
    report = check((MUTANTS | FIELDS)[name], "float32" if name in SHOWN_IN_FLOAT32 else "bfloat16")
    assert not report.passed
    assert (name,) in report.faults, report.explanations
    assert len(report.faults) <= 3, report.faults
