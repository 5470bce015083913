"""What is measured: groups of cases that do the same work in the same rounds, in the order of their importance.

A group has one shape, and inputs that all its cases share; its first case is the base that the others are compared
with. Nothing is allocated or compiled before a group's turn: a case is a function from the inputs to `Ready`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from quads.bench.results import case_name
from quads.bench.timing import SECONDS, Call
from quads.errors import CannotRunHereError

OPERATIONS = (
    "ceiling", "gemm", "moe", "quantize", "quantize_rac", "fake_quantize", "outer_scale", "refit", "train_step",
    "rollout", "emulator", "diagnose",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A case that can be timed.

    calls: the same work on different inputs. bytes, flops: of one call, counted (quads.bench.counts). peak: numerics of
    the `ceiling` case that the FLOPs are held against ("" where there are none). check: largest error over its bound
    (0: bytes are equal); above 1, or an AssertionError, and nothing is timed. graph: whether a CUDA graph can hold it.
    """

    calls: Sequence[Call]
    bytes: float
    flops: float = 0.0
    peak: str = ""
    way: str = ""
    check: Callable[[], float] | None = None
    graph: bool = True
    in_a_row: bool = True


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A bound on a result's ratio to the base, or on its share of the copy bandwidth."""

    text: str
    of: str = "ratio"
    at_least: float | None = None
    at_most: float | None = None

    def met(self, value: float) -> bool:
        """Whether `value` keeps the bound."""
        low = self.at_least is None or value >= self.at_least
        return low and (self.at_most is None or value <= self.at_most)


def always() -> str:
    """The reason why a case cannot run here: none."""
    return ""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One implementation. missing() is "" or the one-line reason why it cannot run here; peer: its name in reports."""

    numerics: str
    implementation: str
    ready: Callable[[Any], Ready]
    variant: str = ""
    missing: Callable[[], str] = always
    goal: Goal | None = None


@dataclass(frozen=True, kw_only=True)
class Group:
    """Cases of one operation and shape. inputs() allocates what they share; quick: also in a quick run.

    seconds: what the rounds of one case may take.
    """

    op: str
    shape: dict[str, int]
    device: str
    cases: tuple[Case, ...]
    inputs: Callable[[], Any] = field(default=lambda: None)
    quick: bool = False
    seconds: float = SECONDS

    def name(self, case: Case) -> str:
        """The key of a case's result."""
        return case_name(self.op, case.numerics, case.implementation, self.shape, case.variant)

    @property
    def in_a_row(self) -> float:
        """Seconds of calls in a row: enough for the energy counter where the shape is one of the first."""
        return 0.5 if self.quick else 0.2

    @property
    def title(self) -> str:
        return case_name(self.op, "", "", self.shape)


def catalogue(device: str) -> Iterator[Group]:
    """Every group of `device` ("cuda" or "cpu"), most important first."""
    modules = ("ceiling", "gemm", "moe", "quantize", "train", "emulator", "diagnose")
    sources = [importlib.import_module(f"quads.bench.cases_{name}") for name in modules]
    yield from sorted((g for source in sources for g in source.groups(device)), key=_rank)


def _rank(group: Group) -> tuple[bool, bool, int]:
    """Ceilings, then the quick groups, then the scaling of each operation (a stable sort keeps a module's order)."""
    return group.op != "ceiling", not group.quick, OPERATIONS.index(group.op)


def devices(wanted: str) -> tuple[str, ...]:
    """Devices that a run takes: `auto` is the GPU where there is one, else the CPU."""
    gpu = torch.cuda.is_available()
    if wanted == "cuda" and not gpu:
        raise CannotRunHereError("--device cuda: torch finds no CUDA GPU here")
    if wanted not in ("auto", "cpu", "cuda", "all"):
        raise ValueError(f"--device '{wanted}' is unknown (known: auto, cpu, cuda, all)")
    if wanted == "all":
        return ("cuda", "cpu") if gpu else ("cpu",)
    return (("cuda" if gpu else "cpu") if wanted == "auto" else wanted,)


def chosen(groups: Iterator[Group], only: Sequence[str], quick: bool) -> list[Group]:
    """The groups whose operation is in `only` (all where it is empty); ceilings always. ValueError names a stranger."""
    for op in only:
        if op not in OPERATIONS:
            raise ValueError(f"--only '{op}' is no operation (known: {', '.join(OPERATIONS)})")
    return [g for g in groups if (not only or g.op in (*only, "ceiling")) and (g.quick or not quick)]
