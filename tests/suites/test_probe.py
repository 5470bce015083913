"""The probe measures what is missing, once, and equal bytes come out however often it was interrupted."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from quads import recipes
from quads.compare import policy as policies
from quads.compare.checkpoint import save_state
from quads.compare.records import Record, Records, write_json
from quads.suites import probe, probe_measure, probe_numerics, summary
from quads.suites.config import Hypothesis, SuiteError
from quads.suites.report_probe import ratio_rows
from tests.suites.probing import run, suite


def records(out: Path) -> list[Record]:
    return Records(out / "probe.jsonl").read()


def gaps(out: Path, reference: str, name: str = "probe/gap_mean") -> dict[str, float]:
    """The metric of each arm on the first draw of the plain start policy."""
    return {
        record["arm"]: record[name]
        for record in records(out)
        if (record.get("reference"), record["draw"], record["outliers"]) == (reference, 0, "")
    }


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("probe")
    outcome = run(out, suite())
    assert outcome.done == outcome.total == len(records(out)) and not outcome.failed
    return out


def test_two_runs_write_equal_bytes(finished: Path, tmp_path: Path) -> None:
    run(tmp_path, suite())
    for name in ("probe.jsonl", "probe-tokens-start.safetensors"):
        assert (tmp_path / name).read_bytes() == (finished / name).read_bytes()


def test_a_killed_run_goes_on_to_equal_bytes(finished: Path, tmp_path: Path) -> None:
    whole = (finished / "probe.jsonl").read_bytes()
    lines = whole.split(b"\n")
    (tmp_path / "probe.jsonl").write_bytes(b"\n".join(lines[:5]) + b"\n" + lines[5][:40])
    told: list[str] = []
    run(tmp_path, suite(), on_progress=lambda done, total, text: told.append(text))
    assert (tmp_path / "probe.jsonl").read_bytes() == whole
    assert told[0] == "dropped 0 records of other checkpoints, tokens or recipes, 1 half-written"


def test_a_finished_probe_measures_nothing_again(finished: Path) -> None:
    told: list[str] = []
    run(finished, suite(), on_progress=lambda done, total, text: told.append(text))
    assert told == []


def test_a_spent_budget_leaves_the_rest_for_another_run(tmp_path: Path) -> None:
    outcome = run(tmp_path, suite(), budget=0.0)
    assert outcome.done == 0 < outcome.total and not (tmp_path / "probe.jsonl").exists()


def test_an_arm_that_is_its_reference_has_no_gap_and_others_have(finished: Path) -> None:
    w4, bf16 = gaps(finished, "w4"), gaps(finished, "bf16")
    assert w4["w4a16"] == 0.0 < bf16["w4a16"]
    assert bf16["nvfp4"] > bf16["w4a16"] and w4["nvfp4"] > w4["quads-full"] > 0
    assert bf16["engine"] < 1e-5 < 0.01 * bf16["nvfp4"]


def test_records_say_what_they_are(finished: Path) -> None:
    record = next(r for r in records(finished) if r.get("arm") == "nvfp4" and r["reference"] == "w4")
    assert record["label"] == "emulated (CPU)" and record["policy"] == "start" and record["outliers"] == ""
    lengths = len(record["probe/by_sequence"]), len(record["probe/kl_by_sequence"])
    assert lengths == (8, 8) and record["probe/tokens"] > 16
    assert 0 <= record["probe/router_flips"] <= 1 and record["probe/gap_max"] >= record["probe/gap_p99"]


def test_each_layer_has_its_terms(finished: Path) -> None:
    layers = [record for record in records(finished) if record.get("kind") == "layer"]
    assert [record["layer"] for record in layers] == [0, 1, 2]
    whole = gaps(finished, "bf16")
    assert all(0 < record["weights"] < 2 * whole["w4a16"] for record in layers)
    assert all(record["both"] > 0 and record["rac"] > 0 and record["activations"] > 0 for record in layers)


def test_layers_can_be_left_out(tmp_path: Path) -> None:
    outcome = run(tmp_path, suite(arms=["w4a16"], draws=1, layers=False))
    assert outcome.done == outcome.total == 5 and all("kind" not in record for record in records(tmp_path))


def test_draws_have_tokens_and_random_channels_of_their_own(tmp_path: Path) -> None:
    run(tmp_path, suite(arms=["quads-random"], sequences=4))
    first, second = (
        r["probe/by_sequence"]
        for r in records(tmp_path)
        if (r.get("arm"), r.get("reference")) == ("quads-random", "w4")
    )
    assert first != second


def test_an_arm_that_raises_is_named_and_the_rest_goes_on(tmp_path: Path) -> None:
    outcome = run(tmp_path, suite(arms=["nvfp4", 'nvfp4:modules=["nothing"]'], draws=1))
    assert len(outcome.failed) == 1 and "selects no linear layer" in outcome.failed[0]
    assert outcome.done == outcome.total - 2 and "nvfp4" in gaps(tmp_path, "w4")


def test_a_static_selection_is_made_on_other_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = suite(arms=["quads:rac_scope=static"], draws=1)
    run(tmp_path / "calibrated", changed)
    monkeypatch.setattr(probe, "Tokens", _SelfCalibrated)
    run(tmp_path / "cheating", changed)
    calibrated, cheating = (gaps(tmp_path / name, "w4") for name in ("calibrated", "cheating"))
    assert calibrated != cheating and calibrated["engine"] == cheating["engine"]


@dataclass
class _SelfCalibrated(probe_measure.Tokens):
    def __post_init__(self) -> None:
        self.calibration = self.batch


def test_a_trained_variant_is_a_policy(tmp_path: Path) -> None:
    one = suite(policies=["plain"], arms=["nvfp4"], draws=1)
    loaded = policies.load_policy(one.cells(tmp_path)[0].compare, lambda step, loss: None).model
    optimizer = torch.optim.AdamW(loaded.parameters())
    path = tmp_path / "plain" / "arms" / "bf16-seed0" / "state.safetensors"
    path.parent.mkdir(parents=True)
    save_state(path, loaded, optimizer, 1, "x")
    run(tmp_path, one)
    before = gaps(tmp_path, "bf16")
    with torch.no_grad():
        loaded.lm_head.weight.mul_(1.5)
    save_state(path, loaded, optimizer, 2, "x")
    told: list[str] = []
    run(tmp_path, one, on_progress=lambda done, total, text: told.append(text))
    assert told[0] == "dropped 5 records of other checkpoints, tokens or recipes, 0 half-written"
    assert gaps(tmp_path, "bf16") != before and {r["policy"] for r in records(tmp_path)} == {"plain"}


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A recipe file: half of the residual on random channels."""
    path = tmp_path / "own.toml"
    path.write_text(recipes.load("quads-random").replace(name="own").to_toml())
    return path


