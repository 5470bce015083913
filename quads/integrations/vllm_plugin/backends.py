"""Which backend a layer runs on, and why: one table, read by the layers and by `quads doctor`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from quads.errors import CannotRunHereError
from quads.integrations.vllm_plugin.fp4_gemms import GEMMS, Gemm
from quads.kernels import support
from quads.recipes import Recipe


@dataclass(frozen=True)
class Backend:
    """`name` as reports print it; `missing` is "" where it can run here, else one line that says what it needs.

    gemm: the product, where it is one of vLLM's own.
    """

    name: str
    why: str
    missing: str = ""
    gemm: Gemm | None = None


@dataclass(frozen=True)
class Shape:
    """Columns out of each product of a layer, and the dtype that the model computes in."""

    n: tuple[int, ...]
    dtype: torch.dtype


def for_layer(recipe: Recipe, *, grouped: bool, device: str | None = None, shape: Shape | None = None) -> Backend:
    """The backend of a dense or (`grouped`) fused-MoE layer under `recipe` on this machine.

    shape: the layer's, where it is known; without it (`quads doctor`) the rules on shapes are not asked.
    """
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if recipe.rollout_weights == "bf16":
        return Backend("vllm bf16", "the recipe leaves the layer in full precision")
    if kind == "cpu":
        return Backend("emulator", "no GPU: exact emulation, for tests and small models")
    if recipe.rollout_weights == "fp8":
        return Backend("torch fp8", "exact arithmetic of the FP8 baseline; for speed serve with fp8_per_block")
    if recipe.rollout_activations == "bf16":
        return Backend("torch bf16", "Q(W) is exact in bf16 values; for speed export and serve with Marlin")
    return _w4a4(recipe, grouped, shape)


def _w4a4(recipe: Recipe, grouped: bool, shape: Shape | None) -> Backend:
    module = "moe" if grouped else "gemm"
    missing = support.missing_triton() or support.missing_ampere()
    chip = support.device_name()
    if missing or support.missing_blackwell():
        return Backend(f"quads.kernels.{module} (decoded to bf16)", f"no FP4 tensor cores: {chip}", missing)
    reasons = []
    for gemm in (gemm for gemm in GEMMS if gemm.grouped == grouped):
        reason = why_not(gemm, recipe, shape)
        if not reason:
            return Backend(gemm.name, f"the first of vLLM's NVFP4 GEMMs that can run here: {chip}", gemm=gemm)
        reasons.append(reason)
    refused = "; ".join(dict.fromkeys(reasons))
    return Backend(f"quads.kernels.{module} (native FP4)", f"FP4 tensor cores: {chip}; not vLLM's GEMM: {refused}")


def why_not(gemm: Gemm, recipe: Recipe, shape: Shape | None) -> str:
    """The first rule that keeps a layer of `recipe` and `shape` from `gemm`, "" where there is none."""
    return next((reason for rule in _RULES if (reason := rule(gemm, recipe, shape))), "")


def _one_alpha(gemm: Gemm, recipe: Recipe, shape: Shape | None) -> str:
    if recipe.activation_outer == "tensor":
        return ""
    return "it multiplies by one alpha before it rounds, and activation_outer 'token' has one a row"


def _columns(gemm: Gemm, recipe: Recipe, shape: Shape | None) -> str:
    step = 128 if gemm.grouped else 32
    uneven = [n for n in shape.n if n % step] if shape else []
    return f"N = {uneven[0]} is not a multiple of {step}" if uneven else ""


def _dtype(gemm: Gemm, recipe: Recipe, shape: Shape | None) -> str:
    given = (torch.bfloat16,) if gemm.grouped else (torch.bfloat16, torch.float16)
    if shape is None or shape.dtype in given:
        return ""
    names = " or ".join(str(dtype).removeprefix("torch.") for dtype in given)
    return f"it gives {names}, the model computes in {str(shape.dtype).removeprefix('torch.')}"


def _available(gemm: Gemm, recipe: Recipe, shape: Shape | None) -> str:
    return gemm.missing()


def _wanted(gemm: Gemm, recipe: Recipe, shape: Shape | None) -> str:
    """vLLM's own switches: its batch-invariant mode, --linear-backend and --moe-backend, VLLM_DISABLED_KERNELS."""
    import vllm.envs as envs
    from vllm.config import get_current_vllm_config_or_none

    config, field = get_current_vllm_config_or_none(), "moe_backend" if gemm.grouped else "linear_backend"
    chosen = getattr(config.kernel_config, field) if config else "auto"
    if envs.VLLM_BATCH_INVARIANT and gemm.choice != "cutlass":
        return "VLLM_BATCH_INVARIANT allows vLLM's CUTLASS GEMM only"
    if chosen not in ("auto", gemm.choice) and not envs.VLLM_BATCH_INVARIANT:
        return f"--{field.replace('_', '-')} is {chosen}"
    if gemm.kernel in envs.VLLM_DISABLED_KERNELS:
        return f"VLLM_DISABLED_KERNELS names {gemm.kernel}"
    return ""


_RULES: tuple[Callable[[Gemm, Recipe, Shape | None], str], ...] = (_one_alpha, _columns, _dtype, _available, _wanted)


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
