"""Worker processes side by side on the visible GPUs (or CPU cores), each given the next job when it is free.

A worker that dies, or that loses its GPU, is replaced and its job tried once more in a fresh process; a second failure
is reported and the others go on. A full disk stops everything: nothing could be recorded.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from quads.errors import CannotRunHereError
from quads.suites import worker
from quads.suites.worker import Message

START_METHOD = "forkserver"  # "spawn" imports everything in every worker
ATTEMPTS = 2
_A_GPU = 14  # workers that one GPU is given: the jobs are small
_WAIT = 0.5  # seconds between two looks at the clock


@dataclass
class Outcome:
    """How jobs ended: `done` to their last step, `stopped` before it (time, interrupt), `failed` with a line each."""

    done: list[Any] = field(default_factory=list)
    stopped: list[Any] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


@dataclass
class _Slot:
    """One worker's place: its process, the GPU it sees, and the job it has."""

    gpu: str
    process: Any = None
    connection: Connection | None = None
    job: Any = None


def gpus() -> list[str]:
    """Indices of the visible GPUs, found without initialising CUDA here: a fork server could not use it afterwards."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return named.split(",")[:count] if named else [str(index) for index in range(count)]


def default_workers() -> int:
    """How many jobs run side by side: several a GPU, else one a CPU core."""
    cores = len(os.sched_getaffinity(0))
    found = gpus()
    return min(_A_GPU * len(found), max(1, cores - 1)) if found else cores


class Pool:
    """`workers` places over the GPUs; `on_message(job, message)` hears everything that workers say."""

    def __init__(
        self,
        workers: int,
        *,
        run: Callable[..., int] = worker.run_job,
        on_message: Callable[[Any, Message], None] = lambda job, message: None,
        on_tick: Callable[[int], None] = lambda running: None,
    ) -> None:
        self._context: Any = multiprocessing.get_context(START_METHOD)
        if START_METHOD == "forkserver":
            self._context.set_forkserver_preload(list(worker.PRELOAD))
        self._stop = self._context.Event()
        self._run, self._on_message, self._on_tick = run, on_message, on_tick
        found = gpus() or [""]
        self._slots = [_Slot(found[index % len(found)]) for index in range(workers)]
        self._attempts: dict[str, int] = {}
        self._queue: deque[Any] = deque()
        self.outcome = Outcome()

    def work(self, jobs: Sequence[Any], deadline: float) -> Outcome:
        """Run `jobs` in order until done or until `deadline` (time.time()); CannotRunHereError on a full disk.

        KeyboardInterrupt lets running steps finish, then goes on up.
        """
        self._queue.extend(jobs)
        try:
            self._serve(deadline)
        except KeyboardInterrupt:
            self._stop.set()
            self._queue.clear()
            self._serve(deadline)
            raise
        finally:
            self._close()
        self.outcome.stopped += self._queue
        return self.outcome

    def _serve(self, deadline: float) -> None:
        while True:
            if time.time() < deadline and not self._stop.is_set():
                for slot in self._slots:
                    if slot.job is None and self._queue:
                        self._start(slot, deadline)
            running = [slot for slot in self._slots if slot.job is not None]
            if not running:
                return
            ready = wait([slot.connection for slot in running if slot.connection is not None], timeout=_WAIT)
            for slot in running:
                if slot.connection in ready:
                    self._hear(slot)
            self._on_tick(len(running))

    def _start(self, slot: _Slot, deadline: float) -> None:
        if slot.process is None or not slot.process.is_alive():
            ours, theirs = self._context.Pipe()
            arguments = (theirs, slot.gpu, self._stop, self._run)
            slot.process = self._context.Process(target=worker.main, args=arguments, daemon=True)
            slot.process.start()
            theirs.close()
            slot.connection = ours
        assert slot.connection is not None
        slot.job = self._queue.popleft()
        try:
            slot.connection.send((slot.job, deadline))
        except OSError:
            self._lost(slot, "its worker process died")

    def _hear(self, slot: _Slot) -> None:
        assert slot.connection is not None
        try:
            message = slot.connection.recv()
        except (EOFError, OSError):
            self._lost(slot, "its worker process died")
            return
        job = slot.job
        self._on_message(job, message)
        if message.kind == "done":
            slot.job = None
            (self.outcome.done if message.step >= job.steps else self.outcome.stopped).append(job)
        elif message.kind == "input":
            slot.job = None
            self.outcome.failed[job.label] = message.text
        elif message.kind == "lost":
            self._lost(slot, message.text)
        elif message.kind == "full":
            self._stop.set()
            raise CannotRunHereError(
                f"no space left ({message.text}): free some and run the same command; what was recorded is kept"
            )

    def _lost(self, slot: _Slot, why: str) -> None:
        """Try the job again at once in a fresh process, or report it."""
        job, slot.job = slot.job, None
        if slot.process is not None:
            slot.process.join(timeout=10)
            slot.process.kill()
            slot.process = None
        tried = self._attempts[job.label] = self._attempts.get(job.label, 0) + 1
        if tried < ATTEMPTS:
            self._on_message(job, Message("say", text=f"{job.label}: {why}; tried again in a fresh process"))
            self._queue.appendleft(job)
        else:
            self.outcome.failed[job.label] = f"{why} (tried {ATTEMPTS} times)"

    def _close(self) -> None:
        for slot in self._slots:
            if slot.process is not None and slot.process.is_alive() and slot.connection is not None:
                if slot.job is None:
                    _goodbye(slot.connection)
                else:
                    slot.process.kill()
        for slot in self._slots:
            if slot.process is not None:
                slot.process.join(timeout=10)


def _goodbye(connection: Connection) -> None:
    with suppress(OSError):
        connection.send(None)
