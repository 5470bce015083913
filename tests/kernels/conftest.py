"""`launch` runs a public kernel wrapper on CPU tensors: on the GPU where there is one, else in Triton's interpreter.

The interpreter must be switched on before triton is first imported, and a process that has it cannot compile, so
it lives in one worker process for the whole session. Deterministic mode poisons every torch.empty (NaN, or the
largest integer), so a byte that a kernel forgets is a wrong byte.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch


def _move(value: Any, device: str) -> Any:
    """`value` with every tensor in it on `device`: tensors, tuples, lists and dataclasses."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, tuple | list):
        return type(value)(_move(item, device) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(**{f.name: _move(getattr(value, f.name), device) for f in fields(value)})
    return value


def _on_gpu(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    moved = {key: _move(value, "cuda") for key, value in kwargs.items()}
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        return _move(function(*(_move(a, "cuda") for a in args), **moved), "cpu")
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def launch() -> Iterator[Callable[..., Any]]:
    """launch(function, *args, **kwargs), tensors in and out on the CPU; `function` must be importable by its name."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        yield _on_gpu
        return
    os.environ["TRITON_INTERPRET"] = "1"
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, initializer=torch.use_deterministic_algorithms, initargs=(True,)) as worker:
        try:
            worker.submit(os.getpid).result()
        finally:
            os.environ.pop("TRITON_INTERPRET")
        yield lambda function, *args, **kwargs: worker.submit(function, *args, **kwargs).result()
