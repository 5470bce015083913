"""Every dialect with evidence `library`, byte for byte against the installed library.

For every bf16 amax A of [2, 4) and every bf16 block maximum v <= A down to a zero block scale: codes and scale bytes
of a block that holds v, -0 and the numbers on both sides of (or on) every E2M1 tie of the step that the dialect takes;
as bfloat16 and as float32 tensors. CI takes every 4th A, from a different start for each dialect (64 of the 256
tensors); the marker `full` takes them all. Random Gaussian blocks would prove nothing here.

The sign of a NaN scale is the processor's, and codes of NaN (for a dialect that says so, also of Inf) come from
undefined conversions there: neither is compared.
"""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
from torch import Tensor

from quads.emulation import dialects, formats
from quads.emulation.dialects import Dialect
from quads.emulation.quantizers import outer_scale, trace
from tests.blocks import amax_row, bfloat16_binade, block_maxima, blocks_at_ties, special_blocks
from tests.emulation import libraries
from tests.emulation.libraries import Library, Quantized

AMAX = 2.5
STRIDE = 4
DTYPES = [torch.bfloat16, torch.float32]

_te, _46 = libraries.te_reference, {"nvfp4_use_4over6": True}
LIBRARIES: dict[str, Library] = {
    "compressed_tensors": libraries.compressed_tensors,
    "modelopt": libraries.modelopt,
    "torchao_two_level": libraries.torchao,
    "torchao_one_level": partial(libraries.torchao, levels=1),
    "fouroversix_six": partial(libraries.fouroversix, rule="static_6"),
    "fouroversix_mse": partial(libraries.fouroversix, rule="mse"),
    "fouroversix_mae": partial(libraries.fouroversix, rule="mae"),
    "fouroversix_abs_max": partial(libraries.fouroversix, rule="abs_max"),
    "fouroversix_mse_16x16": partial(libraries.fouroversix, rule="mse", two_d=True),
    "te_reference": _te,
    "te_reference_16x16": partial(_te, quant_tile_shape=(16, 16)),
    "te_reference_token": partial(_te, row_scaled_nvfp4=True),
    "te_four_over_six_256_mae": partial(_te, **_46, nvfp4_e4m3_max=256),
    "te_four_over_six_256_mse": partial(_te, **_46, nvfp4_e4m3_max=256, nvfp4_4over6_err_mode="MSE"),
    "te_four_over_six_448_mae": partial(_te, **_46),
    "te_four_over_six_448_mse": partial(_te, **_46, nvfp4_4over6_err_mode="MSE"),
    "te_four_over_six_256_mae_16x16": partial(_te, **_46, nvfp4_e4m3_max=256, quant_tile_shape=(16, 16)),
    "vllm_reference": libraries.vllm_reference,
}
TAKES_OUTER = ["compressed_tensors", "modelopt", "torchao_two_level", "vllm_reference"]


def _cases(names: list[str]) -> list[object]:
    return [pytest.param(n, marks=[pytest.mark.vllm] if n == "vllm_reference" else [], id=n) for n in names]


every_library = pytest.mark.parametrize("name", _cases(list(LIBRARIES)))


def test_every_dialect_with_evidence_library_is_compared_here() -> None:
    assert {n for n, d in dialects.named().items() if d.evidence == "library"} == set(LIBRARIES)


@every_library
def test_a_quarter_of_the_enumeration_is_equal(name: str) -> None:
    start = list(LIBRARIES).index(name) % STRIDE
    assert _enumerate(name, bfloat16_binade()[start::STRIDE]) > 10_000_000 // STRIDE


@pytest.mark.full
@every_library
def test_the_whole_enumeration_is_equal(name: str) -> None:
    print(f"{name}: {_enumerate(name, bfloat16_binade())} elements, 0 codes or scales differ")


