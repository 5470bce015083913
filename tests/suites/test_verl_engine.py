"""verl's own FSDP2 worker engine, two processes on CPU, trains under a recipe and sends its masters."""

from __future__ import annotations

import importlib.util
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

if importlib.util.find_spec("verl") is None:
    pytest.skip("needs verl (tox -e verl)", allow_module_level=True)
if importlib.util.find_spec("trl") is not None:
    pytest.skip("verl 0.9 does not import beside this TRL", allow_module_level=True)

from quads import qdq, recipes
from quads.recipes import Recipe

pytestmark = pytest.mark.vllm
WORKER = Path(__file__).with_name("verl_worker.py")
SHAPE: dict[str, Any] = {
    **{"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": False},
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> str:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **SHAPE), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.08)
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    return str(path)


def in_two_processes(recipe: str, folder: str, out: Path, **changes: Any) -> list[dict[str, Any]]:
    """What each of two ranks saw; RuntimeError holds the output of the first that failed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(WORKER)]
    rest = [str(port), recipe, folder, str(out), json.dumps(changes)]
    ranks = [subprocess.Popen([*command, str(rank), *rest], stderr=subprocess.PIPE, text=True) for rank in range(2)]
    errors = [rank.communicate(timeout=300)[1] for rank in ranks]
    for rank, error in zip(ranks, errors, strict=True):
        if rank.returncode:
            raise RuntimeError(error)
    return [torch.load(out / f"{rank}.pt", weights_only=True) for rank in range(2)]


def stacked(sent: dict[str, torch.Tensor]) -> torch.Tensor:
    """gate_up_proj of layer 0 [4, 64, 64] from the names that vLLM loads."""
    name = "model.layers.0.mlp.experts.{}.{}_proj.weight"
    return torch.stack([torch.cat([sent[name.format(e, part)] for part in ("gate", "up")]) for e in range(4)])


def quantized(weight: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    outer = qdq.outer_from_amax(weight.abs().amax(dim=(-2, -1), keepdim=True).float(), recipe)
    return qdq.fake_quantize(weight, recipe, outer)


def test_the_trainer_multiplies_by_what_the_rollout_will_make_of_the_weights_it_is_sent(
    folder: str, tmp_path: Path
) -> None:
    quads = recipes.load("quads")
    for rank in in_two_processes("quads", folder, tmp_path):
        sent = stacked(rank["sent"])
        assert sent.dtype == torch.float32
        assert torch.equal(rank["value"], quantized(sent.bfloat16(), quads))
        assert not torch.equal(rank["value"], quantized(sent, quads).bfloat16())  # the order of rounding matters
        assert rank["norm"] > 0
        moved = [name for name in rank["sent"] if not torch.equal(rank["sent"][name], rank["after"][name])]
        assert len(moved) > 0.9 * len(rank["sent"])  # experts that no token chose may stay


def test_a_recipe_without_qat_trains_as_verl_does(folder: str, tmp_path: Path) -> None:
    for rank in in_two_processes("rac", folder, tmp_path):
        assert torch.equal(rank["value"], stacked(rank["sent"]).bfloat16())


def test_symmetric_qat_trains_under_gradient_checkpointing(folder: str, tmp_path: Path) -> None:
    for rank in in_two_processes("symmetric", folder, tmp_path, checkpointing=True):
        assert torch.isfinite(torch.tensor(rank["norm"])) and rank["norm"] > 0


REFUSED = {
    "actor.strategy is 'fsdp': quads trains under fsdp2": ("quads", {"strategy": "fsdp"}),
    "model.lora_rank is set": ("quads", {"lora_rank": 8}),
    "actor.fsdp_config.qat.enable is set": ("quads", {"qat": True}),
    "model.override_config lacks quads_recipe": ("", {}),
}


def test_a_worker_that_would_train_something_else_is_refused(folder: str) -> None:
    command = [sys.executable, str(WORKER), "refuse", folder, json.dumps(list(REFUSED.values()))]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    raised = json.loads(output.splitlines()[-1])
    assert all(why.startswith(f"actor_rollout_ref.{says}") for why, says in zip(raised, REFUSED, strict=True)), raised
