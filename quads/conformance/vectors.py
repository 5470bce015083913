"""Golden vectors as files: one safetensors file and a JSON manifest, made deterministically and verified by hash.

Folder: `nvfp4-vectors.safetensors`, `nvfp4-vectors.json`. The manifest gives each tensor's dtype, shape, SHA-256,
meaning and evidence class. Nothing depends on a random generator, a thread count or the order of a float sum: the same
version of the format has the same bytes everywhere. A copy is shipped in this package (`SHIPPED`).
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from quads.conformance.vector_sets import Vector, all_vectors

FORMAT, VERSION = "nvfp4-vectors", 1
TENSORS, MANIFEST = f"{FORMAT}.safetensors", f"{FORMAT}.json"
SHIPPED = Path(__file__).with_name("data")


def make(folder: Path) -> dict[str, Any]:
    """Write both files into `folder` (made where missing); returns the manifest."""
    vectors = all_vectors()
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: v.tensor.clone().contiguous() for name, v in vectors.items()}
    (folder / TENSORS).write_bytes(save(tensors, {"format": FORMAT}))
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "file": TENSORS,
        "sha256": hashlib.sha256((folder / TENSORS).read_bytes()).hexdigest(),
        "tensors": {name: _entry(v) for name, v in sorted(vectors.items())},
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n", "utf-8")
    return manifest


def _entry(v: Vector) -> dict[str, Any]:
    return {
        "dtype": str(v.tensor.dtype).removeprefix("torch."),
        "shape": list(v.tensor.shape),
        "sha256": hashlib.sha256(raw_bytes(v.tensor)).hexdigest(),
        "meaning": v.meaning,
        "evidence": v.evidence,
    }


def raw_bytes(x: Tensor) -> bytes:
    """The tensor's bytes, row-major, little-endian."""
    return x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Manifest and tensors of `folder`. ValueError where they are missing, malformed or of another version."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder / MANIFEST}: no manifest of golden vectors ({error})") from error
    if (manifest.get("format"), manifest.get("version")) != (FORMAT, VERSION):
        raise ValueError(f"{folder / MANIFEST}: expected {FORMAT} version {VERSION}")
    try:
        with safe_open(folder / TENSORS, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except Exception as error:  # safetensors raises its own kinds
        raise ValueError(f"{folder / TENSORS}: cannot be read ({error})") from error
    return manifest, tensors


def verify(folder: Path, *, recompute: bool = True) -> list[str]:
    """What is wrong with the vectors in `folder`, one line each; empty where all is well.

    Hashes of the file and of every tensor; with `recompute` also every tensor against this emulator.
    """
    manifest, tensors = read(folder)
    wrong = []
    if hashlib.sha256((folder / TENSORS).read_bytes()).hexdigest() != manifest["sha256"]:
        wrong.append(f"{TENSORS}: its SHA-256 is not the manifest's")
    listed = manifest["tensors"]
    wrong += [f"{name}: in one of the two files only" for name in sorted(set(listed) ^ set(tensors))]
    for name in sorted(set(listed) & set(tensors)):
        if hashlib.sha256(raw_bytes(tensors[name])).hexdigest() != listed[name]["sha256"]:
            wrong.append(f"{name}: its SHA-256 is not the manifest's")
    return wrong + (_recomputed(tensors) if recompute else [])


def _recomputed(tensors: dict[str, Tensor]) -> list[str]:
    wrong = []
    for name, vector in sorted(all_vectors().items()):
        if name not in tensors:
            wrong.append(f"{name}: missing")
        elif raw_bytes(tensors[name]) != raw_bytes(vector.tensor):
            wrong.append(f"{name}: this emulator gives other bytes")
    return wrong
