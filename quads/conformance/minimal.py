"""The smallest input that still differs: one block, the amax beside it, and as few elements as possible."""

from __future__ import annotations

import torch
from torch import Tensor

from quads.conformance.cases import QuantCase
from quads.conformance.protocol import Quantized
from quads.conformance.reference import Difference, Observation, Question, correct, difference, given_outer, question
from quads.conformance.result import FirstFailure
from quads.conformance.runner import Runner
from quads.emulation import explain
from quads.emulation.dialects import BLOCK, Dialect


def first_failure(
    runner: Runner, failing: list[tuple[Observation, Question, Difference]], dialect: Dialect
) -> FirstFailure:
    """The smallest failing case, reduced to one block where the block alone shows it."""
    observation, q, d = min(failing, key=lambda item: item[0].case.x.numel())
    row, block = _where(d)
    small = None if dialect.tile == "16x16" else _reduced(runner, observation, row, block, dialect)
    if small is None:
        return _describe(observation, q, row, block, f"{observation.case.name}, row {row}, block {block}")
    observation, q, d = small
    row, block = _where(d)
    return _describe(observation, q, row, block, f"{observation.case.name}, reduced")


def _where(d: Difference) -> tuple[int, int]:
    """Row and block of the first difference (of the first block, where only padding or the outer scale differs)."""
    blocks = d.scales | d.codes.unflatten(-1, (-1, BLOCK)).any(-1)
    found = blocks.nonzero()
    return (int(found[0, 0]), int(found[0, 1])) if len(found) else (0, 0)


def _reduced(
    runner: Runner, observation: Observation, row: int, block: int, dialect: Dialect
) -> tuple[Observation, Question, Difference] | None:
    x = observation.case.x
    values = x[row, block * BLOCK : (block + 1) * BLOCK].contiguous()
    amax = x.float().abs().nan_to_num(nan=0.0, posinf=0.0).amax().to(x.dtype)
    best = _try(runner, observation, values, amax, dialect)
    if best is None:
        return None
    for index in range(BLOCK):
        fewer = values.clone()
        fewer[index] = 0.0
        kept = _try(runner, observation, fewer, amax, dialect) if values[index] != 0 else None
        if kept is not None:
            best, values = kept, fewer
    return best


def _try(
    runner: Runner, observation: Observation, values: Tensor, amax: Tensor, dialect: Dialect
) -> tuple[Observation, Question, Difference] | None:
    """A matrix of the block and a row that holds amax; None where it does not differ."""
    protocol = runner.protocol
    rows = -(-2 // protocol.row_multiple) * protocol.row_multiple
    x = torch.zeros(rows, max(BLOCK, protocol.k_multiple), dtype=values.dtype)
    x[0, :BLOCK], x[1 % rows, -1] = values, amax
    case = QuantCase(observation.case.name, observation.case.group, x, observation.case.amax)
    given = given_outer(case, protocol)
    outcome = runner.call("quantizer", (x, given))
    if outcome.value is None:
        return None
    seen = Observation(case, given, outcome.value)
    q = question(seen, dialect, protocol)
    d = difference(outcome.value, correct(q), q)
    return (seen, q, d) if d.total else None


def _describe(observation: Observation, q: Question, row: int, block: int, name: str) -> FirstFailure:
    x = observation.case.x
    values = x[row, block * BLOCK : (block + 1) * BLOCK]
    kept = (
        values[: int(values.view(_integer(x)).ne(0).nonzero().max()) + 1]
        if values.view(_integer(x)).any()
        else values[:1]
    )
    amax = x.float().abs().nan_to_num(nan=0.0, posinf=0.0).amax()
    scale = "" if observation.given is None else f"; outer scale {_hex(observation.given.reshape(-1)[:1])}"
    return FirstFailure(
        case=name,
        input_hex=f"{str(x.dtype).removeprefix('torch.')} {_hex(kept)}; amax {float(amax):.9g}{scale}",
        expected=_answer(correct(q), row, block),
        got=_answer(observation.answer, row, block),
        explain=_explain(q, kept, amax, observation),
    )


def _answer(q: Quantized, row: int, block: int) -> str:
    codes = q.codes[row, block * BLOCK : (block + 1) * BLOCK].tolist()
    return f"scale 0x{int(q.scales[row, block]):02X}, codes {' '.join(f'{code:X}' for code in codes)}"


def _explain(q: Question, values: Tensor, amax: Tensor, observation: Observation) -> str:
    """What `quads explain` prints for the block; empty where a block alone says nothing."""
    try:
        if q.outer is None:
            found = explain.explain_block(values.float(), q.dialect, amax=float(amax), dtype=values.dtype)
        else:
            g = float(1.0 / q.outer if q.dialect.encodes else q.outer)
            found = explain.explain_block(values.float(), q.dialect, g, dtype=values.dtype)
    except (ValueError, RuntimeError):
        return ""
    return explain.render(found)


def _hex(x: Tensor) -> str:
    digits = 8 if x.dtype == torch.float32 else 4
    words = [int(word) & (16**digits - 1) for word in x.contiguous().view(_integer(x)).tolist()]
    return " ".join(f"{word:0{digits}X}" for word in words)


def _integer(x: Tensor) -> torch.dtype:
    return torch.int32 if x.dtype == torch.float32 else torch.int16
