"""The checkpoints that a probe measures: the start of a suite or a variant's trained BF16 policy, plain or stressed."""

from __future__ import annotations

import copy
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quads.compare.config import CompareConfig
from quads.compare.policy import Policy, load_policy
from quads.models import open_safetensors
from quads.state import load_master_state
from quads.stress import Stress, add_outliers, parse
from quads.suites.config import Suite, SuiteError

START = "start"


class UntrainedError(SuiteError):
    """A policy whose run has left no checkpoint yet."""


@dataclass(frozen=True)
class Checkpoint:
    """A policy on the CPU, in evaluation mode; `digest` of its weights says which records belong to it."""

    name: str
    policy: Policy
    config: CompareConfig
    digest: str

    @property
    def model(self) -> Any:
        return self.policy.model

    def compute_on(self, device: torch.device) -> str:
        """Arithmetic of what is not quantised: bfloat16 on CUDA, where the kernels give no other, else the suite's."""
        return "bfloat16" if device.type == "cuda" else self.config.compute


def load(suite: Suite, out: Path, name: str) -> Checkpoint:
    """The policy called `name`: "start", or a variant whose BF16 arm of seed 0 is trained under `out`.

    SuiteError where there is no such variant, UntrainedError where there is no checkpoint.
    """
    variants = {variant.name: variant for variant in suite.variants}
    if name != START and name not in variants:
        raise SuiteError(f"probe policy '{name}' is neither '{START}' nor a variant ({', '.join(variants)})")
    settings = {**suite.settings, **(variants[name].settings if name in variants else {})}
    config = CompareConfig(out=out, arms=("bf16",), seeds=(0,), **settings)
    trained = out / name / "arms" / "bf16-seed0" / "state.safetensors"
    if name != START and not trained.exists():
        raise UntrainedError(f"probe policy '{name}' has no checkpoint {trained}: run the suite's arm bf16 first")
    policy = load_policy(config, lambda step, loss: None)
    model = policy.model.cpu().eval()
    if name != START:
        _load_trained(model, trained)
    return Checkpoint(name, policy, config, _digest(model))


def stressed(model: nn.Module, outliers: str, device: torch.device) -> nn.Module:
    """A copy of `model` on `device` with `outliers` ("CHANNELSxSCALE", "" for none) planted."""
    copied = copy.deepcopy(model)
    planted = check_outliers(outliers)
    if planted is not None:
        try:
            add_outliers(copied, planted)
        except ValueError as error:
            raise SuiteError(f"probe outliers '{outliers}': {error}") from None
    return copied.to(device)


def check_outliers(outliers: str) -> Stress | None:
    """`outliers` as a Stress, None for the plain policy; SuiteError in one line where it is malformed."""
    try:
        return parse(outliers) if outliers else None
    except ValueError as error:
        raise SuiteError(f"probe outliers '{outliers}': {error}") from None


def _load_trained(model: nn.Module, path: Path) -> None:
    with open_safetensors(path) as handle:
        keys = [key for key in handle.keys() if key.startswith("model/")]  # noqa: SIM118 (safe_open is no mapping)
        stored = {key.removeprefix("model/"): handle.get_tensor(key) for key in keys}
    own = model.state_dict()
    stored |= {key: value for key, value in own.items() if key not in dict(model.named_parameters())}
    load_master_state(model, stored)


def _digest(model: nn.Module) -> str:
    found = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        found.update(name.encode() + str(tensor.dtype).encode())
        found.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return found.hexdigest()[:12]
