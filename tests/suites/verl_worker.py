"""Processes of verl's FSDP2 workers on CPU, as a script:

    verl_worker.py RANK PORT RECIPE MODEL_FOLDER OUT CHANGES
    verl_worker.py refuse MODEL_FOLDER CASES

A script because verl's wheel brings a top-level package `tests` of its own, which a spawned process finds first.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
import verl_cpu  # type: ignore[import-not-found]


def build(recipe: str, folder: str, **changes: Any) -> Any:
    """The engine that verl's registry gives a worker under the rendered settings, not yet initialised."""
    verl_cpu.set_up()
    os.environ["VERL_ENGINE_DEVICE"] = "cuda"  # whose registry entry is asked for; the platform stays the CPU's
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, QATEngineConfig
    from verl.workers.engine.base import EngineRegistry

    model = HFModelConfig(
        path=folder,
        load_tokenizer=False,
        external_lib="quads.integrations.verl",
        override_config={"attn_implementation": "sdpa", "quads_recipe": recipe},
        enable_gradient_checkpointing=changes.pop("checkpointing", False),
        use_remove_padding=False,
        lora_rank=changes.pop("lora_rank", 0),
    )
    qat = QATEngineConfig(enable=changes.pop("qat", False))
    engine = FSDPEngineConfig(**{"strategy": "fsdp2", "use_torch_compile": False, "qat": qat, **changes})
    return EngineRegistry.new(
        "language_model",
        "fsdp2",
        model_config=model,
        engine_config=engine,
        optimizer_config=FSDPOptimizerConfig(lr=1e-3, total_training_steps=4),
        checkpoint_config=CheckpointConfig(),
    )


def _steps(engine: Any, rank: int) -> dict[str, Any]:
    """Two updates; what the experts of layer 0 multiplied by in the second, and what was sent just before it."""
    engine.initialize()
    seen: dict[str, Any] = {}
    experts = engine.module.model.layers[0].mlp.experts
    experts.register_forward_hook(lambda module, *_: seen.update(value=module.gate_up_proj.detach().clone()))
    for step in range(2):
        seen["sent"] = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]}
        batch = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(10 * step + rank))
        with torch.autocast("cpu", torch.bfloat16):  # as verl's own forward step
            engine.module(input_ids=batch, labels=batch, use_cache=False).loss.backward()
        seen["norm"] = engine.optimizer_step()
        engine.optimizer_zero_grad()
    seen["after"] = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]}
    return seen


def train(rank: int, port: str, recipe: str, folder: str, out: str, changes: dict[str, Any]) -> None:
    """Rank `rank` of two: train, and leave what was seen as OUT/RANK.pt."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    try:
        torch.save(_steps(build(recipe, folder, **changes), rank), f"{out}/{rank}.pt")
    finally:
        dist.destroy_process_group()


def refuse(folder: str, cases: list[tuple[str, dict[str, Any]]]) -> None:
    """Print a JSON list: what each engine of (recipe, changes) raises when it is built."""
    raised = []
    for recipe, changes in cases:
        try:
            build(recipe, folder, **changes)
        except ValueError as error:
            raised.append(str(error))
        else:
            raised.append("")
    print(json.dumps(raised))


if __name__ == "__main__":
    if sys.argv[1] == "refuse":
        refuse(sys.argv[2], json.loads(sys.argv[3]))
    else:
        train(int(sys.argv[1]), *sys.argv[2:6], json.loads(sys.argv[6]))
