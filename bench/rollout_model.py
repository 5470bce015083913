"""Tokens a second of a rollout on each chip: modelled, an engine's step from its layers (quads.bench.layers).

A decoding step of `batch` sequences reads the attention projections, the KV cache, the experts that the batch touches
(even routing), the router and lm_head, samples, and waits for the host. A call is `tokens_in` tokens of prefill, in
chunks, then `tokens_out` steps at the mean context. Models, arms, loads and the engine's constants are rollout.toml.

    seconds(models()["qwen3-30b-a3b"], arms()["quads-static"], Load(batch=128), chip("B200"))
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from quads.bench import counts, layers, work
from quads.bench.layers import Works
from quads.bench.results import Result
from quads.bench.specs import Chip, chip, chips
from quads.bench.work import Work

if TYPE_CHECKING:
    from quads.bench.model_error import Errors

PAPER = 1.16  # "about 16 % higher rollout throughput than FP8": the abstract of arXiv 2607.15810, setting not stated


@dataclass(frozen=True, kw_only=True)
class Model:
    """A mixture of experts."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    top_k: int
    inner: int
    vocabulary: int
    note: str = ""

    @property
    def kv_bytes(self) -> float:
        """Bytes that a token of one layer's context takes in bfloat16."""
        return 2.0 * 2 * self.kv_heads * self.head_dim

    def projections(self) -> tuple[tuple[int, int], ...]:
        """(N, K) of the attention's products."""
        wide = self.heads * self.head_dim
        return (wide + 2 * self.kv_heads * self.head_dim, self.hidden), (self.hidden, wide)

    def weight_bytes(self, arm: Arm) -> float:
        """Bytes of all weights."""
        dense = sum(n * k for n, k in self.projections()) * counts.BYTES[arm.dense]
        experts = 3.0 * self.experts * self.inner * self.hidden * counts.BYTES[arm.experts]
        return self.layers * (dense + experts + 2.0 * self.experts * self.hidden) + 4.0 * self.vocabulary * self.hidden


