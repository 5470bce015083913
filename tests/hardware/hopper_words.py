"""Make hardware words of Hopper's tensor-core instructions, compare them with quads.emulation.mma, keep a fixture.

Run on an H200 from the repository root:  PYTHONPATH=. python tests/hardware/hopper_words.py OUTPUT_FOLDER [NAMES]
Needs nvcc. Two kinds of input, A, B and C alike: `raw` random bits, and `window` (random signs and mantissas,
exponents within a few binades of 1, one value in sixteen zero), where more terms meet. Prints the words compared and
the mismatches.
Fixtures: OUTPUT_FOLDER/hopper_words_<instruction>.safetensors with int32 words a [T, M, 8], b [T, 8, 8], c, d.
"""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from quads.emulation import fdpa, mma

SOURCE = Path(__file__).with_suffix(".cu")
TILES = {64: 2304, 16: 9216}  # by rows: 1,179,648 results of each kind
KEPT = {64: 3, 16: 12}  # tiles of each kind in a fixture
BATCH = {64: 192, 16: 768}


@dataclass(frozen=True)
class Instruction:
    """A PTX instruction as hopper_words.cu names it; `rows` is M, N is 8, K is eight words."""

    ptx: str
    model: str
    format: str
    rows: int

    @property
    def half(self) -> bool:
        return self.model.endswith("_f16_f16") or self.model == "wgmma_fp8_f16"


INSTRUCTIONS = {
    "wgmma_bf16": Instruction("wgmma.m64n8k16.f32.bf16.bf16", "wgmma_f16", "bf16", 64),
    "wgmma_fp16": Instruction("wgmma.m64n8k16.f32.f16.f16", "wgmma_f16", "fp16", 64),
    "wgmma_tf32": Instruction("wgmma.m64n8k8.f32.tf32.tf32", "wgmma_tf32", "tf32", 64),
    "wgmma_e4m3": Instruction("wgmma.m64n8k32.f32.e4m3.e4m3", "wgmma_fp8", "e4m3", 64),
    "wgmma_e5m2": Instruction("wgmma.m64n8k32.f32.e5m2.e5m2", "wgmma_fp8", "e5m2", 64),
    "wgmma_fp16_f16": Instruction("wgmma.m64n8k16.f16.f16.f16", "wgmma_f16_f16", "fp16", 64),
    "wgmma_e4m3_f16": Instruction("wgmma.m64n8k32.f16.e4m3.e4m3", "wgmma_fp8_f16", "e4m3", 64),
    "mma_bf16": Instruction("mma.sync.m16n8k16.f32.bf16.bf16.f32", "hopper_mma_f16", "bf16", 16),
    "mma_fp16": Instruction("mma.sync.m16n8k16.f32.f16.f16.f32", "hopper_mma_f16", "fp16", 16),
    "mma_tf32": Instruction("mma.sync.m16n8k8.f32.tf32.tf32.f32", "hopper_mma_tf32", "tf32", 16),
    "mma_e4m3": Instruction("mma.sync.m16n8k32.f32.e4m3.e4m3.f32", "hopper_mma_fp8", "e4m3", 16),
    "mma_e5m2": Instruction("mma.sync.m16n8k32.f32.e5m2.e5m2.f32", "hopper_mma_fp8", "e5m2", 16),
    "mma_fp16_f16": Instruction("mma.sync.m16n8k16.f16.f16.f16.f16", "hopper_mma_f16_f16", "fp16", 16),
}
_CONTAINER = {"bf16": torch.int16, "fp16": torch.int16, "tf32": torch.int32, "e4m3": torch.uint8, "e5m2": torch.uint8}


