"""Questions that no published evidence settles, put to the hardware: `quads check --hardware FILE`.

Each question is a product whose output is one word under one rule and another under the other; all survive a cast to
BF16, so any product of the user's will do. rcp is asked of the GPU itself. The file names the device and gives every
word seen, so that it can be contributed: it turns an assumption of the evidence table into hardware words.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quads.conformance import products
from quads.conformance.product_check import FAMILIES
from quads.conformance.products import ONE, ProductCase
from quads.conformance.protocol import DTYPES, Protocol
from quads.conformance.runner import perform, protocol_of
from quads.emulation import gemm, mma, undecided
from quads.emulation.quantizers import BLOCK, NVFP4Tensor
from quads.errors import CannotRunHereError

SCHEMA = 1


@dataclass(frozen=True)
class Question:
    """An undecided rule, its id in evidence.toml, a product that decides it, and the word of each answer."""

    rule: str
    behaviour: str
    case: ProductCase
    models: dict[str, Tensor]


def questions(dtype: torch.dtype) -> Iterator[Question]:
    """Dead group, cancelled group, order of the steps, width of the sum."""
    model = gemm.NVFP4
    yield _question("dead group", "dead_group", [[_TINY], [_DEAD]], dtype, {
        "excluded from e_max": model, "included in e_max": model.replace(dead_group="included"),
    })  # fmt: skip
    yield _question("cancelled group", "cancelled_group", [[_TINY], [_CANCELS]], dtype, {
        "included in e_max": model, "excluded from e_max": model.replace(cancelled_group="excluded"),
    })  # fmt: skip
    case = _case("order of steps", _ORDER, dtype)
    orders = {"ascending": "sequential", "descending": "descending"}
    sums = {answer: products.arithmetics()[name].accumulate(case.a, case.b) for answer, name in orders.items()}
    yield Question("order of steps", "k_order", case, {answer: total.to(dtype) for answer, total in sums.items()})
    for bits in (25, 34, 36):
        name = f"width of the sum: 35 or {bits} bits"
        yield _question(name, "fp4_fraction_bits", _WIDTH[bits], dtype, {
            "35": model, str(bits): model.replace(fraction_bits=bits),
        })  # fmt: skip


# Groups of a step as (code a, scale a, code b, scale b) at the first K index of the group; pairs sit at the next.
_Group = tuple[tuple[int, int, int, int], ...]
_TINY: _Group = ((1, 0x01, 1, 0x01),)
_DEAD: _Group = ((0, 0x7E, 0, 0x7E),)
_CANCELS: _Group = ((2, 0x7E, 2, 0x7E), (2, 0x7E, 10, 0x7E))
_BIG: _Group = ((7, 0x7E, 7, 0x7E),)
_MINUS: _Group = ((15, 0x7E, 7, 0x7E),)
_ORDER: list[list[_Group]] = [[_BIG], [_MINUS], [_TINY]]
# Two groups of one step cancel: what is left was truncated at 2^(16 - F), whatever the rule for a cancelled group.
_WIDTH: dict[int, list[list[_Group]]] = {
    25: [[_BIG, _MINUS, ((1, 0x08, 1, 0x20),)]],
    34: [[_BIG, _MINUS, ((1, 0x02, 1, 0x01),), _TINY]],
    36: [[_BIG, _MINUS, _TINY]],
}


def _question(
    rule: str, behaviour: str, steps: list[list[_Group]], dtype: torch.dtype, models: dict[str, mma.Model]
) -> Question:
    case = _case(rule, steps, dtype)
    words = {answer: gemm.matmul(case.a, case.b, model=model).to(dtype) for answer, model in models.items()}
    return Question(rule, behaviour, case, words)


def _case(name: str, steps: list[list[_Group]], dtype: torch.dtype) -> ProductCase:
    k = products.STEP * max(2, len(steps))
    a, b = (
        NVFP4Tensor(torch.zeros(128, k, dtype=torch.uint8), torch.full((128, k // BLOCK), ONE, dtype=torch.uint8), _ONE)
        for _ in range(2)
    )
    for step, groups in enumerate(steps):
        for index, group in enumerate(groups):
            block = step * products.STEP // BLOCK + index
            for place, (code_a, scale_a, code_b, scale_b) in enumerate(group):
                a.codes[:, block * BLOCK + place], a.scales[:, block] = code_a, scale_a
                b.codes[:, block * BLOCK + place], b.scales[:, block] = code_b, scale_b
    return ProductCase(name, "hardware", a, b, products.scalar(1.0), dtype)


_ONE = torch.tensor(1.0)


@dataclass(frozen=True)
class Answer:
    """What was seen. `answer` is the rule that gives the word, `neither`, or why there is none."""

    rule: str
    behaviour: str  # id in evidence.toml
    answer: str
    word: str
    expected: dict[str, str]


def ask(call: Callable[..., Any], protocol: Protocol) -> list[Answer]:
    """Put every question to the product `call`."""
    found = []
    for question in questions(DTYPES[protocol.dtypes[0]]):
        arguments = FAMILIES["gemm"].arguments(question.case, protocol)
        outcome = perform(call, "gemm", arguments, protocol)
        expected = {answer: _word(word) for answer, word in question.models.items()}
        if outcome.value is None:
            found.append(
                Answer(question.rule, question.behaviour, f"no answer: {outcome.violations[0].message}", "", expected)
            )
            continue
        word = _word(outcome.value)
        fits = [answer for answer, other in expected.items() if other == word]
        found.append(
            Answer(question.rule, question.behaviour, fits[0] if len(fits) == 1 else _unclear(fits), word, expected)
        )
    return found


def _unclear(fits: list[str]) -> str:
    return "either: the output type hides it" if fits else "neither"


def rcp_table() -> Answer:
    """Compare `rcp.approx.ftz.f32` of this GPU, all 2^23 significands, with the measured table. Needs CUDA, Triton."""
    from quads.conformance.rcp_probe import rcp_approx
    from quads.emulation import reciprocal

    significands = torch.arange(1 << 23, dtype=torch.int32) | 0x3F800000
    got = rcp_approx(significands.view(torch.float32).cuda()).cpu()
    want = reciprocal.approximate(significands.view(torch.float32))
    differing = int((got.view(torch.int32) != want.view(torch.int32)).sum())
    answer = "equal to the H200's" if not differing else f"{differing} of 2^23 differ from the H200's"
    return Answer("rcp.approx.ftz.f32", "rcp_approx", answer, "", {})


def write(path: Path, gemm_spec: str, overrides: dict[str, Any]) -> dict[str, Any]:
    """Ask the product `gemm_spec` (default: torch's own) and the GPU; write the answers to `path`.

    Raises CannotRunHereError without a GPU where no product is named.
    """
    spec = gemm_spec or "adapter:torch-scaled-mm"
    call, protocol = protocol_of(spec, overrides)
    answers = ask(call, protocol)
    if torch.cuda.is_available():
        try:
            answers.append(rcp_table())
        except ImportError as error:
            raise CannotRunHereError(f"the reciprocal needs triton: {error}") from error
    document = {
        "schema": SCHEMA,
        "product": spec,
        "device": _device(),
        "rules": sorted(undecided.variants(gemm.NVFP4)),
        "answers": [asdict(answer) for answer in answers],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    return document


def _device() -> dict[str, str]:
    if not torch.cuda.is_available():
        return {"name": "CPU", "torch": torch.__version__}
    major, minor = torch.cuda.get_device_capability()
    cuda = str(torch.version.cuda)
    return {"name": torch.cuda.get_device_name(), "sm": f"{major}{minor}", "cuda": cuda, "torch": torch.__version__}


def _word(out: Tensor) -> str:
    """The single word that every output holds; several words are joined, which fits no rule."""
    integer, digits = (torch.int32, 8) if out.dtype == torch.float32 else (torch.int16, 4)
    words = sorted({f"{int(bits) & (16**digits - 1):0{digits}X}" for bits in out.view(integer).unique()})
    return " ".join(words[:4])
