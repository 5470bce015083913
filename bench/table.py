"""A run as Markdown, for a README: products and layers against their peers, quantisers against a copy, other chips."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from quads.bench.figures import label, shown, time_of
from quads.bench.figures_rollout import speed
from quads.bench.results import VERDICTS, Result, ResultsFile
from quads.bench.rollout_model import PAPER
from quads.bench.specs import REFERENCE, chips
from quads.compare.records import Record

COMPARED = {"gemm": "Product", "moe": "MoE layer"}
QUANTISERS = ("quantize", "quantize_rac", "fake_quantize", "outer_scale")
OTHERS = ("refit", "train_step", "emulator", "diagnose")
MODELLED_TOKENS = {
    "gemm": ("M", (16, 8192)), "moe": ("tokens", (16, 256)), "quantize": ("M", (32768,)),
    "quantize_rac": ("M", (32768,)), "fake_quantize": ("M", (32768,)),
}  # fmt: skip
UNMODELLED = {
    *(("quantize", variant) for variant in ("token, amax in the pass", "128x4 scales", "fp16", "vllm dialect")),
    ("quantize_rac", "tensor"), ("quantize_rac", "50 % tile"),
}  # fmt: skip


def markdown(folder: Path) -> str:
    """The tables of a folder of results. FileNotFoundError where there is none."""
    file = ResultsFile(folder)
    measured, modelled = list(file.results("measured")), list(file.results("modelled"))
    stamps = file.stamps()
    parts = [head(stamps[-1]) if stamps and measured else "Nothing was measured."]
    parts += [compared(op, title, measured) for op, title in COMPARED.items()]
    parts += [served(measured), shares(measured), others(measured), chips_table(modelled), rollouts(modelled)]
    return "\n\n".join(part for part in parts if part) + "\n"


def head(stamp: Record) -> str:
    """Where and how the measured numbers were taken."""
    gpu = (stamp.get("gpu") or {}).get("name") or f"{stamp.get('cpu', 'an unknown machine')} (no GPU)"
    versions = stamp.get("versions") or {}
    git = (stamp.get("git") or {}).get("sha", "unknown")[:7]
    used = ", ".join(f"{name} {versions[name]}" for name in ("torch", "triton", "vllm") if versions.get(name))
    return f"*Measured* on {gpu}, {used}, at {git}: `{stamp.get('command', '')}`."


def compared(op: str, title: str, results: Sequence[Result]) -> str:
    """Time of the first case of each shape, then the other cases' times over it, with their intervals."""
    rows = [one for one in results if one.op == op and "from bf16" not in one.variant]
    if not rows:
        return ""
    shapes = sorted({tuple(one.shape.items()) for one in rows})
    constant = set.intersection(*map(set, shapes))
    columns = list(dict.fromkeys(label(one) for one in rows if one.against))
    base_name = next((label(one) for one in rows if not one.against), "base")
    lines = []
    for shape in shapes:
        own = {label(one): one for one in rows if tuple(one.shape.items()) == shape}
        base = own.get(base_name)
        first = f"{1e6 * base.seconds:,.1f} us" if base else ""
        varied = dict(pair for pair in shape if pair not in constant)
        lines.append([shown(varied or dict(shape)), first, *(_ratio(own.get(name)) for name in columns)])
    of = ", ".join(filter(None, [f"{title}s", shown(dict(sorted(constant)))]))
    note = f"{of}: time of {base_name}, and the others' time over it (95 % of the median, round by round)."
    return f"{note}\n\n{grid([title, base_name, *columns], lines)}"


def _ratio(one: Result | None) -> str:
    if one is None or one.against is None:
        return ""
    mark = " †" if one.conditions.marked else ""
    return f"{one.against.ratio:.2f}x ({one.against.low:.2f}–{one.against.high:.2f}){mark}"


def shares(results: Sequence[Result]) -> str:
    """Quantisers: time and share of the copy bandwidth of the same run, largest shape of each operation."""
    lines = []
    for op in QUANTISERS:
        rows = [one for one in results if one.op == op]
        largest = max((one.bytes or 0.0 for one in rows), default=0.0)
        shape = next((one.shape for one in rows if one.bytes == largest), None)
        for one in rows:
            if one.shape == shape:
                share = f"{one.share_of_copy:.0%}" if one.share_of_copy else ""
                name = f"{op.replace('_', ' ')}: {label(one)}"
                lines.append([name, f"{1e6 * one.seconds:,.1f} us", share, _goal(one)])
    return grid(["quantiser", "time", "of copy", "goal"], lines) if lines else ""


