"""Cases of the vLLM script are processes: what they say is kept, however they end."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from quads.bench.h200_vllm import Case

WAITS = """
import sys
print("READY", flush=True)
for line in sys.stdin:
    print('SOME {"speed": 1}', flush=True)
    print('DONE {"speed": 2, "asked": "%s"}' % line.strip(), flush=True)
"""


def case(script: str, tmp_path: Path) -> Case:
    file = tmp_path / "case.py"
    file.write_text(script)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return Case("part", "name", subprocess.Popen([sys.executable, file], text=True, **pipes), {}, [])  # type: ignore[call-overload]


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


def test_a_case_waits_until_it_is_asked_and_ends_when_nobody_asks_more(tmp_path: Path) -> None:
    waiting = case(WAITS, tmp_path)
    assert waiting.until("READY", soon())
    waiting.ask("measure")
    assert waiting.until("DONE ", soon())
    assert waiting.result == {"speed": 2, "asked": "measure"}
    waiting.end(soon())
    assert waiting.process.returncode == 0 and "error" not in waiting.result


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("raise ValueError('no such kernel')", "ValueError: no such kernel"),
        ("raise SystemExit(3)", "exit 3"),
        ("import time; time.sleep(60)", "ended at its deadline"),
    ],
)
def test_a_case_that_gives_nothing_leaves_its_reason(script: str, reason: str, tmp_path: Path) -> None:
    failing = case(script, tmp_path)
    failing.end(soon(1.5))
    assert failing.result == {"error": reason}


def test_what_was_said_before_the_deadline_is_kept(tmp_path: Path) -> None:
    slow = case("""print('SOME {"speed": 1}', flush=True); import time; time.sleep(60)""", tmp_path)
    slow.end(soon(1.5))
    assert slow.result == {"speed": 1}
