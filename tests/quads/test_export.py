"""Checkpoints in both conventions hold the bytes that the trainer saw, or say which outer scale they cannot hold."""

import json
from pathlib import Path

import pytest
import torch

from quads import recipes
from quads.calibration import activation_amax
from quads.emulation.checkpoints import CONVENTIONS, to_multiplier
from quads.export import export_checkpoint, outer_to_stored, read_weights
from quads.sync import export_weights
from tests.quads.tiny import tiny_model, tokens

W4A16 = recipes.named()["w4a16"].replace(modules=(r"_proj$", r"\.experts\."))
W4A4 = recipes.named()["nvfp4"]


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "olmoe", "deepseek_v3", "llama"])
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_a_round_trip_is_byte_equal_or_names_the_scale(family: str, convention: str, tmp_path: Path) -> None:
    model = tiny_model(family, dtype=torch.bfloat16)
    report = export_checkpoint(model, W4A16, tmp_path / "out", convention)
    read = dict(read_weights(tmp_path / "out", convention))
    assert len(read) == report.weights > 0
    direct = _by_bytes(export_weights(model, W4A16))
    for name, q in read.items():
        outer = direct[q.codes.numpy().tobytes(), q.scales.numpy().tobytes()]
        assert (float(q.outer) == outer) == (name not in report.inexact), name


def _by_bytes(weights) -> dict[tuple[bytes, bytes], float]:
    """Every [N, K] matrix of an export, gate and up apart, by its bytes: independent of checkpoint names."""
    result = {}
    for weight in weights:
        q = weight.quantized
        codes, scales = (t.reshape(-1, *t.shape[-2:]) for t in (q.codes, q.scales))
        halves = 2 if weight.name.endswith("gate_up_proj") else 1
        for expert in range(codes.shape[0]):
            for c, s in zip(codes[expert].chunk(halves), scales[expert].chunk(halves), strict=True):
                result[c.numpy().tobytes(), s.numpy().tobytes()] = float(q.outer.reshape(-1)[expert])
    return result


def test_checkpoint_names_are_those_of_published_checkpoints(tmp_path: Path) -> None:
    export_checkpoint(tiny_model(), W4A16, tmp_path / "out", "modelopt")
    names = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())["weight_map"]
    expert = "model.layers.0.mlp.experts.3.gate_proj"
    assert {f"{expert}.weight", f"{expert}.weight_scale", f"{expert}.weight_scale_2"} <= set(names)
    assert "model.layers.0.mlp.gate.weight" in names and "lm_head.weight" in names
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "modelopt"
    assert "lm_head" in config["quantization_config"]["exclude_modules"]


def test_some_outer_scales_have_no_exact_divisor() -> None:
    style = CONVENTIONS["compressed-tensors"]
    # Near 2 the reciprocals of neighbouring divisors lie two ulps apart: about half of the floats are missed.
    outers = torch.arange(0x3FFFF000, 0x40000000, dtype=torch.int32).view(torch.float32)
    verdicts = [outer_to_stored(outer, style) for outer in outers]
    assert 0 < sum(not exact for _, exact in verdicts) < 4096
    assert all(float(to_multiplier(s)) == float(o) for (s, ok), o in zip(verdicts, outers, strict=True) if ok)


def test_a_w4a4_checkpoint_carries_calibrated_activation_scales(tmp_path: Path) -> None:
    model = tiny_model()
    with pytest.raises(ValueError, match="'nvfp4' quantises activations"):
        export_checkpoint(model, W4A4, tmp_path / "none", "modelopt")
    amax = activation_amax(model, W4A4, [tokens()])
    seen = []
    handle = model.model.layers[0].mlp.experts.register_forward_pre_hook(lambda m, a: seen.append(a[0].abs().max()))
    model(tokens())
    handle.remove()
    assert amax["model.layers.0.mlp.experts.gate_up_proj"] == float(seen[0])
    export_checkpoint(model, W4A4, tmp_path / "out", "modelopt", activation_amax=amax)
    names = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())["weight_map"]
    assert "model.layers.1.mlp.experts.0.down_proj.input_scale" in names


def test_nothing_is_overwritten_and_bad_names_are_refused(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("mine")
    with pytest.raises(ValueError, match="not an empty folder"):
        export_checkpoint(tiny_model(), W4A16, tmp_path, "modelopt")
    with pytest.raises(ValueError, match="'awq' is not one of modelopt, compressed-tensors"):
        export_checkpoint(tiny_model(), W4A16, tmp_path / "out", "awq")
    with pytest.raises(ValueError, match="stores its experts transposed"):
        export_checkpoint(tiny_model("gpt_oss"), W4A16, tmp_path / "out", "modelopt")


@pytest.mark.parametrize("convention", ["compressed-tensors", "modelopt"])
def test_engines_are_told_to_leave_the_router_alone(convention: str, tmp_path: Path) -> None:
    export_checkpoint(tiny_model(), recipes.load("w4a16"), tmp_path, convention)
    ignored = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["ignore"]
    assert {"model.layers.0.mlp.gate", "model.layers.0.self_attn.q_proj", "lm_head"} <= set(ignored)
    assert not any("experts" in name or "norm" in name or "embed" in name for name in ignored)
