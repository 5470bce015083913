"""A worker of a suite: a process that runs jobs one after another and says how they go.

It is started by a fork server that has the heavy imports behind it and CUDA not yet initialised. It ends with its
parent, whatever ends that; an interrupt of the terminal is the parent's to handle, which lets steps finish.
"""

from __future__ import annotations

import errno
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PRELOAD = ("torch", "transformers", "datasets", "trl", "quads.integrations.trl_trainer", "quads.compare.training")
FULL = (errno.ENOSPC, errno.EDQUOT)
_SAY_EVERY = 0.5  # seconds between two messages about steps


@dataclass(frozen=True)
class Message:
    """What a worker says: kind "step", "say", "done", "input" (bad input), "full" (disk) or "lost" (anything else)."""

    kind: str
    step: int = 0
    text: str = ""


def main(connection: Any, gpu: str, stop: Any, run: Callable[..., int]) -> None:
    """Run what comes over `connection`, (job, deadline) pairs, with `run` until None comes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    while (task := connection.recv()) is not None:
        job, deadline = task
        answer = _attempt(run, job, connection, lambda: stop.is_set() or time.time() >= deadline)  # noqa: B023
        connection.send(answer)
        if answer.kind == "lost":  # a GPU error poisons the process: the next attempt gets a fresh one
            connection.close()
            os._exit(1)


def run_job(job: Any, on_step: Callable[[int], None], say: Callable[[str], None], stop: Callable[[], bool]) -> int:
    """Train the one arm of `job`; returns the step reached."""
    import torch

    from quads.compare.arm import Arm, Watch
    from quads.compare.training import run_arm

    config = job.compare
    torch.set_num_threads(config.threads)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    (recipe,) = config.recipes()
    return run_arm(Arm(config, recipe, job.seed), _policy(config), Watch(on_step, say, stop))


def prepare(job: Any, on_step: Callable[[int], None], say: Callable[[str], None], stop: Callable[[], bool]) -> int:
    """Make the start policy of `job`, so that other workers find it."""
    from quads.compare.policy import load_policy

    load_policy(job.compare, lambda step, loss: on_step(step))
    return 0


_LOADED: dict[tuple[Any, ...], Any] = {}


def _policy(config: Any) -> Any:
    """The start policy of `config`; the last one is kept, since a worker's next job mostly starts from it."""
    from quads.compare.policy import load_policy

    decides = ("start", "model", "task", "problems", "outliers", "dtype", "held_out", "r3")
    key = tuple(getattr(config, name) for name in decides)
    if key not in _LOADED:
        _LOADED.clear()
        _LOADED[key] = load_policy(config, lambda step, loss: None)
    return _LOADED[key]


def _attempt(run: Callable[..., int], job: Any, connection: Any, stop: Callable[[], bool]) -> Message:
    said = 0.0

    def on_step(step: int) -> None:
        nonlocal said
        if time.monotonic() - said >= _SAY_EVERY:
            said = time.monotonic()
            connection.send(Message("step", step))

    try:
        reached = run(job, on_step, lambda line: connection.send(Message("say", text=line)), stop)
        return Message("done", reached)
    except OSError as error:
        if error.errno in FULL:
            return Message("full", text=f"{error.filename or job.compare.out}: {error.strerror}")
        return Message("lost", text=_line(error))
    except ValueError as error:
        return Message("input", text=_line(error))
    except Exception as error:  # whatever a GPU, a driver or a library does: the parent decides
        _keep_traceback(job)
        return Message("lost", text=_line(error))


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:500]


def _keep_traceback(job: Any) -> None:
    folder = Path(job.compare.out)
    if folder.is_dir():
        with (folder / "errors.log").open("a") as handle:
            handle.write(f"{job.label}\n{traceback.format_exc()}\n")


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)
