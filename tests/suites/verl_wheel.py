"""verl's schema out of its published wheel (QUADS_VERL_WHEEL): its Hydra defaults and its dataclasses, read as files.

verl cannot be installed beside this project's newest torch and transformers, and its dataclasses import Ray; so the
defaults are composed with Hydra, and the dataclasses' fields and types are read from their source.
"""

from __future__ import annotations

import ast
import os
import re
import typing
import zipfile
from collections.abc import Iterator
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pytest


def unpacked(folder: Path) -> Path:
    """The wheel's verl package, unpacked below `folder`; skips without the wheel."""
    wheel = os.environ.get("QUADS_VERL_WHEEL")
    if not wheel or not Path(wheel).is_file():
        pytest.skip("needs QUADS_VERL_WHEEL, the path of a wheel (pip download --no-deps verl==0.9.1)")
    with zipfile.ZipFile(wheel) as files:
        files.extractall(folder)
    return folder / "verl"


class Schema:
    """What verl accepts: `compose` applies overrides as its trainer does, `wrong` names the values of another type."""

    def __init__(self, package: Path) -> None:
        self.package = package

    def compose(self, overrides: list[str]) -> Any:
        """verl's ppo_trainer configuration under `overrides`; Hydra raises for a key that verl has not."""
        from hydra import compose, initialize_config_dir

        with initialize_config_dir(str(self.package / "trainer" / "config"), version_base=None):
            return compose("ppo_trainer", overrides=overrides)

    def open(self, key: str) -> bool:
        """Whether `key` is an empty dictionary by default: one that takes any key."""
        from omegaconf import OmegaConf

        return OmegaConf.select(self.defaults, key) == {}

    @cached_property
    def defaults(self) -> Any:
        return self.compose([])

    def wrong(self, values: dict[str, Any]) -> Iterator[str]:
        """`key: why` of each value that verl's dataclass, or else its default, does not admit."""
        for key, value in values.items():
            if key.startswith("+"):
                continue
            kind = self._annotation(key)
            if not _admits(kind, value):
                yield f"{key} = {value!r} is no {kind}"

    def _annotation(self, key: str) -> Any:
        """The type of `key`: that of its field in the dataclasses above it, or else of verl's default."""
        from omegaconf import OmegaConf

        parts = key.split(".")
        for depth in range(len(parts) - 1, 0, -1):
            target = OmegaConf.select(self.defaults, ".".join([*parts[:depth], "_target_"]))
            if target is not None:
                found = self._descend(str(target).rpartition(".")[2], parts[depth:])
                if found is not None:
                    return _evaluate(found)
                break
        default = OmegaConf.select(self.defaults, key)
        return Any if default is None else list if OmegaConf.is_list(default) else type(default)

    def _descend(self, name: str, path: list[str]) -> str | None:
        """The annotation at `path` below dataclass `name`; None below a field that is no dataclass."""
        fields = self.fields(name)
        assert path[0] in fields, f"{name} has no field {path[0]}"
        if len(path) == 1:
            return fields[path[0]]
        inner = [word for word in re.findall(r"\w+", fields[path[0]]) if word in self._classes]
        return self._descend(inner[0], path[1:]) if inner else None

    @cache  # noqa: B019
    def fields(self, name: str) -> dict[str, str]:
        """Field name -> annotation of dataclass `name`, its bases' included."""
        bases, own = self._classes[name]
        inherited = [self.fields(base) for base in reversed(bases) if base in self._classes]
        return {key: text for fields in (*inherited, own) for key, text in fields.items()}

    @cached_property
    def _classes(self) -> dict[str, tuple[list[str], dict[str, str]]]:
        found = {}
        for path in [*self.package.glob("*/config/*.py"), self.package / "utils" / "profiler" / "config.py"]:
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.ClassDef):
                    fields = {ast.unparse(n.target): ast.unparse(n.annotation) for n in node.body if _is_field(n)}
                    found[node.name] = ([ast.unparse(base) for base in node.bases], fields)
        return found


def _is_field(node: ast.stmt) -> typing.TypeGuard[ast.AnnAssign]:
    return isinstance(node, ast.AnnAssign)


def _evaluate(annotation: str) -> Any:
    """The type that an annotation names; Any for a class of verl's own."""
    names = {"Any": Any, "Optional": typing.Optional, "list": list, "dict": dict, "bool": bool}
    names |= {"str": str, "int": int, "float": float, "None": None}
    words = set(re.findall(r"[A-Za-z_]\w*", annotation))
    return eval(annotation, {"__builtins__": {}}, names) if words <= set(names) else Any


def _admits(kind: Any, value: Any) -> bool:
    if kind is Any:
        return True
    options = typing.get_args(kind) if typing.get_origin(kind) not in (list, dict) else ()
    if options:
        return any(_admits(option, value) for option in options)
    if kind is type(None) or value is None:
        return kind is type(None) and value is None
    if isinstance(value, bool) or kind is bool:
        return kind is bool and isinstance(value, bool)
    kind = typing.get_origin(kind) or kind
    return isinstance(value, (int, float) if kind is float else kind)
