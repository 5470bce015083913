"""One look an arm: colour, dash and marker, the same in every figure of a report; legible on white and on black.

Named recipes keep the colours of `quads compare`; others of a suite (`quads:rac_ratio=0.25`) take spare ones in the
order in which the suite runs them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from quads.compare.figures import COLORS

_SPARE = ("#1f8fc0", "#c9651b", "#8f6ad6", "#5f8f1f", "#c2528b", "#2f9c86", "#a8741a", "#6f7fd0", "#b4564a", "#7a8591")
_CONTROLS = {"engine": "#64748b", "w16a4": "#d9772b"}
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "triangle-down", "x", "pentagon", "star", "hexagon")

SCOPES = {  # rac_scope: what chooses the channels
    "batch": ("residual norm, once a batch", COLORS["quads"], "circle"),
    "token": ("residual norm, each token", "#1f8fc0", "diamond"),
    "tile": ("residual norm, each expert tile", "#8f6ad6", "square"),
    "static": ("residual norm, fixed beforehand", "#a8741a", "triangle-up"),
    "random": ("chance (control)", COLORS["quads-random"], "x"),
}
TERMS = {  # attribution by layer
    "weights": ("weights only", "#3b82c4", "square"),
    "activations": ("activations only", _CONTROLS["w16a4"], "diamond"),
    "both": ("both (W4A4)", COLORS["nvfp4"], "circle"),
    "rac": ("both, with RAC 50 %", COLORS["quads"], "triangle-up"),
}


def colors(arms: Iterable[str]) -> dict[str, str]:
    """Arm -> colour; `arms` in the suite's order."""
    spare = iter(_SPARE * 4)
    fixed = {**COLORS, **_CONTROLS}
    return {arm: fixed.get(arm) or next(spare, "#7a8591") for arm in dict.fromkeys(arms)}


class Look:
    """The looks of a suite's arms."""

    def __init__(self, arms: Iterable[str]) -> None:
        self.colors = colors(arms)
        self._order = {arm: index for index, arm in enumerate(self.colors)}

    def line(self, arm: str) -> dict[str, Any]:
        """plotly `line` of the arm; the dash tells arms apart where colours do not."""
        index = self._order[arm]
        return {"color": self.colors[arm], "width": 2, "dash": _DASHES[index // 2 % len(_DASHES)]}

    def marker(self, arm: str, **more: Any) -> dict[str, Any]:
        """plotly `marker` of the arm."""
        return {"color": self.colors[arm], "symbol": _SYMBOLS[self._order[arm] % len(_SYMBOLS)], "size": 8, **more}

    def trace(self, arm: str, **more: Any) -> dict[str, Any]:
        """A scatter trace of the arm that follows its tick box."""
        return {"type": "scatter", "name": arm, "legendgroup": arm, **more}


def faint(color: str, opacity: float = 0.13) -> str:
    """The colour as a see-through rgba, for bands."""
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"
