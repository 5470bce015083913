"""How a kernel under test is called, what it must return, and how that is read. docs/conformance.md has the prose.

    quantizer(x, outer) -> (packed, scales) or (packed, scales, outer)        quantizer(x) where outer is "own"
    gemm(a_packed, a_scales, b_packed, b_scales, alpha, out_dtype) -> [M, N] in out_dtype
    moe(a_packed, a_scales, w_packed, w_scales, alphas, counts, out_dtype) -> [T, N] in out_dtype

x [M, K]; packed uint8 or float4_e2m1fn_x2 [M, K/2], even K index in the low nibble; scales uint8 or float8_e4m3fn,
[M, K/16] (linear) or the bytes of a swizzled layout in any shape; outer and alpha float32 []. moe: w_packed
[E, N, K/2], w_scales [E, N, K/16] (each expert swizzled for itself), a_scales of all experts in order (each from a row
tile of its own where swizzled), alphas [E], or [E, shards] where equal parts of N have outer scales of
their own; counts int32 [E].
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from quads.emulation import layout as layouts

Kind = Literal["quantizer", "gemm", "moe"]
KINDS: tuple[Kind, ...] = ("quantizer", "gemm", "moe")
ATTRIBUTE = "nvfp4_protocol"  # a callable may carry a dict of these fields

CHOICES: dict[str, tuple[Any, ...]] = {
    "outer": ("multiplier", "divisor", "own"),
    "layout": ("linear", "128x4", "8x4"),
    "granularity": ("tensor", "token"),
}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_BYTES = (torch.uint8, torch.float8_e4m3fn)
_PACKED = (torch.uint8, torch.float4_e2m1fn_x2)


class ContractError(Exception):
    """A callable broke the protocol: `rule` is what (shape, dtype, device, type), the message says how."""

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(message)
        self.rule = rule


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """What a callable takes.

    outer: the outer scale is given as a multiplier g = amax/2688, as a divisor 2688/amax, or derived by the callable.
    layout: of block scales. dtypes: of x, and of outputs of products. device: where it wants tensors.
    row_multiple, k_multiple: the shapes it takes. shards: parts of N with their own alpha (moe).
    """

    outer: str = "multiplier"
    layout: str = "linear"
    granularity: str = "tensor"
    dtypes: tuple[str, ...] = ("bfloat16",)
    device: str = "cpu"
    row_multiple: int = 1
    k_multiple: int = 16
    shards: int = 1

    def __post_init__(self) -> None:
        for field, choices in CHOICES.items():
            if getattr(self, field) not in choices:
                raise ValueError(f"protocol: {field} = {getattr(self, field)!r} is not one of {', '.join(choices)}")
        for name in self.dtypes:
            if name not in DTYPES:
                raise ValueError(f"protocol: dtype {name!r} is not one of {', '.join(DTYPES)}")
        if not self.dtypes or self.k_multiple % 16 or min(self.k_multiple, self.row_multiple, self.shards) < 1:
            raise ValueError("protocol: dtypes must not be empty, k_multiple a multiple of 16, counts at least 1")

    @classmethod
    def of(cls, fn: Callable[..., Any], overrides: dict[str, Any] | None = None) -> Protocol:
        """The protocol that `fn` carries as `nvfp4_protocol`, or by its signature; `overrides` win."""
        fields = dict(getattr(fn, ATTRIBUTE, {})) | {k: v for k, v in (overrides or {}).items() if v is not None}
        known = [field.name for field in dataclasses.fields(cls)]
        for key in fields:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                raise ValueError(f"protocol: field {key!r} is unknown; did you mean {near[0] if near else known}?")
        if "outer" not in fields and _required(fn) == 1:
            fields["outer"] = "own"
        return cls(**{**fields, "dtypes": tuple(fields.get("dtypes", cls.dtypes))})


def _required(fn: Callable[..., Any]) -> int | None:
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return None
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.default is p.empty and p.kind in positional for p in parameters)


@dataclass(frozen=True)
class Location:
    """Where a callable is written, for annotations."""

    file: str
    line: int


def load_callable(spec: str) -> Callable[..., Any]:
    """The callable `pkg.mod:fn` or `path/to/file.py:fn`. ValueError, in one line, where there is none."""
    module_name, _, attribute = spec.rpartition(":")
    if not module_name or not attribute:
        raise ValueError(f"callable {spec!r}: expected pkg.mod:function or path/to/file.py:function")
    try:
        module = _from_file(Path(module_name)) if module_name.endswith(".py") else importlib.import_module(module_name)
    except (ImportError, SyntaxError, OSError) as error:
        raise ValueError(f"callable {spec!r}: cannot import {module_name}: {error}") from error
    target: Any = module
    for part in attribute.split("."):
        if not hasattr(target, part):
            near = difflib.get_close_matches(part, dir(target), n=1)
            raise ValueError(f"callable {spec!r}: {module_name} has no {part!r}" + (f"; {near[0]!r}?" if near else ""))
        target = getattr(target, part)
    if not callable(target):
        raise ValueError(f"callable {spec!r}: it is a {type(target).__name__}, not callable")
    return target


def _from_file(path: Path) -> Any:
    if not path.is_file():
        raise ImportError(f"no file {path}")
    name = f"nvfp4_under_test_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def location(fn: Callable[..., Any]) -> Location | None:
    """File and first line of `fn`, where Python knows them."""
    code = getattr(inspect.unwrap(fn), "__code__", None)
    return Location(code.co_filename, code.co_firstlineno) if code else None


@dataclass(frozen=True)
class Quantized:
    """A quantiser's answer in one form: nibbles [M, K], linear scale bytes [M, K/16], padding bytes, outer or None."""

    codes: Tensor
    scales: Tensor
    padding: Tensor
    outer: Tensor | None = None


