"""Speed of the emulator's NVFP4 matrix product beside mmasim 2.1.1 and a plain float32 product, same process.

python -m pytest bench/bench_emulator.py -s          the issue's 128x128x1024 problem, on this CPU
python bench/bench_emulator.py cpu|cuda              the whole table, best of several runs, operands not prepared
Ratios to mmasim are of wall-clock times, and on a CPU also of CPU times: on a busy machine only the latter are fair.
Data: `raw` random code nibbles and random scale bytes (NaN scales included, as mmasim's own tests draw them),
`finite` the same without NaN scales, `quantized` Gaussian activations and weights after quantisation.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quads.emulation import gemm
from quads.emulation.quantizers import NVFP4Tensor, quantize

SHAPES = {"cpu": [(128, 128, 1024)], "cuda": [(128, 128, 1024), (512, 512, 1024), (1024, 1024, 1024)]}
ROLLOUT_SHAPES = [(1, 1024, 2048), (16, 1024, 1024), (128, 512, 1024), (512, 1024, 2048), (512, 128, 64)]
KINDS = ("raw", "finite", "quantized")
Clock = Callable[[], float]


def operand(kind: str, rows: int, k: int, seed: int, device: str = "cpu") -> NVFP4Tensor:
    """A random NVFP4 matrix [rows, K] of one of KINDS."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "quantized":
        q = quantize(torch.randn(rows, k, generator=generator), granularity="token")
    else:
        scales = torch.randint(0, 256, (rows, k // 16), dtype=torch.uint8, generator=generator)
        if kind == "finite":
            scales = torch.where((scales & 0x7F) == 0x7F, 0x38, scales)
        codes = torch.randint(0, 16, (rows, k), dtype=torch.uint8, generator=generator)
        q = NVFP4Tensor(codes, scales, torch.tensor(1.0))
    return NVFP4Tensor(q.codes.to(device), q.scales.to(device), q.outer.to(device))


def best(function: Callable[[], object], device: str, repeats: int, clock: Clock = time.perf_counter) -> float:
    """Shortest of `repeats` runs after one warm-up, seconds."""
    sync = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    function()
    times = []
    for _ in range(repeats):
        sync()
        start = clock()
        function()
        sync()
        times.append(clock() - start)
    return min(times)


def mmasim_product(a: NVFP4Tensor, b: NVFP4Tensor) -> Tensor:
    """The same product through mmasim: m128n128k64 mxf4nvf4 block16 ue4m3, C = 0."""
    nv_ptx = pytest.importorskip("mmasim.nv_ptx")
    shape = "m128n128k64.kind::mxf4nvf4.block16.f32.e2m1.e2m1.ue4m3"
    operation = nv_ptx.TCGen05MMABlockScale("Blackwell", shape)
    c = torch.zeros(len(a.codes), len(b.codes), device=a.codes.device)
    scales = (x.scales.view(torch.float8_e4m3fn) for x in (a, b))
    return operation(a.packed, b.packed.T, c, next(scales), next(scales).T)


def against_mmasim(
    kind: str, shape: tuple[int, int, int], device: str, clock: Clock = time.perf_counter
) -> tuple[float, float]:
    """(emulator, mmasim) seconds; AssertionError first if one bit differs."""
    m, n, k = shape
    a, b = operand(kind, m, k, 1, device), operand(kind, n, k, 2, device)
    ours, theirs = gemm.matmul(a, b), mmasim_product(a, b)
    assert torch.equal(ours.view(torch.int32), theirs.view(torch.int32)), "bits differ: no speed is worth printing"
    return best(lambda: gemm.matmul(a, b), device, 30, clock), best(lambda: mmasim_product(a, b), device, 3, clock)


def against_float32(shape: tuple[int, int, int], device: str) -> tuple[float, float]:
    """(plain float32 product, emulator with a prepared weight) seconds on quantised Gaussian data."""
    m, n, k = shape
    x, w = torch.randn(m, k, device=device), torch.randn(n, k, device=device)
    a, weight = operand("quantized", m, k, 1, device), gemm.prepare(operand("quantized", n, k, 2, device))
    return best(lambda: x @ w.T, device, 20), best(lambda: gemm.matmul(a, weight), device, 20)


@pytest.mark.parametrize("kind", KINDS)
def test_the_fp4_model_beats_mmasim_on_128x128x1024(kind: str) -> None:
    ours, theirs = against_mmasim(kind, (128, 128, 1024), "cpu", time.process_time)
    print(
        f"\n{kind}: emulator {ours * 1e3:.2f} ms of CPU time, mmasim {theirs * 1e3:.0f} ms, ratio {theirs / ours:.0f}"
    )


@pytest.mark.parametrize("shape", ROLLOUT_SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_a_prepared_weight_multiplies_quantized_activations(benchmark: object, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    a, weight = operand("quantized", m, k, 1), gemm.prepare(operand("quantized", n, k, 2))
    benchmark(lambda: gemm.matmul(a, weight))  # type: ignore[operator]


def main(device: str) -> None:
    """Print the table."""
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"# {name}, torch {torch.__version__}")
    clocks: dict[str, Clock] = {"wall": time.perf_counter}
    if device == "cpu":
        clocks["CPU"] = time.process_time
    for shape, kind, (label, clock) in itertools.product(SHAPES[device], KINDS, clocks.items()):
        ours, theirs = (seconds * 1e3 for seconds in against_mmasim(kind, shape, device, clock))
        print(f"{shape} {kind:9} {label:4} emulator {ours:8.2f} ms  mmasim {theirs:9.1f} ms  {theirs / ours:6.0f}x")
    for shape in ROLLOUT_SHAPES:
        plain, ours = against_float32(shape, device)
        print(f"{shape} float32 {plain * 1e3:7.2f} ms  emulator {ours * 1e3:7.2f} ms  {ours / plain:5.1f}x slower")


if __name__ == "__main__":
    main(sys.argv[1])
