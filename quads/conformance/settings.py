"""How thorough a check is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Settings:
    """dialect, arithmetic: what a quantiser or product must speak (empty: any that is known).

    first_amaxes: enumerations that every dialect is ranked on. amaxes: enumerations of bf16 (amax, block maximum) for
    a kernel that passes those (128 is the whole binade). examples: tries of Hypothesis. seed: of those.
    """

    dialect: str = ""
    arithmetic: str = ""
    first_amaxes: int = 2
    amaxes: int = 16
    examples: int = 100
    seed: int = 0


LEVELS = {"quick": Settings(), "full": Settings(amaxes=128, examples=2000)}
