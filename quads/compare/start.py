"""The start policy: a small Qwen3-MoE that imitates an imperfect demonstrator, shipped or cached by its config's hash.

`python -m quads.compare.start FILE [START [TASK]]` makes the file again; it is the same on the same machine and
packages. `ci` is small enough for a CPU; `small` (16.5 M parameters, 32 channel blocks) wants a GPU.
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

from quads.compare.characters import ALPHABET, character_tokenizer
from quads.compare.checkpoint import load_state, save_state
from quads.compare.config import digest
from quads.compare.families import FAMILIES, FORGETFUL
from quads.compare.records import write_atomically, write_json
from quads.compare.tasks import SHIPPED_TASK, Problem, Task
from quads.compute import Arithmetic
from quads.models import ModelError, open_safetensors

_SAVE_EVERY = 200
IGNORED = -100  # a label that the loss skips


@dataclass(frozen=True, kw_only=True)
class StartConfig:
    """Model and supervised training of one start; the defaults are the shipped one's.

    held_out: how many held-out problems it never sees; a comparison on more would measure memory.
    """

    hidden: int = 128
    expert: int = 128
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    experts: int = 8
    top_k: int = 2
    task: str = SHIPPED_TASK
    held_out: int = 4096
    forgetful: float = FORGETFUL
    steps: int = 4000
    batch: int = 64
    lr: float = 2e-3
    warmup: int = 50
    decay_from: float = 0.6
    seed: int = 0

    def describe(self) -> dict[str, Any]:
        """Every field, and what the fields do not say: the task's options, the demonstrator's rule, the alphabet."""
        family = FAMILIES[self.task]
        task = {"name": self.task, "dataset": family.dataset, **family.options}
        return {**dataclasses.asdict(self), "task": task, "demonstrator": family.rule, "alphabet": ALPHABET}

    @property
    def hash(self) -> str:
        return digest(self.describe())


STARTS: dict[str, StartConfig] = {
    "ci": StartConfig(),
    "small": StartConfig(hidden=512, expert=384, heads=8, kv_heads=4, steps=1500, batch=512, lr=1e-3, warmup=100),
}


def named(start: str, task: str) -> StartConfig:
    """The start called `start`, imitating the demonstrator of `task`."""
    return dataclasses.replace(STARTS[start], task=task)


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
    """The start policy in a safetensors file or its parts (bf16), as float32; ModelError says what is wrong with it."""
    stored: dict[str, Tensor] = {}
    for part in [path] if path.exists() else parts(path):
        with open_safetensors(part) as handle:
            stored |= {name: handle.get_tensor(name).float() for name in handle.keys()}  # noqa: SIM118
    model = build(config)
    wanted = model.state_dict()
    for name, value in wanted.items():
        if name not in stored or stored[name].shape != value.shape:
            raise ModelError(f"{path} lacks tensor {name} of shape {tuple(value.shape)}")
    model.load_state_dict(stored)
    return model


def find(config: StartConfig) -> Path | None:
    """The shipped or cached file of `config` (its parts may stand in for it), None where it must be trained."""
    shipped = resources.files("quads").joinpath("data", f"start-{config.hash}.safetensors")
    for path in (Path(str(shipped)), cache_folder() / f"start-{config.hash}.safetensors"):
        if path.exists() or parts(path):
            return path
    return None


def parts(path: Path) -> list[Path]:
    """The files that `cut` made of `path`; empty unless all of them are there."""
    found = sorted(path.parent.glob(f"{path.stem}-of-*.safetensors"))
    wanted = int(found[0].stem.split("-")[-2]) if found else 0
    return found if len(found) == wanted else []


def cut(path: Path, folder: Path, limit: int = 15 * 2**20) -> list[Path]:
    """Copy `path` into `folder` in parts of at most `limit` bytes of tensors (one tensor at least): NAME-of-N-i."""
    with open_safetensors(path) as handle:
        tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    groups: list[dict[str, Tensor]] = [{}]
    for name, tensor in tensors.items():
        size = sum(value.nbytes for value in groups[-1].values())
        if groups[-1] and size + tensor.nbytes > limit:
            groups.append({})
        groups[-1][name] = tensor
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / f"{path.stem}-of-{len(groups)}-{i}.safetensors" for i in range(1, len(groups) + 1)]
    for target, group in zip(written, groups, strict=True):
        write_atomically(target, save(group, metadata={"format": "pt"}))
    return written


def cache_folder() -> Path:
    """`$QUADS_CACHE`, else `quads` under `$XDG_CACHE_HOME` or ~/.cache."""
    if "QUADS_CACHE" in os.environ:
        return Path(os.environ["QUADS_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "quads"


def train(config: StartConfig, path: Path, progress: Callable[[int, float], None] = lambda step, loss: None) -> None:
    """Fine-tune from scratch and write bf16 safetensors with a JSON beside it; an interrupted run goes on.

    On CUDA products are bfloat16 over float32 master weights.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, state = build(config).to(device).train(), path.with_suffix(".state")
    adam: dict[str, Any] = {"lr": config.lr, "betas": (0.9, 0.98), "weight_decay": 0.01}
    optimizer = torch.optim.AdamW(model.parameters(), fused=device.type == "cuda", **adam)
    done = load_state(state, model, optimizer, config.hash)
    tokenizer, problems = character_tokenizer(), Task(config.task, short=True, held_out=config.held_out).start()
    arithmetic = Arithmetic("bfloat16" if device.type == "cuda" else "float32")
    for step in range(config.steps):
        batch = [next(problems) for _ in range(config.batch)]
        if step < done:
            continue
        texts = [(p.prompt, _demonstrate(config, p, step * config.batch + i)) for i, p in enumerate(batch)]
        for group in optimizer.param_groups:
            group["lr"] = config.lr * schedule(config, step)
        with arithmetic.on(model):
            loss = _update(model, optimizer, *(part.to(device) for part in encode(tokenizer, texts)))
        progress(step + 1, loss)
        if (step + 1) % _SAVE_EVERY == 0:
            save_state(state, model, optimizer, step + 1, config.hash)
    tensors = {name: value.bfloat16().cpu().contiguous() for name, value in model.state_dict().items()}
    write_atomically(path, save(tensors, metadata={"format": "pt"}))
    about = {"hash": config.hash, "command": f"python -m quads.compare.start {path.name}"}
    write_json(path.with_suffix(".json"), {**about, "config": config.describe()})
    state.unlink(missing_ok=True)


