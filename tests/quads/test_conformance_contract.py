"""Callables that misbehave are reported as such, and the rest of the run goes on."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from quads.conformance import protocol
from quads.conformance.check import CheckConfig, check_callable, check_one
from quads.conformance.runner import Isolated, Local
from quads.conformance.settings import Settings
from quads.emulation import quantizers, reciprocal
from tests.quads.conformance_kernels import Kernel

LEAN = Settings(dialect="exact", first_amaxes=1, amaxes=1, examples=3)
right = Kernel()
_counter = itertools.count()


def raises(x: Tensor, outer: Tensor) -> tuple[Tensor, Tensor]:
    raise RuntimeError("no kernel image")


def wrong_shape(x: Tensor, outer: Tensor) -> tuple[Tensor, Tensor]:
    packed, scales = right(x, outer)
    return packed, scales.T


def wrong_dtype(x: Tensor, outer: Tensor) -> tuple[Tensor, Tensor]:
    packed, scales = right(x, outer)
    return packed.int(), scales


def no_tuple(x: Tensor, outer: Tensor) -> Tensor:
    return right(x, outer)[0]


def on_meta(x: Tensor, outer: Tensor) -> tuple[Tensor, Tensor]:
    packed, scales = right(x, outer)
    return packed.to("meta"), scales


def mutates(x: Tensor, outer: Tensor) -> tuple[Tensor, Tensor]:
    answer = right(x, outer)
    x.mul_(2)
    return answer


def by_chance(x: Tensor, outer: Tensor) -> tuple[Tensor, Tensor]:
    packed, scales = right(x, outer)
    packed[0, 0] = next(_counter) % 256
    return packed, scales


def forgets(x: Tensor, outer: Tensor) -> tuple[Tensor, Tensor]:
    """The last row of scales is never written."""
    packed, scales = right(x, outer)
    out = torch.empty_like(scales)
    out[:-1] = scales[:-1]
    return packed, out


RULES: dict[str, Callable[..., Any]] = {
    "raises": raises,
    "shape": wrong_shape,
    "dtype": wrong_dtype,
    "type": no_tuple,
    "device": on_meta,
    "mutates-input": mutates,
    "nondeterministic": by_chance,
}


@pytest.mark.parametrize("rule", RULES)
def test_a_broken_rule_is_an_error_of_its_own(rule: str) -> None:
    report = check_callable(RULES[rule], "quantizer", settings=LEAN)
    errors = [finding.rule for finding in report.findings if finding.level == "error"]
    assert rule in errors
    assert not report.passed
    assert report.calls > 20


def test_memory_that_was_never_written_is_told_from_chance() -> None:
    report = check_callable(forgets, "quantizer", settings=LEAN)
    assert any("never written" in finding.message for finding in report.findings)


def test_a_kernel_that_refuses_nan_and_inf_conforms() -> None:
    def refuses(x: Tensor, outer: Tensor) -> tuple[Tensor, Tensor]:
        if not bool(x.isfinite().all()):
            raise ValueError("NaN or Inf")
        return right(x, outer)

    report = check_callable(refuses, "quantizer", settings=LEAN)
    assert report.passed
    assert [(finding.rule, finding.level) for finding in report.findings] == [("raises", "note")]


def sleeps(x: Tensor, outer: Tensor) -> tuple[Tensor, Tensor]:
    if x.shape[1] == 32:
        time.sleep(60)
    if x.shape[1] == 48:
        os._exit(7)
    return right(x, outer)


def test_a_hang_and_a_crash_cost_one_call_each() -> None:
    runner = Isolated("tests.quads.test_conformance_contract:sleeps", {}, 1.5)
    outer = torch.tensor(1.0)
    try:
        rules = []
        for k in (32, 16, 48, 16):
            outcome = runner.call("quantizer", (torch.ones(1, k, dtype=torch.bfloat16), outer))
            rules.append([violation.rule for violation in outcome.violations])
        assert rules == [["hangs"], [], ["dies"], []]
    finally:
        runner.close()


def test_an_isolated_call_gives_the_bytes_of_a_local_one() -> None:
    x = torch.arange(-64, 64).reshape(4, 32).bfloat16()
    wide = torch.full((4, 64), torch.nan).bfloat16()
    wide[:, :32] = x
    isolated = Isolated("tests.quads.test_conformance_contract:right", {}, 30.0)
    try:
        args = (wide[:, :32], torch.tensor(0.5))
        a, b = (r.call("quantizer", args).value for r in (isolated, Local(right, protocol.Protocol())))
        assert torch.equal(a.codes, b.codes)
        assert torch.equal(a.scales, b.scales)
    finally:
        isolated.close()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nothing", "expected pkg.mod:function"),
        ("quads.no_such:fn", "cannot import quads.no_such"),
        ("quads.emulation.quantizers:quantise", "'quantize'?"),
        ("quads.emulation.quantizers:BLOCK", "not callable"),
        ("no/such/file.py:fn", "no file no/such/file.py"),
        ("adapter:flashinfr", "did you mean 'flashinfer'?"),
    ],
)
def test_a_callable_that_is_not_there_is_one_line(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        check_one(spec, "quantizer", CheckConfig(quantizer=spec))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "nothing to check"),
        ({"quantizer": "a:b", "level": "slow"}, "level 'slow'"),
        ({"quantizer": "a:b", "dialect": "exakt"}, "did you mean 'exact'?"),
        ({"quantizer": "a:b", "limit": 0.0}, "limit = 0.0"),
    ],
)
def test_a_wrong_configuration_names_its_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        CheckConfig(**fields)
    assert message in str(caught.value)


def test_a_protocol_field_that_is_unknown_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean layout"):
        protocol.Protocol.of(right, {"layot": "linear"})


def test_a_callable_of_one_argument_derives_its_own_outer_scale() -> None:
    assert protocol.Protocol.of(lambda x: x).outer == "own"
    assert protocol.Protocol.of(right).outer == "multiplier"


@pytest.mark.parametrize("dialect", ["", "vllm_kernel"])
def test_a_reciprocal_one_ulp_off_conforms_up_to_rcp(dialect: str) -> None:
    def nudged(x: Tensor, outer: Tensor) -> tuple[Tensor, Tensor]:
        q = quantizers.trace(x, outer, dialect="vllm_kernel", rcp=reciprocal.NAMED["+1ulp"]).result
        return q.packed, q.scales

    report = check_callable(nudged, "quantizer", settings=replace(LEAN, dialect=dialect), outer="divisor")
    assert report.passed
    assert report.up_to_rcp
    assert report.speaks == ("vllm_kernel",)
