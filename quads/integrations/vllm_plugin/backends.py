"""Which backend a layer runs on, and why: one table, read by the layers and by `quads doctor`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quads.errors import CannotRunHereError
from quads.kernels import support
from quads.recipes import Recipe


@dataclass(frozen=True)
class Backend:
    """`name` as reports print it; `missing` is "" where it can run here, else one line that says what it needs."""

    name: str
    why: str
    missing: str = ""


def for_layer(recipe: Recipe, *, grouped: bool, device: str | None = None) -> Backend:
    """The backend of a dense or (`grouped`) fused-MoE layer under `recipe` on this machine."""
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if recipe.rollout_weights == "bf16":
        return Backend("vllm bf16", "the recipe leaves the layer in full precision")
    if kind == "cpu":
        return Backend("emulator", "no GPU: exact emulation, for tests and small models")
    if recipe.rollout_weights == "fp8":
        return Backend("torch fp8", "exact arithmetic of the FP8 baseline; for speed serve with fp8_per_block")
    if recipe.rollout_activations == "bf16":
        return Backend("torch bf16", "Q(W) is exact in bf16 values; for speed export and serve with Marlin")
    return _w4a4(grouped)


def _w4a4(grouped: bool) -> Backend:
    module = "moe" if grouped else "gemm"
    missing = support.missing_triton() or support.missing_ampere()
    chip = support.device_name()
    if not missing and not support.missing_blackwell():
        return Backend(f"quads.kernels.{module} (native FP4)", f"FP4 tensor cores: {chip}")
    return Backend(f"quads.kernels.{module} (decoded to bf16)", f"no FP4 tensor cores: {chip}", missing)


def check_available(backend: Backend, layer: str) -> None:
    """CannotRunHereError, naming the layer, where its backend is missing."""
    if backend.missing:
        raise CannotRunHereError(f"{layer} would run on {backend.name}: {backend.missing}")


def check_scope(recipe: Recipe, layer: str) -> None:
    """CannotRunHereError where the fused experts of a GPU cannot select blocks by `recipe`'s scope."""
    if torch.cuda.is_available() and recipe.rac_ratio > 0 and recipe.rac_scope == "tile":
        raise CannotRunHereError(
            f"{layer}: rac_scope 'tile' of fused experts runs on CPU only; use batch, token, static, random or all"
        )
