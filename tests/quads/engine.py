"""vLLM engines (CPU build) over tiny models, for tests."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from quads.gap import token_logps
from quads.integrations.vllm_plugin import weights
from quads.kernels import prepack
from quads.recipes import Recipe
from quads.rollout import rollout_numerics

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="ERROR",
    HF_HUB_OFFLINE="1",
)
if importlib.util.find_spec("vllm"):  # before the tests begin: conftest.py keeps imports out of collections
    import vllm.entrypoints.llm
    import vllm.v1.worker.gpu_model_runner  # noqa: F401

# vLLM's CPU attention has no heads of 16, so these are not the models of tiny.py.
_SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
# In what order an engine keeps its codes: as on a CPU, on Hopper, on Blackwell. The emulator multiplies by all of them.
ORDERS: dict[str, Any] = {
    "exported": None,
    "hopper": prepack.prepare_hopper,
    "native": lambda b, *, interleave, out=None: prepack.prepare_native(b, halves=interleave, out=out),
}
_MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def model(family: str = "qwen3_moe", *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A random model whose logits are far from uniform, in evaluation mode."""
    torch.manual_seed(seed)
    extra = _MOE if "moe" in family else {}
    config = transformers.AutoConfig.for_model(family, **{**_SHAPE, **extra, **changes})
    built = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            if parameter.ndim > 1 or name.endswith(".bias"):
                parameter.normal_(0.0, 0.08)
    return built.eval()


def start(folder: Path, trainer: Any, recipe: Recipe, **options: Any) -> Any:
    """An engine that serves `trainer` under `recipe`, eager, with processed log-probabilities."""
    from vllm import LLM

    from quads.integrations.vllm_plugin.colocate import engine_folder

    engine_folder(trainer, recipe, folder)
    fixed = {
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 64,
        "max_num_seqs": 8,
        "num_gpu_blocks_override": 64,  # a whole GiB takes a second to fill
        "dtype": str(trainer.dtype).removeprefix("torch."),
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "disable_log_stats": True,
    }
    return LLM(model=str(folder), **{**fixed, **options})


@contextmanager
def kept_in(order: Any) -> Iterator[None]:
    """Engines of this block keep their codes in `order` (a value of ORDERS)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "order_on", lambda device: order)
        yield


def addresses(llm: Any) -> dict[str, int]:
    """Where each parameter's storage lies."""
    return llm.apply_model(lambda m: {name: p.data_ptr() for name, p in m.named_parameters()})[0]


@torch.no_grad()
def emulated(trainer: Any, recipe: Recipe, sequences: list[list[int]]) -> torch.Tensor:
    """Log-probabilities of the same policy without an engine.

    Each sequence alone, as one prefill: the batch that a `batch` scope selects over is then the same.
    """
    with rollout_numerics(trainer, recipe):
        rows = (torch.tensor([row]) for row in sequences)
        return torch.cat([token_logps(trainer(row).logits, row).flatten() for row in rows])


@torch.no_grad()
def decoded(trainer: Any, recipe: Recipe, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """Log-probabilities of `completion` without an engine, token by token from a cache as an engine decodes it."""
    with rollout_numerics(trainer, recipe):
        output, logps = trainer(torch.tensor([prompt]), use_cache=True), []
        for token in completion:
            logps.append(output.logits[0, -1].float().log_softmax(-1)[token])
            output = trainer(torch.tensor([[token]]), past_key_values=output.past_key_values, use_cache=True)
    return torch.stack(logps)


def tokens(rows: int = 6, length: int = 24, *, seed: int = 1) -> list[list[int]]:
    """Random sequences of the tiny vocabulary."""
    return torch.randint(2, 64, (rows, length), generator=torch.Generator().manual_seed(seed)).tolist()
