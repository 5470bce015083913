"""Running a callable in a process of its own, so that a hang or a crash costs one call and not the run.

`Local` calls in this process (pytest, objects that cannot be imported); `Isolated` imports the callable in a spawned
worker, gives each call a time limit, and starts a new worker after a hang or a death. Tensors travel as bytes.
"""

from __future__ import annotations

import multiprocessing as mp
from collections.abc import Callable
from typing import Any
from typing import Protocol as Interface

import torch
from torch import Tensor

from quads.conformance import protocol as contract
from quads.conformance.calls import Outcome, Violation, invoke
from quads.conformance.protocol import Kind, Location, Protocol, Quantized

START_LIMIT = 120.0  # seconds to import torch and the package under test


class Runner(Interface):
    """Calls the kernel under test; `protocol` says how, `location` where it is written."""

    protocol: Protocol
    location: Location | None

    def call(self, kind: Kind, args: tuple[Any, ...]) -> Outcome: ...

    def close(self) -> None: ...


def perform(fn: Callable[..., Any], kind: Kind, args: tuple[Any, ...], protocol: Protocol) -> Outcome:
    """One checked call of `fn`; the value is a `Quantized`, or the output of a product."""
    if kind == "quantizer":
        shape = (args[0].shape[0], args[0].shape[1])
        given = args[:1] if protocol.outer == "own" else args
        return invoke(fn, given, lambda result: contract.read_quantized(result, shape, protocol), protocol)
    out = (args[0].shape[0], args[2].shape[-2])
    return invoke(fn, args, lambda result: contract.read_product(result, out, args[-1], protocol), protocol)


class Local:
    """Calls `fn` in this process; a hang hangs."""

    def __init__(self, fn: Callable[..., Any], protocol: Protocol) -> None:
        self._fn, self.protocol, self.location = fn, protocol, contract.location(fn)

    def call(self, kind: Kind, args: tuple[Any, ...]) -> Outcome:
        return perform(self._fn, kind, args, self.protocol)

    def close(self) -> None:
        pass


class Isolated:
    """Calls the callable `spec` in a worker with `limit` seconds a call."""

    def __init__(self, spec: str, overrides: dict[str, Any], limit: float) -> None:
        self._spec, self._overrides, self._limit = spec, overrides, limit
        self._process: Any = None
        self._start()

    def _start(self) -> None:
        context = mp.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._spec, self._overrides), daemon=True)
        self._process.start()
        theirs.close()
        if not self._connection.poll(START_LIMIT):
            self.close()
            raise ValueError(f"callable {self._spec!r}: importing it took more than {START_LIMIT:.0f} s")
        answer = self._receive()
        if answer is None:
            raise ValueError(f"callable {self._spec!r}: its process died at import")
        if isinstance(answer, Exception):
            raise answer
        self.protocol, self.location = answer

    def call(self, kind: Kind, args: tuple[Any, ...]) -> Outcome:
        if not self._process.is_alive():
            self._start()
        self._connection.send((kind, [_pack(arg) for arg in args]))
        if not self._connection.poll(2 * self._limit):
            self.close()
            return Outcome(None, (Violation("hangs", f"no answer within {self._limit:g} s a call"),))
        answer = self._receive()
        if answer is None:
            self._process.join(5)
            return Outcome(None, (Violation("dies", f"its process died (exit code {self._process.exitcode})"),))
        value, violations = answer
        return Outcome(_unpack(value), violations)

    def _receive(self) -> Any:
        try:
            return self._connection.recv()
        except (EOFError, ConnectionResetError):
            return None

    def close(self) -> None:
        if self._process.is_alive():
            self._process.kill()
        self._process.join(5)
        self._connection.close()


def resolve(spec: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The callable of `pkg.mod:fn`, `file.py:fn` or `adapter:name`, and the protocol fields that an adapter brings."""
    if spec.startswith("adapter:"):
        from quads.conformance import adapters

        adapter = adapters.named(spec.removeprefix("adapter:"))
        return adapter.load(), adapter.protocol
    return contract.load_callable(spec), {}


def protocol_of(spec: str, overrides: dict[str, Any]) -> tuple[Callable[..., Any], Protocol]:
    """The callable and its protocol; `overrides` (None = not given) win over the adapter's and the callable's own."""
    fn, fields = resolve(spec)
    return fn, Protocol.of(fn, fields | {k: v for k, v in overrides.items() if v is not None})


def _serve(connection: Any, spec: str, overrides: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    try:
        fn, protocol = protocol_of(spec, overrides)
    except Exception as error:
        connection.send(error if isinstance(error, ValueError | RuntimeError) else ValueError(f"{spec!r}: {error!r}"))
        return
    invoke(torch.neg, (torch.zeros(1),), lambda result: result, Protocol())  # first use loads much, outside any limit
    connection.send((protocol, contract.location(fn)))
    while True:
        try:
            kind, args = connection.recv()
        except EOFError:
            return
        outcome = perform(fn, kind, tuple(_unpack(arg) for arg in args), protocol)
        connection.send((_pack(outcome.value), outcome.violations))


def _pack(value: Any) -> Any:
    if isinstance(value, Tensor):
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return ("tensor", value.dtype, tuple(value.shape), tuple(value.stride()), data)
    if isinstance(value, Quantized):
        return ("quantized", [_pack(field) for field in vars(value).values()])
    return ("plain", value)


def _unpack(packed: Any) -> Any:
    if packed[0] == "plain":
        return packed[1]
    if packed[0] == "quantized":
        return Quantized(*(_unpack(field) for field in packed[1]))
    _, dtype, shape, stride, data = packed
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    value = flat.view(dtype).reshape(shape)
    return value if value.stride() == stride else torch.empty_strided(shape, stride, dtype=dtype).copy_(value)
