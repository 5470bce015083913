"""The stamp of a run: what must be known to believe its numbers and to make them again."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("quads", "torch", "transformers", "trl", "accelerate", "datasets", "reasoning-gym", "triton", "vllm")


def stamp(*, seeds: tuple[int, ...] = ()) -> dict[str, Any]:
    """Versions, source revision and whether it was changed, CPU, GPU, driver, threads, seeds and the time (UTC).

    Holds no host or user name; `command` holds the arguments as they were typed.
    """
    return {
        "time_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "git": revision(Path(__file__).resolve().parent),
        "python": platform.python_version(),
        "versions": {name: version for name in PACKAGES if (version := installed(name))},
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": gpu(),
        "seeds": list(seeds),
    }


def installed(package: str) -> str | None:
    """Version of an installed distribution, None where it is absent."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def revision(folder: Path) -> dict[str, Any] | None:
    """Commit of the checkout that holds `folder` and whether tracked files differ from it; None outside of one."""
    sha = _output(["git", "rev-parse", "HEAD"], folder)
    if sha is None or _output(["git", "ls-files", "provenance.py"], folder) in (None, ""):
        return None  # no checkout, or an installed copy inside somebody else's
    return {"sha": sha, "dirty": bool(_output(["git", "status", "--porcelain", "--untracked-files=no"], folder))}


def cpu_name() -> str:
    """The processor's own name where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def gpu() -> dict[str, Any] | None:
    """Name, capability, memory and driver of the current CUDA device; None without one."""
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "name": properties.name,
        "capability": f"sm_{properties.major}{properties.minor}",
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "count": torch.cuda.device_count(),
        "cuda": torch.version.cuda,
        "driver": _driver(),
    }


def _driver() -> str | None:
    try:
        import pynvml  # the module of the distribution nvidia-ml-py
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return None


def _output(command: list[str], folder: Path) -> str | None:
    try:
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()
