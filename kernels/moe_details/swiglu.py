"""h = bf16(silu(gate) * up) of bfloat16 [rows, 2 I], gate first; silu(v) = v / (1 + exp(-v)), all in FP32."""

from __future__ import annotations

import torch
from torch import Tensor


def swiglu(gate_up: Tensor) -> Tensor:
    """bfloat16 [rows, I]. The decode kernel of Hopper does the same in its epilogue."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate / (1 + torch.exp(-gate)) * up).to(torch.bfloat16)
