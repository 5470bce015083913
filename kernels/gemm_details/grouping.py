"""Which rows of a grouped product belong together."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Grouping:
    """Routed rows of a grouped product, in blocks of a fixed number of slots.

    slots int32 [blocks * slots of a block]: output row, or -1, each block filled from its front;
    groups int32 [blocks]: weight of a block, -1 past the last;
    share: output rows that read one activation row (top-k of the first product, 1 of the second).
    """

    slots: Tensor
    groups: Tensor
    share: int
    rows_out: int
