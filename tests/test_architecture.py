"""Import order of the folders, from runtime to tessera, and limits on sizes."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ORDER = ["runtime", "encoders", "data", "evaluation", "pretrain", "tessera"]
LINES_OF_A_MODULE, LINES_OF_A_FUNCTION, PARAMETERS = 400, 60, 6
OUTSIDE_OF_ENCODERS = {"torch", "einops", "safetensors"}
OPTIONAL = {"timm"}
"""Packages that encoders/published.py imports if a user asks for their weights."""


def imported(path: Path) -> set[str]:
    """Return the top-level names of all imports of a file, including those inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            found.add((node.module or "").partition(".")[0])
    return found


@pytest.mark.parametrize("folder", ORDER)
def test_imports_point_left(folder: str) -> None:
    right = set(ORDER[ORDER.index(folder) + 1 :]) | {"benchmarks", "tests"}
    right |= {"launch"} if folder != "tessera" else set()  # the command `tessera` starts several processes
    files = list((ROOT / folder).rglob("*.py"))
    assert files
    for path in files:
        assert not imported(path) & right, f"{path} imports a folder to its right"


def test_encoders_need_little() -> None:
    allowed = OUTSIDE_OF_ENCODERS | {"encoders", "runtime"} | sys.stdlib_module_names
    for path in (ROOT / "encoders").rglob("*.py"):
        assert imported(path) <= allowed | (OPTIONAL if path.name == "published.py" else set()), path


def test_launch_stands_alone() -> None:
    """Submitting jobs needs no torch. The scripts start any project that is installed."""
    for path in (ROOT / "launch").glob("*.py"):
        assert not imported(path) & set(ORDER), path
    for name in ("slurm", "jobs", "progress"):
        allowed = sys.stdlib_module_names | {"yaml", "jobs", "progress"}
        assert imported(ROOT / "launch" / f"{name}.py") <= allowed, name


def test_scripts_hide_no_module() -> None:
    """`accelerate launch pretrain/run.py` puts pretrain/ first on sys.path."""
    dependencies = {name for folder in ORDER for path in (ROOT / folder).rglob("*.py") for name in imported(path)}
    for folder in ("pretrain", "evaluation"):
        names = {path.stem for path in (ROOT / folder).iterdir() if path.suffix == ".py" or path.is_dir()}
        assert not names & (dependencies | sys.stdlib_module_names | {"evaluate", "datasets", "tests", "launch"}), (
            folder
        )


@pytest.mark.parametrize("folder", [*ORDER, "launch"])
def test_modules_functions_and_parameter_lists_are_short(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        text = path.read_text()
        assert len(text.splitlines()) <= LINES_OF_A_MODULE, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                where = f"{path}:{node.lineno} {node.name}"
                assert (node.end_lineno or 0) - node.lineno < LINES_OF_A_FUNCTION, where
                arguments = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
                of_an_encoder = folder == "encoders" and node.name == "__init__"  # its settings
                assert of_an_encoder or len({*arguments} - {"self", "cls"}) <= PARAMETERS, where
