"""The key of a run hangs on what decides a number, and on nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from quads.bench import identity

STAMP = {"sources": "a", "versions": {}, "python": "3", "cpu": "x", "threads": 1, "gpu": None, "time_utc": "now"}


def test_the_time_of_a_run_does_not_change_its_key() -> None:
    assert identity.key(STAMP) == identity.key({**STAMP, "time_utc": "later"})


@pytest.mark.parametrize(
    "change", [{"gpu": {"name": "H200"}}, {"threads": 2}, {"sources": "b"}, {"versions": {"torch": "3"}}]
)
def test_machine_threads_sources_and_versions_change_the_key(change: dict[str, object]) -> None:
    assert identity.key(STAMP) != identity.key({**STAMP, **change})


def test_the_digest_follows_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "a.py").write_text("1")
    monkeypatch.setattr(identity, "ROOT", tmp_path)
    before = identity.sources_digest()
    (tmp_path / "bench" / "notes.md").write_text("no source")
    assert identity.sources_digest() == before
    (tmp_path / "bench" / "a.py").write_text("2")
    assert identity.sources_digest() != before
