"""The dtype in which a forward sees a parameter is that of the nearest FSDP2 unit around it."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from quads.precision import param_dtypes


def test_the_nearest_unit_decides_and_a_model_without_units_casts_nothing() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)))
    assert set(dict(param_dtypes(model)).values()) == {None}
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = dist.init_device_mesh("cpu", (2,))
        fully_shard(model[1][0], mesh=mesh)
        fully_shard(model[1], mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16))
        fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    finally:
        dist.destroy_process_group()
    found = dict(param_dtypes(model))
    assert [found[m] for m in (model[0], model[1][0], model[1][1])] == [torch.bfloat16, None, torch.float16]
