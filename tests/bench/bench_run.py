"""A folder as `quads bench run` leaves it on an H200, made from the model: times are its predictions, moved."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from quads.bench import model
from quads.bench.results import Against, Conditions, Result, ResultsFile
from quads.bench.specs import chip

GPU = "NVIDIA H200"
STAMP: dict[str, Any] = {
    "kind": "stamp", "stamp": "run", "command": "quads bench run --out runs/bench", "cpu": "a processor",
    "git": {"sha": "0123456789abcdef", "dirty": False}, "versions": {"torch": "2.11.0", "triton": "3.6.0"},
    "gpu": {"name": GPU, "driver": "580"},
}  # fmt: skip
CONDITIONS = Conditions(sm_clock_mhz=(1700.0, 1800.0, 1980.0), power_w=512.0, temperature_c=51.0)
WIDTH = 0.02  # half of an interval, over its median


def measured(one: Result, slower: float = 1.0, like: Result | None = None) -> Result:
    """A prediction as a measurement; `like`: the first of its group, which it is compared with."""
    row = (one.in_a_row_seconds or one.seconds) * slower
    took = one.seconds * slower
    ratio = took / like.seconds if like else None
    against = None
    if like is not None and ratio is not None:
        against = Against(
            case=like.case, implementation=like.implementation, ratio=ratio, low=0.98 * ratio, high=1.02 * ratio
        )
    return dataclasses.replace(
        one, label="measured", chip="", model_error=None, seconds=took, in_a_row_seconds=row, way="",
        seconds_low=took * (1 - WIDTH), seconds_high=took * (1 + WIDTH), interval="95 % of the median",
        samples=(took,) * 5, energy_j=row * CONDITIONS.power_w if CONDITIONS.power_w else None,
        share_of_copy=(one.bytes or 0.0) / took / chip("H200").copy.value, goal="ours / peer >= 1.0" if against else "",
        goal_met=None if against is None else against.ratio >= 1.0, conditions=CONDITIONS, against=against, stamp="run",
    )  # fmt: skip


def ceilings() -> list[Result]:
    """Copy, bf16 and FP8 as the H200 of the specifications reaches them."""
    h200 = chip("H200")
    copy = Result(op="ceiling", numerics="copy", implementation="torch.copy", shape={"bytes": 2**32}, seconds=1e-3)
    found = [dataclasses.replace(copy, bytes=2.0**32, bytes_per_s=h200.copy.value, stamp="run")]
    for name in ("bf16", "fp8"):
        shape = {"M": 8192, "N": 8192, "K": 8192}
        product = Result(op="ceiling", numerics=name, implementation="torch", shape=shape, seconds=1.5e-3)
        found.append(
            dataclasses.replace(product, flops_per_s=h200.matrix(name).value, flops=2.0 * 8192**3, stamp="run")
        )
    return found


def results(slower: float = 1.1) -> list[Result]:
    """Measured results of the GPU catalogue, `slower` times the model's."""
    found, first = ceilings(), {}
    for case in model.catalogue():
        one = model.predict(case, chip("H200"))
        if one is not None:
            key = (one.op, tuple(one.shape.items()))
            taken = measured(one, slower, first.get(key))
            first.setdefault(key, taken)
            found.append(taken)
    marked = dataclasses.replace(CONDITIONS, marked="throttled", throttle=("power cap",))
    return [
        dataclasses.replace(one, conditions=marked) if one.shape.get("M") == 8192 and one.op == "gemm" else one
        for one in found
    ]


def write_run(folder: Path, rows: list[Result], *, gpu: str | None = GPU, chips: tuple[str, ...] = ()) -> Path:
    """results.jsonl of `rows`, with predictions for `chips`, an absent peer and skipped cases."""
    folder.mkdir(parents=True, exist_ok=True)
    file = ResultsFile(folder)
    file.append({**STAMP, "gpu": {"name": gpu} if gpu else None})
    lines: list[dict[str, Any]] = [one.record() for one in rows]
    lines.append({"kind": "absent", "peer": "deep_gemm", "op": "gemm", "why": "deep_gemm does not import"})
    lines.append({"kind": "skipped", "case": "gemm/M=4096,N=8192,K=8192", "why": "budget of 480 s spent"})
    lines += [one.record() for key in chips for one in model.predictions(None, (key,))]
    text = "".join(_line(line) for line in lines)
    with file.path.open("a") as handle:
        handle.write(text)
    return folder


def _line(record: dict[str, Any]) -> str:
    return json.dumps({"schema": 1, **record}) + "\n"
