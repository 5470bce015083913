"""A made-up summary of a suite, in the form that quads.suites.summary writes, for reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

Numbers = dict[str, Any]

ARMS = {  # gap, final accuracy
    "bf16": (1e-6, 0.95),
    "fp8": (5e-3, 0.948),
    "nvfp4": (2e-2, 0.71),
    "qat": (1.6e-2, 0.9),
    "rac": (1.2e-2, 0.93),
    "quads": (1e-2, 0.951),
}
PROBED = (
    *("engine", "w16a4", "bf16", "fp8", "w4a16", "nvfp4", "quads", "quads-random", "quads-full"),
    *(f"{arm}:rac_ratio={ratio}" for ratio in (0.125, 0.25, 0.75) for arm in ("quads", "quads-random")),
    "quads:rac_scope=token",
)
STAMP: Numbers = {
    "time_utc": "2026-01-01T00:00:00+00:00",
    "command": "quads suite run made --out runs/made",
    "git": {"sha": "0123456789abcdef", "dirty": False},
    "versions": {"torch": "2.13.0"},
    "gpu": None,
    "earlier": [{"command": "quads suite run made --out runs/made --budget 9m", "time_utc": "2025-12-31T00:00:00"}],
}


def interval(value: float, half: float) -> Numbers:
    return {"value": value, "low": value - half, "high": value + half}


def made_suite(
    cells: tuple[str, ...] = ("plain", "stress"),
    arms: tuple[str, ...] = tuple(ARMS),
    outliers: tuple[str, ...] = ("", "8x4", "8x16", "32x4", "32x16"),
    probed: tuple[str, ...] = PROBED,
    steps: int = 60,
) -> Numbers:
    """`cells` and `probed` may be empty."""
    rng = np.random.default_rng(0)
    return {
        **{"schema": 1, "suite": "made", "title": "A made suite", "question": "Does it learn?"},
        **{"label": "emulated (CPU)", "identity": "abc123", "settings": {"steps": steps, "lr": 1e-4}},
        "learned": [{"cell": cell, "gain": interval(0.47, 0.04), "learned": cell != "broken"} for cell in cells],
        "outcomes": [_outcome(cell, arm, steps) for cell in cells for arm in arms],
        "comparisons": [c for cell in cells for c in _comparisons(cell, arms)],
        "curves": [_curve(rng, cell, arm, steps) for cell in cells for arm in arms],
        "probe": [_probe(arm, o, ref) for o in outliers for arm in probed for ref in ("bf16", "w4")],
        "probe_comparisons": [
            {"where": "start/w4", "metric": "probe/gap_mean", "arm": "quads", "against": "quads-random"}
            | {"difference": -1e-4, "low": -6e-4, "high": 4e-4, "mde": 8e-4, "pairs": 768}
        ] * bool(probed),
        "layers": [
            {"policy": "start", "outliers": o, "layer": layer, "draws": 3}
            | {"weights": 0.002, "activations": 0.004 + 0.001 * layer, "both": 0.006, "rac": 0.003}
            for o in outliers for layer in range(4)
        ] * bool(probed),
        "hypotheses": _hypotheses() if cells else [],
        "noted": ["plain: 1 half-written record dropped and recomputed"],
    }  # fmt: skip


SUITE: Numbers = {
    "variants": [
        {"name": "plain", "settings": {}, "expect": "every arm learns"},
        {"name": "stress", "settings": {"lr": 3e-4}, "expect": ""},
    ]
}


def write_suite(folder: Path, summary: Numbers, stamp: Numbers | None = STAMP) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "suite.json").write_text(json.dumps({"suite": SUITE, "identity": summary["identity"]}))
    if stamp is not None:
        (folder / "stamp.json").write_text(json.dumps(stamp))
    return folder


def _outcome(cell: str, arm: str, steps: int) -> Numbers:
    gap, accuracy = ARMS.get(arm, (1e-2, 0.9))
    fell = [{"seed": 2, "step": 41, "rule": "reward"}]
    return {
        **{"cell": cell, "arm": arm, "seeds": list(range(8)), "steps": steps, "finished": 8},
        **{"accuracy": interval(accuracy, 0.01), "trainer_accuracy": interval(accuracy + 0.002, 0.01)},
        **{"reward_last": interval(accuracy - 0.07, 0.02), "gap_mean": interval(gap, gap / 10)},
        **{"gap_p99": interval(15 * gap, gap), "gap_max": 300 * gap, "k3": gap**2, "ess": 1 - gap},
        **{"gap_tokens": 800_000, "gap_first": interval(gap, gap / 8), "gap_last": interval(1.2 * gap, gap / 8)},
        "collapsed": fell if (arm, cell) == ("nvfp4", "stress") else [],
        **{"rollout_tokens_per_s": 18_000 * (1 - 30 * gap), "step_tokens_per_s": 1300.0, "memory_gib": None},
    }


def _comparisons(cell: str, arms: tuple[str, ...]) -> list[Numbers]:
    pairs = [(arm, "bf16") for arm in arms if arm != "bf16"] + [("quads", "nvfp4")] * ("quads" in arms)
    metrics = {"outcome/accuracy": (-0.01, 0.02), "run/gap_mean": (0.01, 0.002)}
    return [
        {"cell": cell, "metric": metric, "arm": arm, "against": against, "difference": d, "low": d - h, "high": d + h}
        | {"mde": 1.4 * h, "pairs": 8, "steps": 60}
        for metric, (d, h) in metrics.items()
        for arm, against in pairs
    ]


def _curve(rng: np.random.Generator, cell: str, arm: str, steps: int) -> Numbers:
    gap, accuracy = ARMS.get(arm, (1e-2, 0.9))
    noise = rng.lognormal(0.0, 0.15, steps)
    at = list(range(0, steps + 1, 10))
    mid = np.linspace(0.48, accuracy, len(at))
    return {
        **{"cell": cell, "arm": arm, "steps": list(range(1, steps + 1))},
        "accuracy": {"steps": at, "value": mid.tolist(), "low": (mid - 0.02).tolist(), "high": (mid + 0.02).tolist()},
        "reward": (np.linspace(0.4, accuracy, steps) * noise**0.3).tolist(),
        **{f"gap_{name}": (factor * gap * noise).tolist() for name, factor in (("mean", 1), ("p99", 15), ("max", 90))},
    }


def _probe(arm: str, outliers: str, reference: str) -> Numbers:
    channels, _, scale = outliers.partition("x")
    size = 0.004 * (1 + int(channels or 0) * int(scale or 0) / 16)
    factor = {"bf16": 0.001, "engine": 0.02, "w16a4": 0.9, "fp8": 0.3, "w4a16": 0.5, "quads-full": 0.15}.get(arm, 1.0)
    if "quads" in arm and arm != "quads-full":
        ratio = float(arm.partition("rac_ratio=")[2] or 0.5)
        factor = 1 - ratio * (0.6 if "random" in arm else 0.8)
    gap = size * factor * (1.2 if reference == "bf16" else 1.0)
    return {
        **{"policy": "start", "outliers": outliers, "arm": arm, "reference": reference, "tokens": 1800, "draws": 3},
        **{
            "gap_mean": interval(gap, gap / 12),
            "gap_p99": interval(12 * gap, gap),
            "gap_max": interval(90 * gap, 9 * gap),
        },
        **{"kl": interval(gap**2, gap**2 / 5), "router_flips": interval(min(gap, 0.5), gap / 20)},
    }


def _hypotheses() -> list[Numbers]:
    made = (
        ("supported", "lower", -0.006, 0.001, 0.0, "QAT lowers the gap", "run/gap_mean", "qat", "nvfp4"),
        ("refuted", "lower", 0.003, 0.001, 0.0, "RAC's choice beats chance", "probe/gap_mean", "quads", "quads-random"),
        ("undecided", "equal", -0.01, 0.025, 0.02, "QUADS keeps BF16's accuracy", "outcome/accuracy", "quads", "bf16"),
    )
    found = [
        {"id": f"h{i}", "claim": claim, "source": "abstract", "metric": metric, "arm": arm, "against": against}
        | {"where": "start/w4" if metric.startswith("probe/") else "plain", "direction": direction, "margin": margin}
        | {"verdict": verdict, "difference": d, "low": d - h, "high": d + h, "mde": 1.4 * h, "pairs": 8}
        | {"why": f"the interval says {verdict}"}
        for i, (verdict, direction, d, h, margin, claim, metric, arm, against) in enumerate(made)
    ]
    missing = dict.fromkeys(("difference", "low", "high", "mde"))
    return [*found, {**found[0], "id": "h3", "verdict": "undecided", "pairs": 0, "why": "not measured", **missing}]