def test_an_edited_recipe_file_is_measured_again_and_nothing_else(tmp_path: Path, own: Path) -> None:
    one = suite(arms=["nvfp4", str(own)], draws=1, sequences=4, layers=False)
    run(tmp_path, one)
    before = gaps(tmp_path, "w4")
    own.write_text(recipes.load("quads-full").replace(name="own").to_toml())
    told: list[str] = []
    run(tmp_path, one, on_progress=lambda done, total, text: told.append(text))
    after = gaps(tmp_path, "w4")
    assert told[0] == "dropped 2 records of other checkpoints, tokens or recipes, 0 half-written"
    assert after.pop("own") < before.pop("own") and after == before


def test_records_of_before_recipes_were_kept_stand_for_shipped_recipes_alone(tmp_path: Path, own: Path) -> None:
    one = suite(arms=["nvfp4", str(own)], draws=1, sequences=4)
    run(tmp_path, one)
    there = [{k: v for k, v in record.items() if k != "recipe"} for record in records(tmp_path)]
    old = [{**record, "arm": str(own)} if record.get("arm") == "own" else record for record in there]
    (tmp_path / "probe.jsonl").write_text("".join(json.dumps(record) + "\n" for record in old))
    run(tmp_path, one)
    found = [record for record in records(tmp_path) if "recipe" in record]
    assert {record["arm"] for record in found} == {"own"} and str(own) not in gaps(tmp_path, "w4")
    assert {record["arm"] for record in records(tmp_path) if record.get("arm")} == {*probe.arms(one.probe)[:3], "own"}  # type: ignore[arg-type]


