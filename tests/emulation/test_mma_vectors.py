"""Directed vectors of the FP4 step, worked by hand, each with what plausible wrong models answer."""

from __future__ import annotations

import dataclasses
import struct
from dataclasses import dataclass, field
from fractions import Fraction

import pytest
import torch

from quads.emulation import mma
from tests import oracle_mma
from tests.mma_data import signed

NVFP4 = mma.model("nvfp4")
WRONG = {
    "F=25": NVFP4.replace(fraction_bits=25),
    "F=34": NVFP4.replace(fraction_bits=34),
    "F=36": NVFP4.replace(fraction_bits=36),
    "v1": NVFP4.replace(dead_group="included"),
    "cancelled excluded": NVFP4.replace(cancelled_group="excluded"),
}


@dataclass(frozen=True)
class Vector:
    """C, codes {k: code} and scale bytes {group: byte} of A and B (0 and 0x38 elsewhere), D and other models' D."""

    id: str
    c: float
    d: int
    a: dict[int, int] = field(default_factory=dict)
    b: dict[int, int] = field(default_factory=dict)
    scale_a: dict[int, int] = field(default_factory=dict)
    scale_b: dict[int, int] = field(default_factory=dict)
    others: dict[str, int] = field(default_factory=dict)


ALL = dict.fromkeys(range(4), 0x7E)
EVERY = dict.fromkeys(range(64), 7)
RZ_TRAP = {"F=25": 0x4B800000, "F=34": 0x4B800000, "v1": 0x4B800000, "exact RN": 0x4B800001}
VECTORS = [
    Vector("V1 1.5 onto 2^24", 2.0**24, 0x4B800000, {0: 2, 16: 1}, {0: 2, 16: 2}, others=RZ_TRAP),
    Vector(
        "V2 a term below the window of 2^30",
        2.0**30,
        0x4E800000,
        {0: 1},
        {0: 9},
        {0: 0x08},
        {0: 0x08},
        others={"exact RZ": 0x4E7FFFFF, "exact RN": 0x4E800000},
    ),
    Vector("V4 dead groups with the largest scales", 2.0**-20, 0x35800000, {}, {}, ALL, ALL, others={"v1": 0}),
    Vector(
        "V4b dead groups beside one small live group",
        2.0**-20 * (1 + 2.0**-23),
        0x36000000,
        {16: 1},
        {16: 1},
        {0: 0x7E, 1: 0x01, 2: 0x7E, 3: 0x7E},
        {0: 0x7E, 1: 0x01, 2: 0x7E, 3: 0x7E},
        others={"v1": 0},
    ),
    Vector(
        "V5 a cancelled group with the largest scales",
        2.0**-20,
        0,
        {0: 2, 1: 2},
        {0: 2, 1: 10},
        {0: 0x7E},
        {0: 0x7E},
        others={"cancelled excluded": 0x35800000, "exact RZ": 0x35800000},
    ),
    Vector("V6 a NaN scale on zero codes", 0.0, 0x7FFFFFFF, scale_a={0: 0x7F}),
    Vector("V6b a NaN scale with its sign bit", 0.0, 0x7FFFFFFF, scale_a={0: 0xFF}),
    Vector("V6c a negative zero scale", 0.0, 0x00000000, {0: 7}, {0: 7}, {0: 0x80}),
    Vector("V6d a scale's sign is ignored", 0.0, 0x42100000, {0: 7}, {0: 7}, {0: 0xB8}),
    Vector("V7 the smallest product", 0.0, 0x35800000, {0: 1}, {0: 1}, {0: 0x01}, {0: 0x01}),
    Vector("V9 C = -0 and -0 products", -0.0, 0x00000000, {0: 8}, {0: 2}),
    Vector("V9b C = -1 plus 1", -1.0, 0x00000000, {0: 2}, {0: 2}),
    Vector("V10 C = Inf passes", float("inf"), 0x7F800000, EVERY, dict.fromkeys(range(64), 15), ALL, ALL),
    Vector("V11 the largest sum", 0.0, 0x4DDC8000, EVERY, EVERY, ALL, ALL),
    Vector("V12 FP32 subnormal C is kept", 2.0**-149, 0x00000001),
    Vector(
        "V13 the last bit inside the window",
        2.0**15,
        0x46FFFFFF,
        {0: 1},
        {0: 9},
        {0: 0x01},
        {0: 0x01},
        others={"F=34": 0x47000000, "F=25": 0x47000000, "F=36": 0x46FFFFFF, "exact RN": 0x47000000},
    ),
    Vector(
        "V14 the first bit outside the window",
        2.0**16,
        0x47800000,
        {0: 1},
        {0: 9},
        {0: 0x01},
        {0: 0x01},
        others={"F=36": 0x477FFFFF, "F=34": 0x47800000, "exact RZ": 0x477FFFFF},
    ),
]


def operands(v: Vector) -> tuple[mma.Operand, mma.Operand, torch.Tensor]:
    codes = torch.zeros(2, 64, dtype=torch.uint8)
    scales = torch.full((2, 4), 0x38, dtype=torch.uint8)
    for row, (some, bytes_) in enumerate(((v.a, v.scale_a), (v.b, v.scale_b))):
        for k, code in some.items():
            codes[row, k] = code
        for g, byte in bytes_.items():
            scales[row, g] = byte
    word = struct.unpack("<I", struct.pack("<f", v.c))[0]
    c = signed(torch.tensor([[word]]), 32)
    return mma.Operand(codes[:1], scales[:1]), mma.Operand(codes[1:], scales[1:]), c


def answer(v: Vector, model: mma.Model) -> int:
    a, b, c = operands(v)
    return int(mma.chain(a, b, model, c)) & 0xFFFFFFFF


def exact(v: Vector, name: str) -> int:
    """Rounded once from the exact sum: the model without a window."""
    a, b, _ = operands(v)
    assert a.scales is not None and b.scales is not None
    wide = dataclasses.replace(oracle_mma.NVFP4, fraction_bits=400)
    scales = list(zip(a.scales[0].tolist(), b.scales[0].tolist(), strict=True))
    terms = oracle_mma.terms_of_groups(a.codes[0].tolist(), b.codes[0].tolist(), scales, wide)
    total = Fraction(v.c) + sum(s * Fraction(2) ** e for s, e in terms)
    return (oracle_mma.rn_fp32 if name == "exact RN" else oracle_mma.rz_fp32)(total)


@pytest.mark.parametrize("v", VECTORS, ids=lambda v: v.id)
def test_the_model_gives_the_vector(v: Vector) -> None:
    assert f"{answer(v, NVFP4):08X}" == f"{v.d:08X}"


@pytest.mark.parametrize(("v", "name"), [(v, n) for v in VECTORS for n in v.others], ids=lambda x: getattr(x, "id", x))
def test_another_model_gives_what_is_written_beside_the_vector(v: Vector, name: str) -> None:
    got = exact(v, name) if name.startswith("exact") else answer(v, WRONG[name])
    assert f"{got:08X}" == f"{v.others[name]:08X}"


def test_each_undecided_rule_has_a_vector_that_shows_it() -> None:
    shown = {name for v in VECTORS for name, d in v.others.items() if d != v.d}
    assert shown >= {"v1", "cancelled excluded", "F=34", "F=36", "F=25", "exact RN", "exact RZ"}
