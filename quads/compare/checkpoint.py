"""The state of one arm as one safetensors file: master weights, AdamW moments and the step.

No random state is kept: every draw comes from a generator seeded by (seed, step). Nothing is pickled. The file is
replaced whole, so that after a crash it holds the last finished step.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor, nn

from quads.compare.config import CompareError
from quads.compare.records import write_atomically
from quads.models import ModelError, open_safetensors

_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


def save_state(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None, step: int, identity: str) -> None:
    """Write parameters and moments; `identity` says which run they belong to. No optimiser: a run that is finished."""
    tensors = {f"model/{name}": parameter.detach() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for moment, value in (optimizer.state.get(parameter, {}) if optimizer else {}).items():
            tensors[f"{moment}/{name}"] = value
    cpu = {key: value.cpu().contiguous() for key, value in tensors.items()}
    write_atomically(path, save(cpu, metadata={"step": str(step), "identity": identity}))


def load_state(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, identity: str) -> int:
    """Read parameters and moments into `model` and `optimizer`; returns the step, 0 where there is no file."""
    if not path.exists():
        return 0
    with open_safetensors(path) as handle:
        metadata = handle.metadata() or {}
        if metadata.get("identity") != identity:
            raise CompareError(f"{path} belongs to another run: choose another --out, or remove it to start again")
        stored = {key: handle.get_tensor(key) for key in handle.keys()}  # noqa: SIM118 (safe_open is no mapping)
    for name, parameter in model.named_parameters():
        _copy(path, parameter, stored, name)
        moments = {moment: stored[f"{moment}/{name}"] for moment in _MOMENTS if f"{moment}/{name}" in stored}
        if moments:
            place = {key: value.to(parameter.device) for key, value in moments.items() if key != "step"}
            # A fused optimiser counts steps on its parameters' device.
            fused = bool(optimizer.defaults.get("fused"))
            optimizer.state[parameter] = {**place, "step": moments["step"].to(parameter.device if fused else "cpu")}
    return int(metadata["step"])


def _copy(path: Path, parameter: Tensor, stored: dict[str, Tensor], name: str) -> None:
    value = stored.get(f"model/{name}")
    if value is None or value.shape != parameter.shape:
        raise ModelError(f"{path} lacks tensor {name} of shape {tuple(parameter.shape)}: remove it to start again")
    with torch.no_grad():
        parameter.copy_(value)
