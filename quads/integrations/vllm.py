"""QUADS in vLLM: `vllm serve MODEL --quantization quads`, `LLM(..., quantization="quads")`.

`register` is the entry point that vLLM calls in each of its processes; no vLLM file is changed. docs/vllm.md says how
to choose recipes, refit weights during RL and read log-probabilities.
"""

from __future__ import annotations

from quads.integrations.vllm_plugin import versions


def register() -> None:
    """Register the quantisation `quads` and the weight-transfer backends; harmless when called again."""
    versions.check()
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config

    from quads.integrations.vllm_plugin.config import QuadsConfig

    if "quads" not in QUANTIZATION_METHODS:
        register_quantization_config("quads")(QuadsConfig)
    from quads.integrations.vllm_plugin import transfer

    transfer.register()
