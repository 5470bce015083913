"""The evidence table, its rendering, and that what it names exists."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors import safe_open

from quads.emulation import dialects, evidence, mma

ROOT = Path(__file__).parents[2]
BEHAVIOURS = evidence.load()


def test_the_page_is_the_rendered_table() -> None:
    assert (ROOT / "docs/evidence.md").read_text("utf-8") == evidence.render()


@pytest.mark.parametrize("behaviour", BEHAVIOURS, ids=lambda b: b.id)
def test_each_behaviour_names_a_module_and_a_test_that_exist(behaviour: evidence.Behaviour) -> None:
    assert (ROOT / "emulation" / f"{behaviour.module}.py").exists()
    assert (ROOT / behaviour.test).exists()


@pytest.mark.parametrize("behaviour", BEHAVIOURS, ids=lambda b: b.id)
def test_a_measured_class_has_a_count_and_an_assumption_has_none(behaviour: evidence.Behaviour) -> None:
    if behaviour.evidence in ("hardware words", "library equality"):
        assert behaviour.count > 0 and behaviour.version != "-"
    if behaviour.evidence == "assumption":
        assert behaviour.count == 0


def test_every_undecided_rule_of_the_model_is_listed_as_such() -> None:
    listed = {b.id: b.evidence for b in BEHAVIOURS}
    assert listed["dead_group"] == listed["cancelled_group"] == listed["k_order"] == "assumption"
    assert listed["fp4_fraction_bits"] == "published model"


def test_the_counts_of_hardware_words_are_those_of_the_fixtures() -> None:
    counts: dict[str, int] = {}
    instruction_rows = {
        "wgmma_f16": ["wgmma_bf16", "wgmma_fp16"],
        "wgmma_f16_f16": ["wgmma_fp16_f16"],
        "wgmma_tf32": ["wgmma_tf32"],
        "wgmma_fp8": ["wgmma_e4m3", "wgmma_e5m2"],
        "wgmma_fp8_f16": ["wgmma_e4m3_f16"],
        "hopper_mma_f16": ["mma_bf16", "mma_fp16", "mma_fp16_f16"],
        "hopper_mma_tf32": ["mma_tf32"],
        "hopper_mma_fp8": ["mma_e4m3", "mma_e5m2"],
    }
    for row, names in instruction_rows.items():
        counts[row] = 0
        for name in names:
            with safe_open(ROOT / f"tests/data/hopper_words_{name}.safetensors", framework="pt") as file:
                notes = [file.metadata()[kind] for kind in ("raw", "window")]
            assert all(note.endswith(" 0 mismatches") for note in notes)
            counts[row] += sum(int(note.split()[0]) for note in notes)
    assert counts == {b.id: b.count for b in BEHAVIOURS if b.id in counts}


def test_every_model_of_the_table_is_covered_by_a_behaviour() -> None:
    prefixes = {
        "nvfp4": "nvfp4_step",
        "mxf4": "mxf4_step",
        "mxf8": "mxf8f6f4_step",
        "tcgen05": "tcgen05_step",
        "rtx": "tcgen05_step",
        "wgmma": "wgmma_f16",
        "hopper": "hopper_mma_f16",
        "ada": "older_mma_step",
        "ampere": "older_mma_step",
        "volta": "older_mma_step",
    }
    ids = {b.id for b in BEHAVIOURS}
    for name in mma.models():
        assert any(name.startswith(prefix) and row in ids for prefix, row in prefixes.items()), name


def test_the_dialects_evidence_classes_are_the_ones_the_table_describes() -> None:
    assert {d.evidence for d in dialects.named().values()} == {"contract", "library", "page", "source"}


@pytest.mark.parametrize("change", [("evidence", "hearsay", "is not one of"), ("id", "swiglu", "more than once")])
def test_a_faulty_table_is_refused(change: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    field, value, message = change
    faulty = [evidence.Behaviour(**{**vars(BEHAVIOURS[0]), field: value}), *BEHAVIOURS[1:]]
    monkeypatch.setattr(evidence.tomllib, "loads", lambda _: {"behaviour": [vars(b) for b in faulty]})
    with pytest.raises(ValueError, match=message):
        evidence.load()
