"""The pytest plugin, run in a pytest of its own."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

TEST = """
import pathlib, sys
sys.path.insert(0, {root!r})
from tests.quads.conformance_kernels import Kernel
from tests.quads.test_conformance_product_faults import grouped

def test_right(nvfp4_check):
    assert nvfp4_check(grouped(), "moe").passed

def test_wrong(nvfp4_check):
    nvfp4_check(lambda x, outer: (Kernel()(x, outer)[0].T, Kernel()(x, outer)[1]))
"""
ROOT = Path(__file__).parents[2]


def test_the_fixture_and_the_option_fail_with_the_report(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(TEST.format(root=str(ROOT)))
    spec = f"{ROOT / 'examples' / 'conformance' / 'my_kernel.py'}:quantize"
    registered = any(point.name == "quads" for point in importlib.metadata.entry_points(group="pytest11"))
    plugin = [] if registered else ["-p", "quads.pytest_plugin"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *plugin, "-p", "no:cacheprovider", "--nvfp4-quantizer", spec, "."],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "2 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "nibbles-swapped" in done.stdout
    assert "first failing input" in done.stdout


def test_starting_pytest_does_not_import_torch() -> None:
    code = "import quads.pytest_plugin, sys; raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
