"""Rollouts in vLLM: 8 requests, 32 tokens in and out, two layers of Qwen3-30B-A3B (on a CPU a smaller model).

pytest bench/bench_rollout.py --benchmark-only; loads and arms of a whole comparison: bench/h200_vllm.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quads.bench import peers

RECIPES = {"bf16": "", "nvfp4": "nvfp4", "quads": "quads"}
REQUESTS, TOKENS, LAYERS = 8, 32, 2

pytestmark = pytest.mark.skipif(bool(peers.missing("vllm")), reason=peers.missing("vllm") or "vllm is there")


@pytest.fixture(params=list(RECIPES))
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """An engine with random weights under one recipe of the plugin, or plain bfloat16."""
    from quads import recipes
    from quads.bench import vllm_checkpoint, vllm_engines
    from quads.integrations.vllm import register
    from quads.integrations.vllm_plugin import colocate

    os.environ.update(vllm_engines.ENVIRONMENT)
    register()
    config = {**vllm_checkpoint.shape(), "num_hidden_layers": LAYERS}
    if recipe := RECIPES[request.param]:
        numerics = recipes.load(recipe).replace(rac_scope="static") if recipe == "quads" else recipes.load(recipe)
        config["quantization_config"] = {"quant_method": "quads", "recipe": numerics.to_dict()}
    (tmp_path / "config.json").write_text(json.dumps(config))
    llm = vllm_engines.start(tmp_path, load_format="dummy")
    yield llm
    colocate.stop(llm)


def test_rollout(benchmark: Any, engine: Any) -> None:
    from quads.bench.vllm_engines import generated, tokens

    prompts = tokens(REQUESTS, TOKENS)
    rows = benchmark.pedantic(generated, args=(engine, prompts, TOKENS), rounds=3, warmup_rounds=1)
    assert [len(row["tokens"]) for row in rows] == [TOKENS] * REQUESTS
    benchmark.extra_info.update(op="rollout", shape={"batch": REQUESTS, "tokens_in": TOKENS, "tokens_out": TOKENS})
