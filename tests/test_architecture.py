"""Import order of the folders, and of the files inside them."""

import ast
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ORDER = ["runtime", "encoders", "data", "evaluation", "pretrain"]
"""Folders, each of which imports only from folders on its left. `tessera/` imports from all."""
OUTSIDE_OF_ENCODERS = {"torch", "einops", "safetensors"}


def imported(path: Path) -> set[str]:
    """Return the top-level names of all imports of a file, including those inside functions. The name of a folder of
    this project is written with its package, `tessera.data`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        found |= {".".join(name.split(".")[: 1 + (name.partition(".")[0] == "tessera")]) for name in names}
    return found


def packages(*folders: str) -> set[str]:
    return {f"tessera.{folder}" for folder in folders}


@pytest.mark.parametrize("folder", ORDER)
def test_imports_point_left(folder: str) -> None:
    right = {"benchmarks", "tests"} | packages(*ORDER[ORDER.index(folder) + 1 :], "interface")
    right |= packages("launch")
    files = list((ROOT / folder).rglob("*.py"))
    assert files
    for path in files:
        if path == ROOT / "pretrain" / "__init__.py":  # `tessera.pretrain` is also a function of tessera.interface
            continue
        assert not imported(path) & right, f"{path} imports a folder to its right"


def test_encoders_need_little() -> None:
    allowed = OUTSIDE_OF_ENCODERS | packages("encoders", "runtime", "__main__") | sys.stdlib_module_names
    for path in (ROOT / "encoders").rglob("*.py"):
        assert imported(path) <= allowed, path


def test_launch_stands_alone() -> None:
    """Submitting jobs needs no torch. The scripts start any project that is installed."""
    for path in (ROOT / "launch").glob("*.py"):
        assert not imported(path) & packages(*ORDER), path
    for name in ("slurm", "jobs", "status"):
        allowed = sys.stdlib_module_names | {"yaml", "tessera.launch"}
        assert imported(ROOT / "launch" / f"{name}.py") <= allowed, name


def test_scripts_hide_no_module() -> None:
    """`accelerate launch pretrain/run.py` puts pretrain/ first on sys.path."""
    dependencies = {name for folder in ORDER for path in (ROOT / folder).rglob("*.py") for name in imported(path)}
    for folder in ("pretrain", "evaluation"):
        names = {path.stem for path in (ROOT / folder).iterdir() if path.suffix == ".py" or path.is_dir()}
        assert not names & (dependencies | sys.stdlib_module_names | {"evaluate", "datasets", "tests", "launch"}), (
            folder
        )


EXTRAS = sorted(path.name for path in (ROOT / "extras").iterdir() if (path / "__init__.py").exists())


def extras_imported(folder: Path) -> set[str]:
    """Return the names of the extras that the files of a folder import, also inside functions and for types."""
    nodes = (node for path in folder.rglob("*.py") for node in ast.walk(ast.parse(path.read_text())))
    modules = {
        f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
        for node in nodes
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    return {module.split(".")[2] for module in modules if module.startswith("tessera.extras.")}


@pytest.mark.parametrize("folder", [*ORDER, "launch", "tessera"])
def test_the_core_imports_no_extra(folder: str) -> None:
    assert not extras_imported(ROOT / folder)


@pytest.mark.parametrize("name", EXTRAS)
def test_an_extra_says_which_others_it_needs(name: str) -> None:
    text = ast.get_docstring(ast.parse((ROOT / "extras" / name / "__init__.py").read_text())) or ""
    needs = text.rpartition("Needs: ")[2].rstrip(".").split(", ") if "Needs: " in text else []
    assert extras_imported(ROOT / "extras" / name) - {name} == set(needs)
    assert len(text.splitlines()) <= 20


def test_no_file_imports_itself_over_others() -> None:
    """Imports inside functions and imports for types count, too."""
    files = {}
    for folder in (*ORDER, "launch", "configs", "extras", "tessera"):
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            files[".".join(parts if folder == "tessera" else ("tessera", *parts)).removesuffix(".__init__")] = path
    graph = {}
    for module, path in files.items():
        names = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names |= {name if (name := f"{node.module}.{a.name}") in files else node.module for a in node.names}
        graph[module] = names & files.keys() - {module}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))
