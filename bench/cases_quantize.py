"""Quantisers: to packed NVFP4, with RAC, back to values; on a GPU by kernels, on a CPU by the emulator; and others'.

Before a case is timed, the bytes that the timed call wrote are compared with the emulator's for its first and last rows
(quads.bench.checks compares whole tensors, every block selection among them, before the first of a run).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quads.bench import checks, counts, peers, peers_quantize
from quads.bench.cases import Case, Goal, Group, Ready
from quads.emulation import quantizers, residual
from quads.kernels import compensate, fake_quant, quantize, support

LARGE = (32768, 8192)
MORE = ((16, 8192), (256, 8192), (4096, 8192), (32768, 2048))
CPU = ((256, 1024), (1024, 1024), (4096, 1024), (1024, 4096))
OURS = {"cuda": "quads.kernels", "cpu": "quads.emulation"}


@dataclass(frozen=True)
class Rows:
    """Gaussian rows in bfloat16 and their outer scales, per tensor and per row."""

    x: Tensor
    outer: Tensor
    outers: Tensor

    @property
    def half(self) -> int:
        return self.x.shape[1] // 32


def groups(device: str) -> Iterator[Group]:
    """Quantise, quantise with RAC, fake-quantise and outer scale: the largest shape, which has goals, then others."""
    shapes = (LARGE, *MORE) if device == "cuda" else CPU
    tables = (("quantize", _quantizers), ("quantize_rac", _rac), ("fake_quantize", _fake), ("outer_scale", _outer))
    for shape in shapes:
        for op, cases in tables:
            quick = shape == shapes[0]
            held = cases(device) if quick else tuple(replace(case, goal=None) for case in cases(device))
            sizes = {"M": shape[0], "K": shape[1]}
            inputs = partial(drawn_rows, *shape, device)
            yield Group(op=op, shape=sizes, device=device, cases=held, inputs=inputs, quick=quick)


def drawn_rows(m: int, k: int, device: str) -> Rows:
    """Rows of one size; scales are amax / 2688."""
    x = torch.randn(m, k, dtype=torch.bfloat16, device=device)
    amax = x.abs().amax(1, keepdim=True).float()
    divisor = torch.full_like(amax, 2688.0)
    return Rows(x, (amax / divisor).amax(), amax / divisor)


def _missing(device: str) -> Callable[[], str]:
    if device == "cpu":
        return lambda: ""
    return lambda: support.missing_triton() or support.missing_gpu() or support.missing_ampere()


def _ready(moved: float, call: Callable[[], Any], check: Callable[[Any], float] | None = None, **more: Any) -> Ready:
    return Ready(calls=[call], bytes=moved, check=None if check is None else lambda: check(call()), **more)


def _quantizers(device: str) -> tuple[Case, ...]:
    ours = partial(Case, implementation=OURS[device], missing=_missing(device))
    tensor = Goal(text=">= 90 % of copy", of="share_of_copy", at_least=0.9)
    token = Goal(text=">= 80 % of copy", of="share_of_copy", at_least=0.8)
    plain = ours(numerics="nvfp4", variant="tensor", ready=partial(_one, device), goal=_gpu(device, tensor))
    by_token = partial(_one, device, granularity="token")
    cases = (plain, ours(numerics="nvfp4", variant="token", ready=by_token, goal=_gpu(device, token)))
    if device == "cpu":
        return (*cases, *_others(peers_quantize.QUANTIZERS, counts.quantize))
    extra: dict[str, Callable[[Any], Ready]] = {
        "token, amax in the pass": partial(_one, device, granularity="token", known=False),
        "128x4 scales": partial(_one, device, layout="128x4"),
        "vllm dialect": _vllm_dialect,
        "fp16": partial(_one, device, dtype=torch.float16),
        "fp32": partial(_one, device, dtype=torch.float32),
    }
    return (*cases, *(ours(numerics="nvfp4", variant=name, ready=ready) for name, ready in extra.items()))


def _gpu(device: str, goal: Goal) -> Goal | None:
    return goal if device == "cuda" else None


def _others(table: dict[str, Any], moved: Callable[[int], float]) -> tuple[Case, ...]:
    def ready(make: Callable[[Tensor], Callable[[], Any]], rows: Rows) -> Ready:
        return _ready(moved(rows.x.numel()), make(rows.x), graph=False)

    return tuple(
        Case(numerics="nvfp4", implementation=name, ready=partial(ready, make), missing=partial(peers.missing, package))
        for name, (package, make) in table.items()
    )


def _one(
    device: str,
    rows: Rows,
    *,
    granularity: quantize.Granularity = "tensor",
    layout: quantize.Layout = "linear",
    dtype: torch.dtype = torch.bfloat16,
    known: bool = True,
) -> Ready:
    x = rows.x.to(dtype)
    outer = rows.outers if granularity == "token" else rows.outer
    moved = counts.quantize(x.numel(), {2: "bf16", 4: "fp32"}[dtype.itemsize])
    if device == "cpu":
        return _ready(moved, lambda: quantizers.quantize(x, outer, granularity=granularity).packed)

    def call() -> quantize.PackedNVFP4:
        return quantize.quantize(x, outer if known else None, granularity=granularity, layout=layout)

    return _ready(moved, call, partial(checks.same_as_emulator, x, layout=layout))


def _vllm_dialect(rows: Rows) -> Ready:
    encode = 1 / rows.outer
    moved = counts.quantize(rows.x.numel())
    return _ready(
        moved,
        lambda: quantize.quantize(rows.x, encode, dialect="vllm"),
        partial(checks.same_where_decided, rows.x, encode, "vllm_kernel"),
    )


def _rac(device: str) -> tuple[Case, ...]:
    ours = partial(Case, implementation=OURS[device], missing=_missing(device))
    base = ours(numerics="nvfp4", variant="tensor", ready=partial(_one, device))
    goals = {"static": 1.3, "batch": 2.2}
    scopes: tuple[compensate.Scope, ...] = ("static", "batch", "tile", "token")

    def goal(scope: str) -> Goal | None:
        found = goals.get(scope)
        return _gpu(device, Goal(text=f"RAC / naive <= {found}", at_most=found)) if found else None

    def case(scope: compensate.Scope) -> Case:
        ready = partial(_compensated, device, scope)
        return ours(numerics="quads", variant=f"50 % {scope}", ready=ready, goal=goal(scope))

    cases = (base, *(case(scope) for scope in (scopes if device == "cuda" else scopes[:2])))
    if device == "cpu":
        return cases
    return (
        *cases,
        Case(
            numerics="quads",
            variant="50 % amax in the pass, static",
            ready=_decoded,
            implementation=OURS[device],
            missing=_missing(device),
        ),
    )


def _compensated(device: str, scope: compensate.Scope, rows: Rows) -> Ready:
    x = rows.x
    static = torch.arange(0, x.shape[1] // 16, 2, dtype=torch.int32, device=device) if scope == "static" else None
    moved = counts.quantize_rac(x.numel(), 0.5, second_pass=scope in ("batch", "tile"))
    if device == "cpu":
        return _ready(moved, lambda: _emulated_rac(x, rows.outer, static))

    def call() -> compensate.RacOperand:
        return compensate.quantize_rac(x, rows.half, scope, rows.outer, static_blocks=static)

    return _ready(moved, call, partial(checks.same_residual, x))


def _decoded(rows: Rows) -> Ready:
    """As a decoding step quantises: known blocks, a scale a token found on the way."""
    x = rows.x
    blocks = torch.arange(0, x.shape[1] // 16, 2, dtype=torch.int32, device="cuda")
    places = compensate.ranks(blocks, x.shape[1] // 16)

    def call() -> compensate.RacOperand:
        return compensate.quantize_rac(
            x, rows.half, "static", granularity="token", static_blocks=blocks, static_ranks=places
        )

    return _ready(counts.quantize_rac(x.numel(), 0.5, second_pass=False), call, partial(checks.same_residual, x))


def _emulated_rac(x: Tensor, outer: Tensor, static: Tensor | None) -> quantizers.NVFP4Tensor:
    q = quantizers.quantize(x, outer)
    blocks = static
    if blocks is None:
        scores = residual.block_scores(residual.residual(x, q), q.outer).sum(dim=0)
        blocks = residual.top_blocks(scores, x.shape[1] // 32)
    return residual.quantize_residual(x, q, blocks.long())


def _fake(device: str) -> tuple[Case, ...]:
    ours = partial(Case, implementation=OURS[device], missing=_missing(device))
    goal = _gpu(device, Goal(text=">= 85 % of copy", of="share_of_copy", at_least=0.85))
    others = peers_quantize.FAKE_QUANTIZERS[device]
    return (
        ours(numerics="nvfp4", ready=partial(_faked, "1x16"), goal=goal),
        ours(numerics="nvfp4", variant="16x16", ready=partial(_faked, "16x16")),
        *_others(others, lambda elements: 4.0 * elements),
    )


def _faked(block: fake_quant.WeightBlock, rows: Rows) -> Ready:
    def call() -> Tensor:
        return fake_quant.fake_quantize(rows.x, rows.outer, weight_block=block)

    return _ready(4.0 * rows.x.numel(), call, partial(checks.same_values, rows.x, rows.outer, block))


def _outer(device: str) -> tuple[Case, ...]:
    def ready(rows: Rows) -> Ready:
        call = partial(quantize.outer_scale, rows.x) if device == "cuda" else lambda: rows.x.abs().amax().float() / 2688
        return _ready(2.0 * rows.x.numel(), call, lambda got: checks.unequal(got.float(), rows.outer))

    return (
        Case(numerics="nvfp4", variant="tensor", implementation=OURS[device], ready=ready, missing=_missing(device)),
    )
