"""Delete extras from a copy of the project, and use what is left: `python .ci/without_extras.py [NAME ...]`.

Without names: each extra in turn, then all of them, with a small run and the fast tests of the core. A deleted folder
takes the extras along that need it (the line `Needs:` of their `__init__.py`).
"""

import importlib
import importlib.util
import multiprocessing
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

ROOT = Path(__file__).parents[1]
INSTALLED = ("configs", "data", "encoders", "evaluation", "extras", "launch", "pretrain", "runtime")
"""Folders that are installed inside `tessera/`."""
TESTED = [f"tests/{room}" for room in ("runtime", "encoders", "data", "evaluation", "pretrain", "launch", "tessera")]
LEFT_OUT = shutil.ignore_patterns("__pycache__", "build", "*.egg-info")
"""Also the metadata of an example that was installed: a copy must not find it."""
LARGE = ("torch", "torchvision", "accelerate", "timm", "transformers", "onnx", "pyarrow", "sklearn")
"""Packages that are imported once, before each extra is deleted in a process of its own."""


def needing(names: set[str]) -> set[str]:
    """Return the names with those of all extras that need one of them, directly or through others."""
    found = set(names)
    for path in (ROOT / "extras").glob("*/__init__.py"):
        needs = re.search(r"^Needs: (.+)\.$", path.read_text(), re.MULTILINE)
        if needs and found & set(needs[1].split(", ")):
            found.add(path.parent.name)
    return found if found == names else needing(found)


def copy(names: set[str], folder: Path) -> Path:
    """Copy the project without these extras."""
    project = folder / "project"
    for name in (*INSTALLED, "tessera", "tests", "examples", "benchmarks", "docs"):
        shutil.copytree(ROOT / name, project / name, symlinks=True, ignore=LEFT_OUT)
    for file in (*ROOT.glob("*.md"), ROOT / "pyproject.toml"):
        shutil.copy(file, project)
    for name in names:
        shutil.rmtree(project / "extras" / name)
    for name in INSTALLED:
        link = project / "tessera" / name
        link.unlink(missing_ok=True)
        link.symlink_to(f"../{name}")
    # Without the finder of an editable installation, which would find the deleted folders in the original.
    (project / "sitecustomize.py").write_text(
        "import sys\n"
        "sys.meta_path[:] = [f for f in sys.meta_path if not getattr(f, '__module__', '').startswith('__editable__')]\n"
    )
    return project


def use(project: Path, deleted: set[str], trained: bool) -> int:
    """Import what is left and print all help. Return the number of commands."""
    os.chdir(project)
    os.environ["PYTHONPATH"] = str(project)
    sys.path.insert(0, str(project))
    exec((project / "sitecustomize.py").read_text(), {})
    import tessera

    assert tessera.__file__.startswith(str(project)), tessera.__file__
    for module in pkgutil.walk_packages(tessera.__path__, "tessera."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    for name in deleted:
        assert importlib.util.find_spec(f"tessera.extras.{name}") is None, name
    from tessera.__main__ import COMMANDS, help_text, installed_commands
    from tessera.pretrain.command_line import load

    commands = COMMANDS | installed_commands()
    assert all(name in help_text(commands) for name in commands)
    assert not any("cannot be imported" in purpose for _, purpose in commands.values()), commands
    with Path("log").open("w") as log, redirect_stdout(log), redirect_stderr(log):
        code = "no exit"
        try:
            load(["--help"])
        except SystemExit as ended:
            code = ended.code
        assert not code, code
        if trained:
            small = {"encoder": "vit_micro", "batch_size": 8, "workers": 0}
            small |= {"evaluation": {"pictures": 0, "linear_iterations": 0}}
            tessera.pretrain(output="run", steps=1, **small)
            assert tessera.pretrain(resume=True, output="run", steps=2).finished
    return len(commands)


def check(names: set[str], trained: bool = False) -> None:
    """Delete extras in a copy, and use it in this process."""
    with tempfile.TemporaryDirectory() as folder:
        deleted = needing(names)
        count = use(copy(deleted, Path(folder)), deleted, trained)
        print(f"without {', '.join(sorted(deleted))}: {count} commands", flush=True)
        os.chdir("/")


def main() -> int:
    """Check the extras that were named, or all. Return the exit code."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    everything = {path.parent.name for path in (ROOT / "extras").glob("*/__init__.py")}
    names = sys.argv[1:] or sorted(everything)
    for name in LARGE:
        importlib.import_module(name)
    fork = multiprocessing.get_context("fork")
    turns = [fork.Process(target=check, args=[{name}]) for name in names]
    for process in turns:
        process.start()
        process.join()
    failed = [name for name, process in zip(names, turns, strict=True) if process.exitcode]
    if failed:
        print(f"failed without: {', '.join(failed)}")
        return 1
    if sys.argv[1:]:
        return 0
    whole = fork.Process(target=check, args=[everything, True])
    whole.start()
    whole.join()
    if whole.exitcode:
        return 1
    with tempfile.TemporaryDirectory() as folder:
        project = copy(everything, Path(folder))
        path = {"PYTHONPATH": str(project)}
        return subprocess.run(["pytest", "--fast", "-q", *TESTED], cwd=project, env=os.environ | path).returncode


if __name__ == "__main__":
    sys.exit(main())
