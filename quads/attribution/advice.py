"""One paragraph of advice from a diagnosis: what carries the gap, what would help, what no quantiser can fix."""

from __future__ import annotations

from quads.attribution.result import Diagnosis
from quads.attribution.variants import ACTIVATIONS, BOTH, ENGINE, WEIGHTS


def advise(result: Diagnosis) -> str:
    """The paragraph; every number in it is in the tables too."""
    return " ".join([_terms(result), *_compensation(result), *_layers(result), _engine(result)])


def _terms(result: Diagnosis) -> str:
    weight, activation, both = (result.gap(name)["mean"] for name in (WEIGHTS, ACTIVATIONS, BOTH))
    larger, ratio = ("activations", activation / weight) if activation >= weight else ("weights", weight / activation)
    left = result.gap(BOTH, WEIGHTS)["mean"]
    return (
        f"W4A4 moves a token's log-probability by {both:.4f} on average: weights alone {weight:.4f}, activations alone"
        f" {activation:.4f}; {larger} weigh {ratio:.2f} times the other. A trainer that shares Q(W) (QAT) leaves"
        f" {left:.4f}, {_percent(1 - left / both)} less."
    )


def _compensation(result: Diagnosis) -> list[str]:
    """What each RAC ratio leaves of the gap against Q(W), and whether its choice of channels beats chance."""
    start = result.gap(BOTH, WEIGHTS)["mean"]
    rungs = [row for row in result.gaps if row["variant"].startswith("rac-") and row["against"] == WEIGHTS]
    if not rungs:
        return []
    steps = ", ".join(
        f"{_ratio(row['variant'])} {row['mean']:.4f} (-{_percent(1 - row['mean'] / start)})" for row in rungs
    )
    text = [f"RAC on top of it leaves, by ratio: {steps}."]
    control = [row for row in result.paired if row["minus"].startswith("random-")]
    if control:
        better = sorted({_ratio(row["variant"]) for row in control if row["high"] < 0}, key=_number)
        worse = {_ratio(row["variant"]) for row in control if not row["high"] < 0}
        sure = [ratio for ratio in better if ratio not in worse]
        where = "at " + ", ".join(sure) if sure else "at no ratio"
        text.append(f"Choosing channels by residual norm beats every random draw beyond its interval {where}.")
    return text


def _layers(result: Diagnosis) -> list[str]:
    ranking = result.ranking()
    if not ranking or not result.kept:
        return []
    both = result.gap(BOTH)["mean"]
    tried = "; ".join(
        f"layer{'s' if len(row['layers']) > 1 else ''} {', '.join(map(str, row['layers']))} in BF16: {row['mean']:.4f}"
        f" (-{_percent(1 - row['mean'] / both)})"
        for row in result.kept
    )
    share = _percent(sum(row["share"] for row in ranking[:3]))
    return [f"The three worst layers alone make {share} of the layers' summed squared effects. Keeping {tried}."]


def _engine(result: Diagnosis) -> str:
    recorded = [row for row in result.terms if row["term"] == "engine" and row["source"] == "recorded"]
    if recorded:
        drift, share = recorded[0]["mean"], recorded[0]["share"]
        return (
            f"The rest of the recorded gap, {drift:.4f} on average ({_percent(share)} of its square), is engine drift"
            " or numerics that this recipe does not describe: no quantiser setting removes it."
        )
    drift = result.gap(ENGINE)["mean"]
    return f"The rest is engine drift: another implementation of the same BF16 arithmetic already moves {drift:.4f}."


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _ratio(variant: str) -> str:
    return variant.partition("-")[2].partition("-")[0] + " %"


def _number(ratio: str) -> float:
    return float(ratio.removesuffix(" %"))
