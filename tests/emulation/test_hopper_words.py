"""Words that an NVIDIA H200 returned, against the model; first, that they tell the neighbouring models apart."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from quads.emulation import fdpa, gemm, mma
from tests.hardware.hopper_words import INSTRUCTIONS, emulate

DATA = Path(__file__).parents[1] / "data"
KEPT = sorted(path.stem.removeprefix("hopper_words_") for path in DATA.glob("hopper_words_*.safetensors"))
KINDS = ("raw", "window")


def words(name: str, kind: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    with safe_open(DATA / f"hopper_words_{name}.safetensors", framework="pt") as file:
        a, b, c, d = (file.get_tensor(f"{kind}.{key}") for key in "abcd")
    return a, b, c, d


def different(name: str, kind: str) -> int:
    a, b, c, d = words(name, kind)
    element = torch.int16 if INSTRUCTIONS[name].half else torch.int32
    return int((emulate(INSTRUCTIONS[name], a, b, c).view(element) != d.view(element)).sum())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", KEPT)
def test_the_model_returns_the_hardware_words(name: str, kind: str) -> None:
    assert different(name, kind) == 0


@pytest.mark.parametrize("name", [n for n in KEPT if not INSTRUCTIONS[n].half])
@pytest.mark.parametrize("delta", [-1, 1])
def test_the_words_tell_one_more_or_less_fraction_bit_apart(
    name: str, delta: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    instruction = INSTRUCTIONS[name]
    row = mma.model("hopper_mma_f16" if instruction.model == "hopper_mma_fp8" else instruction.model)
    wrong = row.replace(fraction_bits=row.fraction_bits + delta)
    monkeypatch.setattr(mma, "model", lambda _: wrong)
    assert different(name, "window") > 0


@pytest.mark.parametrize("name", KEPT)
def test_the_words_tell_rounding_to_nearest_apart(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    turned = {key: fdpa.Output(**{**vars(rule), "nearest": not rule.nearest}) for key, rule in fdpa.OUTPUTS.items()}
    monkeypatch.setattr(fdpa, "OUTPUTS", turned)
    assert different(name, "window") > 0


def test_fp8_mma_sync_on_hopper_is_neither_wgmma_nor_one_fused_step() -> None:
    a, b, c, d = words("mma_e4m3", "window")
    x, y = (mma.Operand(t.view(torch.uint8), None, "e4m3") for t in (a, b))
    for name in ("wgmma_fp8", "tcgen05_f8f6f4", "ada_mma_fp8"):
        assert (mma.chain(x, y, mma.model(name), c) != d).any()


def test_fp8_mma_sync_wants_32_elements_of_k() -> None:
    x = mma.Operand(torch.zeros(1, 64, dtype=torch.uint8), None, "e4m3")
    with pytest.raises(ValueError, match=r"a, b of K = 64, 64: mma.sync m16n8k32 takes K = 32"):
        mma.hopper_mma_fp8(x, x, torch.zeros(1, 1, dtype=torch.int32))


@pytest.mark.parametrize("name", ["wgmma_bf16", "wgmma_e4m3"])
def test_the_wgmma_product_returns_the_words_with_c(name: str) -> None:
    a, b, c, d = words(name, "window")
    dtype = torch.bfloat16 if name == "wgmma_bf16" else torch.float8_e4m3fn
    for tile in range(len(a)):
        got = gemm.matmul_wgmma(a[tile].view(dtype), b[tile].view(dtype), c[tile].view(torch.float32))
        assert torch.equal(got.view(torch.int32), d[tile])


def test_each_fixture_says_where_it_comes_from() -> None:
    assert {"wgmma_bf16", "wgmma_e4m3", "mma_bf16", "mma_e4m3"} <= set(KEPT)
    for name in KEPT:
        path = DATA / f"hopper_words_{name}.safetensors"
        assert path.stat().st_size < 200_000
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
        assert metadata["chip"] == "NVIDIA H200" and metadata["driver"] and metadata["source_sha256"]
        assert metadata["ptx"] == INSTRUCTIONS[name].ptx
        assert all(metadata[kind].startswith("1179648 results") for kind in KINDS)
