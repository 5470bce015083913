"""The command line: verbs only. Heavy imports happen inside them.

Exit codes: 0 pass, 1 a gate failed, 2 usage or bad input, 3 cannot run here, 130 interrupted.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import click
import typer
from rich.console import Console

from quads.errors import CannotRunHereError, GateFailedError

app = typer.Typer(
    name="quads",
    help="NVFP4 (W4A4) rollouts for reinforcement learning: compare, diagnose, emulate, export.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document as the last line.")]


def main() -> None:
    """Run the command line; known errors become one line on stderr and an exit code."""
    try:
        result = app(standalone_mode=False)
        sys.exit(result if isinstance(result, int) else 0)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except (KeyboardInterrupt, click.Abort):
        _stop("interrupted: run the same command again to go on", 130)
    except GateFailedError as error:
        _stop(str(error), 1)
    except (ValueError, FileNotFoundError, NotADirectoryError) as error:
        _stop(str(error), 2)
    except CannotRunHereError as error:
        _stop(str(error), 3)


def _stop(message: str, code: int) -> None:
    Console(stderr=True, highlight=False).print(f"[bold red]quads:[/] {' '.join(message.split())}", soft_wrap=True)
    sys.exit(code)


def _print_json(document: Any) -> None:
    print(json.dumps(document, default=str))


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


if __name__ == "__main__":
    main()
