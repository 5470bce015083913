"""What is known of each GPU, with the source of every value (specs.toml), and the ceilings a kernel can reach there.

    chip("B200").copy.value         # bytes/s, a `Value`: number, kind, source, note
    chip("H200").matrix("fp8")      # FLOP/s that products reached
    of_device("NVIDIA H200")        # the chip that runs under this device name, or None

A ceiling that is not given for a chip is this chip's datasheet rate times the share that the H200 reached of its own.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources

KINDS = ("datasheet", "reported", "measured", "derived", "assumed")
REFERENCE = "H200"  # the chip whose measured ceilings stand in elsewhere, and on which the model's error is known


@dataclass(frozen=True, kw_only=True)
class Value:
    """A number (units in specs.toml), what it rests on, and where that was found."""

    value: float
    kind: str
    source: str
    note: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind '{self.kind}' is unknown (known: {', '.join(KINDS)})")


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One GPU. target: what quads.kernels.crosscompile compiles for it; match: a regular expression for device names.

    *_flops: dense matrix rates with FP32 accumulation; *_reached: what products reached; launch_s: what a kernel costs
    besides its work, among others in a CUDA graph; isolated_s: the same for a call alone with cold L2; latency_s: of
    a read from memory under load.
    """

    key: str
    name: str
    match: str
    target: str
    sms: Value
    clock_hz: Value
    l2_bytes: Value
    memory_bytes: Value
    memory_bytes_per_s: Value
    power_w: Value
    bf16_flops: Value
    fp8_flops: Value
    launch_s: Value
    isolated_s: Value
    latency_s: Value
    nvfp4_flops: Value | None = None
    fp8_flops_fp16_accumulate: Value | None = None
    copy_bytes_per_s: Value | None = None
    bf16_reached: Value | None = None
    fp8_reached: Value | None = None
    nvfp4_reached: Value | None = None

    @property
    def native_fp4(self) -> bool:
        """Whether its tensor cores multiply NVFP4."""
        return self.nvfp4_flops is not None

    @property
    def issue_per_s(self) -> float:
        """Warp instructions a second: four schedulers an SM, one instruction a clock each."""
        return self.sms.value * 4 * self.clock_hz.value

    @property
    def copy(self) -> Value:
        """Bytes a second that a copy moves, reads and writes together."""
        return self.copy_bytes_per_s or self._by_share(
            self.memory_bytes_per_s, "memory_bytes_per_s", "copy_bytes_per_s"
        )

    def datasheet(self, numerics: str) -> Value:
        """Dense matrix rate of a number format. ValueError where the tensor cores do not have it."""
        found: Value | None = getattr(self, f"{numerics}_flops", None)
        if found is None:
            raise ValueError(f"{self.key}: tensor cores have no {numerics}")
        return found

    def matrix(self, numerics: str) -> Value:
        """FLOP/s that large products of a number format reach."""
        given: Value | None = getattr(self, f"{numerics}_reached", None)
        like = numerics if numerics != "nvfp4" else "fp8"  # the H200 has no FP4
        return given or self._by_share(self.datasheet(numerics), f"{like}_flops", f"{like}_reached")

    def _by_share(self, datasheet: Value, whole: str, reached: str) -> Value:
        reference = chip(REFERENCE)
        share = getattr(reference, reached).value / getattr(reference, whole).value
        note = f"{share:.1%} of the {datasheet.kind} rate, as the {REFERENCE} reached in {reached.split('_')[0]}"
        return Value(value=datasheet.value * share, kind="derived", source=datasheet.source, note=note)


@cache
def chips() -> dict[str, Chip]:
    """Every chip of specs.toml, in its order."""
    document = tomllib.loads(resources.files(__package__).joinpath("specs.toml").read_text("utf-8"))
    known = document.pop("sources")
    return {key: _chip(key, table, known) for key, table in document.items()}


def sources() -> dict[str, str]:
    """Source key -> what and where."""
    document = tomllib.loads(resources.files(__package__).joinpath("specs.toml").read_text("utf-8"))
    return dict(document["sources"])


def chip(key: str) -> Chip:
    """The chip called `key`. ValueError names the known ones."""
    try:
        return chips()[key]
    except KeyError:
        raise ValueError(f"chip '{key}' is unknown (known: {', '.join(chips())})") from None


def of_device(name: str) -> Chip | None:
    """The chip of a CUDA device name; None where specs.toml has none (other boards of a chip have other rates)."""
    return next((chip for chip in chips().values() if re.search(chip.match, name)), None)


def _chip(key: str, table: dict[str, object], known: dict[str, str]) -> Chip:
    unknown = set(table) - {f.name for f in fields(Chip)}
    if unknown:
        raise ValueError(f"specs.toml [{key}]: '{min(unknown)}' is not a field of a chip")
    values = {name: Value(**entry) for name, entry in table.items() if isinstance(entry, dict)}
    for name, value in values.items():
        if value.source not in known:
            raise ValueError(f"specs.toml [{key}] {name}: source '{value.source}' is not in [sources]")
    named = {name: str(table[name]) for name in ("name", "match", "target")}
    return Chip(key=key, **named, **values)  # type: ignore[arg-type]
