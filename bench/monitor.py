"""Clocks, power, temperature and throttle reasons of the GPU while a case runs, through nvidia-ml-py; read, never set.

A thread samples every 10 ms; `Monitor.window()` says what was seen since it was opened. Without a GPU or NVML the
window still gives the share of the processor that this process had. A case is marked "throttled" where NVML gives a
reason to slow down other than being idle; "shared" where another process computes on the GPU, or where a case of one
CPU thread had less than nine tenths of a core.
"""

from __future__ import annotations

import statistics
import threading
import time
from dataclasses import dataclass
from itertools import pairwise
from types import TracebackType
from typing import Any

import torch

from quads.bench.results import Conditions

PERIOD = 0.01
TICKS = 3  # moves of the energy counter that a power takes
BUSY = 0.9
# NVML's clocks-event reasons that slow a working GPU down; idle and application clocks are not among them.
SLOWING = {0x4: "power cap", 0x8: "hardware slowdown", 0x20: "thermal", 0x40: "hardware thermal", 0x80: "power brake"}


@dataclass(frozen=True)
class Sample:
    """One look at the GPU: MHz, watts, degrees Celsius, bit mask of reasons, processes that compute there.

    joules: the GPU's energy counter, 0 where it has none; at: when, in seconds of `time.perf_counter`.
    """

    clock: float
    power: float
    temperature: float
    reasons: int
    processes: int
    joules: float = 0.0
    at: float = 0.0


class Device:
    """The current CUDA device as NVML sees it."""

    def __init__(self) -> None:
        import pynvml  # the module of the distribution nvidia-ml-py

        self._nvml: Any = pynvml
        pynvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())

    def sample(self) -> Sample:
        """One look; a figure that this GPU does not give is 0."""
        nvml, handle = self._nvml, self._handle
        return Sample(
            clock=self._read(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
            power=self._read(nvml.nvmlDeviceGetPowerUsage, handle) / 1e3,
            temperature=self._read(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
            reasons=int(self._read(nvml.nvmlDeviceGetCurrentClocksEventReasons, handle)),
            processes=self._processes(),
            joules=self._read(nvml.nvmlDeviceGetTotalEnergyConsumption, handle) / 1e3,
            at=time.perf_counter(),
        )

    def _processes(self) -> int:
        try:
            return len(self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle))
        except self._nvml.NVMLError:
            return 0

    def _read(self, function: Any, *args: Any) -> float:
        try:
            return float(function(*args))
        except self._nvml.NVMLError:
            return 0.0


class Window:
    """What was sampled since the window was opened."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor, self._first = monitor, len(monitor.samples)
        self._cpu, self._wall = time.process_time(), time.perf_counter()

    def watts(self) -> float | None:
        """Mean power by the energy counter, None where it did not move often enough to tell."""
        return mean_power(self._monitor.samples[self._first :])

    def conditions(self) -> Conditions:
        """Summary of the samples so far, and one more taken now."""
        self._monitor.look()
        samples = self._monitor.samples[self._first :]
        if samples:
            return summary(samples)
        wall = max(1e-9, time.perf_counter() - self._wall)
        return cpu_conditions((time.process_time() - self._cpu) / wall, torch.get_num_threads())


def summary(samples: list[Sample]) -> Conditions:
    """Conditions of samples of a GPU; the temperature is the highest."""
    clocks = sorted(s.clock for s in samples)
    seen = 0
    for s in samples:
        seen |= s.reasons
    throttle = tuple(name for bit, name in SLOWING.items() if seen & bit)
    shared = max(s.processes for s in samples) > 1
    return Conditions(
        sm_clock_mhz=(clocks[0], statistics.median(clocks), clocks[-1]),
        power_w=round(statistics.median(s.power for s in samples), 1),
        temperature_c=max(s.temperature for s in samples),
        throttle=throttle,
        marked="shared" if shared else "throttled" if throttle else None,
    )


def mean_power(samples: list[Sample]) -> float | None:
    """Joules a second between the first and the last time that the energy counter moved.

    The counter moves about ten times a second, so a difference between two arbitrary moments can be off by a tenth of a
    second's energy at each end. None with fewer than TICKS moves.
    """
    moves = [now for before, now in pairwise(samples) if now.joules > before.joules > 0]
    if len(moves) < TICKS:
        return None
    return (moves[-1].joules - moves[0].joules) / (moves[-1].at - moves[0].at)


def cpu_conditions(share: float, threads: int) -> Conditions:
    """Conditions on a CPU; only one thread's share tells a busy machine from idle threads."""
    return Conditions(cpu_share=round(share, 3), marked="shared" if threads == 1 and share < BUSY else None)


class Monitor:
    """Context manager that samples in the background; `device` is None without a GPU or NVML."""

    def __init__(self, device: Device | None = None) -> None:
        self.device = device
        self.samples: list[Sample] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @classmethod
    def here(cls) -> Monitor:
        """A monitor of the current CUDA device, or of the CPU; `why` it sees no GPU is not an error."""
        if not torch.cuda.is_available():
            return cls()
        try:
            return cls(Device())
        except Exception:  # nvidia-ml-py is missing, or NVML does not run here: the case is measured all the same
            return cls()

    def __enter__(self) -> Monitor:
        if self.device:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def window(self) -> Window:
        """Begin to watch a case."""
        return Window(self)

    def look(self) -> None:
        """Take a sample now."""
        if self.device:
            self.samples.append(self.device.sample())

    def _run(self) -> None:
        while not self._stop.wait(PERIOD):
            self.look()
