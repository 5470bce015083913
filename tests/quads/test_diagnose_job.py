"""The diagnose job: what lands in the output folder, and that bad input leaves it as it was."""

import dataclasses
import io
import json
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console

from quads.attribution import default_recipe
from quads.attribution.layerwise import LayerwiseRun
from quads.diagnose_job import DiagnoseConfig, DiagnoseResult, read_prompts, run
from tests.quads.tiny import tiny_model, tokens


@pytest.fixture
def recording(tmp_path: Path) -> DiagnoseConfig:
    """A tiny MoE folder and what a rollout engine with a small drift would have recorded of it."""
    model, ids = tiny_model("qwen3_moe", dtype=torch.bfloat16), tokens(4, 12)
    model.save_pretrained(tmp_path / "model")
    own = LayerwiseRun(model, [], default_recipe(model), []).reference(ids, torch.ones_like(ids).bool())
    rows = [
        {"prompt_ids": row[:4], "completion_ids": row[4:], "logprobs": [value - 0.01 for value in values[3:]]}
        for row, values in zip(ids.tolist(), own.tolist(), strict=True)
    ]
    (tmp_path / "rollouts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return DiagnoseConfig(
        model=str(tmp_path / "model"),
        rollouts=tmp_path / "rollouts.jsonl",
        out=tmp_path / "out",
        ratios=(0.5, 1.0),
        seeds=(0,),
    )


def quiet(config: DiagnoseConfig) -> tuple[DiagnoseResult, str]:
    console = Console(file=io.StringIO(), width=80)
    return run(config, console), console.file.getvalue()


def test_the_folder_holds_tables_report_configuration_and_stamp(recording: DiagnoseConfig) -> None:
    result, printed = quiet(recording)
    names = {path.name for path in recording.out.iterdir()}
    assert names == {"diagnose.json", "report.html", "config.json", "stamp.json"}
    document = json.loads((recording.out / "diagnose.json").read_text())
    assert document == json.loads(json.dumps(result.document))
    assert document["label"] == "emulated (CPU)" and document["tokens"] == 32
    recorded = next(row for row in document["gaps"] if row["variant"] == "recorded")
    assert recorded["mean"] == pytest.approx(0.01, abs=1e-5)
    assert len(document["experts"]) == 2 * 2 * 4
    assert "NaN" not in (recording.out / "diagnose.json").read_text()
    assert json.loads((recording.out / "stamp.json").read_text())["seeds"] == [0]
    for variant in ("weights", "rac-50", "random-50-s0", "recorded"):
        assert variant in printed and variant in (recording.out / "report.html").read_text()


def test_the_report_is_self_contained(recording: DiagnoseConfig) -> None:
    quiet(recording)
    page = (recording.out / "report.html").read_text()
    assert page.count('id="plotly"') == 1 and len(page) < 3 * 2**20
    assert not re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=", page)


def test_streaming_finds_the_same(recording: DiagnoseConfig) -> None:
    held, _ = quiet(recording)
    streamed, _ = quiet(dataclasses.replace(recording, stream=True))
    assert json.dumps(held.diagnosis.to_dict()) == json.dumps(streamed.diagnosis.to_dict())


def test_bad_rollouts_leave_what_was_written(recording: DiagnoseConfig) -> None:
    quiet(recording)
    before = (recording.out / "diagnose.json").read_bytes()
    recording.rollouts.write_text(recording.rollouts.read_text() + '\n{"prompt_ids": [1]}')
    with pytest.raises(ValueError, match=r"rollouts\.jsonl:5 has no list 'completion_ids'"):
        quiet(recording)
    assert (recording.out / "diagnose.json").read_bytes() == before


def test_the_built_in_prompts_are_sixteen_and_varied() -> None:
    prompts = read_prompts()
    assert len(prompts) == 16 == len(set(prompts))
    assert any("def " in prompt for prompt in prompts) and all(len(prompt) > 150 for prompt in prompts)
    assert not any("---" in prompt for prompt in prompts)


def test_prompts_are_separated_by_rules_or_lines(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_text("one\ntwo\n---\nthree\n")
    assert read_prompts(path) == ["one\ntwo", "three"]
    path.write_text("one\n\ntwo\n")
    assert read_prompts(path) == ["one", "two"]


def test_prompt_files_that_are_absent_empty_or_no_text_are_named(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    with pytest.raises(ValueError, match=r"p\.txt does not exist"):
        read_prompts(path)
    path.write_text("\n\n")
    with pytest.raises(ValueError, match=r"p\.txt holds no prompt"):
        read_prompts(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"p\.txt is not UTF-8"):
        read_prompts(path)
