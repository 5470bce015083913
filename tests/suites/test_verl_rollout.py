"""verl's own validation and its own vLLM worker extension, on a rendered job and on a real engine (CPU)."""

from __future__ import annotations

import asyncio
import importlib.util
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quads import recipes
from quads.integrations.vllm import engine_weights
from quads.suites.verl import render
from quads.sync import SyncError, verify_sync
from tests.quads import engine
from tests.suites import verl_cpu
from tests.suites.test_verl import SUITE, overrides
from tests.suites.verl_wheel import Schema

for package in ("verl", "vllm"):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package} (tox -e verl)", allow_module_level=True)
if importlib.util.find_spec("trl") is not None:
    pytest.skip("verl 0.9 does not import beside this TRL", allow_module_level=True)
verl_cpu.set_up()

pytestmark = pytest.mark.vllm
PROMPTS = engine.tokens(2, 10)
EXTENSION = "verl.workers.rollout.vllm_rollout.utils.vLLMColocateWorkerExtension"
SOCKET = "ipc:///tmp/rl-colocate-zmq-0-replica-0-rank-0.sock"  # the worker's name for itself outside Ray


def schema() -> Schema:
    found = importlib.util.find_spec("verl")
    assert found is not None and found.submodule_search_locations
    return Schema(Path(found.submodule_search_locations[0]))


@pytest.mark.parametrize("arm", ["bf16", "quads"])
def test_verls_own_validation_accepts_a_rendered_job(arm: str, tmp_path: Path) -> None:
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    (folder,) = render(SUITE, tmp_path, arm=arm, variant="plain+tis", seed=0)
    job = schema().compose(overrides(folder))
    validate_config(job, use_reference_policy=False, use_critic=False)
    assert omega_conf_to_dataclass(job.algorithm).rollout_correction["rollout_is"] == "token"
    assert omega_conf_to_dataclass(job.actor_rollout_ref.rollout).n == 16


def test_verls_own_validation_is_not_asleep(tmp_path: Path) -> None:
    from verl.utils.config import validate_config

    (folder,) = render(SUITE, tmp_path, arm="quads", variant="plain", seed=0)
    job = schema().compose([*overrides(folder), "actor_rollout_ref.actor.loss_agg_mode=mean-token"])
    with pytest.raises(Exception, match="mean-token"):
        validate_config(job, use_reference_policy=False, use_critic=False)


def arguments(folder: Path) -> dict[str, Any]:
    """What verl's server gives vLLM out of the rendered engine_kwargs, read back from its command line."""
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.rollout.vllm_rollout.utils import build_cli_args_from_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    rollout = omega_conf_to_dataclass(schema().compose(overrides(folder)).actor_rollout_ref.rollout)
    given = {"quantization": None, "hf_overrides": {}, **rollout.engine_kwargs["vllm"]}
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parsed = parser.parse_args(build_cli_args_from_config(given))
    return {"quantization": parsed.quantization, "hf_overrides": parsed.hf_overrides}


@pytest.fixture(scope="module")
def served(tmp_path_factory: Any) -> Iterator[Any]:
    """An engine started as verl starts it: dummy weights, bfloat16, the rendered arguments, verl's extension."""
    from vllm import LLM

    folder = tmp_path_factory.mktemp("model")
    engine.model(dtype=torch.bfloat16).save_pretrained(folder)
    (job,) = render(SUITE, tmp_path_factory.mktemp("job"), arm="quads", variant="plain", seed=0)
    fixed = {"skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 64, "max_num_seqs": 8}
    how = {"dtype": "bfloat16", "load_format": "dummy", "logprobs_mode": "processed_logprobs"}
    llm = LLM(model=str(folder), worker_extension_cls=EXTENSION, **fixed, **how, **arguments(job))
    llm.collective_rpc("monkey_patch_model", kwargs={"vocab_size": 64, "banned_token_ids": None})
    yield llm
    engine.stop(llm)


def sync(llm: Any, model: Any) -> None:
    """verl's weight update: float32 masters in buckets of 1 MB, sent by a thread, received by the worker."""
    from verl.workers.engine.fsdp.utils import unfuse_moe_params
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

    weights = ((name, tensor.detach()) for name, tensor in model.state_dict().items())
    sender = BucketedWeightSender(zmq_handle=SOCKET, bucket_size_mb=1, use_shm=True)
    named = unfuse_moe_params(weights, "qwen3_moe")
    thread = threading.Thread(target=lambda: asyncio.run(sender.async_send_weights(named)))
    thread.start()
    llm.collective_rpc("update_weights_from_ipc", kwargs={"use_shm": True})
    thread.join()
    llm.reset_prefix_cache()


def rounded(model: Any) -> Any:
    """The policy as FSDP2 gathers it: bfloat16 of the masters."""
    copy = type(model)(model.config).bfloat16()
    copy.load_state_dict(model.state_dict())
    return copy


def test_the_engine_holds_the_trainers_bytes_after_every_update(served: Any) -> None:
    from quads.integrations.vllm_plugin.logprobs import teacher_forced

    quads = recipes.load("quads")
    a, b = engine.model(seed=0), engine.model(seed=5)
    seen = []
    for model in (a, b, a):
        sync(served, model)
        assert verify_sync(rounded(model), quads, engine_weights(served)) == 4
        seen.append(teacher_forced(served, PROMPTS))
    assert all(torch.equal(x, y) for x, y in zip(seen[0], seen[2], strict=True))
    assert not torch.equal(seen[0][0], seen[1][0])


def test_float32_masters_quantised_before_they_are_rounded_would_be_other_bytes(served: Any) -> None:
    model = engine.model(seed=0)
    sync(served, model)
    with pytest.raises(SyncError, match="elements differ"):
        verify_sync(model, recipes.load("quads"), engine_weights(served))
