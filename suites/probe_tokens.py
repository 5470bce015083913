"""The fixed token sequences of a probe: prompts and completions that the BF16 policy sampled once, kept in one file.

Every draw has held-out problems of its own, one completion each. One draw more than is measured is for calibration:
a `static` RAC selection is made on it. Carry the file to another machine to score the same tokens there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from quads.attribution.batch import TokenBatch, pad
from quads.compare.config import digest
from quads.compare.records import write_atomically
from quads.compute import compute
from quads.integrations.trl import end_tokens
from quads.models import open_safetensors
from quads.sampling import sample
from quads.suites.config import Probe, SuiteError
from quads.suites.probe_policies import Checkpoint

_DRAW_SEEDS = 1_000_003
_PARTS = ("tokens", "real", "counted")


def fixed_tokens(checkpoint: Checkpoint, probe: Probe, path: Path, device: torch.device) -> list[TokenBatch]:
    """`probe.draws` batches and the calibration's, on the CPU: from `path`, or sampled now on `device` into it."""
    wanted = _asked(checkpoint, probe)
    if not path.exists() or _stored(path) != wanted:
        model = checkpoint.model.to(device)
        with compute(checkpoint.compute_on(device), device):
            batches = [_sampled(checkpoint, model, probe.sequences, draw) for draw in range(probe.draws + 1)]
        checkpoint.model.cpu()
        stored = {f"{i}/{part}": _compact(getattr(batch, part)) for i, batch in enumerate(batches) for part in _PARTS}
        write_atomically(path, save(stored, metadata={"asked": wanted}))
    with open_safetensors(path) as handle:
        return [_read(handle, draw) for draw in range(probe.draws + 1)]


def content(batches: list[TokenBatch]) -> str:
    """Digest of the tokens themselves and of which count."""
    return digest([getattr(batch, part).tolist() for batch in batches for part in _PARTS])


def on_device(batch: TokenBatch, device: torch.device) -> TokenBatch:
    """`batch` with its tensors on `device`."""
    return TokenBatch(*(getattr(batch, part).to(device) for part in _PARTS))


def _compact(tensor: Tensor) -> Tensor:
    return tensor.to(torch.uint8 if tensor.dtype == torch.bool else torch.int32)


def _asked(checkpoint: Checkpoint, probe: Probe) -> str:
    """Digest of what was asked for: weights, how many draws of how many sequences, and their length."""
    return digest([checkpoint.digest, probe.sequences, probe.draws, checkpoint.config.max_new_tokens])


def _stored(path: Path) -> str:
    with open_safetensors(path) as handle:
        return (handle.metadata() or {}).get("asked", "")


def _read(handle: Any, draw: int) -> TokenBatch:
    tokens, real, counted = (handle.get_tensor(f"{draw}/{part}") for part in _PARTS)
    return TokenBatch(tokens.long(), real.bool(), counted.bool())


def _sampled(checkpoint: Checkpoint, model: Any, sequences: int, draw: int) -> TokenBatch:
    policy = checkpoint.policy
    problems = policy.task.held_out[draw * sequences : (draw + 1) * sequences]
    if len(problems) < sequences:
        raise SuiteError(
            f"probe needs {(draw + 1) * sequences} held-out problems for its draws and calibration, settings.held_out"
            f" is {checkpoint.config.held_out}"
        )
    prompts = [policy.tokenizer(problem.prompt)["input_ids"] for problem in problems]
    completions = sample(
        model,
        prompts,
        samples=1,
        max_new_tokens=checkpoint.config.max_new_tokens,
        eos=end_tokens(model, policy.tokenizer),
        pad=policy.tokenizer.pad_token_id,
        generator=torch.Generator().manual_seed(_DRAW_SEEDS * (draw + 1)),
    )
    rows = [prompt + tokens for prompt, tokens in zip(prompts, completions.tokens, strict=True)]
    return pad(rows, [len(prompt) for prompt in prompts])
