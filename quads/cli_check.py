"""Verbs for other people's kernels: `quads check` and `quads vectors`. Heavy imports happen inside them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from quads.errors import GateFailedError

vectors = typer.Typer(help="Golden vectors: inputs, codes, scales, accumulators and outputs as files.")

Kernel = Annotated[str, typer.Option(help="pkg.mod:function, file.py:function or adapter:name.")]
Field = Annotated[str | None, typer.Option(help="Protocol of the callable; default: what it says of itself.")]
Count = Annotated[int | None, typer.Option(help="Protocol of the callable; default: what it says of itself.")]
Report = Annotated[Path | None, typer.Option(help="Report to write.")]


def check(
    quantizer: Kernel = "",
    gemm: Kernel = "",
    moe: Kernel = "",
    dialect: Annotated[str, typer.Option(help="Dialect that it must speak; empty: any known one.")] = "",
    arithmetic: Annotated[str, typer.Option(help="Order of the K sum it must have; empty: any known one.")] = "",
    outer: Field = None,
    layout: Field = None,
    granularity: Field = None,
    dtypes: Annotated[str, typer.Option(help="Input dtypes, comma-separated; empty: what it says of itself.")] = "",
    device: Field = None,
    k_multiple: Count = None,
    row_multiple: Count = None,
    shards: Count = None,
    level: Annotated[str, typer.Option(help="quick (about a minute) or full (whole enumerations).")] = "quick",
    seed: Annotated[int, typer.Option(help="Of generated cases.")] = 0,
    isolate: Annotated[bool, typer.Option(help="Run each callable in a process of its own.")] = True,
    limit: Annotated[float, typer.Option(help="Seconds a call may take.")] = 60.0,
    junit: Report = None,
    sarif: Report = None,
    html: Report = None,
    json: Report = None,
    annotations: Annotated[bool, typer.Option(help="Print GitHub annotations.")] = False,
    hardware: Annotated[Path | None, typer.Option(help="Ask what is not established; write the answers here.")] = None,
) -> None:
    """Check somebody's NVFP4 quantiser, matrix product or grouped product, bit for bit."""
    from quads.conformance import report_terminal
    from quads.conformance.check import CheckConfig, run

    config = CheckConfig(
        quantizer=quantizer, gemm=gemm, moe=moe, dialect=dialect, arithmetic=arithmetic, outer=outer, layout=layout,
        granularity=granularity, dtypes=tuple(dtypes.split(",")) if dtypes else None, device=device,
        k_multiple=k_multiple, row_multiple=row_multiple, shards=shards, level=level, seed=seed, isolate=isolate,
        limit=limit, junit=junit, sarif=sarif, html=html, json=json, annotations=annotations, hardware=hardware,
    )  # fmt: skip
    console = Console(highlight=False)
    report = run(config, Console(stderr=True, highlight=False).print)
    report_terminal.show(report, console)
    if report.exit_code:
        raise GateFailedError("not every kernel conforms")


@vectors.command("make")
def make(folder: Annotated[Path, typer.Argument(help="Folder to write.")]) -> None:
    """Write the vectors: nvfp4-vectors.safetensors and nvfp4-vectors.json, the same bytes on every machine."""
    from quads.conformance import vectors as golden

    manifest = golden.make(folder)
    Console().print(f"{len(manifest['tensors'])} tensors in {folder}")


@vectors.command("verify")
def verify(folder: Annotated[Path | None, typer.Argument(help="Folder; default: the shipped copy.")] = None) -> None:
    """Check hashes, and every tensor against this emulator."""
    from quads.conformance import vectors as golden

    wrong = golden.verify(folder or golden.SHIPPED)
    for line in wrong:
        Console(highlight=False).print(line)
    if wrong:
        raise GateFailedError(f"{len(wrong)} vectors are not what they should be")
    Console().print("all vectors are as they should be")


@vectors.command("export")
def export(
    out: Annotated[Path, typer.Argument(help="Plain binary file to write.")],
    folder: Annotated[Path | None, typer.Argument(help="Folder; default: the shipped copy.")] = None,
) -> None:
    """Write the vectors as one plain binary file, for C and C++ (docs/conformance-vectors.md)."""
    from quads.conformance import vector_binary
    from quads.conformance import vectors as golden

    Console().print(f"{vector_binary.export(folder or golden.SHIPPED, out)} vectors in {out}")
