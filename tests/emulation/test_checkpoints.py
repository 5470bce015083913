"""Checkpoint conventions against the libraries that own them, and shards that were fused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from quads.emulation import checkpoints
from quads.emulation.checkpoints import COMPRESSED_TENSORS, CONVENTIONS, MODELOPT, Layer, merge_shards
from quads.emulation.quantizers import NVFP4Tensor, dequantize, quantize


def layer(seed: int = 0, dialect: str = "exact") -> Layer:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(8, 64, generator=generator)
    return Layer(quantize(weight, dialect=dialect), torch.tensor(5.25 / 2688))


@pytest.mark.parametrize("convention", CONVENTIONS.values(), ids=lambda c: c.name)
@pytest.mark.parametrize("seed", range(4))
def test_read_inverts_write(convention: checkpoints.Convention, seed: int) -> None:
    written = checkpoints.write(layer(seed), convention)
    back = checkpoints.read(written, convention)
    assert torch.equal(back.weight.codes, layer(seed).weight.codes)
    assert torch.equal(back.weight.scales, layer(seed).weight.scales)
    expected = layer(seed).weight.outer
    if convention is COMPRESSED_TENSORS:
        expected = 1.0 / checkpoints.to_divisor(expected)
    assert torch.equal(back.weight.outer, expected)


def test_names_dtypes_and_shapes_are_the_conventions() -> None:
    form = {k: (v.dtype, tuple(v.shape)) for k, v in checkpoints.write(layer(), MODELOPT).items()}
    shared = {"weight_scale": (torch.float8_e4m3fn, (8, 4))}
    outer = (torch.float32, ())
    assert form == {**shared, "weight": (torch.uint8, (8, 32)), "weight_scale_2": outer, "input_scale": outer}
    form = {k: (v.dtype, tuple(v.shape)) for k, v in checkpoints.write(layer(), COMPRESSED_TENSORS).items()}
    outer = (torch.float32, (1,))
    names = ("weight_global_scale", "input_global_scale")
    assert form == {**shared, "weight_packed": (torch.uint8, (8, 32)), **dict.fromkeys(names, outer)}


def test_compressed_tensors_decompresses_what_is_written() -> None:
    """Its decompressor computes in bfloat16: the values agree to one bfloat16 rounding of scale and product."""
    pytest.importorskip("compressed_tensors", reason="needs compressed-tensors (extra: oracles)")
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.quant_scheme import NVFP4

    scheme = QuantizationScheme(targets=["Linear"], **NVFP4)
    written = checkpoints.write(layer(), COMPRESSED_TENSORS)
    theirs = NVFP4PackedCompressor.decompress(written, scheme)["weight"].float()
    ours = dequantize(layer().weight)
    assert torch.allclose(theirs, ours, rtol=2.0**-7, atol=0)


def test_modelopt_dequantises_what_is_written() -> None:
    """q * (s * g) there, (q * s) * g here: one FP32 rounding apart."""
    pytest.importorskip("modelopt", reason="needs nvidia-modelopt (extra: oracles)")
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    written = checkpoints.write(layer(), MODELOPT)
    theirs = NVFP4QTensor(torch.Size((8, 64)), torch.float32, written["weight"]).dequantize(
        scale=written["weight_scale"], double_scale=written["weight_scale_2"], block_sizes={-1: 16}
    )
    assert torch.allclose(theirs, dequantize(layer().weight), rtol=2.0**-23, atol=0)


def test_conversion_from_modelopt_is_compressed_tensors_own() -> None:
    pytest.importorskip("compressed_tensors", reason="needs compressed-tensors (extra: oracles)")
    from compressed_tensors.entrypoints.convert.converters.modelopt_nvfp4 import ModelOptNvfp4Converter

    written = checkpoints.write(layer(), MODELOPT)
    ours = checkpoints.convert(written, MODELOPT, COMPRESSED_TENSORS)
    theirs = ModelOptNvfp4Converter(targets=["re:.*"]).process({f"l.{k}": v for k, v in written.items()})
    assert set(theirs) == {f"l.{name}" for name in ours}
    for name, tensor in ours.items():
        assert torch.equal(theirs[f"l.{name}"].reshape(tensor.shape).view(torch.uint8), tensor.view(torch.uint8))


def test_a_conversion_there_and_back_keeps_codes_and_block_scales() -> None:
    written = checkpoints.write(layer(), COMPRESSED_TENSORS)
    back = checkpoints.convert(checkpoints.convert(written, COMPRESSED_TENSORS, MODELOPT), MODELOPT, COMPRESSED_TENSORS)
    for name in ("weight_packed", "weight_scale"):
        assert torch.equal(written[name].view(torch.uint8), back[name].view(torch.uint8))


def test_where_the_reciprocal_does_not_invert_back_no_divisor_does() -> None:
    """Over all significands: 1,439,258 multipliers have no divisor, so a search among its neighbours finds nothing."""
    g = (torch.arange(1 << 23, dtype=torch.int32) + 0x3F800000).view(torch.float32)
    plain = checkpoints.to_divisor(g)
    mended = checkpoints.to_multiplier(plain) == g
    assert (~mended).sum() == 1_439_258
    near = [(plain.view(torch.int32) + n).view(torch.float32) for n in (-2, -1, 1, 2)]
    assert not torch.stack([checkpoints.to_multiplier(d) == g for d in near])[:, ~mended].any()


def shard(amax: float, seed: int) -> NVFP4Tensor:
    weight = torch.randn(4, 32, generator=torch.Generator().manual_seed(seed)).clamp(-3, 3)
    weight[0, 0] = 3.0
    return quantize(weight * (amax / 3.0))


def values(q: NVFP4Tensor) -> Tensor:
    return dequantize(q)


def test_shards_of_equal_outer_scale_merge_unchanged() -> None:
    merged = merge_shards([shard(2.0, 0), shard(2.0, 1)])
    assert merged.exact == (True, True)
    assert torch.equal(values(merged.weight), torch.cat([values(shard(2.0, 0)), values(shard(2.0, 1))]))


@given(st.integers(0, 100), st.integers(1, 3))
def test_shards_a_power_of_two_apart_merge_exactly_or_say_so(seed: int, power: int) -> None:
    shards = [shard(2.0, seed), shard(2.0 * 2.0**-power, seed + 1)]
    merged = merge_shards(shards)
    same_values = torch.equal(values(merged.weight)[4:], values(shards[1]))
    assert merged.exact == (True, same_values)


def test_one_outer_scale_for_both_halves_is_the_public_fault_and_merging_is_not() -> None:
    """gate 3.85e-5, up 4.83e-5: reading up's block scales under gate's outer scale is wrong by 1.2545."""
    gate, up = shard(3.85e-5 * 2688, 0), shard(4.83e-5 * 2688, 1)
    fault = NVFP4Tensor(up.codes, up.scales, gate.outer)
    live = values(up) != 0
    assert torch.allclose(values(up)[live] / values(fault)[live], torch.tensor(1.2545), rtol=1e-4)
    merged = merge_shards([gate, up])
    assert merged.exact == (False, True) and merged.weight.outer == up.outer
    relative = (values(merged.weight)[:4] - values(gate)).abs() / values(gate).abs().clamp(min=1e-30)
    assert relative[values(gate) != 0].max() <= 2.0**-4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_scale": None}, "weight_scale is missing; the layer has input_scale, weight, weight_scale_2"),
        ({"weight": torch.zeros(8, 32)}, "weight has dtype torch.float32, not torch.uint8"),
        ({"weight_scale": torch.zeros(8, 5).to(torch.float8_e4m3fn)}, r"shape \(8, 5\) does not fit weight of shape"),
        ({"weight_scale": torch.full((8, 4), torch.nan).to(torch.float8_e4m3fn)}, "holds the NaN byte 0x7F"),
        ({"weight_scale_2": torch.tensor(0.0)}, r"weight_scale_2 is 0.0: needs one positive finite number"),
        ({"input_scale": torch.tensor(torch.inf)}, "input_scale is inf: needs one positive finite number"),
        ({"weight_scale_2": torch.ones(2)}, r"weight_scale_2 is \[1.0, 1.0\]: needs one"),
    ],
)
def test_a_damaged_layer_is_refused_by_name(change: dict[str, Tensor | None], message: str) -> None:
    tensors = {k: v for k, v in {**checkpoints.write(layer(), MODELOPT), **change}.items() if v is not None}
    with pytest.raises(ValueError, match=message):
        checkpoints.read(tensors, MODELOPT)


def test_what_cannot_be_merged_or_stored_is_refused() -> None:
    with pytest.raises(ValueError, match="needs at least one"):
        merge_shards([])
    with pytest.raises(ValueError, match=r"different K: \[32, 16\]"):
        merge_shards([shard(1.0, 0), quantize(torch.ones(1, 16))])
    with pytest.raises(ValueError, match=r"outer scale of shape \(8, 1\)"):
        checkpoints.write(Layer(quantize(torch.ones(8, 16), granularity="token")), MODELOPT)
