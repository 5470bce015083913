"""What samples in a comparison: transformers under emulated numerics, or a vLLM engine of the same process."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from quads.compare.config import CompareConfig
from quads.compare.policy import arithmetic
from quads.integrations.trl import QuadsRollout
from quads.recipes import Recipe

_VLLM_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the trainer refits the engine, so both live in this process
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_LOGGING_LEVEL": "ERROR",
}
# On a GPU the engine takes its weights and this cache, whatever the trainer beside it holds at that moment.
_ON_GPU = {"kv_cache_memory_bytes": 8 << 30, "gpu_memory_utilization": 0.02}


def prepare(engine: str) -> None:
    """Before anything of a run: CannotRunHereError where `engine` is not installed; the environment that it needs."""
    if engine == "vllm":
        from quads.integrations.vllm_plugin import versions

        versions.check()
        for name, value in _VLLM_ENVIRONMENT.items():
            os.environ.setdefault(name, value)


def make_rollout(config: CompareConfig, recipe: Recipe, seed: int, round: int, folder: Path) -> QuadsRollout:
    """The rollout of one arm from its `round`-th round on; `close` it at the end. `folder` is the arm's own."""
    return _MAKERS[config.engine](config, recipe, seed, round, folder)


def _transformers(config: CompareConfig, recipe: Recipe, seed: int, round: int, folder: Path) -> QuadsRollout:
    _, rollout = arithmetic(config)
    return QuadsRollout(recipe, seed=seed, round=round, arithmetic=rollout, routed=config.r3)


def _vllm(config: CompareConfig, recipe: Recipe, seed: int, round: int, folder: Path) -> QuadsRollout:
    from quads.integrations.vllm_rollout import EngineRollout

    return EngineRollout(recipe, seed=seed, round=round, folder=folder / "engine", options=_vllm_options())


def _vllm_options() -> dict[str, Any]:
    """Arguments of `vllm.LLM`. On CPU nothing is compiled: the models are small and a run is short."""
    shared = {"disable_log_stats": True}
    if torch.cuda.is_available():
        return {**shared, **_ON_GPU}
    return {**shared, "enforce_eager": True}


_MAKERS: dict[str, Callable[[CompareConfig, Recipe, int, int, Path], QuadsRollout]] = {
    "transformers": _transformers,
    "vllm": _vllm,
}