def others(results: Sequence[Result]) -> str:
    """Everything else, a line a case."""
    lines = []
    for one in results:
        if one.op in OTHERS:
            lines.append([one.case.replace("|", "/"), _time(one.seconds), _ratio(one), _goal(one)])
    return grid(["case", "result", "over the first of its group", "goal"], lines) if lines else ""


def reached(one: Result) -> str:
    """What a result's goal is held against: its ratio, else its share of the copy bandwidth."""
    if "copy" in one.goal and one.share_of_copy:
        return f"{one.share_of_copy:.0%} of copy"
    return _ratio(one)


def served(results: Sequence[Result]) -> str:
    """Output tokens a second of measured rollouts, a row an arm, a column a batch."""
    rows = [one for one in results if one.op == "rollout"]
    if not rows:
        return ""
    batches = sorted({one.shape["batch"] for one in rows})
    speeds = {(label(one), one.shape["batch"]): f"{speed(one, host=True):,.0f}" for one in rows}
    lines = [[name, *(speeds.get((name, b), "") for b in batches)] for name in dict.fromkeys(map(label, rows))]
    sizes = shown({key: size for key, size in rows[0].shape.items() if key != "batch"})
    return f"Rollouts, {sizes}: output tokens/s.\n\n{grid(['arm', *(f'batch {b}' for b in batches)], lines)}"


def _goal(one: Result) -> str:
    return "" if not one.goal else f"{one.goal}: {VERDICTS[one.goal_met]}"


def _time(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:,.3g} {unit}"
    return f"{seconds * 1e9:,.3g} ns"


def chips_table(modelled: Sequence[Result]) -> str:
    """*Modelled* microseconds on each chip, and the model's error on the H200 beside them."""
    keys = [key for key in chips() if any(one.chip == key for one in modelled)]
    lines = []
    for case, rows in _cases(modelled).items():
        times = {one.chip: f"{1e6 * time_of(one):,.1f}" for one in rows}
        lines.append([case, *(times.get(key, "") for key in keys), error_of(rows[0])])
    if not lines:
        return ""
    note = f"*Modelled*, us of a call among others; last column: measured / predicted on the {REFERENCE}"
    return f"{note} (lowest–highest):\n\n{grid(['case', *keys, 'error'], lines)}"


def _cases(modelled: Iterable[Result]) -> dict[str, list[Result]]:
    found: dict[str, list[Result]] = {}
    for one in modelled:
        axis, wanted = MODELLED_TOKENS.get(one.op, ("", ()))
        if one.shape.get(axis) in wanted and (one.op, one.variant) not in UNMODELLED:
            name = f"{one.op.replace('_', ' ')}, {axis} = {one.shape[axis]:,}: {label(one)}"
            found.setdefault(name, []).append(one)
    return found


def error_of(one: Result) -> str:
    """The model's error as text."""
    error = one.model_error
    return f"{error.ratio:.2f} ({error.low:.2f}–{error.high:.2f})" if error else "unchecked"


def rollouts(modelled: Sequence[Result]) -> str:
    """*Modelled* rollout throughput over FP8's, by chip and batch, for the first model."""
    rows = [one for one in modelled if one.op == "rollout"]
    if not rows:
        return ""
    rows = [one for one in rows if one.way == rows[0].way]
    batches = sorted({one.shape["batch"] for one in rows})
    speeds = {(one.chip, label(one), one.shape["batch"]): speed(one, host=False) for one in rows}
    fp8 = next(label(one) for one in rows if one.numerics == "fp8")
    lines = []
    for key, name in dict.fromkeys((one.chip, label(one)) for one in rows):
        ratios = [
            f"{speeds[key, name, b] / speeds[key, fp8, b]:.2f}"
            if (key, name, b) in speeds and (key, fp8, b) in speeds
            else ""
            for b in batches
        ]
        first = next(one for one in rows if (one.chip, label(one)) == (key, name))
        if name != fp8 and any(ratios):
            lines.append([key, name, *ratios, error_of(first)])
    note = (
        f"*Modelled* rollout of {rows[0].way}, tokens/s over FP8's, GPU time alone (the abstract of arXiv 2607.15810"
        f" says about {PAPER}x; chip and batch not stated there):"
    )
    return f"{note}\n\n{grid(['chip', 'arm', *(f'batch {b}' for b in batches), 'error of times'], lines)}"


def grid(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; bars in cells are escaped."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)
