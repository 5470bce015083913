"""The start policy: a small Qwen3-MoE that imitates an imperfect demonstrator, shipped and cached by its config's hash.

`python -m quads.compare.start FILE` makes the file again; it is the same on the same machine and packages.
"""

from __future__ import annotations

import dataclasses
import os
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from quads.compare import tasks
from quads.compare.characters import character_tokenizer
from quads.compare.checkpoint import load_state, save_state
from quads.compare.config import digest
from quads.compare.records import write_atomically, write_json
from quads.compare.tasks import Task
from quads.models import ModelError, open_safetensors

_SAVE_EVERY = 200
IGNORED = -100  # a label that the loss skips


@dataclass(frozen=True, kw_only=True)
class StartConfig:
    """Model and supervised training of the shipped start."""

    hidden: int = 128
    expert: int = 128
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    experts: int = 8
    top_k: int = 2
    forgetful: float = tasks.FORGETFUL
    steps: int = 4000
    batch: int = 64
    lr: float = 2e-3
    warmup: int = 50
    decay_from: float = 0.6
    seed: int = 0

    def describe(self) -> dict[str, Any]:
        """Every field, and what the fields do not say: the task's options and the demonstrator's rule."""
        task = {"name": tasks.SHIPPED_TASK, **tasks.OPTIONS[tasks.SHIPPED_TASK]}
        return {**dataclasses.asdict(self), "task": task, "demonstrator": tasks.DEMONSTRATOR}

    @property
    def hash(self) -> str:
        return digest(self.describe())


def build(config: StartConfig) -> Qwen3MoeForCausalLM:
    """The untrained model, seeded, float32."""
    torch.manual_seed(config.seed)
    tokenizer = character_tokenizer()
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=len(tokenizer),
            hidden_size=config.hidden,
            intermediate_size=config.expert,
            moe_intermediate_size=config.expert,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            head_dim=config.hidden // config.heads,
            num_experts=config.experts,
            num_experts_per_tok=config.top_k,
            norm_topk_prob=True,
            max_position_embeddings=64,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 3:  # transformers leaves fused expert tensors uninitialised
                parameter.normal_(0.0, 0.02)
    return model


def load(path: Path, config: StartConfig) -> Qwen3MoeForCausalLM:
    """The start policy in a safetensors file (bf16), as float32; ModelError names what is wrong with the file."""
    with open_safetensors(path) as handle:
        stored = {name: handle.get_tensor(name).float() for name in handle.keys()}  # noqa: SIM118
    model = build(config)
    wanted = model.state_dict()
    for name, value in wanted.items():
        if name not in stored or stored[name].shape != value.shape:
            raise ModelError(f"{path} lacks tensor {name} of shape {tuple(value.shape)}")
    model.load_state_dict(stored)
    return model


def find(config: StartConfig) -> Path | None:
    """The shipped or cached file of `config`, None where it must be trained."""
    shipped = resources.files("quads").joinpath("data", f"start-{config.hash}.safetensors")
    for path in (Path(str(shipped)), cache_folder() / f"start-{config.hash}.safetensors"):
        if path.exists():
            return path
    return None


def cache_folder() -> Path:
    """`$QUADS_CACHE`, else `quads` under `$XDG_CACHE_HOME` or ~/.cache."""
    if "QUADS_CACHE" in os.environ:
        return Path(os.environ["QUADS_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "quads"


def train(config: StartConfig, path: Path, progress: Callable[[int, float], None] = lambda step, loss: None) -> None:
    """Fine-tune from scratch and write bf16 safetensors with a JSON beside it; an interrupted run goes on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    model, state = build(config).train(), path.with_suffix(".state")
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.98), weight_decay=0.01)
    done = load_state(state, model, optimizer, config.hash)
    tokenizer, problems = character_tokenizer(), Task(tasks.SHIPPED_TASK, short=True, held_out=512).start()
    for step in range(config.steps):
        batch = [next(problems) for _ in range(config.batch)]
        if step < done:
            continue
        texts = [(p.prompt, _demonstrate(config, p, step * config.batch + i)) for i, p in enumerate(batch)]
        for group in optimizer.param_groups:
            group["lr"] = config.lr * schedule(config, step)
        progress(step + 1, _update(model, optimizer, *encode(tokenizer, texts)))
        if (step + 1) % _SAVE_EVERY == 0:
            save_state(state, model, optimizer, step + 1, config.hash)
    tensors = {name: value.bfloat16().contiguous() for name, value in model.state_dict().items()}
    write_atomically(path, save(tensors, metadata={"format": "pt"}))
    about = {"hash": config.hash, "command": f"python -m quads.compare.start {path.name}"}
    write_json(path.with_suffix(".json"), {**about, "config": config.describe()})
    state.unlink(missing_ok=True)


def _demonstrate(config: StartConfig, problem: tasks.Problem, number: int) -> str:
    return tasks.demonstrate(problem, random.Random(number), config.forgetful)


def schedule(config: StartConfig, step: int) -> float:
    """Share of the learning rate: linear warm-up, flat, then linear decay to 5 %."""
    late = (step / config.steps - config.decay_from) / (1 - config.decay_from)
    return min(1.0, (step + 1) / config.warmup, max(0.05, 1 - max(0.0, late)))


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[tuple[str, str]]) -> tuple[Tensor, Tensor]:
    """Token ids and labels (int64, [rows, longest]) of (prompt, answer) pairs; only answers carry loss."""
    rows, labels = [], []
    for prompt, answer in texts:
        context = tokenizer(prompt)["input_ids"]
        target = [*tokenizer(answer)["input_ids"], tokenizer.eos_token_id]
        rows.append(torch.tensor(context + target))
        labels.append(torch.tensor([IGNORED] * len(context) + target))
    pad = nn.utils.rnn.pad_sequence
    return pad(rows, True, tokenizer.pad_token_id), pad(labels, True, IGNORED)


def _update(model: Any, optimizer: torch.optim.Optimizer, ids: Tensor, labels: Tensor) -> float:
    loss = model(input_ids=ids, labels=labels).loss
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(loss.detach())


if __name__ == "__main__":
    torch.set_num_threads(1)
    default = StartConfig()
    target = Path(sys.argv[1] if len(sys.argv) > 1 else f"start-{default.hash}.safetensors")
    train(default, target, lambda step, loss: print(f"{step} {loss:.4f}", flush=True) if step % 100 == 0 else None)
