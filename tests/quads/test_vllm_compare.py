"""`quads compare --engine vllm`: the main job sampled by a real engine (CPU), refitted and proven at each step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quads.compare import engines
from quads.compare.config import ENGINES
from quads.compare.records import Records
from quads.errors import CannotRunHereError
from quads.integrations.vllm_plugin import versions
from tests.quads.compare_run import config, evaluations, records, run

ARMS = ("bf16", "nvfp4", "quads")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three arms, each in an engine of its own, one after the other in this process."""
    pytest.importorskip("vllm")
    out = tmp_path_factory.mktemp("whole")
    run(out, engine="vllm", arms=ARMS)
    return out


@pytest.mark.vllm
def test_every_arm_samples_in_the_engine_and_its_gap_is_measured(whole: Path) -> None:
    gaps = {arm: [r["gap/mean"] for r in records(whole) if r["arm"] == arm] for arm in ARMS}
    assert all(len(gap) == 3 for gap in gaps.values())
    assert max(gaps["bf16"]) < 1e-5, "the engine did not get the trainer's weights"
    assert min(gaps["nvfp4"]) > 1e-3, "the engine did not quantise"
    assert all(record["time/sync_s"] > 0 for record in Records(whole / "runs.jsonl").read())


@pytest.mark.vllm
def test_a_resumed_engine_gives_the_records_of_an_unbroken_run(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quads.integrations.vllm_rollout import EngineRollout

    sample = EngineRollout.__call__

    def interrupted(self: EngineRollout, *args: Any) -> Any:
        if self.round == 1:
            raise KeyboardInterrupt
        return sample(self, *args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(EngineRollout, "__call__", interrupted)
        run(tmp_path, engine="vllm", arms=("quads",))
    assert len(records(tmp_path)) == 1
    assert "quads-seed0: resumed after step 1" in run(tmp_path, engine="vllm", arms=("quads",))
    assert records(tmp_path) == [record for record in records(whole) if record["arm"] == "quads"]
    assert evaluations(tmp_path) == [record for record in evaluations(whole) if record["arm"] == "quads"]


def test_an_engine_that_is_not_installed_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "installed", lambda: None)
    with pytest.raises(CannotRunHereError, match=r"pip install 'quads\[vllm\]'"):
        run(tmp_path / "out", engine="vllm")
    assert not (tmp_path / "out").exists()


def test_every_engine_that_a_config_may_name_is_there() -> None:
    assert tuple(engines._MAKERS) == ENGINES
    assert config(Path("x"), engine="vllm").identity() != config(Path("x")).identity()
