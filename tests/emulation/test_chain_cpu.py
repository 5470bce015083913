"""The compiled kernel of the chain against `mma.chain`, every rule of the model, ragged widths, and no compiler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quads.emulation import chain_cpu, gemm, mma

VARIANTS: list[dict[str, Any]] = [
    {},
    {"dead_group": "included"},
    {"cancelled_group": "excluded"},
    {"fraction_bits": 34},
]
needs_compiler = pytest.mark.skipif(chain_cpu.library() is None, reason="needs a C++ compiler ($CXX or c++)")


def operand(rows: int, k: int, seed: int) -> mma.Operand:
    """A third of the groups dead, a third cancelling, with any scale; the rest with scales so small that it shows."""
    g = torch.Generator().manual_seed(seed)
    kind = torch.arange(3).repeat(k)[: k // 16].expand(rows, -1)
    scales = torch.randint(0, 0x7F, kind.shape, generator=g)
    scales = torch.where(kind == 2, scales & 0xF, scales) | torch.randint(0, 2, kind.shape, generator=g) << 7
    kind = kind.repeat_interleave(16, -1)
    codes = torch.randint(0, 16, (rows, k), generator=g)
    signs = torch.tensor([2, 10 if seed % 2 else 2]).repeat(k // 2)  # of odd and of even seeds: they cancel
    codes = torch.where(kind == 0, 0, torch.where(kind == 1, signs, codes))
    if rows > 2:
        scales[1, 0] = 0xFF
    return mma.Operand(codes.to(torch.uint8), scales.to(torch.uint8))


def compiled(a: mma.Operand, b: mma.Operand, model: mma.Model) -> Tensor:
    return chain_cpu.chain(chain_cpu.parts(a), chain_cpu.parts(b).transposed(), model).view(torch.int32)


@needs_compiler
@pytest.mark.parametrize("shape", [(1, 1, 64), (3, 65, 192), (17, 130, 1024)])
@pytest.mark.parametrize("change", VARIANTS, ids=str)
def test_the_kernel_is_the_step_model(shape: tuple[int, int, int], change: dict) -> None:
    m, n, k = shape
    a, b, model = operand(m, k, 1), operand(n, k, 2), gemm.NVFP4.replace(**change)
    assert torch.equal(compiled(a, b, model), mma.chain(a, b, model))


@needs_compiler
def test_each_rule_shows_in_this_data() -> None:
    a, b = operand(17, 192, 1), operand(130, 192, 2)
    chosen = compiled(a, b, gemm.NVFP4)
    for change in VARIANTS[1:]:
        assert (compiled(a, b, gemm.NVFP4.replace(**change)) != chosen).any(), change


@pytest.fixture
def fresh_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(chain_cpu, "library", chain_cpu.library.__wrapped__)


@pytest.mark.usefixtures("fresh_library")
@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_no_working_compiler_is_no_library(compiler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", compiler)
    assert chain_cpu.library() is None


@needs_compiler
@pytest.mark.usefixtures("fresh_library")
def test_the_library_is_built_once_and_left_alone_in_the_cache(tmp_path: Path) -> None:
    assert chain_cpu.library() is not None
    (built,) = (tmp_path / "quads").iterdir()
    made = built.stat().st_mtime_ns
    assert chain_cpu.library() is not None
    assert [p.stat().st_mtime_ns for p in (tmp_path / "quads").iterdir()] == [made]
