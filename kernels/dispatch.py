"""Which kernel runs where: the choices as one table, to be asked and printed.

`pick("gemm", tokens=16)` names the way that the operation takes on this device, or why it cannot run, in one line.
The operations ask the same predicates themselves; nothing is routed through here at run time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quads.kernels import support

Capability = tuple[int, int]


@dataclass(frozen=True)
class Choice:
    """`way` taken by `operation` and why; or `missing`, the reason why it cannot run (way is then "")."""

    operation: str
    way: str
    why: str
    missing: str = ""

    def __str__(self) -> str:
        return f"{self.operation}: {self.missing}" if self.missing else f"{self.operation}: {self.way} ({self.why})"


def _quantise(chip: Capability, tokens: int) -> tuple[str, str]:
    if chip >= (10, 0):
        return "native", "cvt.rn.satfinite.e2m1x2.f32"
    return "portable", "E2M1 by fused multiply-adds and minima, same bytes"


_HOPPER_WAYS = {
    "decode": "both operands decoded in registers",
    "wide": "weights decoded in registers, activations once for a thread block",
    "prefill": "both operands decoded to bfloat16 once, then wgmma",
}


def _gemm(chip: Capability, tokens: int) -> tuple[str, str]:
    from quads.kernels.gemm import hopper_way

    if chip >= (10, 0):
        return "native", "FP4 tensor cores"
    if chip[0] != 9:
        return "portable", "the native kernel's twin: codes decoded to FP32"
    way = hopper_way(tokens)
    return way, f"{tokens} tokens: {_HOPPER_WAYS[way]}"


def _moe(chip: Capability, tokens: int) -> tuple[str, str]:
    way, why = _gemm(chip, tokens)
    return ("grouped native" if way == "native" else "grouped"), f"both products by expert; dense: {why}"


def _fp8(chip: Capability, tokens: int) -> tuple[str, str]:
    if chip >= (8, 9):
        return "native", "E4M3 tensor cores, a scale each 128 of K"
    return "portable", "codes decoded to FP32"


OPERATIONS: dict[str, Callable[[Capability, int], tuple[str, str]]] = {
    "quantize": _quantise,
    "quantize_rac": _quantise,
    "fake_quantize": lambda chip, tokens: ("portable", "the value is wanted, not the code"),
    "gemm": _gemm,
    "moe": _moe,
    "fp8": _fp8,
}
# Triton 3.6 and 3.7 abort on dot_scaled for these; 3.8 compiles it.
_NO_NATIVE_GEMM: dict[Capability, str] = {(12, 1): "needs triton 3.8 or newer on sm_121"}


def pick(operation: str, *, tokens: int = 1, device: int = 0) -> Choice:
    """What `operation` does for `tokens` rows on CUDA `device`. ValueError for an unknown operation."""
    if operation not in OPERATIONS:
        raise ValueError(f"operation '{operation}' is unknown (known: {', '.join(OPERATIONS)})")
    missing = support.missing_triton() or support.missing_gpu() or support.missing_ampere()
    chip = support.capability(device)
    if not missing and chip is not None:
        missing = _unsupported(operation, chip)
    if missing or chip is None:
        return Choice(operation, "", "", missing)
    return Choice(operation, *OPERATIONS[operation](chip, tokens))


def pick_all(*, tokens: int = 1, device: int = 0) -> list[Choice]:
    """Every operation's choice, for reports."""
    return [pick(operation, tokens=tokens, device=device) for operation in OPERATIONS]


def _unsupported(operation: str, chip: Capability) -> str:
    if operation in ("gemm", "moe") and chip in _NO_NATIVE_GEMM:
        import triton

        if tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 8):
            return f"{_NO_NATIVE_GEMM[chip]}; found triton {triton.__version__}"
    return ""
