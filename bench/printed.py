"""One line of a terminal for a line of results.jsonl."""

from __future__ import annotations

from rich.markup import escape

from quads.bench.results import VERDICTS
from quads.compare.records import Record


def printed(record: Record) -> str:
    """With rich's markup."""
    kind = record["kind"]
    if kind == "result":
        return _measured(record)
    colour = {"failed": "red", "absent": "yellow", "skipped": "yellow"}.get(kind, "default")
    if kind == "check":
        text = f"{record['name']}: {len(record['compared'])} comparisons" + (
            f", {record['why']}" if record["why"] else ""
        )
        return f"[{'default' if record['passed'] else 'red'}]check[/]   {escape(text)}"
    return (
        f"[{colour}]{kind:7}[/] {escape(str(record.get('case') or record.get('peer')))}: {escape(str(record['why']))}"
    )


def _measured(record: Record) -> str:
    parts = [f"{record['seconds'] * 1e6:12.1f} us  {escape(record['case'])}"]
    if record["against"]:
        parts.append(f"{record['against']['ratio']:.2f}x of {record['against']['implementation']}")
    for key, name in (("share_of_copy", "of copy"), ("share_of_matrix_peak", "of peak")):
        if record[key]:
            parts.append(f"{record[key]:.0%} {name}")
    if record["goal"]:
        parts.append(escape(f"goal {record['goal']}: {VERDICTS[record['goal_met']]}"))
    if record["conditions"]["marked"]:
        parts.append(record["conditions"]["marked"])
    return "  ".join(parts)
