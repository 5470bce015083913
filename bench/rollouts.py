"""Rollouts in vLLM as results: the part `throughput` of bench/h200_vllm.py (DIR/vllm.json), run here or before.

Each arm serves some decoder layers of Qwen3-30B-A3B with the same random weights, for the same prompts. The script
times arms one after the other and gives a rate a load, no samples: results have no interval.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quads.bench import peers
from quads.bench.results import Against, Result, case_name
from quads.compare.records import Record

ARMS = {  # arm: numerics, variant, implementation
    "nvfp4": ("nvfp4", "", "quads.vllm"),
    "quads-static": ("quads", "static", "quads.vllm"),
    "quads-batch": ("quads", "batch", "quads.vllm"),
    "quads-token": ("quads", "token", "quads.vllm"),
    "quads-token-invariant": ("quads", "token, batch-invariant", "quads.vllm"),
    "bf16": ("bf16", "", "vllm"),
    "fp8": ("fp8", "", "vllm.deep_gemm"),
    "fp8-triton": ("fp8", "", "vllm.triton"),
    "nvfp4-marlin": ("w4a16", "", "vllm.marlin"),
}
BASE = "nvfp4"
TOKENS = 128  # in and out, of every load of equal requests
MODEL = {"hidden": 2048, "experts": 128, "inner": 768}
SHORTEST = 300.0  # seconds within which arms start side by side and are measured


def results(path: Path, stamp: str) -> Iterator[Result]:
    """Results of a vllm.json; ValueError where it is not one."""
    try:
        document = json.loads(path.read_text())
        arms, layers = document["results"]["throughput"], int(document["options"]["layers"])
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} holds no throughput of bench/h200_vllm.py: {type(error).__name__} {error}") from None
    for name in (n for n in ARMS if n in arms):
        for batch, rate in arms[name].get("tokens_per_s", {}).items():
            if batch.isdigit() and rate:
                yield _result(name, int(batch), layers, rate, arms.get(BASE, {}).get("tokens_per_s", {}), stamp)


def lines(path: Path) -> Iterator[Result | Record]:
    """The script's stamp, results that carry its key, then the arms that gave none."""
    stamp = json.loads(path.read_text()).get("stamp", {})
    key = hashlib.sha256(json.dumps(stamp, sort_keys=True).encode()).hexdigest()[:12]
    found = list(results(path, key))
    yield {"kind": "stamp", **stamp, "of": "rollout", "stamp": key}
    yield from found
    yield from failures(path)


def failures(path: Path) -> Iterator[Record]:
    """Arms that gave no rate, with their reason."""
    arms = json.loads(path.read_text()).get("results", {}).get("throughput", {})
    for name, arm in arms.items():
        if not arm.get("tokens_per_s"):
            yield {"kind": "failed", "case": f"rollout/{name}", "why": arm.get("error", "ended before it was measured")}


def _result(name: str, batch: int, layers: int, rate: float, base: dict[str, float], stamp: str) -> Result:
    numerics, variant, implementation = ARMS[name]
    shape = {"batch": batch, "tokens_in": TOKENS, "tokens_out": TOKENS, "layers": layers, **MODEL}
    against, ours = None, base.get(str(batch))
    if ours and name != BASE:
        first = case_name("rollout", ARMS[BASE][0], ARMS[BASE][2], shape)
        against = Against(
            case=first, implementation=ARMS[BASE][2], ratio=ours / rate, low=ours / rate, high=ours / rate
        )
    return Result(
        op="rollout", numerics=numerics, variant=variant, implementation=implementation, shape=shape, against=against,
        seconds=batch * TOKENS / rate, method="vLLM, CUDA graphs, wall-clock, median of repeats", stamp=stamp,
    )  # fmt: skip


def missing(left: float | None) -> str:
    """Why rollouts are not run here."""
    reason = peers.missing_vllm()
    if reason or left is None or left >= SHORTEST:
        return reason
    return f"starting and measuring {len(ARMS)} engines takes {SHORTEST:.0f} s or more; {max(0.0, left):.0f} s are left"


def run(folder: Path, left: float | None, *, layers: int = 8) -> Path:
    """Run the script for at most `left` seconds; its vllm.json."""
    options = ["--parts", "throughput", "--layers", str(layers), "--budget", f"{left or 600.0:.0f}"]
    command: list[Any] = [sys.executable, "-m", "quads.bench.h200_vllm", "--out", folder / "vllm", *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder / "vllm" / "vllm.json"
