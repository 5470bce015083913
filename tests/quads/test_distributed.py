"""QAT under DDP and FSDP2 computes what one process computes: same weights bit for bit, same gradients."""

import multiprocessing
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from quads import recipes
from quads.emulation import quantizers
from quads.integrations.workers import packed_for_rollout
from quads.qat import prepare_qat
from quads.recipes import Recipe, RecipeError
from quads.sites import find_sites
from quads.sync import SyncError, export_weights, trainer_weight, verify_sync
from tests.quads.tiny import tiny_model, tokens

QUADS = recipes.named()["quads"]
SYMMETRIC = recipes.named()["symmetric"]
WORLD = 2
PRELOAD = ["torch.distributed.fsdp", "transformers", "quads.integrations.workers", "quads.sync"]


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _on_ranks(function: Callable[..., None], *args: object) -> None:
    """`function(rank, *args)` in WORLD processes, forked from one that has the heavy imports behind it."""
    multiprocessing.set_forkserver_preload(PRELOAD)
    mp.start_processes(function, args=args, nprocs=WORLD, start_method="forkserver")


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
    _on_ranks(_worker, kind, device, _free_port(), str(tmp_path))
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
    _on_ranks(_shard_worker, _free_port(), str(tmp_path))
    for rank in range(WORLD):
        assert torch.load(tmp_path / f"{rank}.pt", weights_only=True)["same"]


def _mixed_worker(rank: int, port: int, cases: list[tuple[str, Recipe, torch.dtype | None, bool]]) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    try:
        for case in cases:
            _what_is_exported_is_what_the_forward_multiplied_by(*case)
    finally:
        dist.destroy_process_group()


def _what_is_exported_is_what_the_forward_multiplied_by(
    family: str, recipe: Recipe, dtype: torch.dtype | None, each_linear: bool
) -> None:
    model = tiny_model(family)
    of_masters = list(export_weights(model, recipe))
    of_rounded = dict(packed_for_rollout(tiny_model(family).to(dtype or torch.float32), recipe))
    prepare_qat(model, recipe)
    shard(model, MixedPrecisionPolicy(param_dtype=dtype), each_linear)
    seen: dict[str, torch.Tensor] = {}
    for site in find_sites(model, recipe):
        site.module.register_forward_pre_hook(
            lambda module, _, site=site: seen.update(
                {site.name: site.k_last(getattr(module, site.attribute).detach().as_subclass(torch.Tensor)).clone()}
            )
        )
    model(tokens(1, 8))
    exported = list(export_weights(model, recipe))
    assert verify_sync(model, recipe, exported) == len(exported) == len(seen) > 0
    for weight, site in zip(exported, find_sites(model, recipe), strict=True):
        assert torch.equal(quantizers.dequantize(weight.quantized, seen[weight.name].dtype), seen[weight.name])
        assert torch.equal(trainer_weight(site, recipe), seen[weight.name])
    for name, tensor in packed_for_rollout(model, recipe):
        rounded = of_rounded[name]  # what is not quantised goes out as the master, to be rounded by the engine
        assert torch.equal(_bytes(tensor.to(rounded.dtype)), _bytes(rounded)), name
    if dtype is None:
        assert verify_sync(model, recipe, of_masters) == len(exported)
    else:  # the planted fault: codes of the float32 masters
        with pytest.raises(SyncError, match="elements differ"):
            verify_sync(model, recipe, of_masters)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def shard(model: torch.nn.Module, policy: MixedPrecisionPolicy, each_linear: bool) -> None:
    mesh = dist.init_device_mesh("cpu", (WORLD,))
    for layer in model.model.layers:
        for linear in [m for m in layer.modules() if isinstance(m, torch.nn.Linear) and each_linear]:
            fully_shard(linear, mesh=mesh, mp_policy=policy)
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def test_under_mixed_precision_the_export_is_what_the_forward_multiplied_by() -> None:
    projections = QUADS.replace(modules=(r"_proj$",))
    cases = [("qwen3_moe", QUADS, dtype, False) for dtype in (torch.bfloat16, None)]
    # q, k and v in units of their own: their common outer scale comes from partners that are still sharded.
    cases += [("llama", projections, torch.bfloat16, True), ("qwen3_moe", SYMMETRIC, torch.bfloat16, False)]
    _on_ranks(_mixed_worker, _free_port(), cases)


def test_an_adapter_that_mixed_precision_casts_is_refused() -> None:
    peft = pytest.importorskip("peft")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    recipe = QUADS.replace(modules=(r"\.q_proj$",))
    model = peft.get_peft_model(tiny_model("llama"), peft.LoraConfig(target_modules=["q_proj"]))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    try:
        shard(model.base_model.model, MixedPrecisionPolicy(param_dtype=torch.bfloat16), each_linear=False)
        with pytest.raises(RecipeError, match=r"q_proj, whose LoRA adapter FSDP2 casts to torch\.bfloat16"):
            list(export_weights(model, recipe))
    finally:
        dist.destroy_process_group()


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
