"""A checkpoint larger than memory, one decoder layer at a time out of its safetensors files.

The model is built without storage ("meta"); embeddings, final norm and head are read once; `scope(i)` reads decoder
layer i and lets it go again. A layer-wise attribution (quads.attribution.layerwise) then never holds more than

    embeddings + final norm + head
  + 3 x one decoder layer                    (master, codes, Q(W): each in the checkpoint's dtype)
  + 64 bytes x the largest [N, K] matrix     (temporaries of its quantisation; of one expert where they are fused)
  + variants x tokens x hidden               (states, in the checkpoint's dtype)
  + 10 bytes x 1024 x vocabulary             (logits of one step)

of which the first line is there before, and the rest while it runs.

Checkpoints store experts one by one (`experts.3.gate_proj.weight`); transformers >= 5 fuses them (`gate_up_proj`
[experts, 2 N, K]). Both are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from quads import models
from quads.attribution.layerwise import LayerScope, decoder_layers
from quads.models import LoadedModel, ModelError

# A fused expert tensor -> the per-expert weights that make one of its slices, stacked along N.
_FUSED = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
}
# Where a checkpoint's name of a module differs from the module tree's.
_RENAMED = ((".mlp.", ".mlp."), (".mlp.", ".block_sparse_moe."))


def load(folder: Path, *, dtype: torch.dtype = torch.bfloat16) -> tuple[LoadedModel, LayerScope]:
    """The model of `folder` without its decoder layers' weights, and the scope that brings them in one at a time."""
    checkpoint = Checkpoint(folder, dtype)
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    inside = {id(parameter) for layer in decoder_layers(model) for parameter in layer.parameters()}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if id(parameter) not in inside and not (name.startswith("lm_head.") and _tied(model)):
            _put(model, name, checkpoint.read(name, parameter.shape))
    if _tied(model):
        model.tie_weights()
    _rebuild_buffers(model)
    loaded = LoadedModel(model.eval(), models.tokenizer(folder), str(folder), "streamed layer by layer")
    return loaded, lambda index: _resident_layer(model, checkpoint, index)


class Checkpoint:
    """The safetensors files of a folder as one table of tensors."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self.folder, self.dtype = folder, dtype
        self.files: dict[str, Path] = {}
        for path in models.check_folder(folder):
            with models.open_safetensors(path) as handle:
                self.files.update(dict.fromkeys(handle.keys(), path))

    def read(self, name: str, shape: torch.Size) -> Tensor:
        """The tensor that the module tree calls `name`; ModelError where it is not stored."""
        for here, there in _RENAMED:
            stored = name.replace(here, there)
            if stored in self.files:
                return self._checked(self._tensor(stored), name, shape)
            parts = self._expert_parts(stored, shape)
            if parts is not None:
                return self._checked(self._stacked(parts, shape), name, shape)
        raise ModelError(f"{self.folder} lacks tensor {name}: every weight must be stored")

    def _expert_parts(self, name: str, shape: torch.Size) -> list[list[str]] | None:
        """Stored names of each expert's slices of the fused tensor `name`; None where it is none."""
        parent, _, leaf = name.rpartition(".")
        for family in _FUSED.get(leaf, ()):
            names = [[f"{parent}.{expert}.{part}.weight" for part in family] for expert in range(shape[0])]
            if all(part in self.files for expert in names for part in expert):
                return names
        return None

    def _stacked(self, parts: list[list[str]], shape: torch.Size) -> Tensor:
        result = torch.empty(shape, dtype=self.dtype)
        for expert, names in enumerate(parts):
            result[expert] = torch.cat([self._tensor(name) for name in names])
        return result

    def _tensor(self, name: str) -> Tensor:
        with models.open_safetensors(self.files[name]) as handle:
            # A copy: what the file's mapping returns would keep its pages.
            return handle.get_tensor(name).to(self.dtype, copy=True)

    def _checked(self, tensor: Tensor, name: str, shape: torch.Size) -> Tensor:
        if tensor.shape != shape:
            raise ModelError(f"{self.folder}: {name} is {tuple(tensor.shape)}, the configuration says {tuple(shape)}")
        return tensor


@contextmanager
def _resident_layer(model: nn.Module, checkpoint: Checkpoint, index: int) -> Iterator[None]:
    """Decoder layer `index` with its weights, inside the context only."""
    layer = decoder_layers(model)[index]
    prefix = next(name for name, module in model.named_modules() if module is layer)
    empty = dict(layer.named_parameters())
    try:
        for name, parameter in empty.items():
            _put(layer, name, checkpoint.read(f"{prefix}.{name}", parameter.shape))
        yield
    finally:
        for name, parameter in empty.items():
            _put(layer, name, parameter)


def _put(root: nn.Module, name: str, value: Tensor) -> None:
    parent, _, leaf = name.rpartition(".")
    module = root.get_submodule(parent)
    module._parameters[leaf] = value if isinstance(value, nn.Parameter) else nn.Parameter(value, requires_grad=False)


def _tied(model: nn.Module) -> bool:
    config: Any = model.config
    return bool(getattr(config, "tie_word_embeddings", False))


def _rebuild_buffers(model: nn.Module) -> None:
    """Buffers are no part of a checkpoint: modules that own some (rotary embeddings) are made again, with storage."""
    for name, module in list(model.named_modules()):
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            if not re.search(r"rotary", type(module).__name__, re.IGNORECASE):
                raise ModelError(f"{type(model).__name__}.{name} has buffers that cannot be streamed")
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, type(module)(model.config))  # type: ignore[call-arg, arg-type]
