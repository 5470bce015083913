"""Timing of GPU calls on rotated inputs, and the table: shared by the H200 scripts of the products.

Two figures a case. `do_bench`: median of triton.testing.do_bench, each repetition one replay of a CUDA graph that holds
one call, L2 cleared before it. `in a row`: median over replays of one graph that holds the calls on all inputs, divided
by their number; launches overlap as they do in a decoding step, weights are cold because the inputs rotate.
"""

from __future__ import annotations

import itertools
import json
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

Call = Callable[[], Any]


@dataclass(frozen=True)
class Row:
    """One timed case in microseconds; `peers`: us of the same work by others, in the same run; `goals`: text."""

    work: str
    tokens: int
    way: str
    do_bench_us: float
    in_a_row_us: float
    peers: dict[str, tuple[float, float]]
    goals: str = ""

    def ratios(self) -> dict[str, str]:
        """Peer over this case, by do_bench and in a row."""
        return {
            name: f"{slow / self.do_bench_us:.2f} / {fast / self.in_a_row_us:.2f}"
            for name, (slow, fast) in self.peers.items()
        }


def timed(calls: Sequence[Call]) -> tuple[float, float]:
    """(do_bench, in a row) of one call, in microseconds; `calls` do the same work on different inputs."""
    from triton.testing import do_bench

    stream = torch.cuda.Stream()
    graphs = [_captured([call], stream) for call in calls]
    turn = itertools.cycle(graphs)
    alone = do_bench(lambda: next(turn).replay(), warmup=5, rep=40, return_mode="median") * 1e3
    together = _captured(calls, stream)
    spans = [_span(together, stream) for _ in range(23)][3:]
    return alone, statistics.median(spans) / len(calls)


def _captured(calls: Sequence[Call], stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
    return graph


def _span(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(stream):
        start.record()
        graph.replay()
        end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def stamp(command: str, sha: str) -> dict[str, str]:
    """GPU, driver, versions and source of a run."""
    import triton

    try:
        import pynvml

        pynvml.nvmlInit()
        driver = pynvml.nvmlSystemGetDriverVersion()
    except Exception:
        driver = "unknown"
    return {
        "label": f"measured on an {torch.cuda.get_device_name()}",
        "driver": str(driver),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "triton": triton.__version__,
        "python": platform.python_version(),
        "git": sha,
        "command": command,
    }


def markdown(rows: Sequence[Row]) -> str:
    """The table: times, ratios (do_bench / in a row) and goals."""
    lines = [
        "| work | tokens | way | do_bench us | in a row us | peer: ratio | goals |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        ratios = "; ".join(f"{name}: {value}" for name, value in row.ratios().items())
        cells = (row.work, row.tokens, row.way, f"{row.do_bench_us:.1f}", f"{row.in_a_row_us:.1f}", ratios, row.goals)
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def publish(path: Path, head: dict[str, Any], rows: Sequence[Row]) -> None:
    """Write JSON to `path` and the table beside it as markdown; print the table."""
    path.write_text(json.dumps({**head, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    table = markdown(rows)
    text = "\n".join([*(f"{key}: {value}  " for key, value in head.items()), "", table, ""])
    path.with_suffix(".md").write_text(text)
    print(table, flush=True)
