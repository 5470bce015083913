"""The rollout of `quads.integrations.trl` in a vLLM engine of the same process: sampled by a real engine.

    rollout = EngineRollout(recipe, seed=0, folder=out / "engine")
    trainer = GRPOTrainer(model, ..., rollout_func=rollout, callbacks=[GapCallback(rollout)])

Each call refits the engine from the trainer's weights as one transaction, proves every quantised weight equal bit for
bit, and samples with processed log-probabilities. On CPU set VLLM_ENABLE_V1_MULTIPROCESSING=0 before vLLM's import.
"""

from __future__ import annotations

import os
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
    """

    folder: Path | None = None
    options: dict[str, Any] = field(default_factory=dict)
    verify: bool = True
    refit_seconds: list[float] = field(default_factory=list)
    llm: Any = None

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        model = trainer.accelerator.unwrap_model(trainer.model)
        self._refit(model)
        return super().__call__(prompts, trainer)

    def _refit(self, model: Any) -> None:
        from quads.integrations.vllm_plugin import colocate

        if self.llm is None:
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
        colocate.engine_folder(model, self.recipe, folder, seed=self.seed)
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
