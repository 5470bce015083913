"""From log-probabilities and layer errors to the flat tables of a Diagnosis."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from quads.attribution.batch import TokenBatch
from quads.attribution.errors import Key, LocalErrors
from quads.attribution.gaps import gap_row, paired_difference, position_means, prompt_means, term_shares
from quads.attribution.result import Diagnosis
from quads.attribution.variants import (
    ENGINE,
    REFERENCE,
    TERMS,
    WEIGHTS,
    Variant,
)
from quads.gap import mean_interval

RECORDED = "recorded"
Logps = dict[str, Tensor]
_TERM_NAMES = {term.name for term in TERMS}


def add_gaps(result: Diagnosis, variants: list[Variant], logps: Logps, batch: TokenBatch) -> None:
    """gaps, paired, positions and terms of the variants that hold in every layer, and of recorded log-probabilities."""
    names = [variant.name for variant in variants]
    if batch.recorded is not None:
        logps = {**logps, RECORDED: batch.recorded}
        names.append(RECORDED)
    for name in names:
        result.gaps.append(_gap(name, REFERENCE, logps, batch))
    trainer = [v.name for v in variants if v.weights and v.activations] + names[len(variants) :]
    for name in trainer:
        result.gaps.append(_gap(name, WEIGHTS, logps, batch))
    for a, b in _pairs(variants):
        mean, low, high = paired_difference(logps[a], logps[b], logps[WEIGHTS], batch.counted)
        result.paired.append({"variant": a, "minus": b, "against": WEIGHTS, "mean": mean, "low": low, "high": high})
    for name in names:
        means = position_means((logps[name] - logps[REFERENCE]).abs(), batch.counted)
        result.positions.extend(
            {"variant": name, "position": i + 1, "gap": gap} for i, gap in enumerate(means) if gap == gap
        )


def _gap(name: str, against: str, logps: Logps, batch: TokenBatch) -> dict[str, Any]:
    return gap_row(name, against, logps[name], logps[against], batch.counted).to_dict()


def _pairs(variants: list[Variant]) -> list[tuple[str, str]]:
    """Top-residual selection against the random control and against the per-token scope, at every shared ratio."""
    top = {v.ratio: v.name for v in variants if v.scope == "batch" and 0 < v.ratio < 1}
    others = [v for v in variants if v.scope != "batch" and v.ratio in top]
    return [(top[v.ratio], v.name) for v in others]


def add_terms(result: Diagnosis, rollout: str, logps: Logps, batch: TokenBatch) -> None:
    """The gap as a telescope: reference - Q(W), Q(W) - rollout, rollout - other engine; the terms sum to the whole.

    `rollout` is the variant of the recipe's rollout numerics. The last step ends at the recorded log-probabilities, or
    without any at the emulated engine's own drift from the reference.
    """
    middle = logps[REFERENCE] if rollout == REFERENCE else logps[WEIGHTS]
    end, source = logps[rollout] + (logps[ENGINE] - logps[REFERENCE]), "emulated"
    if batch.recorded is not None:
        end, source = batch.recorded, RECORDED
    terms = {
        "weight": logps[REFERENCE] - middle,
        "activation": middle - logps[rollout],
        "engine": logps[rollout] - end,
    }
    shares = term_shares(terms, batch.counted)
    for name, value in terms.items():
        means = prompt_means(value.abs(), batch.counted)
        low, high = mean_interval(means)
        mean = float(value[batch.counted].abs().double().mean())
        result.terms.append(
            {"term": name, "source": source, "mean": mean, "low": low, "high": high, "share": shares[name]}
        )


def add_errors(result: Diagnosis, local: LocalErrors) -> None:
    """errors, sites and experts, and the layers' part of positions."""
    by_prompt, by_position = local.prompts(), local.positions()
    for (name, against), prompts in by_prompt.items():
        values = np.array([value for value in prompts if np.isfinite(value)])
        low, high = mean_interval(values)
        mean = float(values.mean())
        result.errors.append({"variant": name, "against": against, "mean": mean, "low": low, "high": high})
    for name, site in local.sites.items():
        where = {"weight": name, "layer": site.place.layer, "projection": site.place.projection}
        result.sites.append({**where, **_columns(local.relative(name))})
        if site.by_expert.shape[1] > 1:
            table = {key: errors for key, errors in local.experts(name).items() if key[0] in _TERM_NAMES}
            for expert in range(site.by_expert.shape[1]):
                errors = _columns({key: values[expert] for key, values in table.items()})
                result.experts.append({**where, "expert": expert, **errors})
    for row in result.positions:
        if (row["variant"], REFERENCE) in by_position:
            row["error"] = _finite(by_position[row["variant"], REFERENCE][row["position"]])


def _columns(errors: dict[Key, float]) -> dict[str, float | None]:
    """One flat record: `rac-50` is the error against the reference, `rac-50/weights` the one against Q(W)."""
    return {a if b == REFERENCE else f"{a}/{b}": _finite(value) for (a, b), value in errors.items()}


def _finite(value: float) -> float | None:
    return value if value == value else None  # JSON has no NaN: nothing was seen there


def add_isolated(result: Diagnosis, variants: list[Variant], logps: Logps, batch: TokenBatch) -> None:
    """isolated and projections: the gap of one term in one place alone, with the share of the places' squared sum."""
    rows = []
    for variant in variants:
        row = _gap(variant.name, REFERENCE, logps, batch)
        square = (logps[variant.name] - logps[REFERENCE])[batch.counted].double().square().mean()
        keep = {key: row[key] for key in ("mean", "low", "high", "p99", "max")}
        rows.append({"term": variant.name.partition("@")[0], **_where(variant), **keep, "square": float(square)})
    for table, key in ((result.isolated, "layer"), (result.projections, "projection")):
        mine = [row for row in rows if key in row]
        for row in mine:
            total = sum(other["square"] for other in mine if other["term"] == row["term"])
            row["share"] = row["square"] / total if total else 0.0
        table.extend(mine)


def _where(variant: Variant) -> dict[str, Any]:
    if variant.layers is not None:
        return {"layer": min(variant.layers)}
    assert variant.projections is not None
    return {"projection": min(variant.projections)}


def add_kept(result: Diagnosis, variants: list[Variant], logps: Logps, batch: TokenBatch) -> None:
    """kept: W4A4 with the worst layers in BF16."""
    worst = [row["layer"] for row in result.ranking()]
    for variant in variants:
        assert variant.layers is not None
        layers = [layer for layer in worst if layer not in variant.layers]
        result.kept.append({"layers": layers, **_gap(variant.name, REFERENCE, logps, batch)})
