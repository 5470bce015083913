"""One recipe in a real engine: agreement with the emulated policy, three refits, refusals, batch dependence."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from quads import recipes
from quads.bench import vllm_engines as engines
from quads.integrations.vllm import engine_weights, refit
from quads.integrations.vllm_plugin import colocate
from quads.integrations.vllm_plugin.logprobs import teacher_forced
from quads.recipes import Recipe
from quads.rollout import rollout_numerics
from quads.sync import verify_sync

_CHANGES: dict[str, dict[str, Any]] = {
    "quads-token": {"rac_scope": "token"},
    "quads-static": {"rac_scope": "static"},
    "quads-random": {"rac_scope": "random", "rac_refresh": 1000},  # else each refit draws anew
    "quads-all": {"rac_scope": "all", "rac_ratio": 1.0},
}
INVARIANT = "+invariant"  # in vLLM's batch-invariant mode
CASES = ("bf16", "nvfp4", "quads", "w4a16", "fp8", *_CHANGES)
CASES += tuple(case + INVARIANT for case in ("quads-token", "nvfp4", "bf16"))
_EAGER = ("quads-random", "quads-all")  # for the time of compiling; the others cover CUDA graphs
_NUDGE = 2.0**-9  # relative; about half a bfloat16 step


def environment(case: str) -> dict[str, str]:
    return {"VLLM_BATCH_INVARIANT": "1"} if case.endswith(INVARIANT) else {}


def recipe_of(case: str) -> Recipe:
    case = case.removesuffix(INVARIANT)
    return recipes.load("quads").replace(**_CHANGES[case]) if case in _CHANGES else recipes.load(case)


def run(case: str) -> dict[str, Any]:
    """Every check of `case`; one that fails leaves its error in its place."""
    recipe = recipe_of(case)
    a, b = engines.tiny(0), engines.tiny(5)
    eager = {"enforce_eager": True} if case in _EAGER else {}
    with tempfile.TemporaryDirectory() as folder:
        llm = engines.serve(a, recipe, Path(folder), **eager)
    served = _Served(llm, recipe, a, b)
    checks: dict[str, Callable[[], Any]] = {
        "backend": served.backends,
        "agreement": served.agreement,
        "sampling": served.sampling,
        "batch": served.batch_dependence,
        "refit": served.refits,
        "refusal": served.refusal,
    }
    results = {name: _kept(check) for name, check in checks.items()}
    colocate.stop(llm)
    return results


def _kept(check: Callable[[], Any]) -> Any:
    try:
        return check()
    except Exception as error:  # the other checks still run
        return {"error": f"{type(error).__name__}: {str(error)[:300]}"}


class _Served:
    def __init__(self, llm: Any, recipe: Recipe, a: Any, b: Any) -> None:
        self.llm, self.recipe, self.a, self.b = llm, recipe, a, b
        self.sequences = engines.tokens(16, 64)

    def backends(self) -> dict[str, str]:
        """The backend of each quantised layer."""

        def of(model: Any) -> dict[str, str]:
            methods = {n: getattr(m, "quant_method", None) for n, m in model.named_modules()}
            return {n: m.backend.name for n, m in methods.items() if m is not None and hasattr(m, "backend")}

        return self.llm.apply_model(of)[0]

    def agreement(self) -> dict[str, Any]:
        """Engine against the emulated policy, each sequence alone; beside it how far a nudge moves the latter."""
        served = self._alone()
        here = emulated(self.a, self.recipe, self.sequences)
        with _nudged(self.a):
            moved = emulated(self.a, self.recipe, self.sequences)
        plain = emulated(self.a, recipes.load("bf16"), self.sequences)
        return {
            "engine": engines.spread(served - here),
            "nudge": engines.spread(moved - here),
            "quantisation": engines.spread(here - plain),
        }

    def sampling(self) -> dict[str, Any]:
        """Sampled tokens (decoding, from graphs) against the engine's own teacher-forced pass over them."""
        prompts = [row[:16] for row in self.sequences]
        drawn = engines.generated(self.llm, prompts, 32)
        whole = [prompt + item["tokens"] for prompt, item in zip(prompts, drawn, strict=True)]
        forced = [row[15:] for row in teacher_forced(self.llm, whole, together=False)]
        again = engines.generated(self.llm, prompts, 32)
        sampled = torch.cat([item["logps"] for item in drawn])
        return {
            "finite": bool(sampled.isfinite().all()),
            "repeatable": all(x["tokens"] == y["tokens"] for x, y in zip(drawn, again, strict=True)),
            "decode_vs_prefill": engines.spread(sampled - torch.cat(forced)),
        }

    def batch_dependence(self) -> dict[str, Any]:
        return engines.batch_dependence(self.llm, self.sequences)

    def refits(self) -> dict[str, Any]:
        """A, B, A, B, A in place: both A and both B the same bits, storages kept, every quantised weight proven."""
        at, seen, proven = self._addresses(), [], 0
        for model in (self.a, self.b, self.a, self.b, self.a):
            refit(self.llm, model.named_parameters())
            seen.append(self._alone())
            if self.recipe.rollout_weights == "nvfp4":
                proven += verify_sync(model, self.recipe, engine_weights(self.llm))
        return {
            "aba_equal": all(torch.equal(seen[i], seen[i + 2]) for i in range(3)),
            "ab_differ": float((seen[0] - seen[1]).abs().mean()),
            "same_storages": at == self._addresses(),
            "proven": proven,
            "b_engine": engines.spread(seen[1] - emulated(self.b, self.recipe, self.sequences)),
        }

    def refusal(self) -> dict[str, Any]:
        """NaN in an expert: refused by name, and the old weights serve on."""
        before = self._alone()
        name = next(n for n, _ in self.b.named_parameters() if "experts.down_proj" in n)
        bad = [(n, p.detach().clone()) for n, p in self.b.named_parameters()]
        dict(bad)[name].view(-1)[7] = float("nan")
        try:
            refit(self.llm, bad)
        except ValueError as error:
            return {"message": str(error)[:200], "old_weights_serve": torch.equal(before, self._alone())}
        return {"error": "NaN weights were accepted"}

    def _alone(self) -> torch.Tensor:
        return torch.cat(teacher_forced(self.llm, self.sequences, together=False))

    def _addresses(self) -> dict[str, int]:
        return self.llm.apply_model(lambda m: {name: p.data_ptr() for name, p in m.named_parameters()})[0]


@torch.no_grad()
def emulated(model: Any, recipe: Recipe, sequences: list[list[int]]) -> torch.Tensor:
    """Each sequence alone, as one prefill: the batch that a `batch` scope selects over is then the engine's."""
    with rollout_numerics(model, recipe):
        rows = (torch.tensor([row], device=engines.device()) for row in sequences)
        return torch.cat([_next_token(model(row).logits[0], row[0]).cpu() for row in rows])


def _next_token(logits: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    return logits[:-1].float().log_softmax(-1).gather(1, row[1:, None]).squeeze(1)


@contextmanager
def _nudged(model: Any) -> Iterator[None]:
    """Every embedding moved by about half a rounding step."""
    weight = model.get_input_embeddings().weight
    before = weight.detach().clone()
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)).to(weight)
    with torch.no_grad():
        weight.copy_((weight.float() * (1 + _NUDGE * noise.float())).to(weight.dtype))
    try:
        yield
    finally:
        with torch.no_grad():
            weight.copy_(before)
