"""Golden vectors as one plain binary file, for C and C++: docs/conformance-vectors.md is its specification.

Little-endian. Header of 16 bytes: "NVFP4VEC", u32 version 1, u32 count. Then `count` entries of 128 bytes:
char name[88] (zero-terminated), u32 dtype, u32 ndim, u32 dims[4], u64 offset from the start of the file, u64 bytes.
Data are row-major, each tensor at a multiple of 64.
"""

from __future__ import annotations

import struct
from pathlib import Path

import torch

from quads.conformance.vectors import raw_bytes, read

MAGIC, VERSION = b"NVFP4VEC", 1
DTYPES = {torch.uint8: 1, torch.bfloat16: 2, torch.float32: 3, torch.int32: 4}
_ENTRY = struct.Struct("<88sII4IQQ")
_HEADER = struct.Struct("<8sII")
_ALIGN = 64


def export(folder: Path, out: Path) -> int:
    """Write the vectors of `folder` to the file `out`; the number of tensors."""
    _, tensors = read(folder)
    names = sorted(tensors)
    offset = _aligned(_HEADER.size + _ENTRY.size * len(names))
    entries, body = [], []
    for name in names:
        tensor, data = tensors[name], raw_bytes(tensors[name])
        if len(name.encode()) >= 88 or tensor.ndim > 4:
            raise ValueError(f"vector {name!r}: names take 87 bytes and shapes 4 dimensions at most")
        dims = [*tensor.shape, *[0] * (4 - tensor.ndim)]
        entries.append(_ENTRY.pack(name.encode(), DTYPES[tensor.dtype], tensor.ndim, *dims, offset, len(data)))
        body.append(data + bytes(_aligned(len(data)) - len(data)))
        offset += len(body[-1])
    head = _HEADER.pack(MAGIC, VERSION, len(names)) + b"".join(entries)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(head + bytes(_aligned(len(head)) - len(head)) + b"".join(body))
    return len(names)


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
