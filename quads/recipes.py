"""Numerics recipes: one frozen record names everything that decides a linear layer's numerics on each side.

A recipe is data. The trainer, the rollout, the export, the suites and the command line all speak in recipes.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import tomllib
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

BLOCK = 16  # quads.emulation.quantizers.BLOCK; named here so that the command line starts without torch
ROUTED_EXPERTS = (r"\.experts(\.|$)",)

_CHOICES: dict[str, tuple[str, ...]] = {
    "rollout_weights": ("bf16", "fp8", "nvfp4"),
    "rollout_activations": ("bf16", "fp8", "nvfp4"),
    "train_weights": ("bf16", "nvfp4"),
    "train_activations": ("bf16", "nvfp4"),
    "backward": ("dequantized", "straight_through"),
    "weight_block": ("1x16", "16x16"),
    "block_rule": ("six", "four_over_six"),
    "activation_outer": ("token", "tensor"),
    "rac_scope": ("token", "tile", "batch", "static", "random", "all"),
}


class RecipeError(ValueError):
    """A recipe field that is unknown, malformed or contradicts another; the message names the field."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Numerics of the selected linear layers.

    rollout_weights, rollout_activations: formats that the rollout multiplies in. `fp8` is E4M3 with 128x128 weight
        blocks and 1x128 activation groups; `nvfp4` is E2M1 with E4M3 scales per 16 along K and an FP32 outer scale.
    train_weights, train_activations: formats that the trainer's forward pass sees (fake-quantised).
    backward: what the gradient GEMMs multiply: Q(W) and Q(X) (`dequantized`, what autograd does with a
        straight-through Q) or the unquantised master and input (`straight_through`).
    weight_block, block_rule: one weight scale per 1x16 or 16x16; absmax to 6, or four-over-six (arXiv 2512.02010).
    activation_outer: outer scale of activations per token or per tensor; the weight's is per tensor.
    rac_ratio: share of K whose residual is compensated, rounded up to whole 16-blocks; 0 is naive W4A4.
    rac_scope: who shares a selection; rac_refresh: rollout steps between refreshes of a `static` one.
    modules, exclude: regular expressions searched in module names; a linear layer is quantised when any of
        `modules` matches and none of `exclude` does.
    """

    name: str = "custom"
    rollout_weights: str = "bf16"
    rollout_activations: str = "bf16"
    train_weights: str = "bf16"
    train_activations: str = "bf16"
    backward: str = "dequantized"
    weight_block: str = "1x16"
    block_rule: str = "six"
    activation_outer: str = "token"
    rac_ratio: float = 0.0
    rac_scope: str = "batch"
    rac_refresh: int = 1
    modules: tuple[str, ...] = ROUTED_EXPERTS
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check_type(field.name, getattr(self, field.name), field.type)
        for field_name, choices in _CHOICES.items():
            if getattr(self, field_name) not in choices:
                _fail(field_name, f"{getattr(self, field_name)!r} is not one of {', '.join(choices)}")
        if not 0.0 <= self.rac_ratio <= 1.0:
            _fail("rac_ratio", f"{self.rac_ratio} is not between 0 and 1")
        if self.rac_refresh < 1:
            _fail("rac_refresh", f"{self.rac_refresh} is not a positive number of steps")
        for field_name in ("modules", "exclude"):
            for pattern in getattr(self, field_name):
                _check_pattern(field_name, pattern)
        if not self.modules:
            _fail("modules", "is empty: the recipe would name no layer")
        self._check_contradictions()

    def _check_contradictions(self) -> None:
        if self.rac_ratio > 0 and (self.rollout_activations, self.rollout_weights) != ("nvfp4", "nvfp4"):
            _fail("rac_ratio", "needs rollout_weights and rollout_activations = 'nvfp4': no residual otherwise")
        if self.rac_scope == "all" and self.rac_ratio not in (0.0, 1.0):
            _fail("rac_scope", f"'all' compensates every block, but rac_ratio is {self.rac_ratio}")
        if self.rollout_activations == "nvfp4" and self.rollout_weights != "nvfp4":
            _fail("rollout_activations", "'nvfp4' needs rollout_weights = 'nvfp4'")
        if (self.rollout_activations == "fp8") != (self.rollout_weights == "fp8"):
            _fail("rollout_activations", "'fp8' goes with rollout_weights = 'fp8' only")
        if self.train_weights == "nvfp4" and self.rollout_weights != "nvfp4":
            _fail("train_weights", "'nvfp4' needs rollout_weights = 'nvfp4', else both sides see other weights")
        if self.train_activations == "nvfp4" and self.train_weights != "nvfp4":
            _fail("train_activations", "'nvfp4' needs train_weights = 'nvfp4' (symmetric QAT)")
        if self.rollout_weights != "nvfp4":
            for field_name, default in (("weight_block", "1x16"), ("block_rule", "six")):
                if getattr(self, field_name) != default:
                    _fail(field_name, "needs rollout_weights = 'nvfp4'")

    def selects(self, module_name: str) -> bool:
        """Whether the linear layer `module_name` (dotted path) is quantised."""
        hit = any(re.search(pattern, module_name) for pattern in self.modules)
        return hit and not any(re.search(pattern, module_name) for pattern in self.exclude)

    def rac_blocks(self, k: int) -> int:
        """Number of 16-blocks of a K = `k` layer that are compensated."""
        return math.ceil(self.rac_ratio * (k // BLOCK) - 1e-9)

    def replace(self, **changes: Any) -> Recipe:
        """A copy with `changes`, checked again."""
        return from_dict({**self.to_dict(), **changes})

    def to_dict(self) -> dict[str, Any]:
        """Every field, tuples as lists: what TOML and JSON hold."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}

    def to_toml(self) -> str:
        """The recipe as a TOML document that `load` reads back to an equal recipe."""
        return "".join(f"{key} = {_toml_value(value)}\n" for key, value in self.to_dict().items())


