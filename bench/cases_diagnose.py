"""What `quads diagnose` costs, by tokens, layers and width of the model: random Qwen3-MoE models, on the CPU.

One RAC ratio, without the trials of each layer alone. Checked first: gaps are finite, the model is left as it was.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import torch

from quads.attribution import Plan, diagnose_tokens
from quads.attribution import batch as batches
from quads.bench.cases import Case, Group, Ready

PLAN = Plan(ratios=(0.5,), seeds=(0,), isolate=False)
SIZES = ((64, 2, 64), (128, 2, 64), (256, 2, 64), (64, 4, 64), (64, 8, 64), (64, 2, 128), (64, 2, 256))
VOCABULARY = 256


def groups(device: str) -> Iterator[Group]:
    """(tokens, layers, hidden) one of them growing at a time; the model is small enough for any CPU."""
    for size in SIZES if device == "cpu" else ():
        shape = dict(zip(("tokens", "layers", "hidden"), size, strict=True))
        case = Case(numerics="nvfp4", implementation="quads.attribution", ready=partial(_ready, *size))
        yield Group(op="diagnose", shape=shape, device=device, cases=(case,), quick=size == SIZES[0])


def _ready(tokens: int, layers: int, hidden: int, _: None) -> Ready:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=4, head_dim=16,
        num_key_value_heads=2, intermediate_size=2 * hidden, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=hidden // 2, max_position_embeddings=tokens,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM._from_config(config, dtype=torch.float32).eval()
    batch = batches.pad(torch.randint(0, VOCABULARY, (4, tokens // 4)).tolist())
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}

    def check() -> float:
        gaps = [row["mean"] for row in diagnose_tokens(model, batch, plan=PLAN).gaps]
        same = all(torch.equal(before[name], weight) for name, weight in model.named_parameters())
        return 0.0 if same and gaps and all(math.isfinite(gap) for gap in gaps) else math.inf

    weights = sum(w.numel() for name, w in model.named_parameters() if "experts" in name)
    return Ready(
        calls=[partial(diagnose_tokens, model, batch, plan=PLAN)], bytes=4.0 * weights, check=check, in_a_row=False
    )
