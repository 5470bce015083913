"""QUADS in vLLM: `vllm serve MODEL --quantization quads`, `LLM(..., quantization="quads")`.

`register` is the entry point that vLLM calls in each of its processes; no vLLM file is changed. docs/vllm.md says how
to choose recipes, refit weights during RL and read log-probabilities.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from quads.integrations.vllm_plugin import versions
from quads.qdq import PackedWeight


def register() -> None:
    """Register the quantisation `quads` and the weight-transfer backends; harmless when called again."""
    versions.check()
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config

    from quads.integrations.vllm_plugin.config import QuadsConfig

    if "quads" not in QUANTIZATION_METHODS:
        register_quantization_config("quads")(QuadsConfig)
    from quads.integrations.vllm_plugin import transfer

    transfer.register()


def refit(
    llm: Any, weights: Iterable[tuple[str, Tensor] | PackedWeight], checksums: Mapping[str, str] | None = None
) -> None:
    """Replace weights of a running `vllm.LLM` of this process, in place, all or none; then drop its caches.

    `weights`: full-precision tensors under checkpoint names and packed weights (`quads.sync.export_weights`) under the
    trainer's, in any mixture; layers that it does not name stay. Running requests start over.
    checksums: those of the packed weights, from `checksums` at the sender.
    ValueError, naming the layer, leaves the old weights and caches.
    """
    from vllm.config import set_current_vllm_config

    from quads.integrations.vllm_plugin.refit import apply_update

    config = llm.llm_engine.vllm_config

    def apply(model: Any) -> None:
        with set_current_vllm_config(config), torch.no_grad():
            apply_update(model, config.model_config, weights, checksums)

    llm.apply_model(apply)
    llm.reset_prefix_cache(reset_running_requests=True)


def engine_weights(llm: Any) -> Iterator[PackedWeight]:
    """The packed weights that a `vllm.LLM` of this process multiplies by, one at a time, for `quads.sync.verify_sync`.

    A GPU keeps them in its kernels' order alone: asking for all of them at once takes their memory a second time.
    """
    from quads.integrations.vllm_plugin.packed import held

    return llm.apply_model(held)[0]


def checksums(weights: Iterable[PackedWeight]) -> dict[str, str]:
    """sha256 of each packed weight, for the receiver to compare: taken by the sender, before any transport."""
    from quads.integrations.vllm_plugin import packed

    return packed.checksums(weights)


def abort_refit(llm: Any) -> None:
    """End a weight-update session of any of the plugin's backends that cannot be finished; old weights are kept.

    Nothing happens where no session is open. An engine of another process reports errors by their text only.
    """
    try:
        llm.update_weights({"update_info": {"abort": True}})
    except Exception as error:
        if not any(text in str(error) for text in ("weight update aborted", "start_weight_update must be called")):
            raise
