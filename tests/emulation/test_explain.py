"""Explanations: the roundings of a block worked by hand, and the dialects that part ways on it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from torch import Tensor

from quads.emulation import dialects
from quads.emulation.explain import explain_block, explain_value, render
from quads.emulation.quantizers import dequantize, quantize
from tests.strategies import blocked_tensors


def test_the_steps_of_exact_are_the_contract_in_its_order() -> None:
    """A = 2688, so g = 1: v = 3 gives 0.5, byte 0x30, step 0.5; 1.3 / 0.5 = 2.6 is nearest to 3 (code 5)."""
    e = explain_block([3.0, -1.3], amax=2688.0)
    named = [(s.name, s.element) for s in e.steps]
    expected = [("v", None), ("g", None), ("v/6", None), ("(v/6)/g", None), ("s", None), ("s*g", None)]
    assert named == [*expected, ("y", 0), ("y", 1)]
    assert [s.value for s in e.steps[:6]] == [3.0, 1.0, 0.5, 0.5, 0.5, 0.5]
    assert e.steps[-1].hex == "C0266666"
    assert (e.scale, e.codes, e.dequantized) == (0x30, (7, 0xD), (3.0, -1.5))


@given(blocked_tensors(max_rows=1, max_blocks=1))
def test_an_explanation_is_what_quantize_does(x: Tensor) -> None:
    x = x.float()
    q = quantize(x)
    e = explain_block(x[0].tolist())
    assert (e.codes, e.scale) == (tuple(q.codes[0].tolist()), q.scales.item())
    assert e.dequantized == tuple(dequantize(q)[0].tolist())


def test_dialects_that_disagree_are_exactly_those_that_quantise_otherwise() -> None:
    values = [0.005950927734375, 0.00217, -0.00099, -0.0]
    e = explain_block(values, "vllm_kernel", amax=2.03125, dtype=torch.bfloat16)
    found = {d.dialect: d for d in e.disagreements}
    x = torch.zeros(2, 16, dtype=torch.bfloat16)
    x[0, :4], x[1, 0] = torch.tensor(values), 2.03125
    for name, d in dialects.named().items():
        if d.tile == "16x16" or d.granularity == "token":
            continue
        q = quantize(x, dialect=d)
        same = (int(q.scales[0, 0]), tuple(q.codes[0, :4].tolist())) == (e.scale, e.codes)
        assert same == (name not in found), name
    assert found["modelopt"].elements == (3,) and not found["modelopt"].scale_differs
    assert found["te"].scale_differs and found["te"].scale == 0x3B and e.scale == 0x3A


def test_elements_at_a_tie_are_marked_as_depending_on_rcp() -> None:
    e = explain_block([6.0, 0.75, 0.9], "vllm_kernel", outer=1.0)
    assert (e.codes_depend_on_rcp, e.scale_depends_on_rcp) == ((1,), False)
    assert "[1] 0.75 -> code" in render(e) and "depends on rcp" in render(e)


def test_a_value_stands_in_a_block_of_the_maximum_that_is_named() -> None:
    e = explain_value(-0.3, block_max=6.0, amax=2688.0)
    assert e.values[1] == 6.0 and e.scale == 0x38 and e.codes[0] == 9
    assert explain_value(-0.3).codes == (15,)


def test_the_text_has_a_line_for_each_rounding_with_its_bits() -> None:
    lines = render(explain_value(1.0, amax=2688.0)).splitlines()
    assert lines[0] == "dialect exact (this project's contract)"
    assert [line.split()[-1] for line in lines[1:4]] == ["3F800000", "3F800000", "3E2AAAAB"]
    assert any(line.startswith("  scale byte 0x23") for line in lines)


def test_both_candidates_of_four_over_six_are_shown() -> None:
    e = explain_block([6.0, 5.0], "exact_four_over_six")
    names = {s.name for s in e.steps}
    assert {"y | six", "y | four", "error mse | six", "error mse | four"} <= names


def test_every_dialect_explains_a_block_with_negative_zero_and_a_zero_block() -> None:
    for name, d in dialects.named().items():
        if d.tile == "1x16":
            for values in ([1.0, -0.0], [0.0, -0.0]):
                assert render(explain_block(values, name, amax=4.0))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: explain_block([]), "block of 0 values: needs 1 to 16"),
        (lambda: explain_block([1.0] * 17), "block of 17 values"),
        (lambda: explain_block([3.0], amax=2.0), "amax 2.0 is below the block's largest magnitude 3.0"),
        (lambda: explain_block([3.0], outer=1.0, amax=4.0), "outer and amax both given"),
        (lambda: explain_value(3.0, block_max=2.0), "block maximum 2.0 is below"),
        (lambda: explain_value(3.0, "exakt"), "did you mean 'exact'"),
        (lambda: explain_value(float("nan")), "NaN or Inf"),
        (lambda: explain_value(3.0, "exact_16x16"), "16x16 tiles need rows"),
    ],
)
def test_bad_input_is_refused(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]