def test_an_arm_in_a_recipe_file_meets_its_records(tmp_path: Path, own: Path) -> None:
    wanted = {"metric": "probe/gap_mean", "arm": str(own), "against": "nvfp4", "where": "start/w4"}
    claimed = {**wanted, "id": "h", "claim": "c", "direction": "lower"}
    one = suite(arms=["nvfp4", "quads", str(own)], sequences=4, layers=False)
    one = dataclasses.replace(one, arms=(), hypotheses=(Hypothesis(**claimed),))
    run(tmp_path, one)
    write_json(tmp_path / "suite.json", {"suite": one.to_dict()})
    document = summary.write(tmp_path)
    assert document["hypotheses"][0]["pairs"] == 2 and "own" in {row["arm"] for row in document["probe"]}
    assert list(ratio_rows(document["probe"], "w4")) == ["batch"]  # a figure over ratios leaves it out


def test_two_arms_of_one_name_are_refused(tmp_path: Path, own: Path) -> None:
    shadow = own.rename(own.with_name("nvfp4.toml"))
    shadow.write_text(recipes.load("quads").replace(name="nvfp4").to_toml())
    with pytest.raises(SuiteError, match="probe arms name one recipe twice: engine, w16a4, nvfp4, nvfp4"):
        run(tmp_path, suite(arms=["nvfp4", str(shadow)]))


def test_a_policy_that_is_not_trained_yet_is_named_and_the_start_is_measured(tmp_path: Path) -> None:
    outcome = run(tmp_path, suite(policies=["plain", "start"], arms=["nvfp4"], draws=1))
    (line,) = outcome.failed
    assert line.startswith("probe policy 'plain' has no checkpoint") and line.endswith("run the suite's arm bf16 first")
    assert outcome.done == outcome.total == 8 and {record["policy"] for record in records(tmp_path)} == {"start"}


def test_records_of_another_machine_are_not_mixed(finished: Path, tmp_path: Path) -> None:
    there = [{**record, "label": "measured (NVIDIA H200)"} for record in records(finished)]
    path = tmp_path / "probe.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in there))
    run(tmp_path, suite())  # nothing is missing
    path.write_text("".join(json.dumps(record) + "\n" for record in there[:-1]))
    with pytest.raises(SuiteError, match=r"holds records measured \(NVIDIA H200\), this is emulated \(CPU\)"):
        run(tmp_path, suite())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"references": ["fp16"]}, "probe reference 'fp16' is not one of bf16, w4, trainer"),
        ({"scoring": "guess"}, "probe scoring 'guess' is not one of prefill, decode"),
        ({"outliers": ["8x12"]}, "probe outliers '8x12'"),
        ({"policies": ["slow"]}, "probe policy 'slow' is neither 'start' nor a variant"),
        ({"sequences": 60}, "settings.held_out is 64"),
        ({"outliers": ["64x4"]}, "probe outliers '64x4': channels is 64"),
    ],
)
def test_a_probe_that_cannot_be_is_one_line(tmp_path: Path, change: dict, says: str) -> None:
    with pytest.raises(SuiteError) as caught:
        run(tmp_path, suite(**change))
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_every_recipe_of_every_scope_is_measured(tmp_path: Path) -> None:
    scopes = [f"quads:rac_scope={scope}" for scope in ("token", "tile", "static")]
    outcome = run(tmp_path, suite(arms=[*recipes.named(), *scopes], draws=1, references=["bf16", "w4", "trainer"]))
    assert not outcome.failed and outcome.done == outcome.total
    trainer, w4, bf16 = (gaps(tmp_path, reference) for reference in ("trainer", "w4", "bf16"))
    assert bf16["bf16"] == 0 < bf16["fp8"] < bf16["nvfp4"]
    assert trainer["quads"] == w4["quads"] and trainer["nvfp4"] == bf16["nvfp4"]
    assert trainer["symmetric"] < 0.5 * w4["symmetric"] == 0.5 * w4["nvfp4"]
    assert set(probe.arms(suite().probe)) >= set(probe_numerics.CONTROLS)  # type: ignore[arg-type]
