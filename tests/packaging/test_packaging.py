"""The rules that keep `quads` importable, light and beside Hugging Face's own `kernels` package."""

import ast
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("bench", "emulation", "kernels", "suites")
HEAVY = ("triton", "vllm", "trl", "datasets", "plotly", "reasoning_gym", "verl", "peft")


def python(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_is_linked_and_never_a_regular_package(folder: str) -> None:
    link = ROOT / "quads" / folder
    assert link.is_symlink() and str(link.readlink()) == f"../{folder}"
    assert not (ROOT / folder / "__init__.py").exists()


def test_importing_quads_needs_no_heavy_package_and_no_gpu() -> None:
    blocked = "".join(f"sys.modules[{name!r}] = None\n" for name in HEAVY)
    modules = ["quads", "quads.recipes", "quads.qat", "quads.rollout", "quads.sync", "quads.gap", "quads.cli"]
    done = python(f"import sys\n{blocked}import " + ", ".join(modules), ROOT)
    assert done.returncode == 0, done.stderr


def test_the_command_line_starts_without_importing_torch() -> None:
    done = python("import sys, quads.cli; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)", ROOT)
    assert done.returncode == 0, done.stderr


def test_a_regular_package_called_kernels_still_wins(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("theirs = True")
    code = f"import sys; sys.path.insert(1, {str(ROOT)!r}); import kernels, quads.kernels; assert kernels.theirs"
    done = python(code, tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_wheel_holds_every_folder_and_data_file_under_quads_only(tmp_path: Path) -> None:
    source = tmp_path / "source"  # a build in place would leave build/ behind, and ship what lies there
    ignored = shutil.ignore_patterns(".git", ".tox", "build", "runs", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, symlinks=True, ignore=ignored)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    command += ["-w", str(tmp_path), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    names = zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist()
    top = {name.split("/")[0] for name in names}
    assert top == {"quads", next(t for t in top if t.endswith(".dist-info"))}
    listing = subprocess.run(
        ["git", "ls-files", *FOLDERS, "quads"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    shipped = (".py", ".toml", ".cu", ".cuh", ".npz", ".txt", ".safetensors")
    wanted = [line for line in listing.stdout.splitlines() if line.endswith(shipped)]
    missing = [line for line in wanted if not {line, f"quads/{line}"} & set(names)]
    assert not missing


def _imports(path: Path) -> set[str]:
    tree = ast.parse(path.read_text("utf-8"))
    nodes = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    return {n.module or "" for n in nodes if isinstance(n, ast.ImportFrom)} | {
        alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names
    }


@pytest.mark.parametrize(
    ("folder", "allowed"),
    [("emulation", ("quads.emulation",)), ("kernels", ("quads.emulation", "quads.kernels"))],
)
def test_imports_go_one_way(folder: str, allowed: tuple[str, ...]) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        for module in _imports(path):
            if module.split(".")[0] == "quads" and module != "quads":
                assert module.startswith(allowed), f"{path.relative_to(ROOT)} imports {module}"


def test_nothing_unpickles() -> None:
    for path in [*ROOT.glob("quads/**/*.py"), *(p for f in FOLDERS for p in ROOT.glob(f"{f}/**/*.py"))]:
        text = path.read_text("utf-8")
        assert not {"pickle", "dill", "joblib", "cloudpickle"} & _imports(path), path
        assert "allow_pickle=True" not in text and "weights_only=False" not in text, path
