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


def test_brackets_in_an_error_are_printed() -> None:
    assert "[bold]" in quads("recipes", "--show", "[bold]").stderr


def test_check_diagnoses_a_newcomers_kernel_in_one_command() -> None:
    done = quads("check", "--quantizer", "examples/conformance/my_kernel.py:quantize")
    assert done.returncode == 1 and "not every kernel conforms" in done.stderr
    assert "nibbles-swapped" in done.stdout and "code-ties-toward" in done.stdout


def test_check_of_nothing_is_a_usage_error() -> None:
    done = quads("check")
    assert done.returncode == 2 and "nothing to check" in done.stderr


def test_the_shipped_vectors_verify_and_export(tmp_path) -> None:
    assert quads("vectors", "verify").returncode == 0
    assert quads("vectors", "export", str(tmp_path / "v.bin")).returncode == 0
    assert (tmp_path / "v.bin").stat().st_size > 1000
