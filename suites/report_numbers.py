"""How a suite's numbers are written: as many digits as their interval justifies, a dash for what was not measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

DASH, MINUS = "–", "−"


def known(value: Any) -> bool:
    """Whether `value` is a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)


def number(value: Any, *, signed: bool = False) -> str:
    """Three significant digits: `0.0194`, `2.86e-07`, `18,496`; a dash for None and NaN."""
    if not known(value):
        return DASH
    sign = "+" if signed else ""
    if isinstance(value, int) or abs(value) >= 1000:
        text = f"{value:{sign},.0f}"
    elif value == 0:
        text = "0"
    else:
        text = f"{value:{sign}.2e}" if abs(value) < 1e-3 else f"{value:{sign}.{_decimals(abs(value), 3)}f}"
    return text.replace("-", MINUS, 1) if text.startswith("-") else text


def interval(share: Mapping[str, Any] | None, *, signed: bool = False, name: str = "value") -> str:
    """`0.951 (0.930–0.967)`, `+0.002 (−0.004 to +0.008)`; without an interval the number alone; a dash for None."""
    if share is None or not known(share.get(name)):
        return DASH
    value, low, high = (float(share[key]) if known(share.get(key)) else math.nan for key in (name, "low", "high"))
    if math.isnan(low + high):
        return number(value, signed=signed)
    middle, *ends = alike((value, low, high), signed=signed)
    return f"{middle} ({(' to ' if signed or low < 0 else DASH).join(ends)})"


def as_ratio(entry: Mapping[str, Any]) -> str:
    """The difference of a logarithm as a ratio with its interval: `0.70 times (0.65–0.76)`; empty for other metrics."""
    if "/log_" not in entry["metric"] or not known(entry["difference"]):
        return ""
    times = {key: math.exp(entry[key]) if known(entry[key]) else None for key in ("difference", "low", "high")}
    value, bracket, ends = interval(times, name="difference").partition(" (")
    return f"{value} times{bracket}{ends}"


def alike(values: tuple[Any, ...], *, signed: bool = False) -> tuple[str, ...]:
    """Value, low and high with the same decimals: two significant digits of the interval's width, three at most."""
    value, low, high = map(float, values)
    sign, largest = "+" if signed else "", max(map(abs, (value, low, high)))
    width = max(high - low, largest / 100)
    if 0 < largest < 1e-3:
        texts = [f"{item:{sign}.1e}" if item else "0" for item in (value, low, high)]
    else:
        decimals = _decimals(width, 2) if width else 3
        texts = [f"{item:{sign},.{decimals}f}" for item in (value, low, high)]
    return tuple(text.replace("-", MINUS, 1) if text.startswith("-") else text for text in texts)


def _decimals(size: float, digits: int) -> int:
    return max(0, digits - 1 - math.floor(math.log10(size) + 1e-9))