def _enumerate(name: str, amaxes: list[float]) -> int:
    """Compare; the number of elements."""
    compared = 0
    for amax in amaxes:
        for dtype in DTYPES:
            x = _tensor_of_ties(dialects.load(name), amax, dtype)
            _assert_equal(name, x)
            compared += x.numel()
    return compared


@every_library
@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_underflow_nan_and_inf_blocks_are_equal(name: str, dtype: torch.dtype) -> None:
    for _, block in special_blocks(AMAX, dtype):
        _assert_equal(name, torch.cat([amax_row(AMAX, dtype), block]))
        _assert_equal(name, block)


@pytest.mark.parametrize("name", _cases(TAKES_OUTER))
@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_above_the_calibrated_amax_are_equal(name: str, dtype: torch.dtype) -> None:
    """gs * v / 6 from 448 up: the cast to E4M3 saturates, and so does E2M1; NaN and Inf blocks under a finite scale."""
    outer = outer_scale(amax_row(AMAX, dtype), dialect=name)
    for factor in (1.0, 1.01, 1.04, 464 / 448, 480 / 448, 2.0, 1e3, 1e30):
        ramp = torch.linspace(-1, 1, 16).unsqueeze(0) * AMAX * factor
        _assert_equal(name, ramp.to(dtype), outer)
    for _, block in special_blocks(AMAX, dtype):
        _assert_equal(name, block, outer)


def _tensor_of_ties(d: Dialect, amax: float, dtype: torch.dtype) -> Tensor:
    v = block_maxima(amax)
    seed = torch.zeros(len(v), 16, dtype=dtype)
    seed[:, 0] = v.to(dtype)
    seed = torch.cat([amax_row(amax, dtype), seed])
    taken = trace(seed, dialect=d.replace(granularity="tensor", tile="1x16")).result
    step = (formats.decode(taken.scales, formats.E4M3) * taken.outer)[1:, 0]
    x = torch.cat([amax_row(amax, dtype), blocks_at_ties(v, torch.where(step > 0, step, 1.0), dtype)])
    if d.tile == "16x16":
        x = x[: len(x) // 16 * 16]
        return torch.cat([x, x.flip(0)], dim=-1)
    return torch.cat([x, amax_row(amax, dtype).expand(len(x), -1)], dim=-1) if d.granularity == "token" else x


def _assert_equal(name: str, x: Tensor, outer: Tensor | None = None) -> None:
    d = dialects.load(name)
    if d.tile == "16x16":
        x = torch.cat([x, x[:1].expand(-len(x) % 16, -1)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        codes, scales = LIBRARIES[name](x, outer)
    ours = trace(x, outer, dialect=d)
    undefined = ~_y(ours.steps).isfinite() if d.nan == "undefined" else torch.zeros_like(x, dtype=torch.bool)
    _assert_same_bytes((codes, scales), (ours.result.codes, ours.result.scales), undefined, x)


def _y(steps: dict[str, Tensor]) -> Tensor:
    return next(t for step, t in steps.items() if step.split(" | ")[0] == "y").flatten(-2)


def _assert_same_bytes(theirs: Quantized, ours: Quantized, undefined: Tensor, x: Tensor) -> None:
    wrong_scales = _unsigned_nan(theirs[1]) != _unsigned_nan(ours[1])
    wrong_codes = (theirs[0] != ours[0]) & ~undefined
    rows = (wrong_scales.any(-1) | wrong_codes.any(-1)).nonzero().flatten().tolist()
    if rows:
        row = rows[0]
        raise AssertionError(
            f"{int(wrong_scales.sum())} scales and {int(wrong_codes.sum())} codes of {x.numel()} differ; first in row "
            f"{row}: x {x[row].tolist()}, theirs {theirs[1][row].tolist()} {theirs[0][row].tolist()}, "
            f"ours {ours[1][row].tolist()} {ours[0][row].tolist()}"
        )


def _unsigned_nan(scales: Tensor) -> Tensor:
    return torch.where((scales & 0x7F) == 0x7F, 0x7F, scales)
