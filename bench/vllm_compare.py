"""One arm of `quads compare --engine vllm`: GRPO through TRL whose rollouts the engine of the same process samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

CASES = ("bf16", "nvfp4", "quads")
_SHOWN = (
    "gap/mean",
    "gap/p99",
    "gap/max",
    "reward/mean",
    "throughput/rollout_tokens_per_s",
    "time/sync_s",
    "time/step_s",
)


def run(case: str, out: Path, steps: int) -> dict[str, Any]:
    """Train the arm, without a report; the mean of its records over the last half of the steps, and its accuracy."""
    from quads import recipes
    from quads.compare import engines
    from quads.compare.arm import Arm, Watch
    from quads.compare.config import CompareConfig
    from quads.compare.policy import load_policy
    from quads.compare.training import run_arm
    from quads.integrations.vllm import register

    register()  # the entry point does it where the package is installed
    bf16: dict[str, Any] = {"dtype": "bfloat16", "compute": "bfloat16"}
    config = CompareConfig(out=out / case, arms=(case,), steps=steps, engine="vllm", eval_every=steps, **bf16)
    engines.prepare(config.engine)
    arm = Arm(config, recipes.load(case), 0)
    run_arm(arm, load_policy(config, lambda step, loss: None), Watch(lambda step: None, print))
    records, evals = (file.read() for file in arm.records())
    late = records[len(records) // 2 :]
    means = {name: sum(float(r[name]) for r in late) / len(late) for name in _SHOWN}
    return {"steps": len(records), "accuracy": [r["eval/accuracy"] for r in evals], **means}
