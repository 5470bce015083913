"""Golden vectors: deterministic, verified by hash, readable from C; and the questions to hardware."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from quads.conformance import hardware, vector_binary, vectors
from quads.emulation import gemm, layout
from quads.emulation.quantizers import NVFP4Tensor

EXAMPLES = Path(__file__).parents[2] / "examples" / "conformance"


def test_the_shipped_vectors_are_what_this_emulator_gives() -> None:
    assert vectors.verify(vectors.SHIPPED) == []


def test_vectors_are_made_byte_for_byte_the_same_again(tmp_path: Path) -> None:
    vectors.make(tmp_path)
    for name in (vectors.TENSORS, vectors.MANIFEST):
        assert (tmp_path / name).read_bytes() == (vectors.SHIPPED / name).read_bytes()


def test_the_shipped_vectors_are_small_and_say_their_evidence() -> None:
    manifest, _ = vectors.read(vectors.SHIPPED)
    assert sum(path.stat().st_size for path in vectors.SHIPPED.iterdir()) < 600_000
    evidence = {entry["evidence"].split(":")[0] for entry in manifest["tensors"].values()}
    assert {"library equality", "published model", "assumption", "vendor document"} <= evidence


def test_a_changed_byte_is_found_and_named(tmp_path: Path) -> None:
    shutil.copytree(vectors.SHIPPED, tmp_path, dirs_exist_ok=True)
    path = tmp_path / vectors.TENSORS
    tensors = load(path.read_bytes())
    tensors["quantize/ties/exact/scales"][0, 0] ^= 1
    path.write_bytes(save(tensors, {"format": vectors.FORMAT}))
    wrong = vectors.verify(tmp_path)
    assert "quantize/ties/exact/scales: its SHA-256 is not the manifest's" in wrong
    assert "quantize/ties/exact/scales: this emulator gives other bytes" in wrong


@pytest.mark.parametrize("content", ["", "{}", '{"format": "nvfp4-vectors", "version": 9}'])
def test_a_folder_without_a_manifest_of_this_version_is_one_line(tmp_path: Path, content: str) -> None:
    if content:
        (tmp_path / vectors.MANIFEST).write_text(content)
    with pytest.raises(ValueError, match=r"nvfp4-vectors\.json"):
        vectors.verify(tmp_path)


def test_the_c_example_reads_the_export_and_finds_no_difference(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler (cc or gcc)")
    out = tmp_path / "vectors.bin"
    count = vector_binary.export(vectors.SHIPPED, out)
    flags = ["-std=c99", "-O2", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off"]
    program = tmp_path / "read_vectors"
    subprocess.run([compiler, *flags, EXAMPLES / "read_vectors.c", "-o", program], check=True)
    good = subprocess.run([program, out], capture_output=True, text=True, check=False)
    assert (good.returncode, good.stdout) == (0, f"{count} vectors, 0 differences\n")
    data = bytearray(out.read_bytes())
    at = _offset(data, b"quantize/tails/exact/scales")
    data[at] ^= 1
    out.write_bytes(data)
    assert subprocess.run([program, out], capture_output=True, check=False).returncode == 1


def _offset(data: bytes, name: bytes) -> int:
    entry = data.index(name)
    return int.from_bytes(data[entry + 112 : entry + 120], "little")


def product(model: Any) -> Any:
    def call(a: Tensor, sa: Tensor, b: Tensor, sb: Tensor, alpha: Tensor, dtype: torch.dtype) -> Tensor:
        one = torch.tensor(1.0)
        x, w = (NVFP4Tensor(layout.unpack(p), s, one) for p, s in ((a, sa), (b, sb)))
        return gemm.epilogue(gemm.matmul(x, w, model=model), alpha, dtype)

    return call


@pytest.mark.parametrize(
    ("changes", "rule", "answer"),
    [
        ({}, "dead group", "excluded from e_max"),
        ({"dead_group": "included"}, "dead group", "included in e_max"),
        ({}, "cancelled group", "included in e_max"),
        ({"cancelled_group": "excluded"}, "cancelled group", "excluded from e_max"),
        ({}, "order of steps", "ascending"),
        ({}, "width of the sum: 35 or 25 bits", "35"),
        ({"fraction_bits": 25}, "width of the sum: 35 or 25 bits", "25"),
        ({"fraction_bits": 34}, "width of the sum: 35 or 34 bits", "34"),
        ({"fraction_bits": 36}, "width of the sum: 35 or 36 bits", "36"),
    ],
)
def test_a_question_to_hardware_tells_the_rule_in_bfloat16(changes: dict[str, Any], rule: str, answer: str) -> None:
    from quads.conformance.protocol import Protocol

    answers = hardware.ask(product(gemm.NVFP4.replace(**changes)), Protocol())
    assert {a.rule: a.answer for a in answers}[rule] == answer


emulated = product(gemm.NVFP4)


def test_the_answers_are_written_with_the_device(tmp_path: Path) -> None:
    out = tmp_path / "answers.json"
    hardware.write(out, "tests.quads.test_conformance_vectors:emulated", {})
    document = json.loads(out.read_text())
    assert document["device"]["torch"] == torch.__version__
    assert len(document["answers"]) >= 6
