"""Tensors in and out of files: .npy and .safetensors in, .safetensors out, for the command line.

Checkpoints of whole layers are the business of `quads.emulation.checkpoints`; here a tensor becomes its bytes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from quads.emulation.quantizers import NVFP4Tensor


def read_tensor(path: str | Path, name: str | None = None) -> Tensor:
    """The tensor of an .npy file, or `name` of a .safetensors file (not needed where the file has one tensor).

    ValueError, in one line, on a missing or unreadable file, an unknown suffix, or a name that the file has not.
    """
    path = Path(path)
    if path.suffix not in (".npy", ".safetensors"):
        raise ValueError(f"{path}: only .npy and .safetensors files can be read")
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    return _read_npy(path) if path.suffix == ".npy" else _read_safetensors(path, name)


def write_safetensors(path: str | Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write `tensors` to `path`. ValueError where the suffix is not .safetensors or the folder does not exist."""
    path = Path(path)
    if path.suffix != ".safetensors":
        raise ValueError(f"{path}: output is written as .safetensors")
    if not path.parent.is_dir():
        raise ValueError(f"{path}: folder {path.parent} does not exist")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata)


def quantized_tensors(q: NVFP4Tensor, name: str = "tensor") -> dict[str, Tensor]:
    """`q` as <name>.codes uint8 [..., K/2] (even K low), <name>.scales uint8 [..., K/16], <name>.outer float32."""
    return {f"{name}.codes": q.packed, f"{name}.scales": q.scales, f"{name}.outer": q.outer}


def _read_npy(path: Path) -> Tensor:
    try:
        array = np.load(path, allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise ValueError(f"{path}: not a readable .npy file: {error}") from None
    if array.dtype not in (np.float32, np.float16):
        raise ValueError(f"{path}: dtype {array.dtype}; NVFP4 quantisation takes float32 or float16 from .npy")
    return torch.from_numpy(np.ascontiguousarray(array))


def _read_safetensors(path: Path, name: str | None) -> Tensor:
    try:
        with safe_open(path, "pt") as file:
            names = list(file.keys())
            if name is None and len(names) != 1:
                raise ValueError(f"{path}: holds {len(names)} tensors; name one of {', '.join(names[:8])}")
            if name is not None and name not in names:
                raise ValueError(f"{path}: no tensor {name!r}; it has {', '.join(names[:8])}")
            return file.get_tensor(name or names[0])
    except SafetensorError as error:
        raise ValueError(f"{path}: not a readable .safetensors file: {error}") from None
