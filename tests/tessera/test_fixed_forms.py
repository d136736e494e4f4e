"""Commands that start by the path or the name of a module, as scripts of users do."""

import subprocess
import sys

import pytest

from tests.installed import needs_extra
from tests.launched import ROOT

FORMS = {
    "data/check_shards.py": "",
    "data/make_shards.py": "",
    "encoders/summary.py": "",
    "evaluation/embed.py": "",
    "evaluation/knn.py": "",
    "evaluation/linear_probe.py": "",
    "launch/slurm.py": "",
    "pretrain/run.py": "",
    "data/preview.py": "shard_tools",
    "encoders/weights.py": "exports",
    "evaluation/finetune.py": "finetune",
    "evaluation/report.py": "report",
    "evaluation/segmentation.py": "dense",
}
"""Files, and the extra that each needs."""
NAMED = """
import runpy, sys
for name in sys.argv[1:]:
    sys.argv[:] = [name, "--help"]
    print("== " + name)
    try:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        assert not ended.code, (name, ended.code)
"""
"""Does what `python -m NAME --help` does, for several names in one process: to import torch takes longest."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "file", [pytest.param(file, marks=[needs_extra(extra)] if extra else []) for file, extra in FORMS.items()]
)
def test_a_command_starts_by_its_file(file: str) -> None:
    ended = subprocess.run([sys.executable, file, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert "--" in ended.stdout


@pytest.mark.slow
def test_commands_start_by_their_names() -> None:
    files = [file for file, extra in FORMS.items() if not extra or (ROOT / "extras" / extra).exists()]
    names = [file.removesuffix(".py").replace("/", ".") for file in files]
    ended = subprocess.run([sys.executable, "-c", NAMED, *names], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr
    printed = dict(part.split("\n", 1) for part in ended.stdout.removeprefix("== ").split("\n== "))
    assert {name for name in names if "--" in printed[name]} == {*names}
