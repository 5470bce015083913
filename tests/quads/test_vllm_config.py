"""Names, recipes and refusals of the vLLM plugin."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quads import recipes
from quads.errors import CannotRunHereError
from quads.integrations.vllm_plugin import backends, names, versions
from quads.recipes import RecipeError

QUADS = recipes.load("quads")
PROJECTIONS = QUADS.replace(modules=["proj"])


@pytest.mark.parametrize("version", ["0.26.0", "0.31.0+cpu", "0.32.0rc1"])
def test_supported_versions_pass(version: str) -> None:
    assert versions.check(version) == version


@pytest.mark.parametrize("version", ["0.25.1", "0.33.0", "1.0.0"])
def test_other_versions_are_refused_in_one_line(version: str) -> None:
    with pytest.raises(CannotRunHereError, match=rf"supports vLLM 0\.26 to 0\.32; found {version}"):
        versions.check(version)


def test_fused_layers_have_the_trainers_names() -> None:
    attention = "model.layers.3.self_attn"
    assert names.linear_sites(f"{attention}.qkv_proj", {}) == tuple(f"{attention}.{x}_proj" for x in "qkv")
    assert names.linear_sites(f"{attention}.o_proj", {}) == (f"{attention}.o_proj",)
    own = {"in_proj": ["in_proj_a", "in_proj_b"]}
    assert names.linear_sites("m.in_proj", own) == ("m.in_proj_a", "m.in_proj_b")
    assert names.expert_sites("m.experts") == ("m.experts.gate_up_proj", "m.experts.down_proj")


def test_layers_that_transformers_renamed_have_the_trainers_names() -> None:
    assert names.expert_sites("m.0.block_sparse_moe.experts.routed_experts")[1] == "m.0.mlp.experts.down_proj"


@pytest.mark.parametrize("router", ["m.mlp.gate", "m.mlp.shared_expert_gate", "m.feed_forward.router"])
def test_routers_stay_in_full_precision_whatever_a_recipe_names(router: str) -> None:
    """vLLM builds them as linear layers; in the trainer most are none, so its rollout would not quantise them."""
    assert not names.selected(QUADS.replace(modules=["."]), (router,), router)


def test_the_projection_that_mla_absorbs_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"selects m\.self_attn\.kv_b_proj.*inside attention"):
        names.check_not_absorbed("m.self_attn.kv_b_proj")


def test_a_recipe_that_takes_part_of_a_fused_layer_is_refused_by_name() -> None:
    sites = names.linear_sites("m.self_attn.qkv_proj", {})
    assert names.selected(PROJECTIONS, sites, "m.self_attn.qkv_proj")
    assert not names.selected(QUADS, sites, "m.self_attn.qkv_proj")
    with pytest.raises(RecipeError, match=r"selects m\.self_attn\.q_proj but not m\.self_attn\.k_proj.*qkv_proj"):
        names.selected(QUADS.replace(modules=["q_proj"]), sites, "m.self_attn.qkv_proj")


def test_tied_heads_and_cut_blocks_are_refused() -> None:
    with pytest.raises(RecipeError, match="lm_head, which is tied"):
        names.check_tied(QUADS.replace(modules=["lm_head"]), tied=True)
    names.check_tied(QUADS.replace(modules=["lm_head"]), tied=False)
    names.check_tied(QUADS, tied=True)
    with pytest.raises(RecipeError, match=r"m\.down_proj, whose K = 24 of 48 on this rank is not a multiple of 16"):
        names.check_k("m.down_proj", 24, " of 48 on this rank")


def test_a_missing_kernel_is_said_with_the_layers_name(monkeypatch: Any) -> None:
    monkeypatch.setattr(backends.support, "missing_triton", lambda: "needs triton")
    backend = backends.for_layer(QUADS, grouped=True, device="cuda")
    with pytest.raises(CannotRunHereError, match=r"m\.experts would run on quads\.kernels\.moe.*needs triton"):
        backends.check_available(backend, "m.experts")
    backends.check_available(backends.for_layer(QUADS, grouped=True, device="cpu"), "m.experts")


@pytest.mark.vllm
class TestConfig:
    def config(self, **fields: Any) -> Any:
        from quads.integrations.vllm_plugin.config import QuadsConfig

        return QuadsConfig.from_config({"quant_method": "quads", **fields})

    def test_recipes_come_by_name_by_file_inline_and_changed(self, tmp_path: Any) -> None:
        own = tmp_path / "own.toml"
        own.write_text(QUADS.replace(name="own", rac_ratio=0.25).to_toml())
        assert self.config().recipe == QUADS
        assert self.config(recipe="nvfp4").recipe == recipes.load("nvfp4")
        assert self.config(recipe=str(own)).recipe.rac_ratio == 0.25
        assert self.config(recipe=QUADS.to_dict()).recipe == QUADS
        assert self.config(set={"rac_scope": "token"}).recipe.rac_scope == "token"

    def test_unknown_fields_and_recipes_are_refused(self) -> None:
        with pytest.raises(RecipeError, match="field 'recipie' is unknown"):
            self.config(recipie="quads")
        with pytest.raises(RecipeError, match="no recipe named 'qads'; did you mean 'quads'"):
            self.config(recipe="qads")

    def test_fields_of_another_type_are_refused_by_name(self) -> None:
        with pytest.raises(RecipeError, match="field 'set' is 'rac_ratio=1', not a table"):
            self.config(set="rac_ratio=1")
        with pytest.raises(RecipeError, match="field 'seed' is 'one', not an integer"):
            self.config(seed="one")

    def test_a_tied_head_is_refused_when_the_model_config_is_known(self) -> None:
        config = self.config(set={"modules": ["lm_head"]})
        with pytest.raises(RecipeError, match="tied to the input embeddings"):
            config.maybe_update_config("m", hf_config=SimpleNamespace(tie_word_embeddings=True))

    def test_registration_can_be_repeated(self) -> None:
        from vllm.model_executor.layers.quantization import get_quantization_config

        from quads.integrations.vllm import register
        from quads.integrations.vllm_plugin.config import QuadsConfig

        register()
        register()
        assert get_quantization_config("quads") is QuadsConfig

    def test_a_port_counts_shards_however_often_they_come(self) -> None:
        from torch.nn import Parameter

        from quads.integrations.vllm_plugin.port import RefitPort

        template = Parameter(torch.zeros(4, 2), requires_grad=False)
        template.weight_loader = lambda p, w, shard: p.data[2 * shard : 2 * shard + 2].copy_(w)  # type: ignore
        got: list[torch.Tensor] = []
        port = RefitPort("layer", template, got.append)
        port(port.parameter(), torch.ones(2, 2), 0)
        port(port.parameter(), torch.full((2, 2), 3.0), 0)
        with pytest.raises(RuntimeError, match="refit of layer is incomplete: 4 of 8"):
            port.check_complete()
        port(port.parameter(), torch.full((2, 2), 5.0), 1)
        port.check_complete()
        assert got[0].tolist() == [[3.0, 3.0]] * 2 + [[5.0, 5.0]] * 2
