"""Byte layouts of packed codes.

Packing: byte j of a row holds element 2j in its low nibble and element 2j+1 in its high nibble, the order of
torch.float4_e2m1fn_x2, vLLM, FlashInfer, Transformer Engine, torchao, ModelOpt and compressed-tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pack(codes: Tensor) -> Tensor:
    """Pack `codes` (uint8 nibbles, [..., K], K even) into bytes [..., K/2]."""
    if codes.shape[-1] % 2:
        raise ValueError(f"codes of shape {tuple(codes.shape)}: the last dimension must be even to pack nibbles")
    low, high = codes[..., 0::2], codes[..., 1::2]
    return low | (high << 4)


def unpack(packed: Tensor) -> Tensor:
    """Inverse of `pack`: bytes [..., K/2] to nibbles [..., K]."""
    return torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)
