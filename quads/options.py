"""A config dataclass as command-line options: one source for names, defaults and help texts."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer


def command(config_class: type, run: Callable[[Any], None], doc: str) -> Callable[..., None]:
    """A typer command whose options are the fields of `config_class` (each with `metadata["help"]`).

    Tuples are comma-separated. The command builds the config, whose own errors name the field, and calls `run`.
    """
    hints = get_type_hints(config_class)
    fields = dataclasses.fields(config_class)

    def body(**values: Any) -> None:
        run(config_class(**{f.name: _parsed(values[f.name], hints[f.name]) for f in fields}))

    parameters = [_parameter(f, hints[f.name]) for f in fields]
    body.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    body.__annotations__ = {p.name: p.annotation for p in parameters}
    body.__doc__ = doc
    return body


def _parameter(field: dataclasses.Field[Any], hint: Any) -> inspect.Parameter:
    is_tuple = hint in (tuple[str, ...], tuple[int, ...], tuple[float, ...])
    default: Any = field.default
    if is_tuple:
        default = ",".join(str(value) for value in default)
    kind = str if is_tuple else hint
    flag = f"--{field.name.replace('_', '-')}"
    option = typer.Option(flag, help=field.metadata["help"])
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
    )


def _parsed(value: Any, hint: Any) -> Any:
    if hint == tuple[str, ...]:
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if hint in (tuple[int, ...], tuple[float, ...]):
        return numbers(value, int if hint == tuple[int, ...] else float)
    return Path(value) if hint is Path else value


def numbers(text: str, number: type) -> tuple[Any, ...]:
    """The comma-separated numbers of an option."""
    return tuple(_number(part, number) for part in text.split(",") if part.strip())


def _number(text: str, number: type) -> Any:
    try:
        return number(text)
    except ValueError:
        raise ValueError(f"{text.strip()!r} is not {'an integer' if number is int else 'a number'}") from None
