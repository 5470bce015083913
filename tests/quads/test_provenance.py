"""The stamp says what made a number, and nothing about the person or host that did."""

from __future__ import annotations

import getpass
import json
import platform
import subprocess
from pathlib import Path

import torch

from quads import provenance


def test_the_stamp_names_versions_threads_and_seeds() -> None:
    stamp = provenance.stamp(seeds=(3, 5))
    assert stamp["versions"]["torch"] == torch.__version__
    assert stamp["threads"] == torch.get_num_threads()
    assert stamp["seeds"] == [3, 5]
    assert (stamp["gpu"] is None) == (not torch.cuda.is_available())
    json.dumps(stamp)


def test_the_stamp_holds_no_host_name() -> None:
    text = json.dumps({key: value for key, value in provenance.stamp().items() if key != "command"})
    assert platform.node() not in text
    assert f"/{getpass.getuser()}" not in text


def _git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    return subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout


def test_the_revision_says_whether_tracked_files_differ(tmp_path: Path) -> None:
    _git(tmp_path, "init", "-q")
    (tmp_path / "provenance.py").write_text("1\n")
    _git(tmp_path, "add", ".")
    _git(tmp_path, "commit", "-qm", "first")
    sha = _git(tmp_path, "rev-parse", "HEAD").strip()
    assert provenance.revision(tmp_path) == {"sha": sha, "dirty": False}
    (tmp_path / "untracked").write_text("")
    assert provenance.revision(tmp_path) == {"sha": sha, "dirty": False}
    (tmp_path / "provenance.py").write_text("2\n")
    assert provenance.revision(tmp_path) == {"sha": sha, "dirty": True}


def test_an_installed_copy_inside_a_foreign_checkout_has_no_revision(tmp_path: Path) -> None:
    _git(tmp_path, "init", "-q")
    (tmp_path / "other.py").write_text("1\n")
    _git(tmp_path, "add", ".")
    _git(tmp_path, "commit", "-qm", "first")
    installed = tmp_path / "site-packages"
    installed.mkdir()
    (installed / "provenance.py").write_text("1\n")
    assert provenance.revision(installed) is None


def test_no_checkout_no_revision(tmp_path: Path) -> None:
    assert provenance.revision(tmp_path) is None


def test_a_missing_distribution_has_no_version() -> None:
    assert provenance.installed("no-such-distribution-anywhere") is None
