"""`quads emulate` and `quads explain` on files: exact bytes out, bad input named."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from quads.emulate_job import explain_text, gemm_files, quantize_file
from quads.emulation import gemm, layout, quantizers


def test_quantize_writes_the_bytes_of_the_emulator(tmp_path: Path) -> None:
    x = torch.randn(5, 64).bfloat16()
    save_file({"a": x, "b": x + 1}, tmp_path / "in.safetensors")
    quantize_file(tmp_path / "in.safetensors", tmp_path / "out.safetensors", name="a", dialect="te", scales="128x4")
    written = load_file(tmp_path / "out.safetensors")
    q = quantizers.quantize(x, dialect="te")
    assert torch.equal(written["a.codes"], q.packed) and torch.equal(written["a.outer"], q.outer)
    assert torch.equal(written["a.scales"], layout.swizzle(q.scales))


def test_gemm_writes_accumulator_and_output(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((n, 128)).astype(np.float32) for n in (3, 5))
    np.save(tmp_path / "a.npy", a)
    np.save(tmp_path / "b.npy", b)
    gemm_files(tmp_path / "a.npy", tmp_path / "b.npy", tmp_path / "y.safetensors")
    written = load_file(tmp_path / "y.safetensors")
    qa, qb = quantizers.quantize(torch.from_numpy(a), granularity="token"), quantizers.quantize(torch.from_numpy(b))
    assert torch.equal(written["accumulator"], gemm.matmul(qa, qb))
    assert written["y"].dtype == torch.bfloat16


def test_explain_shows_each_rounding_and_who_disagrees() -> None:
    text = explain_text([0.005950927734375], "vllm_reference", 2.03125, "bfloat16")
    assert "scale byte 0x3a" in text and "te differs: scale byte 0x3b" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scales": "4x4"}, "scale layout '4x4' is not one of linear, 128x4, 8x4"),
        ({"granularity": "row"}, "granularity 'row' is not one of"),
        ({"dialect": "tea"}, "did you mean 'te'"),
    ],
)
def test_bad_options_are_named(tmp_path: Path, arguments: dict, message: str) -> None:
    np.save(tmp_path / "x.npy", np.ones((2, 16), np.float32))
    with pytest.raises(ValueError, match=message):
        quantize_file(tmp_path / "x.npy", tmp_path / "y.safetensors", **arguments)


def test_bad_files_are_named(tmp_path: Path) -> None:
    np.save(tmp_path / "odd.npy", np.ones((2, 24), np.float32))
    with pytest.raises(ValueError, match="K = 24 is not a multiple of 16"):
        quantize_file(tmp_path / "odd.npy", tmp_path / "y.safetensors")
    with pytest.raises(ValueError, match="no such file"):
        quantize_file(tmp_path / "none.npy", tmp_path / "y.safetensors")
    np.save(tmp_path / "a.npy", np.ones((2, 16), np.float32))
    np.save(tmp_path / "b.npy", np.ones((2, 32), np.float32))
    with pytest.raises(ValueError, match=r"K = 16, .* K = 32: they must agree"):
        gemm_files(tmp_path / "a.npy", tmp_path / "b.npy", tmp_path / "y.safetensors")
