"""One rank of a two-rank vLLM model (CPU, gloo): load, quantise, refit packed, save what the rank keeps."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch


def main(rank: int, folder: Path, port: int, expert_parallel: bool) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", VLLM_DIST_IDENT=f"quads_{port}")
    from safetensors.torch import load_file
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading

    from quads.integrations.vllm_plugin import packed
    from tests.quads import engine

    arguments = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        tensor_parallel_size=2,
        enable_expert_parallel=expert_parallel,
        enforce_eager=True,
        dtype="float32",
        max_model_len=64,
    )
    for order, prepare in engine.ORDERS.items():
        config = arguments.create_engine_config()
        with set_current_vllm_config(config), torch.no_grad(), engine.kept_in(prepare):
            if order == "exported":
                init_distributed_environment(2, rank, f"tcp://127.0.0.1:{port}", rank, backend="gloo")
                initialize_model_parallel(2)
            model = initialize_model(vllm_config=config)
            model.load_weights(load_file(folder / "model.safetensors").items())
            process_weights_after_loading(model, config.model_config, torch.device("cpu"))
            torch.save(_kept(model), folder / f"{order}-loaded{rank}.pt")
            packed.load(model, torch.load(folder / "packed.pt", weights_only=False))
            torch.save(_kept(model), folder / f"{order}-refitted{rank}.pt")
            if order == "exported":
                refusal = _refused(model, config.model_config, load_file(folder / "model.safetensors"))
                torch.save({"refusal": refusal, "kept": _kept(model)}, folder / f"refused{rank}.pt")


def _refused(model: torch.nn.Module, model_config: Any, update: dict[str, torch.Tensor]) -> str:
    """What is said to an update with one NaN, which only the second rank holds, however experts are cut."""
    from quads.integrations.vllm_plugin import refit

    update["model.layers.1.mlp.experts.3.down_proj.weight"][-1, -1] = float("nan")
    try:
        refit.apply_update(model, model_config, update.items())
    except ValueError as error:
        return str(error)
    return ""


def _kept(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """As exported, by the names of vLLM's parameters and the field."""
    from quads.integrations.vllm_plugin import packed, weights

    names = {id(module): name for name, module in model.named_modules()}
    kept = {}
    for slot in packed.slots(model).values():
        whole = weights.exported(slot.layer, slot.name)
        for field in ("packed", "scales", "outer"):
            kept[f"{names[id(slot.layer)]}.{slot.name} {field}"] = getattr(whole, field).clone()
    return kept


if __name__ == "__main__":
    torch.set_default_dtype(torch.float32)
    main(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "ep")
