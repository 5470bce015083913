"""What a diagnosis found, as flat tables: the JSON document, the report and the advice are made of these."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from quads.attribution.variants import BOTH, REFERENCE


@dataclass
class Diagnosis:
    """Tables of a diagnosis, each a list of flat records; `to_dict` is the JSON document.

    gaps: every variant against the BF16 reference, and against Q(W) in BF16 (what a QAT trainer computes).
    errors: relative output error by variant, mean over weights, with its interval over prompts.
    sites, experts: relative output error of each weight and of each expert. isolated, projections: gap of one term in
    one decoder layer or one kind of projection alone. positions: by token position. paired: differences between two
    variants' gaps, with interval. kept: W4A4 with the worst layers in BF16. terms: shares of the total.
    """

    tokens: int
    prompts: int
    layers: int
    weights: int
    gaps: list[dict[str, Any]] = field(default_factory=list)
    errors: list[dict[str, Any]] = field(default_factory=list)
    sites: list[dict[str, Any]] = field(default_factory=list)
    experts: list[dict[str, Any]] = field(default_factory=list)
    isolated: list[dict[str, Any]] = field(default_factory=list)
    projections: list[dict[str, Any]] = field(default_factory=list)
    positions: list[dict[str, Any]] = field(default_factory=list)
    paired: list[dict[str, Any]] = field(default_factory=list)
    kept: list[dict[str, Any]] = field(default_factory=list)
    terms: list[dict[str, Any]] = field(default_factory=list)
    advice: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {"schema": 1, **asdict(self)}

    def gap(self, variant: str, against: str = REFERENCE) -> dict[str, Any]:
        """The gap record of `variant`; KeyError where it was not tried."""
        for row in self.gaps:
            if (row["variant"], row["against"]) == (variant, against):
                return row
        raise KeyError(f"no gap of {variant} against {against}")

    def ranking(self) -> list[dict[str, Any]]:
        """Decoder layers, the one whose W4A4 alone moves log-probabilities most first."""
        rows = [row for row in self.isolated if row["term"] == BOTH]
        return sorted(rows, key=lambda row: -row["mean"])
