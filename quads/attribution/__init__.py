"""Where a log-probability gap comes from: weight, activation and engine terms of any transformers causal LM.

variants -> products and inputs (numerics of one layer) -> layerwise (all variants through a model at once) ->
errors and gaps (statistics) -> tables -> result -> advice.
"""

from quads.attribution.batch import TokenBatch, encode
from quads.attribution.diagnosis import Plan, default_recipe, diagnose, diagnose_tokens
from quads.attribution.result import Diagnosis

__all__ = ["Diagnosis", "Plan", "TokenBatch", "default_recipe", "diagnose", "diagnose_tokens", "encode"]