def from_dict(fields: dict[str, Any]) -> Recipe:
    """Recipe of `fields`; an unknown key is a RecipeError that names the nearest known one."""
    known = [field.name for field in dataclasses.fields(Recipe)]
    for key in fields:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean '{near[0]}'?" if near else f"; known fields: {', '.join(known)}"
            raise RecipeError(f"recipe field '{key}' is unknown{hint}")
    values: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in fields.items()}
    return Recipe(**values)


@lru_cache(maxsize=1)
def named() -> dict[str, Recipe]:
    """The named recipes, in the order of recipes.toml."""
    table = tomllib.loads(resources.files("quads").joinpath("recipes.toml").read_text("utf-8"))
    return {name: from_dict({"name": name, **fields}) for name, fields in table.items()}


def load(source: str | Path) -> Recipe:
    """A named recipe, a changed one such as `quads:rac_ratio=0.25:rac_scope=token`, or the recipe in a TOML file."""
    base, *changes = str(source).split(":")
    if base in named():
        return named()[base].replace(name=str(source), **_changes(changes)) if changes else named()[base]
    path = Path(source)
    if path.suffix != ".toml":
        near = difflib.get_close_matches(str(source), named(), n=1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise RecipeError(f"no recipe named '{source}'{hint} (named: {', '.join(named())}; or a .toml file)")
    try:
        fields = tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise RecipeError(f"recipe file {path} does not exist") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(f"recipe file {path} is not TOML: {error}") from None
    return from_dict({"name": path.stem, **fields})


def _changes(parts: list[str]) -> dict[str, Any]:
    """Fields of `key=value` parts; a value is TOML, a bare word a string."""
    fields = {}
    for part in parts:
        key, _, value = part.partition("=")
        try:
            fields[key] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            fields[key] = value
    return fields


def _fail(field_name: str, why: str) -> None:
    raise RecipeError(f"recipe field '{field_name}' {why}")


_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "float": (float, int),
    "int": (int,),
    "tuple[str, ...]": (tuple,),
}


def _check_type(field_name: str, value: object, annotation: Any) -> None:
    allowed = _TYPES[str(annotation)]
    if not isinstance(value, allowed) or (isinstance(value, bool)):
        _fail(field_name, f"is {value!r}, not a {str(annotation).replace('tuple[str, ...]', 'list of strings')}")
    if isinstance(value, float) and not math.isfinite(value):
        _fail(field_name, f"is {value}, not a finite number")
    if isinstance(value, tuple) and not all(isinstance(item, str) for item in value):
        _fail(field_name, f"is {list(value)!r}, not a list of strings")


def _check_pattern(field_name: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        _fail(field_name, f"holds {pattern!r}, not a regular expression: {error}")


def _toml_value(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in escaped) + '"'
    return repr(value)
