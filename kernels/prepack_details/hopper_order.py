"""The bytes of a weight in decode order (prepack.py) and back: two permutations, one move of bits, one table.

Within each 16-bit half of a word of sixteen codes:
    code 0: sign 15, magnitude 8..6;  1: sign 12, 5..3;  2: sign 14, 2..0;  3: sign 13, 11..9
Scales are E5M3 with bias 10, NaN 0xFF. A zero scale has no code of its own: its byte 0x00 reads as 2^-10, so the
magnitudes of its block are cleared, their signs kept. That is all that the way back cannot give again.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

TILE = 64
_MOVES = (  # mask within each 16-bit half, left shift
    (0x0008, 12),
    (0x0007, 6),
    (0x0080, 5),
    (0x0070, -1),
    (0x0800, 3),
    (0x0700, -8),
    (0x8000, -2),
    (0x7000, -3),
)
_MOVES_BACK = tuple((mask << shift if shift > 0 else mask >> -shift, -shift) for mask, shift in _MOVES)
_MAGNITUDES, _SIGNS, _NAN = 0x7F, 0x8888, 0x7F


def ordered(packed: Tensor, scales: Tensor, interleave: bool) -> tuple[Tensor, Tensor]:
    """Codes int64 [experts, tile, K/16, i, g, h] and E5M3 scales uint8 [experts, tile, K/16, g, i, h]: strided views.

    packed uint8 [experts, N, K/2], E4M3 scales uint8 [experts, N, K/16]. The views' elements in order are the bytes.
    """
    codes = _tiles(_moved(cleared(packed, scales).view(torch.int64), _MOVES), interleave)
    table = torch.tensor(_e5m3_table(), dtype=torch.uint8, device=scales.device)
    e5m3 = _tiles(table[(scales & _MAGNITUDES).long()], interleave)
    return codes.permute(0, 1, 5, 3, 4, 2), e5m3.permute(0, 1, 5, 4, 3, 2)


def exported(codes: Tensor, scales: Tensor, n: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Inverse of `ordered`: packed uint8 [experts, n, K/2] and E4M3 scales uint8 [experts, n, K/16], contiguous.

    codes uint8 [experts, tiles, K/16, 512], scales uint8 [experts, tiles, K/16, 64]. Rows past n are dropped unread.
    """
    words = codes.view(torch.int64).unflatten(3, (4, 8, 2)).permute(0, 1, 5, 3, 4, 2)
    e5m3 = scales.unflatten(3, (8, 4, 2)).permute(0, 1, 5, 4, 3, 2)
    table = torch.tensor(_e4m3_table(), dtype=torch.uint8, device=scales.device)
    packed = _bytes(_moved(_rows(words, n, interleaved).contiguous(), _MOVES_BACK))
    return packed, table[_rows(e5m3, n, interleaved).long()]


def cleared(packed: Tensor, scales: Tensor) -> Tensor:
    """`packed` with the magnitudes of codes under a zero block scale cleared, contiguous: the same values.

    packed uint8 [..., K/2], E4M3 scales uint8 [..., K/16].
    """
    words = packed.contiguous().view(torch.int64)
    return _bytes(torch.where((scales & _MAGNITUDES) == 0, words & _repeat(_SIGNS), words))


def _bytes(words: Tensor) -> Tensor:
    return words.unsqueeze(-1).view(torch.uint8).flatten(-2)  # a last dimension of one may have any stride


def _tiles(x: Tensor, interleave: bool) -> Tensor:
    """[experts, N, K/16] as [experts, tile, h, i, g, K/16], zero rows appended to whole tiles."""
    halves = x.unflatten(1, (2, -1)) if interleave else x.unsqueeze(1)
    missing = -halves.shape[2] % (TILE // halves.shape[1])
    padded = pad(halves, (0, 0, 0, missing)) if missing else halves
    if interleave:
        return padded.unflatten(2, (-1, 4, 8)).permute(0, 2, 1, 3, 4, 5)
    return padded.squeeze(1).unflatten(1, (-1, 4, 2, 8)).permute(0, 1, 3, 2, 4, 5)


def _rows(x: Tensor, n: int, interleaved: bool) -> Tensor:
    """Inverse of `_tiles`: [experts, tile, h, i, g, K/16] as [experts, n, K/16]."""
    if interleaved:
        return x.permute(0, 2, 1, 3, 4, 5).flatten(2, 4)[:, :, : n // 2].flatten(1, 2)
    return x.permute(0, 1, 3, 2, 4, 5).flatten(1, 4)[:, :n]


def _repeat(half: int) -> int:
    """A 16-bit pattern repeated over 64 bits, as a signed integer."""
    value = half * 0x0001_0001_0001_0001
    return value - (1 << 64) if value >> 63 else value


def _moved(words: Tensor, moves: tuple[tuple[int, int], ...]) -> Tensor:
    """Every bit of `words` at its new place; two temporaries of their size, one of them the result."""
    moved = torch.zeros(words.shape, dtype=words.dtype, device=words.device)
    for mask, shift in moves:
        if shift > 0:
            moved.add_(words & _repeat(mask), alpha=1 << shift)  # places are disjoint: no carry
        else:  # mask after an arithmetic shift: no sign bits come along
            moved.add_((words >> -shift).bitwise_and_(_repeat(mask >> -shift)))
    return moved


def _e5m3_table() -> list[int]:
    """E5M3 byte (bias 10) for each E4M3 magnitude; 0 for zero, 0xFF for NaN."""
    subnormal = [0x00, 0x08, 0x10, 0x14, 0x18, 0x1A, 0x1C, 0x1E]
    return [*subnormal, *(code + 0x18 for code in range(8, 0x7F)), 0xFF]


def _e4m3_table() -> list[int]:
    """E4M3 byte for each E5M3 byte; NaN for those that no E4M3 value has."""
    table = [_NAN] * 256
    for e4m3, e5m3 in enumerate(_e5m3_table()):
        table[e5m3] = e4m3
    return table
