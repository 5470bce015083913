"""Results of `quads bench`: one flat JSON object a line, written case by case, read by reports and comparisons.

Kinds of line (`kind`): `stamp` (first; what quads.provenance says of the machine and the source), `result`, `check` (a
correctness check that ran), `absent` (a peer that is not installed here), `skipped` (a case that was not run, and why),
`failed` (a case that raised), `group` (what measuring one shape cost, in seconds). A result's label is `measured` or
`modelled`. Seconds are of one call.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from quads.compare.records import SCHEMA, Record, Records, RecordsError, write_atomically

FILE = "results.jsonl"
LABELS = ("measured", "modelled")
MOST_SAMPLES = 50
VERDICTS = {True: "met", False: "missed", None: "not decided"}  # of `goal_met`


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What NVML said of the GPU while a case ran; clocks (SM, MHz) and power (W) are its samples' extremes and median.

    throttle: reasons other than idle, by name. marked: "throttled", "shared" (another process computes on the GPU) or
    None, while the samples of `seconds` were taken. cpu_share: CPU time over wall time, on a CPU.
    """

    sm_clock_mhz: tuple[float, float, float] | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    throttle: tuple[str, ...] = ()
    cpu_share: float | None = None
    marked: str | None = None


@dataclass(frozen=True, kw_only=True)
class Against:
    """Seconds of this case over seconds of `case`, sample by sample of the same rounds: median and 95 % interval."""

    case: str
    implementation: str
    ratio: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class ModelError:
    """How far the model is off where it can be checked: measured over predicted seconds of `cases` cases on the H200.

    ratio: their median; low, high: their extremes; source: which measurements.
    """

    ratio: float
    low: float
    high: float
    cases: int
    source: str


@dataclass(frozen=True, kw_only=True)
class Result:
    """One case. `seconds`: median of a call, caches cold; `seconds_low/high` its interval, which `interval` names.

    case: the key, unique in a file: op/numerics[/variant]/implementation/shape. in_a_row_seconds: of a call among
    others, launches overlapping, inputs rotated. bytes, flops: counted, of one call. share_*: of the copy bandwidth and
    of the matrix peak of the case's number format, both measured in the same run. energy_j: of one call, in a row.
    error: largest error over its bound, 0 where bytes are equal, None where nothing was compared.
    chip, model_error: of a modelled result, the chip of quads.bench.specs and the error on the H200; its case is
    modelled/CHIP/ and the case it predicts.
    """

    op: str
    numerics: str
    implementation: str
    shape: dict[str, int]
    seconds: float
    label: str = "measured"
    variant: str = ""
    way: str = ""
    method: str = ""
    seconds_low: float | None = None
    seconds_high: float | None = None
    interval: str = ""
    in_a_row_seconds: float | None = None
    samples: tuple[float, ...] = ()
    bytes: float | None = None
    flops: float | None = None
    bytes_per_s: float | None = None
    flops_per_s: float | None = None
    share_of_copy: float | None = None
    share_of_matrix_peak: float | None = None
    energy_j: float | None = None
    error: float | None = None
    goal: str = ""
    goal_met: bool | None = None
    conditions: Conditions = field(default_factory=Conditions)
    against: Against | None = None
    chip: str = ""
    model_error: ModelError | None = None
    stamp: str = ""

    def __post_init__(self) -> None:
        if self.label not in LABELS:
            raise ValueError(f"label '{self.label}' is unknown (known: {', '.join(LABELS)})")

    @property
    def case(self) -> str:
        """Key of the case."""
        name = case_name(self.op, self.numerics, self.implementation, self.shape, self.variant)
        return f"modelled/{self.chip}/{name}" if self.label == "modelled" else name

    def record(self) -> Record:
        """The line's object."""
        return {"kind": "result", "case": self.case, **asdict(self)}


def case_name(op: str, numerics: str, implementation: str, shape: dict[str, int], variant: str = "") -> str:
    """For example gemm/nvfp4/quads.kernels/M=16,N=8192,K=8192."""
    sizes = ",".join(f"{name}={size}" for name, size in shape.items())
    return "/".join(part for part in (op, numerics, variant, implementation, sizes) if part)


def result(record: Record) -> Result:
    """The object of a line of kind `result`. RecordsError naming a field that is missing or not known."""
    known = {f.name for f in fields(Result)}
    given = {key: value for key, value in record.items() if key not in ("kind", "schema", "case")}
    unknown = sorted(set(given) - known)
    if unknown:
        raise RecordsError(f"result {record.get('case')}: field '{unknown[0]}' is not known")
    nested: dict[str, Any] = {"samples": tuple(given.get("samples", ()))}
    if given.get("conditions"):
        conditions = dict(given["conditions"])
        clock = conditions.get("sm_clock_mhz")
        conditions |= {"sm_clock_mhz": tuple(clock) if clock else None, "throttle": tuple(conditions["throttle"])}
        nested["conditions"] = Conditions(**conditions)
    for name, kind in (("against", Against), ("model_error", ModelError)):
        if given.get(name):
            nested[name] = kind(**given[name])
    try:
        return Result(**{**given, **nested})
    except (TypeError, ValueError) as error:
        raise RecordsError(f"result {record.get('case')}: {error}") from None


class ResultsFile:
    """results.jsonl of one folder: append a line at a time, read them back by kind."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        self._records = Records(self.path)

    def append(self, entry: Result | Record) -> None:
        """Add one line durably."""
        self._records.append(entry.record() if isinstance(entry, Result) else entry)

    def replace_modelled(self, modelled: Iterable[Result]) -> int:
        """Put `modelled` in the place of what was modelled before, in one write; returns how many they are."""
        lines = [r for r in self._records.read() if r.get("label") != "modelled"]
        new = [{"schema": SCHEMA, **result.record()} for result in modelled]
        write_atomically(self.path, "".join(json.dumps(r, allow_nan=False) + "\n" for r in (*lines, *new)).encode())
        return len(new)

    def records(self, kind: str = "") -> list[Record]:
        """Lines of one kind, or all. FileNotFoundError where there is no such file."""
        if not self.path.exists():
            raise FileNotFoundError(f"{self.path} does not exist: run `quads bench run --out {self.path.parent}` first")
        return [record for record in self._records.read() if kind in ("", record.get("kind", "result"))]

    def results(self, label: str = "") -> Iterator[Result]:
        """Results, optionally of one label; where a case stands twice, the later line."""
        latest = {record.get("case"): record for record in self.records("result")}
        yield from (one for one in map(result, latest.values()) if label in ("", one.label))

    def stamps(self) -> list[Record]:
        """Stamps of runs, oldest first; a resumed run adds one. What was read in from elsewhere is not among them."""
        return [stamp for stamp in self.records("stamp") if "of" not in stamp]


__all__ = ["FILE", "SCHEMA", "Against", "Conditions", "ModelError", "Result", "ResultsFile", "case_name", "result"]
