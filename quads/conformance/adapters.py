"""Ready adapters: other projects' quantisers and products under this harness's protocol; the table is adapters.toml."""

from __future__ import annotations

import difflib
import importlib.util
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from quads.conformance.protocol import Kind
from quads.errors import CannotRunHereError

_PIP = {
    "compressed_tensors": "compressed-tensors",
    "modelopt": "nvidia-modelopt",
    "flashinfer": "flashinfer-python",
    "transformer_engine": "transformer-engine[pytorch]",
    "sgl_kernel": "sgl-kernel",
}
_GPU = {"cuda": "a CUDA GPU", "blackwell": "FP4 tensor cores (sm_100 or newer)"}


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """One row of adapters.toml."""

    name: str
    kind: Kind
    needs: str
    wrapper: str
    source: str
    dialect: str = ""
    gpu: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    protocol: dict[str, Any] = field(default_factory=dict)

    def why_not(self) -> str | None:
        """One line that says why it cannot run here; None where it can."""
        if importlib.util.find_spec(self.needs) is None:
            return f"adapter {self.name} needs {self.needs} (pip install {_PIP.get(self.needs, self.needs)})"
        if self.gpu and not torch.cuda.is_available():
            return f"adapter {self.name} needs {_GPU[self.gpu]}; found no GPU"
        if self.gpu == "blackwell" and torch.cuda.get_device_capability()[0] < 10:
            return f"adapter {self.name} needs {_GPU[self.gpu]}; found {torch.cuda.get_device_name()}"
        return None

    def load(self) -> Callable[..., Any]:
        """The wrapper. CannotRunHereError where the package or the hardware is missing."""
        reason = self.why_not()
        if reason:
            raise CannotRunHereError(reason)
        from quads.conformance import libraries

        try:
            return getattr(libraries, self.wrapper)(**self.options)
        except ImportError as error:
            raise CannotRunHereError(f"adapter {self.name}: {error}") from error


@cache
def table() -> dict[str, Adapter]:
    """Every adapter by name."""
    rows = tomllib.loads(Path(__file__).with_name("adapters.toml").read_text("utf-8"))
    return {name: Adapter(name=name, **row) for name, row in rows.items()}


def named(name: str) -> Adapter:
    """The adapter `name`; ValueError that names the nearest otherwise."""
    if name not in table():
        near = difflib.get_close_matches(name, table(), n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(table())}"
        raise ValueError(f"no adapter {name!r}; {hint}")
    return table()[name]
