"""A mixture of few experts as two batched products: every expert on every token, weighted by 0 where not chosen.

For a rollout that must not share the trainer's grouped product and cannot afford an expert at a time: no sorting, no
waiting for the GPU, E / top-k times the arithmetic. Registered with transformers as the implementation `dense`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

NAME = "dense"
FEW = 16  # with more experts the wasted arithmetic would matter


def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Experts of transformers >= 5: hidden states [M, K], indices and weights [M, k]; result [M, K].

    Biases, other layouts and many experts go to `grouped_mm`.
    """
    if self.num_experts > FEW or self.has_bias or self.is_transposed or not hasattr(self, "gate_up_proj"):
        return ALL_EXPERTS_FUNCTIONS["grouped_mm"](self, hidden_states, top_k_index, top_k_weights)
    gate, up = torch.matmul(hidden_states, self.gate_up_proj.transpose(-2, -1)).chunk(2, dim=-1)  # [E, M, N] each
    y = torch.matmul(self.act_fn(gate) * up, self.down_proj.transpose(-2, -1))  # [E, M, K]
    shares = top_k_weights.new_zeros(len(hidden_states), self.num_experts).scatter(-1, top_k_index, top_k_weights)
    return (y * shares.T.unsqueeze(-1)).sum(dim=0).to(hidden_states.dtype)


def register() -> str:
    """Make transformers know it; returns its name."""
    if NAME not in ALL_EXPERTS_FUNCTIONS:
        ALL_EXPERTS_FUNCTIONS.register(NAME, forward)
    return NAME
