"""Commands that start by the path or the name of a module, as scripts of users do."""

import subprocess
import sys

import pytest

from tests.installed import needs_extra
from tests.launched import ROOT

FORMS = [
    "data/check_shards.py",
    "data/make_shards.py",
    "encoders/summary.py",
    "evaluation/embed.py",
    "evaluation/knn.py",
    "evaluation/linear_probe.py",
    "launch/slurm.py",
    "pretrain/run.py",
    pytest.param("data/preview.py", marks=needs_extra("shard_tools")),
    pytest.param("encoders/weights.py", marks=needs_extra("exports")),
    pytest.param("evaluation/finetune.py", marks=needs_extra("finetune")),
    pytest.param("evaluation/report.py", marks=needs_extra("report")),
    pytest.param("evaluation/segmentation.py", marks=needs_extra("dense")),
]


@pytest.mark.slow
@pytest.mark.parametrize("file", FORMS)
def test_a_command_starts_by_its_file_and_by_its_name(file: str) -> None:
    name = file.removesuffix(".py").replace("/", ".")
    for words in ([file], ["-m", name]):
        ended = subprocess.run(
            [sys.executable, *words, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=120
        )
        assert ended.returncode == 0, ended.stderr
        assert "--" in ended.stdout
