"""The time of a kernel on a chip, from what it moves, multiplies and issues.

    t = overhead + (memory^3 + matrix^3 + issue^3 + feed^3 + serial^3)^(1/3)

memory: bytes over the copy bandwidth. matrix: FLOPs over the rate that products reach, in whole waves of thread blocks.
issue: warp instructions over the issue slots of the SMs in use. feed: bytes that thread blocks request, over what they
keep in flight. serial: a chain of dependent steps. The exponent says how well they overlap (infinity: perfectly, 1: not
at all); 3 fits the quantisers on the H200, whose bytes, instructions and times are known (docs/results/kernels-h200).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from quads.bench.specs import Chip

OVERLAP = 3.0
PROGRAMS_AN_SM = 2  # of the Triton product's persistent grid


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one kernel does; a call is a sequence of them.

    bytes: through main memory. flops: executed by tensor cores in format `numerics`; reached: share of that format's
    rate that its kind of instruction can reach. instructions: of warps, in all; issued: share of the issue slots that
    the kernel can use, where it was measured. launches: kernels of this kind that are too small to do more than start.
    blocks: thread blocks (None: enough to fill every chip), of which each requests `requested / blocks` bytes and keeps
    `in_flight` bytes on their way. serial: seconds of a chain of dependent steps.
    """

    bytes: float = 0.0
    flops: float = 0.0
    numerics: str = "bf16"
    reached: float = 1.0
    instructions: float = 0.0
    issued: float = 1.0
    launches: int = 1
    blocks: float | None = None
    requested: float = 0.0
    in_flight: float = 0.0
    serial: float = 0.0


def parts(work: Work, chip: Chip) -> dict[str, float]:
    """Seconds of each resource alone."""
    resident = chip.sms.value * PROGRAMS_AN_SM if work.blocks is None else work.blocks
    used = min(1.0, resident / chip.sms.value)
    waves = 1.0 if work.blocks is None else _waves(work.blocks, chip.sms.value)
    streams = min(resident, PROGRAMS_AN_SM * chip.sms.value) * work.in_flight / chip.latency_s.value
    return {
        "memory": work.bytes / chip.copy.value,
        "matrix": work.flops / (chip.matrix(work.numerics).value * work.reached) * waves if work.flops else 0.0,
        "issue": work.instructions / (chip.issue_per_s * used * work.issued),
        "feed": work.requested / streams if streams else 0.0,
        "serial": work.serial,
    }


def seconds(works: tuple[Work, ...], chip: Chip, *, isolated: bool = False) -> float:
    """Seconds of a call: among others in a CUDA graph, or alone with cold L2."""
    busy = sum(sum(t**OVERLAP for t in parts(work, chip).values()) ** (1 / OVERLAP) for work in works)
    launches = sum(work.launches for work in works)
    first = chip.isolated_s.value - chip.launch_s.value if isolated else 0.0
    return busy + launches * chip.launch_s.value + first


def bound_by(works: tuple[Work, ...], chip: Chip) -> str:
    """The resource that takes longest over the call, "launch" among them."""
    total: dict[str, float] = {"launch": sum(work.launches for work in works) * chip.launch_s.value}
    for work in works:
        for name, t in parts(work, chip).items():
            total[name] = total.get(name, 0.0) + t
    return max(total, key=lambda name: total[name])


def _waves(blocks: float, sms: float) -> float:
    """Time of whole waves over that of a perfectly divided one."""
    return math.ceil(blocks / sms) / (blocks / sms) if blocks else 1.0
