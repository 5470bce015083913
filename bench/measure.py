"""Measure one group: check every case, time those that are right in the same rounds, make results of the samples.

A case that raises, or whose check fails, is a `failed` line; the others of its group go on. A ratio is of samples of
the same rounds, to those of the first case of the group.
"""

from __future__ import annotations

import gc
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from quads.bench import timing
from quads.bench.cases import Case, Goal, Group, Ready
from quads.bench.monitor import Monitor
from quads.bench.results import MOST_SAMPLES, Against, Conditions, Result
from quads.compare.records import Record


def seed_of(group: Group) -> int:
    """A seed of its own: with one for all, activations would repeat the start of weights that an earlier group drew."""
    return zlib.crc32(group.title.encode())


@dataclass(frozen=True)
class Ceilings:
    """Bytes a second of a copy and FLOPs a second by number format, of this run."""

    copy: float | None = None
    peaks: tuple[tuple[str, float], ...] = ()

    def joined(self, result: Result) -> Ceilings:
        """With the ceiling that `result` measured."""
        if result.numerics == "copy":
            return replace(self, copy=result.bytes_per_s)
        return replace(self, peaks=(*self.peaks, (result.numerics, result.flops_per_s or 0.0)))

    def peak(self, numerics: str) -> float | None:
        """The matrix peak of a number format, None where it was not measured."""
        return dict(self.peaks).get(numerics)


@dataclass(frozen=True)
class _Checked:
    case: Case
    ready: Ready
    runner: timing.Runner
    error: float | None


def measure(group: Group, monitor: Monitor, ceilings: Ceilings, stamp: str) -> Iterator[Result | Record]:
    """Results of a group and lines for what could not be measured."""
    inputs: Any = None
    torch.manual_seed(seed_of(group))
    try:
        inputs = group.inputs()
        checked: list[_Checked] = []
        for case in group.cases:
            found = _check(group, case, inputs)
            if isinstance(found, _Checked):
                checked.append(found)
            else:
                yield found
        if checked:
            yield from _timed(group, checked, monitor, ceilings, stamp)
    except Exception as error:  # out of memory and the like: the next group may do
        yield {"kind": "failed", "case": group.title, "why": one_line(error)}
    finally:
        del inputs
        free()


def _check(group: Group, case: Case, inputs: Any) -> _Checked | Record:
    if reason := case.missing():
        return {"kind": "absent", "peer": case.implementation, "op": group.op, "why": reason}
    try:
        ready = case.ready(inputs)
        error = ready.check() if ready.check else None
        if error is not None and not error <= 1:
            return failed(group.name(case), f"wrong result: {error:.3g} times the bound; not timed")
        return _Checked(case, ready, timing.runner(ready.calls, group.device, graph=ready.graph), error)
    except ImportError as error:  # installed, but not what it needs itself
        return {"kind": "absent", "peer": case.implementation, "op": group.op, "why": one_line(error)}
    except AssertionError as error:
        return failed(group.name(case), f"wrong result: {one_line(error)}; not timed")
    except Exception as error:  # a peer of another version, a kernel that does not compile: said, and passed over
        return failed(group.name(case), one_line(error))


def failed(case: str, why: str) -> Record:
    """The line of a case that raised."""
    return {"kind": "failed", "case": case, "why": why}


def one_line(error: BaseException) -> str:
    """Class and message of an error, on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _timed(group: Group, checked: list[_Checked], monitor: Monitor, ceilings: Ceilings, stamp: str) -> Iterator[Result]:
    window = monitor.window()
    samples = timing.rounds([c.runner for c in checked], seconds=group.seconds)
    together = window.conditions()
    base = samples[0] if checked[0].case is group.cases[0] else None
    for c, own in zip(checked, samples, strict=True):
        window = monitor.window()
        in_a_row = c.runner.in_a_row(group.in_a_row) if c.ready.in_a_row else None
        conditions, watts = (during(together, window.conditions()), window.watts()) if in_a_row else (together, None)
        result = replace(
            _result(group, c, own, ceilings), in_a_row_seconds=in_a_row, conditions=conditions, stamp=stamp
        )
        against = _against(group, own, base) if base is not None and own is not base else None
        energy = watts * in_a_row if watts and in_a_row else None
        yield with_goal(replace(result, against=against, energy_j=energy), c.case.goal)


def during(rounds: Conditions, in_a_row: Conditions) -> Conditions:
    """Clocks and power of the calls in a row, throttle reasons of both; marked by the rounds, which give `seconds`."""
    reasons = tuple(dict.fromkeys((*rounds.throttle, *in_a_row.throttle)))
    return replace(in_a_row, throttle=reasons, marked=rounds.marked)


def _result(group: Group, c: _Checked, own: list[float], ceilings: Ceilings) -> Result:
    median, low, high = timing.median_interval(own)
    ready, peak = c.ready, ceilings.peak(c.ready.peak)
    moved, flops = ready.bytes or None, ready.flops or None
    return Result(
        op=group.op, numerics=c.case.numerics, variant=c.case.variant, implementation=c.case.implementation,
        shape=group.shape, way=ready.way, method=c.runner.method, error=c.error, samples=tuple(own[:MOST_SAMPLES]),
        seconds=median, seconds_low=low, seconds_high=high, interval=timing.INTERVAL,
        bytes=moved, flops=flops,
        bytes_per_s=moved and moved / median, flops_per_s=flops and flops / median,
        share_of_copy=moved / median / ceilings.copy if moved and ceilings.copy else None,
        share_of_matrix_peak=flops / median / peak if flops and peak else None,
    )  # fmt: skip


def _against(group: Group, own: list[float], base: list[float]) -> Against:
    ratio, low, high = timing.ratio_interval(own, base)
    first = group.cases[0]
    return Against(case=group.name(first), implementation=first.implementation, ratio=ratio, low=low, high=high)


def with_goal(result: Result, goal: Goal | None) -> Result:
    """A ratio decides where both ends of its interval say the same."""
    if goal is None:
        return result
    values: tuple[float, ...] = ()
    if goal.of == "ratio" and result.against:
        values = (result.against.low, result.against.high)
    elif goal.of == "share_of_copy" and result.share_of_copy is not None:
        values = (result.share_of_copy,)
    decided = {goal.met(value) for value in values}
    return replace(result, goal=goal.text, goal_met=decided.pop() if len(decided) == 1 else None)


def free() -> None:
    """Give back what the last group held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


Checks = dict[str, Callable[[], Iterator[str]]]


def checks(device: str) -> Checks:
    """What is checked once before the first case of an operation."""
    if device != "cuda":
        return {}
    from quads.bench import checks as quantisers
    from quads.bench import checks_product

    return {
        **dict.fromkeys(("quantize", "quantize_rac", "fake_quantize", "outer_scale"), quantisers.whole_tensors),
        **dict.fromkeys(("refit", "train_step"), checks_product.weights),
        "gemm": checks_product.dense,
        "moe": checks_product.layers,
    }