def read_quantized(result: Any, shape: tuple[int, int], protocol: Protocol) -> Quantized:
    """`result` of a quantiser for x of `shape`; ContractError that names the rule it breaks."""
    rows, k = shape
    if not isinstance(result, tuple | list) or len(result) not in (2, 3):
        raise ContractError("type", f"returned {_describe(result)}: expected (packed, scales) or (packed, scales, g)")
    packed, scales = result[0], result[1]
    packed = _bytes("packed codes", packed, _PACKED, protocol)
    scales = _bytes("block scales", scales, _BYTES, protocol)
    if tuple(packed.shape) != (rows, k // 2):
        raise ContractError("shape", f"packed codes of shape {tuple(packed.shape)}: expected {(rows, k // 2)}")
    linear, padding = read_scales(scales, rows, k // 16, protocol)
    outer = _outer(result[2]) if len(result) == 3 else None
    return Quantized(layouts.unpack(packed), linear, padding, outer)


def read_scales(scales: Tensor, rows: int, blocks: int, protocol: Protocol) -> tuple[Tensor, Tensor]:
    """Linear bytes [rows, blocks] and the padding bytes (flat) of scales in the protocol's layout."""
    if protocol.layout == "linear":
        if tuple(scales.shape) != (rows, blocks):
            raise ContractError("shape", f"block scales of shape {tuple(scales.shape)}: expected {(rows, blocks)}")
        return scales, scales.new_zeros(0)
    form = layouts.LAYOUTS[protocol.layout]
    padded = layouts.padded_shape(rows, blocks, form)
    if scales.numel() != padded[0] * padded[1]:
        raise ContractError(
            "shape",
            f"block scales of {scales.numel()} bytes: {rows} x {blocks} in layout {form.name} take "
            f"{padded[0]} x {padded[1]} = {padded[0] * padded[1]} bytes",
        )
    whole = layouts.unswizzle(scales.reshape(padded), *padded, form)
    inside = torch.zeros(padded, dtype=torch.bool)
    inside[:rows, :blocks] = True
    return whole[:rows, :blocks].contiguous(), whole[~inside]


def write_scales(scales: Tensor, protocol: Protocol, *, poison: int = 0) -> Tensor:
    """Linear bytes [..., M, B] in the protocol's layout. `poison` fills padding rows (never padding columns)."""
    if protocol.layout == "linear":
        return scales
    form = layouts.LAYOUTS[protocol.layout]
    rows, _ = layouts.padded_shape(scales.shape[-2], scales.shape[-1], form)
    padded = torch.nn.functional.pad(scales, (0, 0, 0, rows - scales.shape[-2]), value=poison)
    return layouts.swizzle(padded, form)


def read_product(result: Any, shape: tuple[int, int], dtype: torch.dtype, protocol: Protocol) -> Tensor:
    """Output of a product; ContractError that names the rule it breaks."""
    if not isinstance(result, Tensor):
        raise ContractError("type", f"returned {_describe(result)}: expected a tensor")
    _same_device("output", result, protocol)
    if tuple(result.shape) != shape:
        raise ContractError("shape", f"output of shape {tuple(result.shape)}: expected {shape}")
    if result.dtype != dtype:
        raise ContractError("dtype", f"output has dtype {result.dtype}: asked for {dtype}")
    return result.detach().cpu().contiguous()


def _bytes(name: str, value: Any, dtypes: tuple[torch.dtype, ...], protocol: Protocol) -> Tensor:
    if not isinstance(value, Tensor):
        raise ContractError("type", f"{name} are {_describe(value)}: expected a tensor")
    _same_device(name, value, protocol)
    if value.dtype not in dtypes:
        raise ContractError("dtype", f"{name} have dtype {value.dtype}: expected {' or '.join(map(str, dtypes))}")
    return value.detach().cpu().contiguous().view(torch.uint8)


def _same_device(name: str, value: Tensor, protocol: Protocol) -> None:
    if value.device.type != torch.device(protocol.device).type:
        raise ContractError("device", f"{name} on {value.device}: the input is on {protocol.device}")


def _outer(value: Any) -> Tensor:
    outer = torch.as_tensor(value).detach().cpu().float()
    return outer.reshape(()) if outer.numel() == 1 else outer


def _describe(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"