def raw_words(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Random bits as int32."""
    return torch.randint(-(2**31), 2**31, shape, generator=generator, dtype=torch.int64).int()


def window_words(shape: tuple[int, ...], name: str, width: int, generator: torch.Generator) -> Tensor:
    """Words of format `name` with exponents within `width` binades of 1; one value in sixteen is zero."""
    field, integer = fdpa.FIELDS[name], torch.int32 if name == "fp32" else _CONTAINER[name]
    codes = raw_words(shape, generator).view(integer).long()
    mantissa = codes & ((1 << (field.mantissa_bits + field.shift)) - 1)
    exponent = field.bias + torch.randint(-width, width + 1, codes.shape, generator=generator)
    sign = torch.randint(0, 2, codes.shape, generator=generator) << (field.bits - 1 + field.shift)
    live = torch.randint(0, 16, codes.shape, generator=generator) > 0
    codes = torch.where(live, mantissa | (exponent << (field.mantissa_bits + field.shift)), 0) | sign
    return _wrap(codes, integer).view(torch.int32)


def _wrap(codes: Tensor, integer: torch.dtype) -> Tensor:
    """Unsigned codes as the two's complement of a narrower integer."""
    return (
        codes.to(torch.uint8) if integer == torch.uint8 else (codes.int() if integer == torch.int32 else codes.short())
    )


def inputs(instruction: Instruction, kind: str, tiles: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Words of A [T, M, 8], B [T, 8, 8] and C [T, M, 8] (or [T, M, 4] for FP16)."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(tiles, instruction.rows, 8), (tiles, 8, 8), (tiles, instruction.rows, 4 if instruction.half else 8)]
    if kind == "raw":
        return tuple(raw_words(shape, generator) for shape in shapes)  # type: ignore[return-value]
    name_c, width_c = ("fp16", 12) if instruction.half else ("fp32", 14)
    a, b = (window_words(shape, instruction.format, 6, generator) for shape in shapes[:2])
    return a, b, window_words(shapes[2], name_c, width_c, generator)


def emulate(instruction: Instruction, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """The model's words for D."""
    integer = _CONTAINER[instruction.format]
    operand_a, operand_b = (mma.Operand(x.view(integer), None, instruction.format) for x in (a, b))
    if instruction.model == "hopper_mma_fp8":
        return mma.hopper_mma_fp8(operand_a, operand_b, c)
    bits = c.view(torch.int16) if instruction.half else c
    return mma.chain(operand_a, operand_b, mma.model(instruction.model), bits).view(torch.int32)


def build(folder: Path) -> ctypes.CDLL:
    """Compile the instructions for sm_90a."""
    library = folder / "hopper_words.so"
    target = "-gencode=arch=compute_90a,code=sm_90a"
    subprocess.run(["nvcc", "-O2", target, "-shared", "-Xcompiler", "-fPIC", "-o", library, SOURCE], check=True)
    return ctypes.CDLL(str(library))


def run(library: ctypes.CDLL, name: str, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """D of every tile, on the GPU; RuntimeError with CUDA's number when the launch fails."""
    d = torch.full_like(c, 0x5A5A5A5A)
    error = getattr(library, f"run_{name}")(*(ctypes.c_void_p(x.data_ptr()) for x in (a, b, c, d)), len(a))
    if error:
        raise RuntimeError(f"{name}: CUDA error {error}")
    return d


def compare(library: ctypes.CDLL, name: str, kind: str, seed: int) -> tuple[int, int, int, list[Tensor]]:
    """(results, mismatches, finite results, the first tiles) of one instruction and kind of input."""
    instruction = INSTRUCTIONS[name]
    words = [x.cuda() for x in inputs(instruction, kind, TILES[instruction.rows], seed)]
    words.append(run(library, name, *words))
    wrong = finite = total = 0
    for a, b, c, d in zip(*(x.split(BATCH[instruction.rows]) for x in words), strict=True):
        element = torch.int16 if instruction.half else torch.int32
        got, want = d.view(element), emulate(instruction, a, b, c).view(element)
        wrong += int((got != want).sum())
        finite += int(got.view(torch.float16 if instruction.half else torch.float32).isfinite().sum())
        total += got.numel()
    return total, wrong, finite, [x[: KEPT[instruction.rows]].cpu() for x in words]


def main(folder: Path, names: list[str]) -> None:
    """Compare the named instructions, or all, and write their fixtures."""
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True
    ).stdout.strip()
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()
    library = build(folder)
    print(f"{torch.cuda.get_device_name()}, driver {driver}, {SOURCE.name} sha256 {digest[:16]}")
    for index, (name, instruction) in enumerate(INSTRUCTIONS.items()):
        if names and name not in names:
            continue
        kept: dict[str, Tensor] = {}
        metadata = {
            "chip": torch.cuda.get_device_name(),
            "driver": driver,
            "ptx": instruction.ptx,
            "source_sha256": digest,
        }
        for offset, kind in enumerate(("raw", "window")):
            total, wrong, finite, tiles = compare(library, name, kind, 1000 * index + offset)
            print(f"{name:16} {kind:7} {total:9} results {finite:9} finite {wrong:7} mismatches", flush=True)
            metadata[kind] = f"{total} results, {finite} finite, {wrong} mismatches"
            kept.update({f"{kind}.{key}": x.contiguous() for key, x in zip("abcd", tiles, strict=True)})
        save_file(kept, folder / f"hopper_words_{name}.safetensors", metadata=metadata)
    (folder / "hopper_words.so").unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
