"""The evidence table: what is known of each modelled behaviour, and how. `python -m quads.emulation.evidence` prints
docs/evidence.md from evidence.toml."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib import resources

CLASSES = ("hardware words", "library equality", "vendor document", "published model", "assumption")

_HEAD = """# Evidence

Rendered from emulation/evidence.toml by `python -m quads.emulation.evidence`; a test keeps the two equal.
Count: results compared bit for bit, all of them equal; 0 where nothing was run. Which output bits of a product rest on
an undecided rule is answered per element by `quads.emulation.undecided`.
"""


@dataclass(frozen=True, kw_only=True)
class Behaviour:
    """One modelled behaviour; `test` is the file that holds it, `count` the results compared."""

    id: str
    statement: str
    module: str
    evidence: str
    source: str
    count: int
    version: str
    test: str


def load() -> list[Behaviour]:
    """Every behaviour of evidence.toml, in its order; ValueError on an unknown class or a repeated id."""
    text = resources.files("quads.emulation").joinpath("evidence.toml").read_text("utf-8")
    found = [Behaviour(**fields) for fields in tomllib.loads(text)["behaviour"]]
    for behaviour in found:
        if behaviour.evidence not in CLASSES:
            raise ValueError(f"behaviour {behaviour.id}: evidence '{behaviour.evidence}' is not one of {CLASSES}")
        if sum(other.id == behaviour.id for other in found) > 1:
            raise ValueError(f"behaviour {behaviour.id} is listed more than once")
    return found


def render() -> str:
    """The table as Markdown, one section a class."""
    sections = [_section(name, [b for b in load() if b.evidence == name]) for name in CLASSES]
    return "\n".join([_HEAD, *sections])


def _section(name: str, rows: list[Behaviour]) -> str:
    lines = [f"## {name.capitalize()}", "| behaviour | module | count | source | version | test |", "|" + " --- |" * 6]
    for b in rows:
        count = f"{b.count:,}" if b.count else "0"
        cells = (f"**{b.id}**: {b.statement}", f"`{b.module}`", count, b.source, b.version, f"`{b.test}`")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(render(), end="")
