"""Times of the benchmark's cases on chips that are not here: modelled, from counted bytes, FLOPs and compiled code.

    predictions()             # every modelled case of the GPU catalogue on every chip of specs.toml
    predict(result, chip("B200"))

What a case does on a chip is in quads.bench.operations, how long that takes in quads.bench.work; how wrong that is
where it can be measured stands in each prediction (quads.bench.model_error).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from quads.bench import model_error, rollout_model
from quads.bench.model_error import Errors
from quads.bench.operations import OURS, works
from quads.bench.results import Result
from quads.bench.specs import Chip, chip, chips
from quads.bench.work import bound_by, seconds

SHOWN = (OURS, "torch.cublas", "torch.scaled_mm", "vllm.triton", "vllm.marlin")
SCALED = {"gemm": {"N": 8192, "K": 8192}, "moe": {"hidden": 2048, "experts": 128}}  # over tokens on every chip
METHOD = "bytes, FLOPs and issued instructions (quads.bench.work)"
UNCHECKED = "; its kernels decode to bfloat16: those for FP4 tensor cores have run nowhere"
INTERVAL = "times measured / predicted on the H200, lowest to highest case"


def predict(like: Result, on: Chip, errors: Errors | None = None) -> Result | None:
    """The case of `like` (measured or not) `on` a chip, with the model's error on the H200; None where not modelled."""
    found = works(like.op, like.numerics, like.implementation, like.variant, like.shape, on)
    if found is None:
        return None
    alone, in_a_row = seconds(found, on, isolated=True), seconds(found, on)
    moved, flops = sum(work.bytes for work in found), sum(work.flops for work in found)
    error = (errors or model_error.known()).of(like.op, like.numerics, like.implementation, like.variant)
    if error and on.native_fp4 and like.implementation == OURS and like.op in ("gemm", "moe"):
        error = replace(error, source=error.source + UNCHECKED)
    return Result(
        op=like.op, numerics=like.numerics, implementation=like.implementation, variant=like.variant,
        shape=like.shape, label="modelled", chip=on.key, seconds=alone, in_a_row_seconds=in_a_row,
        seconds_low=alone * error.low if error else None, seconds_high=alone * error.high if error else None,
        interval=INTERVAL if error else "",
        way=bound_by(found, on), method=METHOD,
        bytes=moved, flops=flops, bytes_per_s=moved / alone, flops_per_s=flops / alone, model_error=error,
    )  # fmt: skip


def predictions(folder: Path | None = None, wanted: Iterable[str] = ()) -> Iterator[Result]:
    """Every modelled case on the `wanted` chips (all where it is empty), rollouts too.

    folder: a run, whose own measurements give the errors where it ran on an H200; else the stored ones do.
    ValueError names an unknown chip.
    """
    errors = model_error.known() if folder is None else model_error.of_folder(folder)
    wanted = tuple(wanted) or tuple(chips())
    for key in wanted:
        yield from (found for case in catalogue() if (found := predict(case, chip(key), errors)) is not None)
    yield from rollout_model.predictions(wanted, errors)


def catalogue() -> Iterator[Result]:
    """The cases of a GPU run that other chips are predicted for, without their times."""
    from quads.bench import cases

    for group in cases.catalogue("cuda"):
        if group.quick or group.shape.items() >= SCALED.get(group.op, {"": 0}).items():
            for case in group.cases:
                if case.implementation in SHOWN and "from bf16" not in case.variant:
                    yield Result(
                        op=group.op, numerics=case.numerics, implementation=case.implementation,
                        variant=case.variant, shape=group.shape, seconds=0.0,
                    )  # fmt: skip
