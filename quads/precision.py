"""The precision in which a forward sees its parameters where a wrapper casts them: FSDP2 mixed precision."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


def param_dtypes(model: nn.Module, outer: torch.dtype | None = None) -> Iterator[tuple[nn.Module, torch.dtype | None]]:
    """(module, `MixedPrecisionPolicy.param_dtype` of the nearest `fully_shard` around it), None where none casts.

    `outer`: what holds around `model`. It cannot be known from inside: pass the module that was wrapped outermost.
    """
    if isinstance(model, FSDPModule):
        outer = model._get_fsdp_state()._mp_policy.param_dtype
    yield model, outer
    for child in model.children():
        yield from param_dtypes(child, outer)
