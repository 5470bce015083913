"""A suite is data: it loads whole or says in one line which key of which file cannot be."""

from pathlib import Path

import pytest

from quads.suites import config
from quads.suites.config import SuiteError

MINIMAL = """
title = "t"
question = "q"
arms = ["bf16", "nvfp4"]
seeds = 2
[settings]
steps = 3
[[variant]]
name = "slow"
lr = 1e-5
[[variant]]
name = "fast"
lr = 1e-3
"""


def write(folder: Path, text: str) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "suite.toml").write_text(text)
    return str(folder)


@pytest.mark.parametrize("name", config.shipped())
def test_every_shipped_suite_loads_and_names_arms_that_exist(name: str, tmp_path: Path) -> None:
    suite = config.load(name)
    assert suite.hypotheses and (suite.probe or suite.cells(tmp_path))


def test_each_variant_is_a_cell_with_its_own_settings(tmp_path: Path) -> None:
    cells = config.load(write(tmp_path / "s", MINIMAL)).cells(tmp_path)
    assert [(c.name, c.compare.lr, c.compare.steps) for c in cells] == [("slow", 1e-5, 3), ("fast", 1e-3, 3)]


def test_a_change_lays_over_the_file_and_changes_the_identity(tmp_path: Path) -> None:
    source = write(tmp_path / "s", MINIMAL)
    plain, changed = config.load(source), config.load(source, {"settings.steps": 4})
    assert changed.settings["steps"] == 4 and changed.identity != plain.identity


def test_a_default_that_is_written_out_does_not_change_the_identity(tmp_path: Path) -> None:
    source = write(tmp_path / "s", MINIMAL + PROBE)
    plain, written, other = (config.load(source, change) for change in ({}, {"probe.draws": 3}, {"probe.draws": 4}))
    assert plain.identity == written.identity != other.identity


def test_texts_do_not_change_the_identity(tmp_path: Path) -> None:
    source = write(tmp_path / "s", MINIMAL)
    assert config.load(source, {"title": "another"}).identity == config.load(source).identity
    expecting = write(tmp_path / "e", MINIMAL.replace('name = "slow"', 'name = "slow"\nexpect = "little"'))
    assert config.load(expecting).identity == config.load(source).identity


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("steps = 3", "stepz = 3", "did you mean 'steps'"),
        ("lr = 1e-3", "lr = 7.0", "'lr' is 7.0"),
        ('"nvfp4"]', '"nvfp5"]', "did you mean 'nvfp4'"),
        ('name = "fast"', 'name = "slow"', "two variants share a name"),
        ("seeds = 2", 'seeds = 2\ncorrections = ["tiss"]', "correction 'tiss' is unknown"),
        ("seeds = 2", "seedz = 2", "did you mean 'seeds'"),
        ('question = "q"', "", "lacks"),
        ("[settings]", "[settings", "is not TOML"),
    ],
)
def test_a_bad_suite_is_one_line_that_names_the_key(tmp_path: Path, old: str, new: str, says: str) -> None:
    assert old in MINIMAL
    with pytest.raises(SuiteError, match=r"suite\.toml") as caught:
        config.load(write(tmp_path / "s", MINIMAL.replace(old, new)))
    assert says in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("arm", "qat", "arm 'qat'"),
        ("where", "fst", "did you mean 'fast'"),
        ("where", "fast : slwo", "did you mean 'slow'"),
        ("against", "bf16 + qat", "arm 'qat'"),
        ("direction", "up", "direction 'up'"),
        ("direction", "equal", "margin above 0"),
    ],
)
def test_a_hypothesis_must_name_what_the_suite_runs(tmp_path: Path, key: str, value: str, says: str) -> None:
    entry = {"id": "h", "claim": "c", "metric": "outcome/accuracy", "arm": "nvfp4", "against": "bf16"}
    entry |= {"where": "fast", "direction": "lower", key: value}
    text = "\n[[hypothesis]]\n" + "".join(f'{k} = "{v}"\n' for k, v in entry.items())
    with pytest.raises(SuiteError) as caught:
        config.load(write(tmp_path / "s", MINIMAL + text))
    assert says in str(caught.value)


PROBE = """
[probe]
arms = ["nvfp4", "quads"]
outliers = ["", "8x16"]
[[hypothesis]]
id = "h"
claim = "c"
metric = "probe/gap_mean"
arm = "quads"
against = "nvfp4"
direction = "lower"
where = "start/8x16/w4"
"""


def test_a_hypothesis_of_the_probe_must_name_a_place_that_is_probed(tmp_path: Path) -> None:
    assert config.load(write(tmp_path / "s", MINIMAL + PROBE)).hypotheses
    with pytest.raises(SuiteError, match="did you mean 'start/8x16/w4'"):
        config.load(write(tmp_path / "s", MINIMAL + PROBE.replace("start/8x16/w4", "start/8x61/w4")))


def test_a_hypothesis_can_compare_across_places_and_with_the_mean_of_arms() -> None:
    hypothesis = config.Hypothesis(
        id="h", claim="c", metric="m", arm="a", against="b + c", where="x : y", direction="lower"
    )
    assert hypothesis.rivals == ("b", "c") and hypothesis.places == ("x", "y")
