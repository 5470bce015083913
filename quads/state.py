"""Checkpoint names of a model under QAT: `x.parametrizations.weight.original` is `x.weight` to everybody else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor, nn

_MARK, _END = ".parametrizations.", ".original"


def master_name(name: str) -> str:
    """The name that `name` has without `prepare_qat`."""
    head, mark, tail = name.partition(_MARK)
    return f"{head}.{tail.removesuffix(_END)}" if mark and tail.endswith(_END) else name


def master_state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The state dict of `model` under its ordinary names, one tensor at a time: master weights, never Q(W)."""
    for name, tensor in model.state_dict().items():
        yield master_name(name), tensor


def load_master_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load ordinarily named tensors into `model`, prepared or not. ValueError names a missing or extra tensor."""
    own = {master_name(name): name for name in model.state_dict()}
    missing, extra = sorted(set(own) - set(state)), sorted(set(state) - set(own))
    if missing or extra:
        what = f"lacks {missing[0]}" if missing else f"holds {extra[0]}, which the model has not"
        raise ValueError(f"checkpoint {what} ({len(missing)} missing, {len(extra)} extra)")
    model.load_state_dict({own[name]: tensor for name, tensor in state.items()})