def _demonstrate(config: StartConfig, problem: Problem, number: int) -> str:
    return FAMILIES[config.task].demonstrate(problem.entry, random.Random(number), config.forgetful)


def schedule(config: StartConfig, step: int) -> float:
    """Share of the learning rate: linear warm-up, flat, then linear decay to 5 %."""
    late = (step / config.steps - config.decay_from) / (1 - config.decay_from)
    return min(1.0, (step + 1) / config.warmup, max(0.05, 1 - max(0.0, late)))


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[tuple[str, str]]) -> tuple[Tensor, Tensor]:
    """Token ids and labels (int64, [rows, longest]) of (prompt, answer) pairs; only answers carry loss."""
    token = tokenizer.get_vocab()
    prompts = [[token[c] for c in prompt] for prompt, _ in texts]
    answers = [[*(token[c] for c in answer), tokenizer.eos_token_id] for _, answer in texts]
    longest = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    ids, labels = [], []
    for prompt, answer in zip(prompts, answers, strict=True):
        rest = longest - len(prompt) - len(answer)
        ids.append(prompt + answer + [tokenizer.pad_token_id] * rest)
        labels.append([IGNORED] * len(prompt) + answer + [IGNORED] * rest)
    return torch.tensor(ids), torch.tensor(labels)


def _update(model: Any, optimizer: torch.optim.Optimizer, ids: Tensor, labels: Tensor) -> float:
    loss = model(input_ids=ids, labels=labels).loss
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(loss.detach())


if __name__ == "__main__":
    torch.set_num_threads(1)
    _, name, which, task = [*sys.argv, *["", "ci", SHIPPED_TASK][len(sys.argv) - 1 :]]
    chosen = named(which, task)
    target = Path(name or f"start-{chosen.hash}.safetensors")
    train(chosen, target, lambda step, loss: print(f"{step} {loss:.4f}", flush=True) if step % 100 == 0 else None)
