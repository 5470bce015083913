"""Workers side by side: order, retries, a full disk, the clock, an interrupt, and no orphans."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quads.errors import CannotRunHereError
from quads.suites import worker
from quads.suites.pool import Outcome, Pool
from tests.suites import pool_jobs
from tests.suites.pool_jobs import PoolJob


@pytest.fixture(autouse=True)
def _light(monkeypatch: pytest.MonkeyPatch) -> None:
    """No heavy imports before a job that needs none."""
    monkeypatch.setattr(worker, "PRELOAD", ())


def _work(
    folder: Path, *whats: str, workers: int = 2, seconds: float = math.inf, said: list[str] | None = None
) -> Outcome:
    jobs = [PoolJob(f"job{index}", what, folder) for index, what in enumerate(whats)]
    lines = [] if said is None else said
    pool = Pool(workers, run=pool_jobs.run, on_message=lambda job, message: lines.append(message.text))
    return pool.work(jobs, time.time() + seconds)


def _attempts(folder: Path, label: str) -> list[str]:
    log = folder / f"{label}.log"
    return log.read_text().splitlines() if log.exists() else []


def test_every_job_is_done_once_and_a_worker_takes_several(tmp_path: Path) -> None:
    outcome = _work(tmp_path, *["well"] * 5)
    assert [job.label for job in sorted(outcome.done, key=lambda job: job.label)] == [f"job{i}" for i in range(5)]
    processes = [_attempts(tmp_path, f"job{i}") for i in range(5)]
    assert all(len(attempts) == 1 for attempts in processes)
    assert len({attempts[0] for attempts in processes}) <= 2


@pytest.mark.parametrize("what", ["die once", "lose the gpu once"])
def test_a_lost_worker_is_replaced_and_its_job_tried_in_a_fresh_process(tmp_path: Path, what: str) -> None:
    said: list[str] = []
    outcome = _work(tmp_path, what, "well", said=said)
    assert len(outcome.done) == 2 and not outcome.failed
    first, second = _attempts(tmp_path, "job0")
    assert first != second
    assert any("tried again in a fresh process" in line for line in said)


def test_a_job_that_kills_its_worker_twice_is_reported_and_the_others_go_on(tmp_path: Path) -> None:
    outcome = _work(tmp_path, "die", "well", "well", workers=1)
    assert outcome.failed == {"job0": "its worker process died (tried 2 times)"}
    assert len(outcome.done) == 2 and len(_attempts(tmp_path, "job0")) == 2


def test_bad_input_is_not_tried_again(tmp_path: Path) -> None:
    outcome = _work(tmp_path, "bad input", "well")
    assert outcome.failed == {"job0": "ValueError: field 'x' is 1, not 2"}
    assert len(_attempts(tmp_path, "job0")) == 1


def test_a_full_disk_stops_everything_with_the_file_and_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(CannotRunHereError, match=r"no space left \(runs\.jsonl: No space left.*run the same command"):
        _work(tmp_path, "full disk", "well", "well", "well", workers=1)
    assert not _attempts(tmp_path, "job2")


def test_the_clock_stops_jobs_after_a_step_and_begins_no_other(tmp_path: Path) -> None:
    started = time.monotonic()
    outcome = _work(tmp_path, "slow", "slow", "slow", workers=1, seconds=1.0)
    assert time.monotonic() - started < 20
    assert not outcome.failed and len(outcome.done) + len(outcome.stopped) == 3 and outcome.stopped


def test_workers_end_with_their_parent_whatever_ends_it(tmp_path: Path) -> None:
    script = f"""
import math
from pathlib import Path
from quads.suites import pool, worker
from tests.suites import pool_jobs
if __name__ == "__main__":
    worker.PRELOAD = ()
    job = pool_jobs.PoolJob("job0", "slow", Path({str(tmp_path)!r}), steps=1000)
    pool.Pool(1, run=pool_jobs.run).work([job], math.inf)
"""
    (tmp_path / "script.py").write_text(script)
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    parent = subprocess.Popen([sys.executable, str(tmp_path / "script.py")], cwd=root, env=environment)
    try:
        deadline = time.monotonic() + 120
        while not _attempts(tmp_path, "job0") and time.monotonic() < deadline:
            time.sleep(0.05)
        (child,) = _attempts(tmp_path, "job0")
    finally:
        parent.kill()
        parent.wait()
    for _ in range(200):
        if not _alive(child):
            return
        time.sleep(0.1)
    pytest.fail(f"worker {child} outlived its parent")


def _alive(process: str) -> bool:
    stat = Path("/proc") / process / "stat"
    return stat.exists() and ") Z " not in stat.read_text()
