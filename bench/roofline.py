"""Rooflines: what a machine can do at each arithmetic intensity, from a run's own ceilings or from a chip's.

A roof is min(FLOP/s of products, intensity times bytes/s of a copy). Intensity is FLOPs over bytes, both as counted for
a case (quads.bench.counts): executed FLOPs, every byte through main memory once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from quads.bench.results import Result
from quads.bench.specs import Chip


@dataclass(frozen=True, kw_only=True)
class Roof:
    """One number format's roof: bytes/s of a copy, FLOP/s of products, and what these rest on."""

    numerics: str
    bytes_per_s: float
    flops_per_s: float
    kind: str

    @property
    def ridge(self) -> float:
        """Intensity at which memory and tensor cores bind alike."""
        return self.flops_per_s / self.bytes_per_s

    def at(self, intensity: float) -> float:
        """FLOP/s at an intensity."""
        return min(self.flops_per_s, intensity * self.bytes_per_s)


def of_run(results: Iterable[Result]) -> list[Roof]:
    """Roofs of the ceilings that a run measured; none where it measured no copy."""
    ceilings = [one for one in results if one.op == "ceiling" and one.label == "measured"]
    copy = max((one.bytes_per_s or 0.0 for one in ceilings if one.numerics == "copy"), default=0.0)
    return [
        Roof(numerics=one.numerics, bytes_per_s=copy, flops_per_s=one.flops_per_s, kind="measured")
        for one in ceilings
        if one.flops_per_s and copy
    ]


def of_chip(chip: Chip) -> list[Roof]:
    """Roofs of a chip: what copies and products reach there, or are taken to."""
    formats = ("bf16", "fp8", "nvfp4") if chip.native_fp4 else ("bf16", "fp8")
    copy, products = chip.copy, {name: chip.matrix(name) for name in formats}
    return [
        Roof(numerics=name, bytes_per_s=copy.value, flops_per_s=reached.value, kind=f"{reached.kind}, copy {copy.kind}")
        for name, reached in products.items()
    ]


def intensity(result: Result) -> float | None:
    """FLOPs over bytes of a case; None where one of them was not counted."""
    return result.flops / result.bytes if result.flops and result.bytes else None
