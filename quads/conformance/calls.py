"""Calling a kernel under test once: errors, changed inputs, unwritten memory and chance, each told apart.

Every call is made twice. Around the second, memory that torch hands out uninitialised is filled with 0x7F (an E4M3
NaN) instead of 0x00, so bytes that the kernel forgets to write differ between the two. Memory that a C++ extension
allocates for itself is not seen that way; a difference there still shows when the allocator hands out old bytes.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quads.conformance.protocol import ContractError, Protocol

CLEAN, POISON = 0x00, 0x7F
_EMPTY = {
    "empty.memory_format",
    "empty_strided.default",
    "empty_like.default",
    "new_empty.default",
    "new_empty_strided.default",
}


@dataclass(frozen=True)
class Violation:
    """A broken rule of one call: raises, type, shape, dtype, device, mutates-input, nondeterministic, hangs, dies."""

    rule: str
    message: str


@dataclass(frozen=True)
class Outcome:
    """What a call gave: `value` as the reader returns it (None where there is none) and the rules it broke."""

    value: Any
    violations: tuple[Violation, ...] = ()


def invoke(fn: Callable[..., Any], args: tuple[Any, ...], read: Callable[[Any], Any], protocol: Protocol) -> Outcome:
    """Call `fn(*args)` twice; `read` turns a result into tensors or raises ContractError."""
    violations: list[Violation] = []
    values = []
    for fill in (CLEAN, POISON):
        given = tuple(_on_device(arg, protocol.device) for arg in args)
        before = [arg.detach().cpu().clone() if isinstance(arg, Tensor) else None for arg in given]
        try:
            with torch.no_grad(), uninitialized(fill):
                result = fn(*given)
            values.append(read(result))
        except ContractError as error:
            return Outcome(None, (Violation(error.rule, str(error)),))
        except Exception as error:
            return Outcome(None, (Violation("raises", _last_line(error)),))
        if not violations:
            violations += _mutated(given, before)
    if not same_bytes(values[0], values[1]):
        violations.append(Violation("nondeterministic", _chance(values[0], values[1])))
    return Outcome(values[0], tuple(violations))


@contextlib.contextmanager
def uninitialized(fill: int) -> Iterator[None]:
    """Uninitialised tensors of torch hold the byte `fill`."""
    with _Fill(fill):
        yield


class _Fill(TorchDispatchMode):
    def __init__(self, fill: int) -> None:
        super().__init__()
        self.fill = fill

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.__name__ in _EMPTY and isinstance(result, Tensor) and result.layout == torch.strided:
            storage = result.untyped_storage()
            if storage.nbytes():
                torch.empty(0, dtype=torch.uint8, device=result.device).set_(storage).fill_(self.fill)
        return result


def same_bytes(a: Any, b: Any) -> bool:
    """Whether two results (tensors, or dataclasses and tuples of them) hold the same bytes."""
    return all(torch.equal(_raw(x), _raw(y)) for x, y in zip(_tensors(a), _tensors(b), strict=True))


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    fields = vars(value).values() if hasattr(value, "__dataclass_fields__") else value
    return [x for field in fields if field is not None for x in _tensors(field)]


def _raw(x: Tensor) -> Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)


def _on_device(arg: Any, device: str) -> Any:
    """A copy, with the strides of a slice kept on the CPU: a kernel that writes hurts nobody."""
    if not isinstance(arg, Tensor):
        return arg
    if not arg.is_contiguous():
        return torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype, device=device).copy_(arg)
    return arg.to(device, copy=True)


def _mutated(given: tuple[Any, ...], before: list[Tensor | None]) -> list[Violation]:
    for index, (arg, old) in enumerate(zip(given, before, strict=True)):
        if old is not None and not torch.equal(_raw(arg.detach().cpu()), _raw(old)):
            return [Violation("mutates-input", f"argument {index} of shape {tuple(arg.shape)} was changed by the call")]
    return []


def _chance(a: Any, b: Any) -> str:
    for x, y in zip(_tensors(a), _tensors(b), strict=True):
        differs = (_raw(x) != _raw(y)).nonzero().flatten()
        if len(differs):
            first = int(differs[0])
            stale = int((_raw(y)[differs] == POISON).sum())
            why = f"; {stale} of them hold the poison 0x7F, memory that was never written" if stale else ""
            return (
                f"two calls with one input differ in {len(differs)} of {_raw(x).numel()} bytes, first at byte {first}: "
                f"0x{int(_raw(x)[first]):02X} then 0x{int(_raw(y)[first]):02X}{why}"
            )
    return "two calls with one input differ"


def _last_line(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno})" if frames else ""
    return " ".join(f"{type(error).__name__}: {error}".split())[:400] + where
