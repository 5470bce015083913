"""Which bits of a tensor-core result rest on rules that no published evidence decides.

The rules (evidence.toml, class "assumption" or "published model"): whether a dead group counts in e_max, whether a
cancelled one does, F = 35 rather than 34 or 36, and the order of the K steps. A bit that changes with one of them is
*not established*; all others are the same under every rule. F is varied for the FP4 models only: the other models'
F is decided by hardware words or by mmasim's published tests.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quads.emulation import exact_chain, gemm, mma
from quads.emulation.quantizers import NVFP4Tensor

DESCENDING = "steps of K in descending order"


def variants(model: mma.Model) -> dict[str, mma.Model]:
    """The models that the evidence does not rule out, by the rule that they change."""
    found = {"dead terms count in e_max": model.replace(dead_group="included")}
    if model.group > 1:
        found["cancelled groups do not count in e_max"] = model.replace(cancelled_group="excluded")
        found |= {
            f"F = {model.fraction_bits + d}": model.replace(fraction_bits=model.fraction_bits + d) for d in (-1, 1)
        }
    return found


def not_established(a: mma.Operand, b: mma.Operand, model: mma.Model, c: Tensor | None = None) -> dict[str, Tensor]:
    """For each undecided rule, the outputs [..., M, N] (bool) whose bits depend on it. Arguments as `mma.chain`."""
    chosen = mma.chain(a, b, model, c)
    found = {rule: mma.chain(a, b, other, c) != chosen for rule, other in variants(model).items()}
    if a.codes.shape[-1] > model.k:
        found[DESCENDING] = mma.chain(descending(a, model), descending(b, model), model, c) != chosen
    return found


def not_established_matmul(a: NVFP4Tensor, b: NVFP4Tensor, model: mma.Model = gemm.NVFP4) -> dict[str, Tensor]:
    """The same for the accumulator of `gemm.matmul`, at its speed."""
    chosen = gemm.matmul(a, b, model=model)
    found = {rule: _differs(gemm.matmul(a, b, model=other), chosen) for rule, other in variants(model).items()}
    turned = (_turned(x, model) for x in (a, b))
    return found | {DESCENDING: _differs(gemm.matmul(*turned, model=model), chosen)}


def _turned(q: NVFP4Tensor, model: mma.Model) -> NVFP4Tensor:
    operand = descending(exact_chain.padded(mma.Operand(q.codes, q.scales)), model)
    assert operand.scales is not None
    return NVFP4Tensor(operand.codes, operand.scales, q.outer)


def _differs(x: Tensor, y: Tensor) -> Tensor:
    return x.view(torch.int32) != y.view(torch.int32)


def descending(operand: mma.Operand, model: mma.Model) -> mma.Operand:
    """The operand with its K steps in reverse order; K must be a multiple of the step."""
    if operand.codes.shape[-1] % model.k:
        raise ValueError(f"codes of shape {tuple(operand.codes.shape)}: K is not a multiple of the step {model.k}")
    scales = operand.scales
    if scales is not None:
        scales = _flip(scales, model.k // model.scale_block)
    return mma.Operand(_flip(operand.codes, model.k), scales, operand.format)


def _flip(x: Tensor, step: int) -> Tensor:
    return x.unflatten(-1, (-1, step)).flip(-2).flatten(-2)
