"""Four-over-six: scale a block to 6 or to 4, whichever errs less (arXiv 2512.02010).

E2M1 has no 5, so a block whose second largest numbers sit near 5/6 of its maximum does better when the maximum maps
to 4. The error is the dialect's: its formula for the dequantised value, its norm and its order of summation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quads.emulation import formats
from quads.emulation.dialects import BLOCK, Dialect
from quads.emulation.scaling import WRAPS, Candidate, Outer, constant, to_even


def better(candidates: list[Candidate], blocks: Tensor, amax: Tensor, outer: Outer, d: Dialect) -> Candidate:
    """Four-over-six: of the candidates for 6 and for 4, the one of the smaller error; a tie is six's."""
    six, four = candidates
    errors = [_error(c, blocks, amax, outer, d) for c in (six, four)]
    pick = errors[1] < errors[0]
    steps = {f"{k} | six": t for k, t in six.steps.items()} | {f"{k} | four": t for k, t in four.steps.items()}
    steps |= {f"error {d.rule} | six": errors[0], f"error {d.rule} | four": errors[1]}
    return Candidate(
        steps,
        torch.where(pick, four.scales, six.scales),
        torch.where(pick.unsqueeze(-1), four.codes, six.codes),
        torch.where(pick.unsqueeze(-1), four.y, six.y),
    )


def _error(c: Candidate, blocks: Tensor, amax: Tensor, outer: Outer, d: Dialect) -> Tensor:
    grid = formats.decode(formats.encode(c.y, formats.E2M1), formats.E2M1)
    if d.overflow == "wrap":
        grid = torch.where(c.y.abs() >= WRAPS, to_even(c.y), grid)
    value = grid * formats.decode(c.scales, formats.E4M3).unsqueeze(-1)
    if d.error == "q*s*g":
        value = value * outer.g.unsqueeze(-1)
    else:
        value = value * amax.float().unsqueeze(-1) / constant(formats.E2M1_MAX * d.outer_max, value)
    difference = (value - blocks).abs()
    if d.rule == "mse":
        difference = difference * difference
    if d.tile == "16x16":
        return _tile_reduce(difference, d)
    return _reduce(difference, d)


def _reduce(difference: Tensor, d: Dialect) -> Tensor:
    """Error of a block from its elements [..., n], as float32; the order of a sum is the dialect's."""
    if d.rule == "abs_max":
        return difference.amax(dim=-1)
    if d.error_sum == "torch":  # the library's own call: its order is this torch build's, and no promise
        return difference.sum(dim=-1)
    total = torch.zeros_like(difference[..., 0])
    for index in range(difference.shape[-1]):
        total = total + difference[..., index]
    return total


def _tile_reduce(difference: Tensor, d: Dialect) -> Tensor:
    """Error of a 16x16 tile for each of its rows; [..., N, K/16, 16] -> [..., N, K/16].

    Sequential sums run along each row, then rows are folded 8, 4, 2, 1, as Transformer Engine's warp does.
    """
    rows = difference.unflatten(-3, (-1, BLOCK))  # [..., N/16, 16, K/16, 16]
    if d.error_sum == "torch" or d.rule == "abs_max":
        tile = _reduce(rows.transpose(-3, -2).flatten(-2), d)
    else:
        tile = _reduce(rows, d)
        for half in (8, 4, 2, 1):
            tile = tile[..., :half, :] + tile[..., half : 2 * half, :]
        tile = tile.squeeze(-2)
    return tile.repeat_interleave(BLOCK, dim=-2)
