"""The words cover what a suite can hold."""

from __future__ import annotations

from pathlib import Path

from quads import recipes
from quads.suites import config, metrics
from quads.suites.report_paper import _OURS
from quads.suites.report_words import meaning, words


def test_every_named_recipe_and_control_is_explained() -> None:
    assert {*recipes.named(), *config.CONTROLS} == words()["arms"].keys()


def test_every_metric_has_a_name_in_words() -> None:
    assert {*metrics.RUN, *metrics.PROBE} == words()["metrics"].keys()


def test_every_source_of_a_shipped_hypothesis_has_words() -> None:
    used = {hypothesis.source for name in config.shipped() for hypothesis in config.load(name).hypotheses}
    assert used <= words()["sources"].keys()


def test_every_figure_of_the_paper_can_be_looked_up() -> None:
    for entry in words()["paper"]:
        assert entry["ours"] in _OURS
        assert entry["source"] in ("abstract", "as summarised by third parties")


def test_a_recipe_file_is_spelled_out(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('rollout_weights = "nvfp4"\nrollout_activations = "nvfp4"\nrac_ratio = 0.25\n')
    assert meaning(str(path)) == "rollout nvfp4/nvfp4 (weights/activations), trainer bf16/bf16, RAC 25 %"
    assert meaning("gone") == "a recipe of this suite's own"
