"""What this machine can do and what each recipe's layers would run on, as rows for `quads doctor`."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from importlib import metadata

import torch

from quads import recipes
from quads.errors import CannotRunHereError
from quads.kernels import support

_PACKAGES = ("torch", "triton", "transformers", "trl", "accelerate", "datasets")
_CAPABILITIES = {
    "kernels: Triton": support.missing_triton,
    "kernels: portable (sm_80 or newer)": support.missing_ampere,
    "kernels: Hopper": support.missing_hopper,
    "kernels: native FP4": support.missing_blackwell,
}


@dataclass(frozen=True)
class Row:
    """One finding: `ok` is None where nothing is right or wrong."""

    topic: str
    finding: str
    ok: bool | None = None


def rows() -> list[Row]:
    """Packages, the GPU and its capabilities, vLLM and its NVFP4 GEMMs, the backend of every named recipe and why."""
    return [*_packages(), *_gpu(), _vllm(), *_gemms(), *_backends()]


def _packages() -> list[Row]:
    found = []
    for name in _PACKAGES:
        try:
            found.append(Row(name, metadata.version(name), True))
        except metadata.PackageNotFoundError:
            found.append(Row(name, "not installed"))
    return found


def _gpu() -> list[Row]:
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "none: everything runs in the CPU emulator"
    found = [Row("GPU", name)]
    for topic, predicate in _CAPABILITIES.items():
        reason = predicate()
        found.append(Row(topic, reason or "yes", None if reason else True))
    return found


def _vllm() -> Row:
    from quads.integrations.vllm_plugin import versions

    if importlib.util.find_spec("vllm") is None:
        return Row("vLLM", "not installed: pip install 'quads[vllm]'")
    try:
        return Row("vLLM", f"{versions.check()}, plugin registered through vllm.general_plugins", _registered())
    except CannotRunHereError as error:
        return Row("vLLM", str(error), False)


def _registered() -> bool:
    return any(point.name == "quads" for point in metadata.entry_points(group="vllm.general_plugins"))


def _gemms() -> list[Row]:
    from quads.integrations.vllm_plugin.fp4_gemms import GEMMS

    reasons = [(f"vLLM's GEMM: {gemm.name}", gemm.missing()) for gemm in GEMMS]
    return [Row(topic, reason or "yes", None if reason else True) for topic, reason in reasons]


def _backends() -> list[Row]:
    from quads.integrations.vllm_plugin import backends

    found = []
    for name, recipe in recipes.named().items():
        for kind, grouped in (("dense", False), ("experts", True)):
            backend = backends.for_layer(recipe, grouped=grouped)
            why = backend.missing or backend.why
            found.append(Row(f"recipe {name}, {kind}", f"{backend.name}: {why}", not backend.missing))
    return found
