"""One model with one draw of tokens: what an arm's records and a layer's terms are made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn

from quads.attribution.batch import TokenBatch
from quads.compare.records import Record
from quads.compute import compute
from quads.suites import probe_numerics
from quads.suites.probe_numerics import ACTIVATIONS, BF16, Numerics, Pair
from quads.suites.probe_records import compare
from quads.suites.probe_scoring import Scored, Scorer, prefill

LAYER_TERMS = {"weights": "w4a16", "activations": ACTIVATIONS, "both": "nvfp4", "rac": "quads"}
_DRAW_SEEDS = 1_000_003  # the random control of one draw shares no layer's selection with the next


@dataclass
class Tokens:
    """One model with one draw of tokens on its device; references are scored once."""

    model: nn.Module
    batch: TokenBatch
    calibration: TokenBatch
    scorer: Scorer
    compute: str
    draw: int
    _references: dict[Numerics, Scored] = field(default_factory=dict)

    def score(self, numerics: Numerics) -> Scored:
        """The tokens under `numerics`; a static selection is first made on the calibration's tokens."""
        return self._score(numerics, self.scorer)

    def reference(self, numerics: Numerics) -> Scored:
        """The tokens under a trainer's numerics: in one forward, as trainers score."""
        if numerics not in self._references:
            self._references[numerics] = self._score(numerics, prefill)
        return self._references[numerics]

    def _score(self, numerics: Numerics, scorer: Scorer) -> Scored:
        modules, recipe = numerics.modules(self.model), numerics.recipe
        arithmetic = compute(self.compute, self.batch.tokens.device)
        with arithmetic, numerics.entered(self.model, seed=_DRAW_SEEDS * (self.draw + 1)):
            if recipe.rac_ratio and recipe.rac_scope == "static":
                scorer(self.model, self.calibration, modules)
            return scorer(self.model, self.batch, modules)


def arm_records(tokens: Tokens, pairs: dict[str, Pair], tag: Record) -> Iterator[Record]:
    """One record a reference; the arm is scored once."""
    scored: dict[Numerics, Scored] = {}
    for reference, (ours, theirs) in pairs.items():
        if ours not in scored:
            scored[ours] = tokens.score(ours)
        yield {**tag, "reference": reference, **compare(scored[ours], tokens.reference(theirs), tokens.batch)}


def layer_record(tokens: Tokens, layer: int, tag: Record) -> Iterator[Record]:
    """Mean gap to BF16 of each term in `layer` alone."""
    reference = tokens.reference(Numerics("rollout", BF16)).logps.double()
    terms = {}
    for term, name in LAYER_TERMS.items():
        scored = tokens.score(probe_numerics.in_layer(probe_numerics.arm(name), layer))
        terms[term] = float((scored.logps.double() - reference).abs().mean())
    yield {**tag, **terms}
