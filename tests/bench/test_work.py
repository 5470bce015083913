"""Times of a kernel: each resource alone, together, and over launches and waves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quads.bench.specs import chip
from quads.bench.work import OVERLAP, Work, bound_by, parts, seconds

H200, B200 = chip("H200"), chip("B200")


def test_bytes_take_the_copy_bandwidth() -> None:
    assert parts(Work(bytes=H200.copy.value), H200)["memory"] == pytest.approx(1.0)


def test_flops_take_the_rate_of_their_format() -> None:
    work = Work(flops=B200.matrix("nvfp4").value, numerics="nvfp4")
    assert parts(work, B200)["matrix"] == pytest.approx(1.0)
    assert parts(replace(work, reached=0.5), B200)["matrix"] == pytest.approx(2.0)


def test_instructions_take_the_slots_of_the_sms_in_use() -> None:
    everywhere = Work(instructions=H200.issue_per_s)
    half = Work(instructions=H200.issue_per_s, blocks=H200.sms.value / 2)
    assert parts(everywhere, H200)["issue"] == pytest.approx(1.0)
    assert parts(half, H200)["issue"] == pytest.approx(2.0)
    assert parts(Work(instructions=H200.issue_per_s, issued=0.5), H200)["issue"] == pytest.approx(2.0)


def test_one_block_more_than_a_wave_costs_a_second_wave() -> None:
    def matrix(blocks: float) -> float:
        return parts(Work(flops=1e15 * blocks, blocks=blocks), H200)["matrix"]

    assert matrix(H200.sms.value + 1) == pytest.approx(2 * matrix(H200.sms.value), rel=1e-6)


def test_few_blocks_are_bound_by_what_they_keep_in_flight() -> None:
    work = Work(requested=1e6, blocks=1, in_flight=1e3)
    assert parts(work, H200)["feed"] == pytest.approx(1e3 * H200.latency_s.value)


def test_resources_overlap_by_the_exponent() -> None:
    both = Work(bytes=H200.copy.value, instructions=H200.issue_per_s)
    assert seconds((both,), H200) == pytest.approx(2 ** (1 / OVERLAP) + H200.launch_s.value)


def test_every_launch_costs_and_a_call_alone_costs_more() -> None:
    two = (Work(launches=1), Work(launches=3))
    assert seconds(two, H200) == pytest.approx(4 * H200.launch_s.value)
    alone = seconds(two, H200, isolated=True)
    assert alone == pytest.approx(3 * H200.launch_s.value + H200.isolated_s.value)


def test_the_binding_resource_is_named() -> None:
    assert bound_by((Work(bytes=1e12),), H200) == "memory"
    assert bound_by((Work(flops=1e15),), H200) == "matrix"
    assert bound_by((Work(launches=9),), H200) == "launch"
