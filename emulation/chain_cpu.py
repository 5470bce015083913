"""The NVFP4 chain as a compiled kernel (chain.cpp), for CPU operands that no exact short cut covers.

Built once with the C++ compiler of the machine ($CXX or c++) and kept in the user's cache folder, under a name that
holds the source, the flags and the processor's features. Without a compiler `gemm` falls back to `mma.chain`: the
same bits, some thirty times slower.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

import torch
from torch import Tensor

from quads.emulation import fdpa, mma

EXACT_FLAGS = ["-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"]  # std::trunc inline, no FMA
FLAGS = ["-O3", "-march=native", *EXACT_FLAGS, "-std=c++17", "-shared", "-fPIC"]


class _Problem(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("a", "b", "scale_a", "scale_b", "top_a", "top_b", "out")),
        *((name, ctypes.c_int64) for name in ("m", "n", "k", "fraction_bits", "zero", "dead", "cancelled", "nan")),
    ]


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernel, or None where there is no working C++ compiler."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        return None
    source = resources.files("quads.emulation").joinpath("chain.cpp").read_bytes()
    key = hashlib.sha256(source + " ".join([compiler, *FLAGS, _processor()]).encode()).hexdigest()[:16]
    path = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "quads" / f"chain-{key}.so"
    try:
        if not path.exists():
            _build(compiler, source, path)
        return ctypes.CDLL(str(path))
    except (OSError, subprocess.CalledProcessError):
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def _build(compiler: str, source: bytes, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        code, built = Path(folder, "chain.cpp"), Path(folder, "chain.so")
        code.write_bytes(source)
        subprocess.run([compiler, *FLAGS, "-o", built, code], check=True, capture_output=True)
        os.replace(built, path)


@dataclass(frozen=True)
class Parts:
    """Twice the FP4 values (int16 [rows, K]), scales (float64) and their exponents (int64), both [rows, K/16].

    The left operand of `chain` is laid out by rows, the right one by columns of B^T: all three transposed.
    """

    values: Tensor
    scales: Tensor
    exponents: Tensor

    def transposed(self) -> Parts:
        return Parts(*(x.T.contiguous() for x in (self.values, self.scales, self.exponents)))


def parts(operand: mma.Operand) -> Parts:
    """Codes [rows, K] and UE4M3 scales [rows, K/16] as the kernel reads them."""
    assert operand.scales is not None
    significand, exponent = fdpa.split(torch.arange(16), "e2m1")
    table = (significand * 2 * fdpa.power_of_two(exponent)).short()
    values = table.index_select(0, operand.codes.flatten().int()).view(operand.codes.shape)
    significand, exponent = fdpa.split(operand.scales, "ue4m3")
    return Parts(values, significand.double() * fdpa.power_of_two(exponent), exponent.long())


def chain(a: Parts, b: Parts, model: mma.Model) -> Tensor:
    """FP32 accumulator [M, N]: `a` by rows, `b` transposed, K a multiple of 64; C is zero."""
    (m, k), n = a.values.shape, b.values.shape[1]
    kernel = library()
    assert kernel is not None and model.scale == "ue4m3" and model.group == 16 and k % 64 == 0
    out = torch.empty(m, n, dtype=torch.int32)
    dead, cancelled = model.dead_group == "included", model.cancelled_group == "included"
    tensors = (a.values, b.values, a.scales, b.scales, a.exponents, b.exponents, out)
    numbers = (m, n, k, model.fraction_bits, model.zero_exponent, dead, cancelled, fdpa.OUTPUTS[model.output].nan)
    _run(kernel, _Problem(*(x.data_ptr() for x in tensors), *numbers), m)
    return out.view(torch.float32)


def _run(kernel: ctypes.CDLL, problem: _Problem, rows: int) -> None:
    workers = min(rows, torch.get_num_threads())
    bounds = [ctypes.c_int64(rows * i // workers) for i in range(workers + 1)]
    if workers == 1:
        kernel.run(ctypes.byref(problem), *bounds)
        return
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(lambda i: kernel.run(ctypes.byref(problem), bounds[i], bounds[i + 1]), range(workers)))
