"""Instructions counted along paths of a disassembly small enough to count by hand."""

from __future__ import annotations

import pytest

from quads.bench import issue


def sass(*lines: str) -> str:
    return "\n".join(f"        /*{16 * i:04x}*/                   {line} ;  /* 0x0 */" for i, line in enumerate(lines))


# A fast path of 6 instructions, a slow one that calls a subroutine, padding behind the last exit.
FORK = sass(
    "S2R R0, SR_TID.X",
    "ISETP.GT.AND P0, PT, R0, RZ, PT",
    "@P0 BRA 0x0060",  # slow
    "FMUL R1, R0, R0",
    "STG.E [R2], R1",
    "EXIT",
    "CALL.REL.NOINC 0x00a0",
    "FMUL R1, R0, R0",
    "STG.E [R2], R1",
    "EXIT",
    "FADD R3, R3, R3",
    "RET.REL.NODEC R4 0x0",
    "BRA 0x00c0",
)

LOOP = sass(
    "MOV R0, RZ",
    "LDG.E R1, [R2]",  # loop
    "@P2 BRA 0x0040",
    "HMMA.16816.F32.BF16 R4, R1, R1, R4",
    "IADD3 R0, R0, 0x1, RZ",
    "@P1 BRA 0x0010",
    "FADD R5, R5, R5",  # a loop without products
    "@P1 BRA 0x0060",
    "STG.E [R2], R4",
    "EXIT",
)


def test_paths_that_exclude_each_other_are_not_added() -> None:
    assert issue.through_stores(FORK) == [6, 7]
    assert len(issue.instructions(FORK)) == 13


def test_a_loop_counts_once_on_a_path() -> None:
    assert issue.through_stores(LOOP) == [9]


def test_the_whole_body_of_the_loop_that_multiplies_is_counted() -> None:
    assert issue.multiplying_loops(LOOP) == [5]


def test_of_nested_loops_the_inner_one_counts() -> None:
    nested = sass(
        "MOV R0, RZ", "MOV R1, RZ", "HMMA.16816.F32 R4, R1, R1, R4", "@P0 BRA 0x0020", "@P1 BRA 0x0010", "EXIT"
    )
    assert issue.multiplying_loops(nested) == [2]


# Rounds of two kinds: 2 instructions, then one of two loops that multiply, then 2 (the way round) or 1 more.
ROUNDS = sass(
    "MOV R0, RZ",
    "BAR.SYNC 0x0",  # a round
    "@P0 BRA 0x0070",
    "MOV R1, RZ",
    "HMMA.16816.F32 R4, R1, R1, R4",  # one loop
    "@P1 BRA 0x0040",
    "BRA 0x00b0",
    "HMMA.16816.F32 R4, R1, R1, R4",  # the other
    "HMMA.16816.F32 R8, R1, R1, R8",
    "@P1 BRA 0x0070",
    "@P3 FADD R2, R2, R2",
    "@P2 BRA 0x0010",  # the next round
    "STG.E [R2], R4",
    "EXIT",
)


def test_of_a_round_what_lies_between_its_loops_counts_once_by_the_shortest_way() -> None:
    assert issue.multiplying_loops(ROUNDS) == [2, 3]
    # From the first loop: BRA, the branch back, BAR, the branch to the second. From the second its predicated FADD too.
    assert issue.between_multiplying_loops(ROUNDS) == 4


def test_a_loop_that_no_other_encloses_has_no_rounds() -> None:
    with pytest.raises(ValueError, match="no loop of the code encloses"):
        issue.between_multiplying_loops(LOOP)


def test_code_without_a_store_or_a_product_is_refused() -> None:
    with pytest.raises(ValueError, match="reaches no store"):
        issue.through_stores(sass("MOV R0, RZ", "EXIT"))
    with pytest.raises(ValueError, match="no loop of the code multiplies"):
        issue.multiplying_loops(FORK)
