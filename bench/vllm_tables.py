"""The results of the vLLM script of the GPU as text: one table a part, ratios with their goals."""

from __future__ import annotations

import math
from typing import Any

Results = dict[str, dict[str, Any]]

GOALS = (("quads-static", "fp8", 1.16), ("quads-static", "nvfp4-marlin", 1.0), ("quads-static", "nvfp4", 0.92))
_NONE = float("nan")


def tables(results: dict[str, Results]) -> str:
    """Every part that has results."""
    makers = {"smoke": smoke, "stock": stock, "compare": compare, "throughput": throughput}
    return "\n\n".join(make(results[part]) for part, make in makers.items() if results.get(part))


def smoke(cases: Results) -> str:
    """Engine terms beside what a nudge of the embeddings does, and the verdicts."""
    lines = [f"{'recipe':24}{'engine mean / max':>20}{'nudge':>9}{'quantised':>11}{'batch':>9}{'decode':>9}  verdicts"]
    for name, case in cases.items():
        if "error" in case:
            lines.append(f"{name:24}  {case['error']}")
            continue
        pair = f"{_at(case, 'agreement', 'engine', 'mean'):.4f} / {_at(case, 'agreement', 'engine', 'max'):.3f}"
        numbers = (
            _at(case, "agreement", "nudge", "mean"),
            _at(case, "agreement", "quantisation", "mean"),
            _at(case, "batch", "prefill", "mean"),
            _at(case, "batch", "decode", "mean"),
        )
        row = f"{numbers[0]:9.4f}{numbers[1]:11.4f}{numbers[2]:9.4f}{numbers[3]:9.4f}"
        lines.append(f"{name:24}{pair:>20}{row}  {_verdicts(case)}")
    return "\n".join(lines)


def _verdicts(case: dict[str, Any]) -> str:
    wanted = {
        "A-B-A": ("refit", "aba_equal"),
        "storages": ("refit", "same_storages"),
        "refuses NaN": ("refusal", "old_weights_serve"),
        "finite": ("sampling", "finite"),
        "repeatable": ("sampling", "repeatable"),
    }
    said = [f"{label} {'yes' if case.get(a, {}).get(b) else 'NO'}" for label, (a, b) in wanted.items()]
    failed = [
        f"{name}: {check['error']}" for name, check in case.items() if isinstance(check, dict) and "error" in check
    ]
    return ", ".join([*said, *failed])


def stock(cases: Results) -> str:
    """Whether vLLM's own loaders filled in our bytes, and how far its log-probabilities are from W4A16."""
    lines = [f"{'export':26}{'bytes equal':>12}{'code bytes':>12}{'to W4A16 mean / max':>24}{'to bf16 mean':>14}"]
    for name, case in cases.items():
        pair = f"{_at(case, 'w4a16', 'mean'):.4f} / {_at(case, 'w4a16', 'max'):.3f}"
        said = f"{case.get('layers_equal')!s:>12}{case.get('code_bytes', 0):>12}{pair:>24}"
        lines.append(f"{name:26}{said}{_at(case, 'bf16', 'mean'):14.4f}  {case.get('error', '')}")
    return "\n".join(lines)


def compare(cases: Results) -> str:
    """Gap, accuracy and throughput of each arm."""
    lines = [f"{'arm':10}{'gap mean':>12}{'p99':>10}{'max':>10}{'tokens/s':>10}{'sync s':>8}  accuracy"]
    for name, case in cases.items():
        keys = ("gap/mean", "gap/p99", "gap/max", "throughput/rollout_tokens_per_s", "time/sync_s")
        a, b, c, d, e = (float(case.get(key, _NONE)) for key in keys)
        lines.append(
            f"{name:10}{a:12.3g}{b:10.3g}{c:10.3g}{d:10.0f}{e:8.2f}  {case.get('accuracy', case.get('error'))}"
        )
    return "\n".join(lines)


def throughput(arms: Results) -> str:
    """Output tokens a second by arm and load, then each ratio with its goal."""
    loads = list(dict.fromkeys(load for arm in arms.values() for load in arm.get("tokens_per_s", {})))
    head = "".join(f"{load:>10}" for load in loads)
    lines = [f"{'tokens/s':22}{head}   weights     peak   refit  A-B-A   together-alone"]
    for name, arm in arms.items():
        row = "".join(f"{_at(arm, 'tokens_per_s', load):10.0f}" for load in loads)
        refits = arm.get("refit_s") or [_NONE]
        memory = f"{arm.get('weights_gib', _NONE):8.2f} G {arm.get('peak_gib', _NONE):6.1f} G"
        why = arm.get("error") or arm.get("refit_error") or ""
        batch = _at(arm, "batch", "prefill", "mean")
        said = f"{refits[-1]:6.2f} s  {arm.get('aba_equal', '-')!s:>5}  {batch:8.4f}  {why[:100]}"
        lines.append(f"{name:22}{row}{memory}{said}")
    for ours, theirs, goal in GOALS:
        ratios = [_ratio(arms, ours, theirs, load) for load in loads]
        measured = [ratio for ratio in ratios if not math.isnan(ratio)]
        met = "met" if measured and len(measured) == len(ratios) and min(measured) >= goal else "missed or unmeasured"
        lines.append(
            f"{ours + ' / ' + theirs:28}" + "".join(f"{r:10.3f}" for r in ratios) + f"  goal >= {goal} ({met})"
        )
    return "\n".join(lines)


def _ratio(arms: Results, ours: str, theirs: str, load: str) -> float:
    a, b = (_at(arms.get(arm, {}), "tokens_per_s", load) for arm in (ours, theirs))
    return a / b if b else _NONE


def _at(case: dict[str, Any], *path: str) -> float:
    value: Any = case
    for key in path:
        value = value.get(key, {}) if isinstance(value, dict) else {}
    return float(value) if isinstance(value, int | float) else _NONE
