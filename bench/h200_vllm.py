"""The vLLM plugin on one GPU, in parts: does it compute what it says, does stock vLLM load our exports, how fast is it.

    PYTHONPATH=.:SITE python bench/h200_vllm.py --out DIR --parts smoke,stock,compare,throughput --budget 400

smoke       each recipe over a tiny MoE: agreement with the emulated policy, refits, refusals, batch dependence
stock       vLLM without the plugin over exports in both conventions: the same bytes, log-probabilities of W4A16
compare     `quads compare --engine vllm`, three arms at once
throughput  layers of Qwen3-30B-A3B: every arm with the same weights and prompts, CUDA graphs on, one after the other

Each case is a process of its own. All start side by side, the arms of the throughput part too, which then wait: they
are timed, refitted and profiled in turn when the other parts have ended (at half of the budget at the latest). Writes
DIR/vllm.json after every case, DIR/vllm.log, and prints a table. A case that fails leaves its error and nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from quads.bench import vllm_compare, vllm_smoke, vllm_stock, vllm_throughput
from quads.bench.vllm_engines import ENVIRONMENT
from quads.bench.vllm_tables import tables

PARTS: dict[str, Any] = {
    "smoke": vllm_smoke,
    "stock": vllm_stock,
    "compare": vllm_compare,
    "throughput": vllm_throughput,
}
_SIDE_BY_SIDE = ("compare", "smoke", "stock")  # longest first


def main() -> None:
    """Run the parts, or one case of one part where a parent asked for it."""
    options = _parser().parse_args()
    if options.child:
        _child(options)
        return
    book = Book(options)
    chosen = options.parts.split(",")
    if "throughput" in chosen:
        book.begin(_cases("throughput", options))
    jobs = [(part, case) for part in _SIDE_BY_SIDE if part in chosen for case in _cases(part, options)]
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(lambda job: book.alone(*job), jobs))
    book.in_turn()
    print(tables(book.results), flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("h200-vllm"))
    parser.add_argument("--parts", default="smoke,stock,throughput")
    parser.add_argument("--only", default="", help="comma-separated cases; empty: all of the chosen parts")
    parser.add_argument("--budget", type=float, default=420.0, help="seconds for everything")
    parser.add_argument("--jobs", type=int, default=7, help="cases side by side")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batches", default="1,32,128,256")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20, help="GRPO steps of the comparison")
    parser.add_argument("--child", nargs=2, metavar=("PART", "CASE"), help=argparse.SUPPRESS)
    return parser


def _cases(part: str, options: argparse.Namespace) -> list[str]:
    only = options.only.split(",") if options.only else PARTS[part].CASES
    return [case for case in PARTS[part].CASES if case in only]


def _child(options: argparse.Namespace) -> None:
    part, case = options.child
    extra: dict[str, Any] = {}
    if part == "throughput":
        batches = [int(batch) for batch in options.batches.split(",")]
        extra = {"layers": options.layers, "batches": batches, "repeats": options.repeats}
    if part == "compare":
        extra = {"out": options.out / "compare", "steps": options.steps}
    print("DONE " + json.dumps(PARTS[part].run(case, **extra)), flush=True)


@dataclass
class Case:
    """A running process; its last DONE line is its result so far."""

    part: str
    name: str
    process: subprocess.Popen[str]
    result: dict[str, Any]
    tail: list[str]

    def until(self, word: str, deadline: float) -> bool:
        """Read until a line that begins with `word`; False where the process ended or was ended at `deadline`."""
        timer = _Timer(self.process, deadline)
        assert self.process.stdout is not None
        with timer:
            for line in self.process.stdout:
                self.tail.append(line)
                if line.startswith(("DONE ", "SOME ")):
                    self.result |= json.loads(line[5:])
                if line.startswith(word):
                    return True
        return False

    def ask(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def end(self, deadline: float) -> None:
        """Let it finish, or end it at `deadline`; keeps why it gave nothing."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        while self.until("DONE ", deadline):
            pass
        if self.process.wait() and not self.result:
            lines = [line.strip() for line in self.tail if "Error" in line]
            ended = "ended at its deadline" if self.process.returncode < 0 else f"exit {self.process.returncode}"
            self.result["error"] = (lines or [ended])[-1][-300:]


class _Timer:
    """Ends one process of ours at a deadline."""

    def __init__(self, process: subprocess.Popen[str], deadline: float) -> None:
        from threading import Timer

        self._timer = Timer(max(1.0, deadline - time.monotonic()), process.kill)

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()


class Book:
    """Starts cases and writes down what they give."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self._lock = options, Lock()
        self.results: dict[str, dict[str, Any]] = {}
        self.started = time.monotonic()
        self.deadline = self.started + options.budget
        self._turn = self.deadline if "throughput" not in options.parts else self.started + 0.5 * options.budget
        self._begun: list[Case] = []
        self._caches = tempfile.mkdtemp(prefix="quads-vllm-")
        options.out.mkdir(parents=True, exist_ok=True)

    def begin(self, arms: list[str]) -> None:
        """Start arms of the throughput part; they wait for their turn."""
        self._begun = [self._start("throughput", name) for name in arms]

    def alone(self, part: str, name: str) -> None:
        """One case from start to end."""
        if time.monotonic() < self._turn - 20:
            case = self._start(part, name)
            case.end(self._turn)
            self._keep(case)

    def in_turn(self) -> None:
        """When each arm is ready or has failed: in turn two rounds of speeds, refits, profiles."""
        cases = self._begun
        ready_by = self.started + 0.6 * self.options.budget
        with ThreadPoolExecutor(max(1, len(cases))) as pool:
            there = list(pool.map(lambda case: case.until("READY", ready_by), cases))
        ready = [case for case, ok in zip(cases, there, strict=True) if ok]
        self._say(f"ready: {', '.join(case.name for case in ready) or 'no arm'}")
        for word in ("measure", "again", "refit", "profile"):  # a profiler slows down what follows it
            for case in [c for c in ready if c.process.poll() is None and time.monotonic() < self.deadline - 15]:
                case.ask(word)
                case.until("DONE ", self.deadline)
                self._keep(case)
        for case in cases:
            case.end(min(self.deadline, time.monotonic() + 20) if case in ready else time.monotonic())
            self._keep(case)

    def _start(self, part: str, name: str) -> Case:
        given: dict[str, str] = getattr(PARTS[part], "environment", lambda _: {})(name)
        command = [sys.executable, "-m", "quads.bench.h200_vllm", *sys.argv[1:], "--child", part, name]
        process = subprocess.Popen(
            command,
            env={**os.environ, **ENVIRONMENT, **given, "VLLM_CACHE_ROOT": f"{self._caches}/{part}-{name}"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return Case(part, name, process, {}, [])

    def _keep(self, case: Case) -> None:
        with self._lock:
            self.results.setdefault(case.part, {})[case.name] = case.result
            document = {"options": vars(self.options) | {"out": str(self.options.out)}, "stamp": _stamp()}
            text = json.dumps({**document, "results": self.results}, indent=1, default=str)
            (self.options.out / "vllm.json").write_text(text)
            with (self.options.out / "vllm.log").open("a") as log:
                log.write(f"===== {case.part} {case.name}\n" + "".join(case.tail[-150:]))
            case.tail.clear()
        self._say(f"{case.part} {case.name}: {json.dumps(case.result)[:400]}")

    def _say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.started:5.0f} s] {text}", flush=True)


def _stamp() -> dict[str, Any]:
    from quads import provenance

    stamped: Callable[..., dict[str, Any]] = provenance.stamp
    return stamped()


if __name__ == "__main__":
    main()
