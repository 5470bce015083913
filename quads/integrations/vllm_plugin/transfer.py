"""Weight-transfer backends of vLLM's RL API (start_weight_update, update_weights, finish_weight_update).

`quads`        tensors or packed weights of this process, or a folder of safetensors; nothing is touched before finish
`quads_ipc`    vLLM's own CUDA IPC transport, as one transaction
`quads_nccl`   vLLM's own NCCL transport, as one transaction
Choose with `weight_transfer_config={"backend": "quads"}`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from quads.integrations.vllm_plugin import refit
from quads.integrations.vllm_plugin.refit import RefitError, Snapshot, Update
from quads.qdq import PackedWeight


def register() -> None:
    """Register the backends; harmless when called again."""
    for name, (module, engine) in _BACKENDS.items():
        if name not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(name, f"quads.integrations.vllm_plugin.{module}", engine)


_BACKENDS = {
    "quads": ("transfer", "LocalTransfer"),
    "quads_ipc": ("transfer_ipc", "Transfer"),
    "quads_nccl": ("transfer_nccl", "Transfer"),
}


@dataclass
class LocalInit(WeightTransferInitInfo):
    """Nothing to agree on."""


@dataclass
class LocalUpdate(WeightTransferUpdateInfo):
    """One part of an update: `weights` of this process ((name, tensor) or PackedWeight), or the folder `path`.

    abort: end the session, old weights kept; vLLM's worker leaves it open when finish_weight_update fails.
    checksums: see `quads.integrations.vllm.checksums`; once given, every packed weight of the update must have one.
    """

    weights: list[Any] = field(default_factory=list)
    path: str = ""
    abort: bool = False
    checksums: dict[str, str] = field(default_factory=dict)


class LocalTransfer(WeightTransferEngine[LocalInit, LocalUpdate]):
    """Collects an update by reference and applies it when it is finished; a trainer must not write meanwhile."""

    init_info_cls = LocalInit
    update_info_cls = LocalUpdate

    def init_transfer_engine(self, init_info: LocalInit) -> None:
        self._parts: list[LocalUpdate] = []

    def start_weight_update(self) -> None:
        self._parts = []

    def receive_weights(self, update_info: LocalUpdate) -> None:
        if update_info.abort:
            self._parts = []
            _abort()
        if bool(update_info.path) == bool(update_info.weights):
            raise RefitError("weight update needs 'weights' or 'path', one of them")
        for item in update_info.weights:
            _check_finite(item)
        if update_info.path:
            _files(update_info.path)
        self._parts.append(update_info)

    def finish_weight_update(self) -> None:
        parts, self._parts = self._parts, []
        if not parts:
            raise RefitError("weight update is empty: nothing was sent between start and finish")
        sums = {name: digest for part in parts for name, digest in part.checksums.items()}
        refit.apply_update(self.model, self.model_config, _items(parts), sums or None)

    def shutdown(self) -> None:
        self._parts = []

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: Any) -> None:
        """`trainer_args["llm"]` receives what `iterator` yields (vLLM 0.26 asks for this method)."""
        llm = trainer_args["llm"]
        llm.start_weight_update()
        llm.update_weights({"update_info": {"weights": list(iterator)}})
        llm.finish_weight_update()


def _abort() -> None:
    raise RefitError("weight update aborted: old weights kept")


def _check_finite(item: Update) -> None:
    """Refused here, in update_weights, where vLLM ends the session by itself."""
    if not isinstance(item, PackedWeight) and not bool(item[1].isfinite().all()):
        raise RefitError(f"weight update gives {item[0]} NaN or Inf: old weights kept")


def _files(folder: str) -> list[Path]:
    """The files of an update's folder; RefitError names a folder that has none, or a file that cannot be read."""
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise RefitError(f"weight update folder {folder} holds no .safetensors file")
    for file in files:
        try:
            safe_open(file, "pt")
        except SafetensorError as error:
            raise RefitError(f"weight update file {file} cannot be read: {error}") from None
    return files


def _items(parts: list[LocalUpdate]) -> Iterator[Update]:
    for part in parts:
        yield from part.weights
        for file in _files(part.path) if part.path else []:
            with safe_open(file, "pt") as shard:
                for key in shard.keys():  # noqa: SIM118 (a handle is no mapping)
                    yield key, shard.get_tensor(key)


class Transactional:
    """Mixin over a streaming vLLM transport: an error anywhere puts the old weights back."""

    model: Any
    model_config: Any
    _before: Snapshot | None = None

    def start_weight_update(self) -> None:
        self._before = Snapshot(self.model)
        self._guarded(super().start_weight_update)  # type: ignore[misc]

    def parse_update_info(self, update_dict: dict[str, Any]) -> Any:
        """As the transport does; what it refuses ends the session in vLLM's worker, and {"abort": True} is to."""
        if update_dict.get("abort"):
            self._guarded(_abort)
        return self._guarded(super().parse_update_info, update_dict)  # type: ignore[misc]

    def receive_weights(self, update_info: Any) -> None:
        self._guarded(super().receive_weights, update_info)  # type: ignore[misc]

    def finish_weight_update(self) -> None:
        self._guarded(refit.check_complete, self.model)
        self._guarded(super().finish_weight_update)  # type: ignore[misc]
        self._guarded(refit.check_finite, self.model)
        refit.unwrap_loaders(self.model)
        self._before = None

    def _guarded(self, step: Any, *args: Any) -> Any:
        try:
            return step(*args)
        except BaseException:
            if self._before is not None:
                self._before.restore()
                self._before = None
            raise
