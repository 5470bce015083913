"""Whether the implementations that others would use can run here: predicates that return their own reason, or ""."""

from __future__ import annotations

import importlib.util
from functools import cache

from quads.kernels import support

REMEDIES = {
    "vllm": "pip install vllm",
    "modelopt": "pip install nvidia-modelopt",
    "fouroversix": "SKIP_CUDA_BUILD=1 pip install --no-deps --no-build-isolation fouroversix",
    "mmasim": "pip install mmasim==2.1.1",
}


def missing(package: str) -> str:
    """Reason why `package` cannot be used."""
    if importlib.util.find_spec(package) is None:
        return f"needs {package} ({REMEDIES[package]}); it is not installed"
    return ""


def missing_fp8() -> str:
    """Reason why no FP8 product can run here."""
    found = support.capability()
    return (
        "" if found and found >= (8, 9) else f"needs FP8 tensor cores (sm_89 or newer); found {support.device_name()}"
    )


@cache
def missing_vllm() -> str:
    """Reason why vLLM's CUDA kernels cannot be called."""
    reason = missing("vllm") or support.missing_gpu()
    if reason:
        return reason
    try:
        import vllm._custom_ops  # noqa: F401
        from vllm.platforms import current_platform
    except Exception as error:  # a build for another torch or CUDA
        return f"vllm does not import: {type(error).__name__}: {str(error)[:120]}"
    return "" if current_platform.is_cuda() else "needs a CUDA build of vllm; this one is for another platform"


@cache
def missing_deep_gemm() -> str:
    """Reason why DeepGEMM cannot be called, on its own or out of vLLM's wheel."""
    if support.missing_hopper() and support.missing_blackwell():
        return f"needs sm_90 or newer; found {support.device_name()}"
    if not any(importlib.util.find_spec(package) for package in ("deep_gemm", "vllm")):
        return "needs deep_gemm, or vllm, whose wheel holds it; neither is installed"
    from quads.bench.peers_cuda import deep_gemm

    try:
        deep_gemm()
    except Exception as error:
        return f"deep_gemm does not import: {type(error).__name__}: {str(error)[:120]}"
    return ""


def missing_modelopt() -> str:
    """Reason why ModelOpt's NVFP4 quantiser cannot be called."""
    return missing("modelopt")


def missing_fouroversix() -> str:
    """Reason why fouroversix's quantiser cannot be called."""
    return missing("fouroversix")


def missing_mmasim() -> str:
    """Reason why mmasim's FP4 model cannot be called."""
    return missing("mmasim")
