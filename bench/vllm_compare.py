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
    """Train the arm; the mean of its records over the last half of the steps, and its held-out accuracy."""
    from quads.compare import job
    from quads.compare.config import CompareConfig
    from quads.compare.records import Records

    bf16: dict[str, Any] = {"dtype": "bfloat16", "compute": "bfloat16"}
    config = CompareConfig(out=out, arms=(case,), steps=steps, engine="vllm", eval_every=steps, **bf16)
    job.run(config)
    records = [r for r in Records(out / "runs.jsonl").read() if r["arm"] == case]
    evals = [r["eval/accuracy"] for r in Records(out / "evals.jsonl").read() if r["arm"] == case]
    late = records[len(records) // 2 :]
    means = {name: sum(float(r[name]) for r in late) / len(late) for name in _SHOWN}
    return {"steps": len(records), "accuracy": evals, **means}
