"""The rollout of `quads.integrations.trl` in a vLLM engine of the same process: sampled by a real engine.

    rollout = EngineRollout(recipe, seed=0, folder=out / "engine")
    trainer = GRPOTrainer(model, ..., rollout_func=rollout, callbacks=[GapCallback(rollout)])

Each call refits the engine from the trainer's weights as one transaction, proves every quantised weight equal bit for
bit, and samples with processed log-probabilities. On CPU set VLLM_ENABLE_V1_MULTIPROCESSING=0 before vLLM's import.
"""

from __future__ import annotations

import gc
import os
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quads.integrations.trl import QuadsRollout
from quads.integrations.vllm_plugin import versions
from quads.sampling import Completions

_REQUEST_SEEDS = 1_000_003


@dataclass
class EngineRollout(QuadsRollout):
    """A `rollout_func` of GRPOTrainer that samples in vLLM.

    folder: where the engine's model folder is written (default: a temporary one). options: further arguments of
    `vllm.LLM`. verify: prove each refit. refit_seconds: time of each refit, its proof included.
    A resumed `round` samples what an unbroken run would have sampled.
    """

    folder: Path | None = None
    options: dict[str, Any] = field(default_factory=dict)
    verify: bool = True
    refit_seconds: list[float] = field(default_factory=list)
    llm: Any = None

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        model = trainer.accelerator.unwrap_model(trainer.model)
        self._refit(model)
        result = super().__call__(prompts, trainer)
        self.history[-1] = replace(self.history[-1], sync_seconds=self.refit_seconds[-1])
        return result

    def close(self) -> None:
        """Stop the engine and give its memory back; the next call would start another."""
        if self.llm is None:
            return
        from vllm.distributed import cleanup_dist_env_and_memory

        self.llm.llm_engine.engine_core.shutdown()
        self.llm = None
        gc.collect()
        cleanup_dist_env_and_memory()

    def _refit(self, model: Any) -> None:
        from quads.integrations.vllm_plugin import colocate

        if self.llm is None:
            with torch.random.fork_rng():  # vLLM seeds this process's generators, which a trainer draws from
                self.llm = self._start(model)
        started = time.perf_counter()
        colocate.sync(self.llm, model, self.recipe, verify=self.verify)
        self.refit_seconds.append(time.perf_counter() - started)

    def _start(self, model: Any) -> Any:
        versions.check()
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        from vllm import LLM

        from quads.integrations.vllm_plugin import colocate

        folder = self.folder or Path(tempfile.mkdtemp(prefix="quads-engine-"))
        epoch = self.round // self.recipe.rac_refresh
        colocate.engine_folder(model, self.recipe, folder, seed=self.seed + epoch * _REQUEST_SEEDS)
        dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        fixed = {"skip_tokenizer_init": True, "logprobs_mode": "processed_logprobs", "dtype": dtype, "seed": self.seed}
        return LLM(model=str(folder), **{**fixed, **self.options})

    def _context(self, model: nn.Module) -> Any:
        return nullcontext()

    def _sample(self, model: nn.Module, ids: list[list[int]], trainer: Any, tokenizer: Any) -> Completions:
        from quads.integrations.trl import end_tokens
        from quads.integrations.vllm_plugin import logprobs

        params = self._params(trainer, end_tokens(model, tokenizer), len(ids))
        outputs = self.llm.generate([{"prompt_token_ids": row} for row in ids], params, use_tqdm=False)
        logps = [row.tolist() for row in logprobs.sampled(self.llm, outputs)]
        return Completions([list(output.outputs[0].token_ids) for output in outputs], logps)

    def _params(self, trainer: Any, ends: tuple[int, ...], count: int) -> list[Any]:
        from vllm import SamplingParams

        first = (self.seed * _REQUEST_SEEDS + self.round) * _REQUEST_SEEDS
        return [
            SamplingParams(
                max_tokens=trainer.args.max_completion_length,
                temperature=trainer.args.temperature,
                stop_token_ids=list(ends),
                seed=(first + row) % (1 << 62),
                logprobs=0,
                detokenize=False,
            )
            for row in range(count)
        ]
