"""What NVML says becomes conditions; a throttled or shared machine is marked."""

from __future__ import annotations

import time

import pytest

from quads.bench.monitor import Device, Monitor, Sample, cpu_conditions, mean_power, summary

QUIET = Sample(clock=1980.0, power=500.0, temperature=60.0, reasons=0x1, processes=1)


class Scripted(Device):
    """A GPU whose samples are given."""

    def __init__(self, *samples: Sample) -> None:
        self._samples = list(samples)

    def sample(self) -> Sample:
        return self._samples.pop(0) if len(self._samples) > 1 else self._samples[0]


def changed(**values: float) -> Sample:
    return Sample(**{**QUIET.__dict__, **values})


def test_an_idle_reason_is_no_throttling() -> None:
    found = summary([QUIET])
    assert (found.marked, found.throttle) == (None, ())


@pytest.mark.parametrize(("bit", "name"), [(0x4, "power cap"), (0x20, "thermal"), (0x80, "power brake")])
def test_a_reason_seen_once_marks_the_case_throttled(bit: int, name: str) -> None:
    found = summary([QUIET, changed(reasons=bit), QUIET])
    assert (found.marked, found.throttle) == ("throttled", (name,))


def test_another_process_on_the_gpu_marks_the_case_shared() -> None:
    assert summary([QUIET, changed(processes=2)]).marked == "shared"


def test_clocks_are_lowest_median_highest_and_the_temperature_the_highest() -> None:
    found = summary([changed(clock=float(c), temperature=float(c) / 10) for c in (300, 900, 600)])
    assert found.sm_clock_mhz == (300.0, 600.0, 900.0)
    assert found.temperature_c == 90.0


def counter(*joules: float) -> list[Sample]:
    return [changed(joules=j, at=0.05 * i) for i, j in enumerate(joules)]


def test_power_is_counted_between_moves_of_the_energy_counter() -> None:
    assert mean_power(counter(100, 100, 150, 150, 200, 200, 250, 250)) == pytest.approx(500)


def test_an_energy_counter_that_hardly_moves_gives_no_power() -> None:
    assert mean_power(counter(100, 100, 150, 150, 200)) is None


def test_a_gpu_without_an_energy_counter_gives_no_power() -> None:
    assert mean_power(counter(*[0.0] * 20)) is None


def test_a_window_holds_only_what_came_after_it_was_opened() -> None:
    monitor = Monitor(Scripted(changed(reasons=0x4), QUIET))
    monitor.look()
    assert monitor.window().conditions().marked is None


def test_a_monitor_samples_in_the_background() -> None:
    with Monitor(Scripted(QUIET)) as monitor:
        time.sleep(0.1)
    assert len(monitor.samples) >= 2


@pytest.mark.parametrize(("share", "threads", "marked"), [(0.95, 1, None), (0.5, 1, "shared"), (0.5, 4, None)])
def test_a_busy_cpu_is_told_by_the_share_of_one_thread(share: float, threads: int, marked: str | None) -> None:
    assert cpu_conditions(share, threads).marked == marked


@pytest.mark.gpu
def test_the_gpu_at_hand_gives_a_clock_and_power() -> None:
    pytest.importorskip("pynvml")
    sample = Device().sample()
    assert sample.clock > 0
    assert sample.power > 0
