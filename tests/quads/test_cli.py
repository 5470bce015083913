"""The command line: one-line errors, exit codes, help that names every option."""

import dataclasses
import json
import subprocess
import sys

import pytest

from quads.compare.config import CompareConfig


def quads(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; sys.argv[0] = 'quads'; from quads.cli import main; main()"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("recipes", "--show", "quad"), "did you mean 'quads'?"),
        (("compare", "--steps", "0"), "'steps' is 0"),
        (("compare", "--seeds", "a"), "'a' is not an integer"),
        (("compare", "--arms", "bf16,nothing"), "no recipe named 'nothing'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: tuple[str, ...], message: str) -> None:
    done = quads(*arguments)
    assert done.returncode == 2 and message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1 and "Traceback" not in done.stderr


def test_an_unknown_option_is_a_usage_error() -> None:
    done = quads("compare", "--colour", "red")
    assert done.returncode == 2 and "No such option" in done.stderr


def test_help_names_every_field_of_a_comparison() -> None:
    done = quads("compare", "--help")
    assert done.returncode == 0
    for field in dataclasses.fields(CompareConfig):
        assert f"--{field.name.replace('_', '-')}" in done.stdout
        assert field.metadata["help"].split()[0] in done.stdout


def test_json_is_one_document() -> None:
    document = json.loads(quads("recipes", "--json").stdout)
    assert document["quads"]["rac_ratio"] == 0.5
