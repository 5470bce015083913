"""What this machine can run: predicates that return their own reason.

A predicate returns "" when the answer is yes, else one line that says what is needed and what was found. Tests,
`quads doctor` and the dispatch all print the same line.
"""

from __future__ import annotations

import importlib.util
import os
from functools import cache

import torch
from torch import Tensor


def interpreting() -> bool:
    """Whether Triton runs its CPU interpreter (TRITON_INTERPRET=1 before triton's first import)."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@cache
def capability(device: int = 0) -> tuple[int, int] | None:
    """Compute capability of a CUDA device, None without one."""
    if not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability(device)


@cache
def device_name(device: int = 0) -> str:
    """For example "NVIDIA H200, sm_90", or "no CUDA GPU"."""
    found = capability(device)
    return f"{torch.cuda.get_device_name(device)}, sm_{found[0]}{found[1]}" if found else "no CUDA GPU"


def missing_triton() -> str:
    """Reason why no kernel can be compiled here."""
    if importlib.util.find_spec("triton") is None:
        return "needs triton (pip install 'quads[kernels]'); it is not installed"
    return ""


def missing_gpu() -> str:
    """Reason why no kernel can run here."""
    if capability() is None:
        return "needs a CUDA GPU; found no CUDA GPU"
    return ""


def missing_ampere() -> str:
    """Reason why this GPU cannot run the portable kernels."""
    found = capability()
    if found is None or found < (8, 0):
        return f"needs sm_80 or newer; found {device_name()}"
    return ""


def missing_hopper() -> str:
    """Reason why wgmma kernels cannot run here: they need sm_90 exactly."""
    found = capability()
    if found is None or found[0] != 9:
        return f"needs Hopper tensor cores (sm_90); found {device_name()}"
    return ""


def missing_blackwell() -> str:
    """Reason why native NVFP4 kernels cannot run here."""
    found = capability()
    if found is None or found[0] < 10:
        return f"needs FP4 tensor cores (sm_100 or newer); found {device_name()}"
    return ""


def native_level(device: int = 0) -> int:
    """The `NATIVE` constant of kernels/bits.py: 0 no conversions in hardware, 89 to E4M3, 100 to E2M1 too."""
    found = capability(device)
    if interpreting() or found is None or found < (8, 9):
        return 0
    return 100 if found[0] >= 10 else 89


def check_launch(x: Tensor, operation: str) -> None:
    """Raise RuntimeError, in one line, where no kernel can be launched on `x`."""
    reason = missing_triton()
    if not reason and not interpreting():
        reason = missing_gpu() or missing_ampere()
        if not reason and not x.is_cuda:
            reason = f"needs a CUDA tensor; found one on {x.device}"
    if reason:
        raise RuntimeError(f"{operation} {reason}")
