"""Streaming: the same diagnosis as with the model in memory, within the memory bound that the module states."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quads import models, streaming
from quads.attribution import Plan, TokenBatch, diagnose_tokens
from quads.attribution.layerwise import decoder_layers
from quads.models import ModelError
from tests.quads.tiny import tiny_model, tokens

PLAN = Plan(ratios=(0.5,), scopes=("batch", "random"), seeds=(0,), keep=(1,))


def batch() -> TokenBatch:
    real = torch.ones(2, 12, dtype=torch.bool)
    return TokenBatch(tokens(), real, real[:, 1:])


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "mixtral", "olmoe", "gpt_oss"])
def test_a_streamed_diagnosis_equals_one_in_memory(family: str, tmp_path: Path) -> None:
    tiny_model(family, dtype=torch.bfloat16).save_pretrained(tmp_path)
    loaded, scope = streaming.load(tmp_path)
    streamed = diagnose_tokens(loaded.model, batch(), plan=PLAN, scope=scope)
    resident = diagnose_tokens(models.load(tmp_path).model, batch(), plan=PLAN)
    assert json.dumps(streamed.to_dict()) == json.dumps(resident.to_dict())


def test_shards_and_tied_embeddings_stream_too(tmp_path: Path) -> None:
    model = tiny_model("llama", dtype=torch.bfloat16)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    loaded, scope = streaming.load(tmp_path)
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight
    streamed = diagnose_tokens(loaded.model, batch(), plan=PLAN, scope=scope)
    assert json.dumps(streamed.to_dict()) == json.dumps(diagnose_tokens(model, batch(), plan=PLAN).to_dict())


def test_one_layer_is_resident_inside_its_scope_and_none_outside(tmp_path: Path) -> None:
    tiny_model("qwen3_moe", dtype=torch.bfloat16).save_pretrained(tmp_path)
    loaded, scope = streaming.load(tmp_path)

    def resident() -> list[bool]:
        return [not any(p.is_meta for p in layer.parameters()) for layer in decoder_layers(loaded.model)]

    assert resident() == [False, False]
    with scope(1):
        assert resident() == [False, True]
    with pytest.raises(KeyError), scope(0):
        assert resident() == [True, False]
        raise KeyError
    assert resident() == [False, False]


def test_a_tensor_that_is_not_stored_or_misshapen_is_named(tmp_path: Path) -> None:
    tiny_model("qwen3_moe", dtype=torch.bfloat16).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.experts.3.down_proj.weight"]
    tensors["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(3, 3)
    save_file(tensors, path, metadata={"format": "pt"})
    _, scope = streaming.load(tmp_path)
    with pytest.raises(ModelError, match=r"lacks tensor model\.layers\.1\.mlp\.experts\.down_proj"), scope(1):
        pass
    with (
        pytest.raises(ModelError, match=r"layers\.0\.self_attn\.q_proj\.weight is \(3, 3\), the configuration says"),
        scope(0),
    ):
        pass


_CHILD = """
import json, resource, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from quads import streaming
from quads.attribution import Plan, TokenBatch, diagnose_tokens
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
loaded, scope = streaming.load(Path(sys.argv[1]))
ids = torch.arange(24).reshape(2, 12)
batch = TokenBatch(ids, torch.ones_like(ids).bool(), torch.ones(2, 11).bool())
plan = Plan(ratios=(0.5,), scopes=("batch",), seeds=(0,), isolate=False)
with scope(0): torch.rand(512, 512) @ torch.rand(512, 512)   # libraries warm: what follows is the diagnosis itself
before = peak()
diagnose_tokens(loaded.model, batch, plan=plan, scope=scope)
print(json.dumps(peak() - before))
"""


@pytest.mark.slow
def test_memory_stays_within_the_stated_bound(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=512, intermediate_size=2048, num_hidden_layers=32, num_attention_heads=8
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    total = sum(p.numel() * 2 for p in model.parameters())
    layer = sum(p.numel() * 2 for p in model.model.layers[0].parameters())
    largest = 512 * 2048
    del model
    grown = json.loads(
        subprocess.run([sys.executable, "-c", _CHILD, str(tmp_path)], capture_output=True, check=True).stdout
    )
    bound = 3 * layer + 64 * largest  # states and logits of 24 tokens are nothing here
    assert bound < total / 2, "the stand-in must be too big to be held by accident"
    assert grown < bound, f"grew by {grown / 2**20:.0f} MiB, bound {bound / 2**20:.0f}, model {total / 2**20:.0f}"
