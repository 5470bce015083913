"""QAT under DDP and FSDP2 computes what one process computes: same weights bit for bit, same gradients."""

import os
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from quads import recipes
from quads.qat import prepare_qat
from quads.sites import find_sites
from quads.sync import export_weights, trainer_weight
from tests.quads.tiny import tiny_model, tokens

QUADS = recipes.named()["quads"]
WORLD = 2


def _worker(rank: int, kind: str, device: str, port: int, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", rank=rank, world_size=WORLD)
    try:
        torch.save(_step(kind, rank, device), Path(folder) / f"{rank}.pt")
    finally:
        dist.destroy_process_group()


def _step(kind: str, rank: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    """One forward and backward on this rank's sequence; what the comparison needs, on rank 0 and 1."""
    model = tiny_model().to(device).train()
    prepare_qat(model, QUADS)
    sites = find_sites(model, QUADS)
    wrapped: torch.nn.Module = model
    if kind == "ddp":
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    elif kind == "fsdp":
        mesh = dist.init_device_mesh(device, (WORLD,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    seen: dict[str, torch.Tensor] = {}

    def keep_value(module: torch.nn.Module, *_: object) -> None:
        seen["value"] = module.gate_up_proj.detach()

    handle = sites[0].module.register_forward_hook(keep_value)
    batch = (tokens(WORLD, 12)[rank : rank + 1] if kind != "single" else tokens(WORLD, 12)).to(device)
    out = wrapped(batch, labels=batch)
    out.loss.backward()
    handle.remove()
    grad = sites[0].parameter.grad
    full = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    return {"value": seen["value"].cpu(), "grad": full.cpu(), "loss": out.loss.detach().cpu()}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes_compute_what_one_does(kind: str, device: str, tmp_path: Path) -> None:
    if device == "cuda" and torch.cuda.device_count() < WORLD:
        pytest.skip(f"needs {WORLD} GPUs for NCCL; found {torch.cuda.device_count()}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_worker, args=(kind, device, port, str(tmp_path)), nprocs=WORLD)
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(WORLD)]
    alone = _step("single", 0, device)
    for rank in ranks:
        assert torch.equal(rank["value"], alone["value"])  # Q(W) of the whole weight, not of a shard
        # The mean over two sequences: only the order of the sum over tokens differs.
        torch.testing.assert_close(rank["grad"], alone["grad"], rtol=1e-4, atol=1e-7)
    assert torch.equal(ranks[0]["grad"], ranks[1]["grad"])


def _shard_worker(rank: int, port: int, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    try:
        model = tiny_model()
        whole = [w.packed for w in export_weights(model, QUADS)]
        mesh = dist.init_device_mesh("cpu", (WORLD,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        sharded = [w.packed for w in export_weights(model, QUADS)]
        same = all(torch.equal(a, b) for a, b in zip(whole, sharded, strict=True))
        value = trainer_weight(find_sites(model, QUADS)[0], QUADS)
        torch.save({"same": torch.tensor(same), "value": value}, Path(folder) / f"{rank}.pt")
    finally:
        dist.destroy_process_group()


def test_a_sharded_model_exports_the_bytes_of_the_whole_one(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_shard_worker, args=(port, str(tmp_path)), nprocs=WORLD)
    for rank in range(WORLD):
        assert torch.load(tmp_path / f"{rank}.pt", weights_only=True)["same"]


def test_a_shard_that_cuts_a_block_is_refused() -> None:
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from quads import qdq

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        mesh = dist.init_device_mesh("cpu", (4,))
        weight = distribute_tensor(torch.randn(8, 96), mesh, [Shard(1)])
        with pytest.raises(
            ValueError, match=r"\(8, 96\) is sharded along K over 4 ranks: the shards cut a block of 16"
        ):
            qdq.fake_quantize(weight, QUADS, torch.tensor(1.0))
        fits = distribute_tensor(torch.randn(8, 128), mesh, [Shard(1)])
        assert qdq.fake_quantize(fits, QUADS, torch.tensor(1.0)).placements == fits.placements
    finally:
        dist.destroy_process_group()
