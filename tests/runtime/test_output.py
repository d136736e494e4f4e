"""Commands whose output is cut off end without a traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.output import READER_LEFT, quiet_if_reader_leaves

ROOT = Path(__file__).parents[2]
PRINTING = """
import sys
from runtime.output import quiet_if_reader_leaves
with quiet_if_reader_leaves():
    {}
"""


def cut_off(*command: str) -> tuple[int, str]:
    """Run a command whose stdout nobody reads. Return its exit code and its stderr."""
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, *command], stdout=writing, stderr=subprocess.PIPE, text=True, cwd=ROOT, timeout=120
    )
    os.close(writing)
    return done.returncode, done.stderr


@pytest.mark.parametrize("body", ["print('a' * 10**6)", "print('a')", "print('a'); sys.exit(0)"])
def test_ends_quietly(body: str) -> None:
    assert cut_off("-c", PRINTING.format(body)) == (READER_LEFT, "")


def test_other_pipes_and_other_errors_are_raised() -> None:
    code, message = cut_off("-c", PRINTING.format("raise ValueError('wrong')"))
    assert (code, "ValueError: wrong" in message) == (1, True)
    reading, writing = os.pipe()
    os.close(reading)
    with pytest.raises(BrokenPipeError), quiet_if_reader_leaves():
        os.write(writing, b"a")
    os.close(writing)


@pytest.mark.medium
@pytest.mark.parametrize(
    "command",
    [
        ["-m", "pretrain.run", "--help", "all"],
        ["-m", "encoders.summary"],
        ["-m", "data.make_shards", "--help"],
        ["-m", "evaluation.knn", "--help"],
        ["-m", "tessera", "--help"],
    ],
)
def test_every_kind_of_command_ends_quietly(command: list[str]) -> None:
    assert cut_off(*command) == (READER_LEFT, "")
