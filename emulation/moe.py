"""A whole NVFP4 mixture-of-experts layer, bfloat16 in to bfloat16 out, as grouped kernels compute it.

    order   token-expert pairs sorted by expert, equal experts by token, then slot; an expert may have no rows
    x       quantised once, before it is gathered (per token, or one outer scale for all tokens)
    w13     gate and up are separate matrices with their own outer scales (one alpha each, no merged scale)
    hidden  RNE_bf16(fl(silu(gate) * up)) of the bf16 gate and up; silu(v) = v / (1 + exp(-v)) evaluated in float64 and
            rounded once to FP32. The product is rounded to bf16 *before* the block maxima of its quantisation.
    w2      the hidden rows quantised again (same granularity), own RAC selection
    output  sum over a token's slots, ascending, of fl(weight * bf16 row) in FP32, RNE each, then one RNE to bf16
RAC: ascending 16-block indices that all rows of all experts share ([S]) or one row of indices per expert ([E, S]).
Sources: vLLM's and FlashInfer's grouped NVFP4 layers for order and rounding points; silu there is an approximation
(`__expf`), here it is correctly rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from quads.emulation import gemm
from quads.emulation.quantizers import Granularity, NVFP4Tensor, quantize

Weight = NVFP4Tensor | gemm.Prepared


@dataclass(frozen=True)
class Expert:
    """One expert's matrices: gate and up [I, H], down [H, I], each with one outer scale."""

    gate: Weight
    up: Weight
    down: Weight


@dataclass(frozen=True)
class Order:
    """rows: int64 [P], the flat index (token * slots + slot) of each sorted pair; ends: rows up to an expert's end."""

    rows: Tensor
    ends: list[int]

    def groups(self) -> list[slice]:
        """The sorted rows of each expert, empty ones included."""
        return [slice(start, stop) for start, stop in pairwise([0, *self.ends])]


def sort_pairs(expert_ids: Tensor, experts: int) -> Order:
    """Sort the token-expert pairs of `expert_ids` (int64 [T, slots]) by expert, stable."""
    if experts < 1:
        raise ValueError(f"a mixture of {experts} experts: expected at least one")
    if expert_ids.ndim != 2:
        raise ValueError(f"expert_ids of shape {tuple(expert_ids.shape)}: expected [tokens, slots]")
    flat = expert_ids.flatten()
    if flat.numel() and not 0 <= int(flat.min()) <= int(flat.max()) < experts:
        raise ValueError(f"expert_ids range from {int(flat.min())} to {int(flat.max())}: there are {experts} experts")
    counts = torch.bincount(flat, minlength=experts)
    return Order(torch.sort(flat, stable=True).indices, counts.cumsum(0).tolist())


def grouped_matmul(
    x: Tensor,
    q: NVFP4Tensor,
    weights: Sequence[Weight],
    groups: Sequence[slice],
    *,
    rac_blocks: Tensor | None = None,
) -> Tensor:
    """Rows `groups[e]` of `x` (quantised as `q`) times weights[e]^T: [P, N] in the dtype of `x`."""
    width = _codes(weights[0]).shape[0]
    y = x.new_zeros(len(x), width)
    for index, (rows, weight) in enumerate(zip(groups, weights, strict=True)):
        if rows.stop > rows.start:
            y[rows] = gemm.product(x[rows], _rows(q, rows), weight, rac_blocks=_blocks_of(rac_blocks, index))
    return y


def _codes(weight: Weight) -> Tensor:
    return weight.q.codes if isinstance(weight, gemm.Prepared) else weight.codes


def _rows(q: NVFP4Tensor, rows: slice | Tensor) -> NVFP4Tensor:
    return NVFP4Tensor(q.codes[rows], q.scales[rows], q.outer[rows] if q.outer.ndim else q.outer)


def _blocks_of(blocks: Tensor | None, expert: int) -> Tensor | None:
    return blocks[expert] if blocks is not None and blocks.ndim == 2 else blocks


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """RNE(fl(fl(silu(gate)) * up)) in the dtype of `gate` (bfloat16); shapes equal."""
    wide = gate.double()
    return ((wide / (1 + torch.exp(-wide))).float() * up.float()).to(gate.dtype)


def layer(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    experts: Sequence[Expert],
    *,
    granularity: Granularity = "token",
    rac_in: Tensor | None = None,
    rac_mid: Tensor | None = None,
) -> Tensor:
    """The layer's output [T, H] (dtype of `x`).

    x [T, H] bfloat16; expert_ids int64 and expert_weights float32, both [T, slots]; rac_in, rac_mid: compensated
    16-blocks of H before w13 and of I before w2. Raises ValueError on a bad shape, expert index, NaN or Inf.
    """
    order = sort_pairs(expert_ids, len(experts))
    if expert_weights.shape != expert_ids.shape or len(x) != len(expert_ids):
        raise ValueError(
            f"x {tuple(x.shape)}, expert_ids {tuple(expert_ids.shape)} and "
            f"expert_weights {tuple(expert_weights.shape)}: expected [T, H], [T, slots] and [T, slots]"
        )
    slots = expert_ids.shape[1]
    tokens, groups = order.rows // slots, order.groups()
    rows, q = x[tokens], _rows(quantize(x, granularity=granularity), tokens)
    gate = grouped_matmul(rows, q, [e.gate for e in experts], groups, rac_blocks=rac_in)
    up = grouped_matmul(rows, q, [e.up for e in experts], groups, rac_blocks=rac_in)
    hidden = swiglu(gate, up)
    q_hidden = quantize(hidden, granularity=granularity)
    down = grouped_matmul(hidden, q_hidden, [e.down for e in experts], groups, rac_blocks=rac_mid)
    return combine(down, order, expert_weights).to(x.dtype)


def combine(rows: Tensor, order: Order, expert_weights: Tensor) -> Tensor:
    """FP32 [T, H]: each token's sorted rows, weighted and added in ascending slot order."""
    by_pair = torch.empty_like(rows)
    by_pair[order.rows] = rows
    terms = by_pair.float().unflatten(0, expert_weights.shape) * expert_weights.float().unsqueeze(-1)
    total = terms[:, 0]
    for slot in range(1, terms.shape[1]):
        total = total + terms[:, slot]
    return total