@dataclass(frozen=True, kw_only=True)
class Arm:
    """Numerics of a rollout; see rollout.toml."""

    numerics: str
    implementation: str
    experts: str
    dense: str
    variant: str = ""
    ours: bool = False
    scope: str = "plain"
    ratio: float = 0.0
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Constants of the engine around the layers."""

    launches_a_layer: int
    launches_a_step: int
    sampler_bytes_a_logit: float
    host_floor_s: float
    host_s_a_sequence: float
    chunk: int


@dataclass(frozen=True, kw_only=True)
class Load:
    """Equal requests that start together."""

    batch: int
    tokens_in: int = 128
    tokens_out: int = 128


@cache
def _document() -> dict[str, Any]:
    return tomllib.loads(resources.files("quads.bench").joinpath("rollout.toml").read_text("utf-8"))


def models() -> dict[str, Model]:
    """The models of rollout.toml."""
    return {name: Model(name=name, **table) for name, table in _document()["models"].items()}


def arms() -> dict[str, Arm]:
    """The arms of rollout.toml."""
    return {name: Arm(**table) for name, table in _document()["arms"].items()}


def engine() -> Engine:
    """The engine of rollout.toml."""
    return Engine(**_document()["engine"])


def seconds(model: Model, arm: Arm, load: Load, on: Chip, *, host: bool = True) -> float:
    """Seconds of a call of equal requests; `host` False: as if the host were hidden behind the GPU."""
    made, step = engine(), step_seconds(model, arm, load, on)
    if host:
        step = max(step, made.host_floor_s) + made.host_s_a_sequence * load.batch
    tokens = load.batch * load.tokens_in
    chunk = min(tokens, made.chunk)
    prefill = model.layers * work.seconds(chunk_layer(model, arm, chunk, load, on), on) * tokens / chunk
    return prefill + load.tokens_out * step


def step_seconds(model: Model, arm: Arm, load: Load, on: Chip) -> float:
    """Seconds of the GPU in one decoding step at the mean context."""
    context = load.tokens_in + load.tokens_out / 2
    layer = work.seconds(step_layer(model, arm, load.batch, context, on), on)
    return model.layers * layer + work.seconds(step_end(model, load.batch, on), on)


def tokens_per_s(model: Model, arm: Arm, load: Load, on: Chip, *, host: bool = True) -> float:
    """Output tokens a second."""
    return load.batch * load.tokens_out / seconds(model, arm, load, on, host=host)


def fits(model: Model, arm: Arm, load: Load, on: Chip) -> bool:
    """Whether weights and KV cache leave a tenth of the memory free."""
    cache_bytes = load.batch * (load.tokens_in + load.tokens_out) * model.layers * model.kv_bytes
    return model.weight_bytes(arm) + cache_bytes <= 0.9 * on.memory_bytes.value


def step_layer(model: Model, arm: Arm, batch: int, context: float, on: Chip) -> Works:
    """The kernels of one layer in a decoding step."""
    attention = Work(
        bytes=batch * context * model.kv_bytes, flops=4.0 * batch * context * model.heads * model.head_dim,
        launches=engine().launches_a_layer - len(model.projections()) - 1,
    )  # fmt: skip
    return (attention, *_layer_products(model, arm, batch, on))


def step_end(model: Model, batch: int, on: Chip) -> Works:
    """lm_head and sampler."""
    made = engine()
    head = layers.dense(batch, model.vocabulary, model.hidden, "bf16", on, ours=False)
    sampler = Work(bytes=made.sampler_bytes_a_logit * batch * model.vocabulary, launches=made.launches_a_step - 1)
    return (*head, sampler)


def chunk_layer(model: Model, arm: Arm, tokens: int, load: Load, on: Chip) -> Works:
    """The kernels of one layer in a prefill step of `tokens` tokens of whole prompts."""
    pairs = tokens * load.tokens_in / 2
    attention = Work(
        bytes=tokens * model.kv_bytes, flops=4.0 * pairs * model.heads * model.head_dim,
        launches=engine().launches_a_layer - len(model.projections()) - 1,
    )  # fmt: skip
    return (attention, *_layer_products(model, arm, tokens, on))


def _layer_products(model: Model, arm: Arm, tokens: int, on: Chip) -> Works:
    """Projections, router and experts of one layer."""
    native = arm.dense == "nvfp4"
    ratio = arm.ratio if native else 0.0
    found: Works = layers.dense(tokens, model.experts, model.hidden, "bf16", on, ours=False)
    for n, k in model.projections():
        if native:
            found += layers.operand(tokens, k, arm.scope, ratio, on)
        elif arm.dense != "bf16":
            found += (Work(bytes=tokens * k * (2 + counts.BYTES[arm.dense])),)
        found += layers.dense(tokens, n, k, arm.dense, on, ratio=ratio, ours=native)
    return found + layers.moe(
        tokens, model.hidden, model.inner, model.experts, model.top_k, arm.experts, on,
        scope=arm.scope, ratio=arm.ratio, ours=arm.ours,
    )  # fmt: skip


def shape(model: Model, load: Load) -> dict[str, int]:
    """What a result of a rollout names as its shape."""
    return {
        "batch": load.batch, "tokens_in": load.tokens_in, "tokens_out": load.tokens_out, "layers": model.layers,
        "hidden": model.hidden, "experts": model.experts, "inner": model.inner,
    }  # fmt: skip


def predicted(measured: Result, on: Chip) -> float | None:
    """Seconds that the model gives for a measured rollout; None where it knows no such model or arm."""
    key = (measured.numerics, measured.variant, measured.implementation)
    arm = next((arm for arm in arms().values() if (arm.numerics, arm.variant, arm.implementation) == key), None)
    sizes = {name: measured.shape.get(name) for name in ("hidden", "experts", "inner")}
    like = next((m for m in models().values() if all(getattr(m, name) == size for name, size in sizes.items())), None)
    if arm is None or like is None:
        return None
    model = dataclasses.replace(like, layers=measured.shape["layers"])
    load = Load(**{name: measured.shape[name] for name in ("batch", "tokens_in", "tokens_out")})
    return seconds(model, arm, load, on)


def predictions(wanted: Iterable[str] = (), errors: Errors | None = None) -> Iterator[Result]:
    """Every model, arm and batch on the wanted chips (all where it is empty), where it fits in memory.

    seconds: of the call, with the host that the H200's runs waited for; in_a_row_seconds: with the host hidden.
    """
    from quads.bench import model_error
    from quads.bench.model import INTERVAL

    loads = _document()["loads"]
    for on in [chip(key) for key in wanted] or list(chips().values()):
        for model in models().values():
            for arm in arms().values():
                error = (errors or model_error.known()).of("rollout", arm.numerics, arm.implementation, arm.variant)
                for batch in loads["batches"]:
                    load = Load(batch=batch, tokens_in=loads["tokens_in"], tokens_out=loads["tokens_out"])
                    if not fits(model, arm, load, on):
                        continue
                    took = seconds(model, arm, load, on)
                    yield Result(
                        op="rollout", numerics=arm.numerics, variant=arm.variant, implementation=arm.implementation,
                        shape=shape(model, load), label="modelled", chip=on.key, seconds=took,
                        in_a_row_seconds=seconds(model, arm, load, on, host=False), way=model.name,
                        seconds_low=took * error.low if error else None,
                        seconds_high=took * error.high if error else None, interval=INTERVAL if error else "",
                        method="quads.bench.rollout_model", model_error=error,
                    )  # fmt: skip
