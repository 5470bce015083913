"""Compile Triton kernels for chips that are not here, and report what the compiled code holds.

Every job runs in a forked child of one fresh interpreter: a compiler that aborts (Triton 3.6 does, on dot_scaled for
sm_90) becomes a report with `error` set, and a process that runs Triton's interpreter can still ask for real code.
A kernel that overflows TMEM compiles to an empty body without an error, and one that overflows shared memory fails
only at launch; so a report counts instructions and `problems` compares it with the limits of the chip.

    job = Job(kernel="quads.kernels.quantize_details.kernel:quantize_kernel", chip="sm_100a",
              signature={"x": "*bf16", ...}, constants={"BLOCKS": 128}, options={"num_warps": 4})
    [report] = compile_jobs([job])
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Chip:
    """Limits of a compile target: shared memory in bytes for one block, tensor memory in columns."""

    capability: int
    shared_bytes: int
    tmem_columns: int


CHIPS: dict[str, Chip] = {
    "sm_90a": Chip(90, 232_448, 0),
    "sm_100a": Chip(100, 232_448, 512),
    "sm_103a": Chip(103, 232_448, 512),
    "sm_120a": Chip(120, 101_376, 0),
    "sm_121a": Chip(121, 101_376, 0),
}
_BODY_FLOOR = 8  # PTX instructions: an empty kernel keeps its parameter loads at most, then returns


@dataclass(frozen=True, kw_only=True)
class Job:
    """One kernel for one chip.

    kernel: "module:function", the function decorated with triton.jit.
    signature: argument -> Triton type ("*bf16", "i32", "*i64", "fp32", "tensordesc<...>"); constants are left out.
    constants: constexpr argument -> value. divisible: arguments known to be multiples of 16 (aligned pointers).
    options: num_warps, num_stages, enable_fp_fusion, maxnreg and the like.
    """

    kernel: str
    chip: str
    signature: dict[str, str]
    constants: dict[str, Any] = field(default_factory=dict)
    divisible: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.chip not in CHIPS:
            raise ValueError(f"chip '{self.chip}' is unknown (known: {', '.join(CHIPS)})")


@dataclass(frozen=True, kw_only=True)
class Report:
    """What the compiled kernel holds.

    ptx_opcodes: PTX mnemonic -> count, instructions their sum; sass_opcodes: SASS mnemonic (its first two parts) ->
    count, empty where the disassembler at hand does not know the chip (Triton 3.6's does not know sm_103a);
    spill_bytes: stores plus loads; stack_bytes: stack frame of a thread.
    """

    chip: str
    error: str = ""
    registers: int = 0
    stack_bytes: int = 0
    spill_bytes: int = 0
    shared_bytes: int = 0
    tmem_columns: int = 0
    instructions: int = 0
    ptx_opcodes: dict[str, int] = field(default_factory=dict)
    sass_opcodes: dict[str, int] = field(default_factory=dict)
    ptx: str = field(default="", repr=False)
    sass: str = field(default="", repr=False)

    def count(self, *parts: str) -> int:
        """Number of PTX instructions whose mnemonic contains every one of `parts`."""
        return sum(n for opcode, n in self.ptx_opcodes.items() if all(part in opcode for part in parts))

    def problems(self) -> list[str]:
        """Why this code must not be trusted on its chip; empty when nothing was found."""
        chip = CHIPS[self.chip]
        rules = (
            (bool(self.error), f"does not compile: {self.error}"),
            (not self.error and self.instructions <= _BODY_FLOOR, f"body is empty ({self.instructions} instructions)"),
            (self.spill_bytes > 0, f"spills {self.spill_bytes} bytes to local memory"),
            (self.stack_bytes > 0, f"has a stack frame of {self.stack_bytes} bytes"),
            (self.shared_bytes > chip.shared_bytes, f"shared memory {self.shared_bytes} > {chip.shared_bytes} bytes"),
            (self.tmem_columns > chip.tmem_columns, f"TMEM {self.tmem_columns} > {chip.tmem_columns} columns"),
        )
        return [text for broken, text in rules if broken]


def compile_jobs(jobs: Sequence[Job], *, timeout_s: float = 600.0) -> list[Report]:
    """Compile every job, in order, and return its report. Needs triton and no GPU.

    Raises RuntimeError when the compiling process itself fails (triton missing, for example).
    """
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    worker = subprocess.run(
        [sys.executable, "-m", "quads.kernels.crosscompile"],
        input=json.dumps([dataclasses.asdict(job) for job in jobs]),
        capture_output=True,
        text=True,
        env=environment,
        timeout=timeout_s,
    )
    if worker.returncode:
        raise RuntimeError(f"the compile worker failed: {worker.stderr.strip().splitlines()[-1:]}")
    return [Report(**fields) for fields in json.loads(worker.stdout.splitlines()[-1])]


def _compile_in_children(jobs: list[Job]) -> list[Report]:
    """Fork a child for each job, one a core at a time; an abort of a child is its report's error."""
    running: dict[int, tuple[int, str]] = {}
    reports: dict[int, Report] = {}
    with tempfile.TemporaryDirectory() as folder:
        for index, job in enumerate(jobs):
            if len(running) >= (os.cpu_count() or 1):
                _collect(running, jobs, reports)
            answer = os.path.join(folder, f"{index}.json")
            child = os.fork()
            if child == 0:
                _child(job, answer)
            running[child] = (index, answer)
        while running:
            _collect(running, jobs, reports)
    return [reports[index] for index in range(len(jobs))]


def _collect(running: dict[int, tuple[int, str]], jobs: list[Job], reports: dict[int, Report]) -> None:
    """Wait for one child and read its report."""
    child, status = os.wait()
    index, answer = running.pop(child)
    if os.path.exists(answer):
        with open(answer) as file:
            reports[index] = Report(**json.load(file))
    else:
        reason = f"the compiler died (exit status {os.waitstatus_to_exitcode(status)})"
        reports[index] = Report(chip=jobs[index].chip, error=reason)


def _child(job: Job, answer: str) -> None:
    try:
        report = _compile(job)
    except Exception as error:
        report = Report(chip=job.chip, error=_reason(error))
    with open(f"{answer}.part", "w") as file:
        json.dump(dataclasses.asdict(report), file)
    os.replace(f"{answer}.part", answer)
    os._exit(0)


def _reason(error: BaseException) -> str:
    """The innermost cause: Triton wraps an error once for each call between kernel and fault."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {str(error).strip()[-600:]}"


def _compile(job: Job) -> Report:
    import importlib

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, _, name = job.kernel.partition(":")
    function = getattr(importlib.import_module(module), name)
    signature = {arg: job.signature.get(arg, "constexpr") for arg in function.arg_names}
    attributes = {(function.arg_names.index(arg),): [["tt.divisibility", 16]] for arg in job.divisible}
    constants = {(function.arg_names.index(arg),): value for arg, value in job.constants.items()}
    source = ASTSource(function, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", CHIPS[job.chip].capability, 32), options=job.options)
    return _read(job, compiled)


def _read(job: Job, compiled: Any) -> Report:
    from triton import knobs

    ptx = compiled.asm["ptx"]
    ptxas = knobs.nvidia.ptxas_blackwell if CHIPS[job.chip].capability >= 100 else knobs.nvidia.ptxas
    fused = [] if job.options.get("enable_fp_fusion", True) else ["--fmad=false"]
    with tempfile.TemporaryDirectory() as folder:
        source, binary = os.path.join(folder, "k.ptx"), os.path.join(folder, "k.cubin")
        with open(source, "w") as file:
            file.write(ptx)
        log = _output([ptxas.path, "-v", *fused, f"--gpu-name={job.chip}", source, "-o", binary])
        with open(binary, "wb") as image:
            image.write(compiled.asm["cubin"])
        sass = _output([knobs.nvidia.cuobjdump.path, "-sass", binary], check=False)
    opcodes = _ptx_opcodes(ptx)
    return Report(
        chip=job.chip,
        registers=_number(r"Used (\d+) registers", log),
        stack_bytes=_number(r"(\d+) bytes stack frame", log),
        spill_bytes=_number(r"(\d+) bytes spill stores", log) + _number(r"(\d+) bytes spill loads", log),
        shared_bytes=int(compiled.metadata.shared),
        tmem_columns=int(getattr(compiled.metadata, "tmem_size", 0) or 0),
        instructions=sum(opcodes.values()),
        ptx_opcodes=opcodes,
        sass_opcodes=_sass_opcodes(sass),
        ptx=ptx,
        sass=sass,
    )


def _output(command: list[str], *, check: bool = True) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=check)
    return done.stdout + done.stderr


def _number(pattern: str, log: str) -> int:
    found = re.search(pattern, log)
    return int(found.group(1)) if found else 0


def _ptx_opcodes(ptx: str) -> dict[str, int]:
    """Mnemonics with their modifiers, inline assembly included."""
    pattern = re.compile(
        r"^[\s{]*(?:@!?%\w+\s+)?([a-z][a-z0-9_]*(?:(?:\.|::)[a-zA-Z0-9_]+)*)(?=[\s;])[^;]*;", re.MULTILINE
    )
    found = Counter(m.group(1) for line in ptx.splitlines() for m in pattern.finditer(line.replace(";", ";\n")))
    return dict(sorted(found.items()))


def _sass_opcodes(sass: str) -> dict[str, int]:
    """First two parts of each mnemonic ("FMNMX", "LDG.E"); NOP and the final branch-to-self are padding."""
    pattern = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*(?:\.[A-Z0-9_]+)?)", re.MULTILINE)
    found = Counter(pattern.findall(sass))
    return {opcode: n for opcode, n in sorted(found.items()) if opcode != "NOP"}


def main() -> None:
    """Worker: jobs as JSON on standard input, reports as one JSON line on standard output."""
    import triton  # noqa: F401  once, before the children are forked

    jobs = [Job(**{**fields, "divisible": tuple(fields["divisible"])}) for fields in json.load(sys.stdin)]
    print(json.dumps([dataclasses.asdict(report) for report in _compile_in_children(jobs)]))


if __name__ == "__main__":
    main()
