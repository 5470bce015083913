"""Files in and out, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from quads.emulation.files import quantized_tensors, read_tensor, write_safetensors
from quads.emulation.quantizers import quantize


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_an_npy_file_is_read_with_its_bits(tmp_path: Path, dtype: type) -> None:
    array = np.array([[1.5, -0.0, np.nan, 6e-8]], dtype=dtype)
    np.save(tmp_path / "x.npy", array)
    assert read_tensor(tmp_path / "x.npy").numpy().tobytes() == array.tobytes()


def test_a_fortran_ordered_npy_file_keeps_its_elements(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.asfortranarray(np.arange(32, dtype=np.float32).reshape(2, 16)))
    assert read_tensor(tmp_path / "x.npy").flatten().tolist() == list(range(32))


def test_a_safetensors_file_is_read_by_name_or_as_its_only_tensor(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(2, 16, dtype=torch.bfloat16), "b": torch.zeros(1, 16)}
    save_file(tensors, tmp_path / "two.safetensors")
    save_file({"a": tensors["a"]}, tmp_path / "one.safetensors")
    assert torch.equal(read_tensor(tmp_path / "two.safetensors", "b"), tensors["b"])
    assert torch.equal(read_tensor(tmp_path / "one.safetensors"), tensors["a"])


def test_quantised_bytes_come_back_from_the_file(tmp_path: Path) -> None:
    q = quantize(torch.randn(4, 32), granularity="token")
    write_safetensors(tmp_path / "q.safetensors", quantized_tensors(q, "w"), {"dialect": "exact"})
    back = load_file(tmp_path / "q.safetensors")
    assert torch.equal(back["w.codes"], q.packed)
    assert torch.equal(back["w.scales"], q.scales) and torch.equal(back["w.outer"], q.outer)


def test_what_cannot_be_read_is_named_in_one_line(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "two.safetensors")
    np.save(tmp_path / "object.npy", np.array([{}], dtype=object), allow_pickle=True)
    np.save(tmp_path / "double.npy", np.zeros(16))
    (tmp_path / "broken.npy").write_bytes(b"\x93NUMPY")
    (tmp_path / "broken.safetensors").write_bytes(b"{}")
    for file, name, message in [
        ("x.bin", None, "only .npy and .safetensors"),
        ("missing.npy", None, "no such file"),
        ("object.npy", None, "not a readable .npy"),
        ("double.npy", None, "dtype float64"),
        ("broken.npy", None, "not a readable .npy"),
        ("broken.safetensors", None, "not a readable .safetensors"),
        ("two.safetensors", None, "holds 2 tensors; name one of a, b"),
        ("two.safetensors", "c", "no tensor 'c'; it has a, b"),
    ]:
        with pytest.raises(ValueError, match=message) as raised:
            read_tensor(tmp_path / file, name)
        assert "\n" not in str(raised.value) and file in str(raised.value)


def test_output_goes_to_an_existing_folder_as_safetensors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"written as \.safetensors"):
        write_safetensors(tmp_path / "q.npy", {})
    with pytest.raises(ValueError, match="does not exist"):
        write_safetensors(tmp_path / "none" / "q.safetensors", {})
