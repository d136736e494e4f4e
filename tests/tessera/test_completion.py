import subprocess
import sys

import pytest

from tests.launched import ROOT

WORDS = """
tessera() {{ {python} -m tessera "$@"; }}
eval "$(tessera completion)"
reply() {{ COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _tessera; echo "${{COMPREPLY[@]}}"; }}
reply tessera linear
reply tessera --num_processes 2 knn --chec
reply tessera slurm submit --knn
reply tessera knn shards/tr
"""


@pytest.mark.slow
def test_bash_completes_commands_and_flags() -> None:
    script = WORDS.format(python=sys.executable)
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n") == ["linear_probe", "--checkpoint", "--knn-flags", "", ""]
