"""Instructions that compiled code issues, counted on its disassembly (cuobjdump -sass): paths, not totals.

A static count adds paths that exclude each other: a quantiser's fast path, its slow one and its division subroutines.
Counted here are the shortest path from entry to exit through each store (every warp takes at least one of them, and
where the fast path is the shortest, the common one), the whole body of each loop that multiplies, and the shortest way
from one such loop to the next, which a loop around them takes.
"""

from __future__ import annotations

import heapq
import re
from dataclasses import dataclass

_LINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)([^;]*);", re.MULTILINE)
_STORES = ("STG", "UTMASTG", "ST.E")
_MULTIPLIES = ("HMMA", "HGMMA", "QMMA", "OMMA", "UTCHMMA", "UTCQMMA", "UTCOMMA")


@dataclass(frozen=True)
class Instruction:
    """One line of SASS; predicated: issued only by the threads that a predicate names."""

    address: int
    predicated: bool
    opcode: str
    operands: str


def instructions(sass: str) -> list[Instruction]:
    """Every instruction of a disassembly, in order of its address."""
    return [Instruction(int(m[1], 16), bool(m[2]), m[3], m[4]) for m in _LINE.finditer(sass)]


def through_stores(sass: str) -> list[int]:
    """Fewest instructions from entry to exit through each store to memory, ascending, without repetitions.

    A loop counts once. ValueError where no store can be reached.
    """
    code = instructions(sass)
    after = _successors(code)
    exits = [i for i, line in enumerate(code) if line.opcode == "EXIT"]
    stores = [i for i, line in enumerate(code) if line.opcode.startswith(_STORES)]
    entry = _distances(after, 0)
    found = set()
    for store in stores:
        onward = _distances(after, store)
        ends = [onward[e] for e in exits if e in onward]
        if store in entry and ends:
            found.add(entry[store] + min(ends) - 1)
    if not found:
        raise ValueError("the code reaches no store")
    return sorted(found)


def multiplying_loops(sass: str) -> list[int]:
    """Instructions of the whole body of each innermost loop that multiplies matrices, by address.

    ValueError where no loop does.
    """
    code = instructions(sass)
    return [last - first + 1 for first, last in _innermost(code, _successors(code))]


def between_multiplying_loops(sass: str) -> int:
    """Fewest instructions from the end of such a loop to the start of the next, or of the same one: of a round of both.

    ValueError where no way leads back to one.
    """
    code = instructions(sass)
    after = _successors(code)
    loops = _innermost(code, after)
    ways = [_distances(after, last + 1).get(first) for _, last in loops for first, _ in loops]
    found = [way - 1 for way in ways if way is not None]
    if not found:
        raise ValueError("no loop of the code encloses one that multiplies matrices")
    return min(found)


def _innermost(code: list[Instruction], after: list[list[int]]) -> list[tuple[int, int]]:
    """First and last instruction of each innermost loop that multiplies matrices."""
    loops = sorted({(first, last) for last, ends in enumerate(after) for first in ends if first < last})
    found = [loop for loop in loops if any(line.opcode.startswith(_MULTIPLIES) for line in code[loop[0] : loop[1] + 1])]
    inner = [one for one in found if not any(one != o and one[0] <= o[0] and o[1] <= one[1] for o in found)]
    if not inner:
        raise ValueError("no loop of the code multiplies matrices")
    return inner


def _successors(code: list[Instruction]) -> list[list[int]]:
    """Where control can go after each instruction; a subroutine is taken to return."""
    index = {line.address: i for i, line in enumerate(code)}
    after = []
    for i, line in enumerate(code):
        following = [i + 1] if i + 1 < len(code) else []
        if line.opcode.startswith(("BRA", "JMP")):
            target = index.get(int((re.findall(r"0x([0-9a-f]+)", line.operands) or ["0"])[-1], 16))
            conditional = line.predicated or re.search(r"\bU?P\d", line.operands) is not None
            after.append(([] if target is None else [target]) + (following if conditional else []))
        elif line.opcode.startswith(("EXIT", "RET")):
            after.append(following if line.predicated else [])
        else:
            after.append(following)
    return after


def _distances(after: list[list[int]], start: int) -> dict[int, int]:
    """Fewest instructions from `start` to each reachable one, both counted."""
    best, queue = {start: 1}, [(1, start)]
    while queue:
        steps, i = heapq.heappop(queue)
        if steps > best[i]:
            continue
        for j in after[i]:
            if steps + 1 < best.get(j, steps + 2):
                best[j] = steps + 1
                heapq.heappush(queue, (steps + 1, j))
    return best
