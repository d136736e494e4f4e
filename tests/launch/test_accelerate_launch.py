"""Our launcher: exit codes and signals are the trainers' own. The trainers here are small scripts without torch."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

LAUNCHER = Path(__file__).parents[2] / "launch" / "accelerate_launch.py"

# Saves for so many seconds once it is asked, or ends by itself with its code of a list.
TRAINER = """
import os, signal, sys, time

folder, what, *values = sys.argv[1:]
rank = int(os.environ.get("RANK", "0"))
asked = []
if what != "unprepared":
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, _: asked.append(number))
open(f"{folder}/ready-{rank}", "a").write(f"{os.getpid()}\\n")
if what == "codes":
    code = int(values[rank])
    if code < 0:
        time.sleep(600)  # until the launcher ends it
    if code == 137:
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(code)
while not asked:
    time.sleep(0.02)
end = time.monotonic() + float(values[0])
while time.monotonic() < end:
    time.sleep(0.02)
open(f"{folder}/saved-{rank}", "w").write(" ".join(map(str, asked)))
sys.exit(75)
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen]]:
    started: list[subprocess.Popen] = []
    (tmp_path / "trainer.py").write_text(TRAINER)

    def start(*arguments: str, processes: int = 2, options: tuple[str, ...] = (), ready: bool = True):
        command = [sys.executable, str(LAUNCHER), "--num_processes", str(processes), "--num_machines", "1"]
        command += ["--mixed_precision", "no", "--dynamo_backend", "no", *options]
        command += ["--multi_gpu", "--main_process_port", "0"] if processes > 1 else []
        with (tmp_path / "log.txt").open("w") as log:
            launcher = subprocess.Popen(
                [*command, str(tmp_path / "trainer.py"), str(tmp_path), *arguments],
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True, cwd=tmp_path,
            )  # fmt: skip
        started.append(launcher)
        end = time.monotonic() + 60
        while ready and not all((tmp_path / f"ready-{rank}").exists() for rank in range(processes)):
            assert time.monotonic() < end, (tmp_path / "log.txt").read_text()
            time.sleep(0.02)
        return launcher

    yield start
    for launcher in started:
        if launcher.poll() is None:
            os.killpg(launcher.pid, signal.SIGKILL)
    for file in tmp_path.glob("ready-*"):
        for pid in map(int, file.read_text().split()):
            if Path(f"/proc/{pid}").exists() and str(tmp_path) in Path(f"/proc/{pid}/cmdline").read_text():
                os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("accelerate_launch", LAUNCHER)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("codes", "asked", "expected"),
    [
        ([75, 75], signal.SIGUSR1, 75),
        ([75, 75], None, 75),  # told by another machine's trainers
        ([75, -15], signal.SIGUSR1, 75),  # the launcher's SIGTERM to who was slower
        ([-15, 75], None, 75),
        ([1, -15], None, 1),
        ([-15, 2], None, 2),
        ([69, 1], None, 69),
        ([75, 1], signal.SIGTERM, 1),
        ([1, 75], signal.SIGTERM, 1),
        ([-9, 69], None, 137),
        ([-9, -15], signal.SIGTERM, 137),
        ([75, -9], signal.SIGTERM, 137),
        ([-6], None, 134),
        ([-15, -15], None, 143),
        ([-15, -15], signal.SIGTERM, 75),  # asked before they were able to listen
        ([-10, -15], signal.SIGUSR1, 75),
        ([-10], None, 138),
    ],
)
def test_one_code_for_all(module: ModuleType, codes: list[int], asked: signal.Signals | None, expected: int) -> None:
    assert module.exit_code(codes, asked) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("codes", "expected"), [([0], 0), ([2], 2), ([75], 75), ([0, 0], 0), ([0, 3], 3), ([-1, 2], 2), ([137, -1], 137)]
)
def test_the_trainers_own_code(start, tmp_path: Path, codes: list[int], expected: int) -> None:
    options = ("--debug",) if codes == [0, 3] else ()  # with which accelerate itself says nothing of a failure
    launcher = start("codes", *map(str, codes), processes=len(codes), options=options, ready=False)
    for rank, code in enumerate(codes):
        if code == -1:  # its handler only notes the launcher's SIGTERM: it would be killed after half a minute
            while not (tmp_path / f"ready-{rank}").exists():
                time.sleep(0.02)
            time.sleep(2)
            os.kill(int((tmp_path / f"ready-{rank}").read_text()), signal.SIGKILL)
    assert launcher.wait(60) == expected
    log = (tmp_path / "log.txt").read_text()
    assert "Traceback" not in log
    assert "ChildFailedError" not in log


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_reaches_the_trainers_and_nothing_else_happens(
    start, tmp_path: Path, processes: int, number: signal.Signals
) -> None:
    launcher = start("save", "2", processes=processes)
    os.kill(launcher.pid, number)
    time.sleep(0.3)
    os.killpg(launcher.pid, signal.SIGTERM)
    os.killpg(launcher.pid, signal.SIGUSR1)
    assert launcher.wait(60) == 75
    for rank in range(processes):
        assert (tmp_path / f"saved-{rank}").read_text().startswith(str(int(number)))
    assert "Traceback" not in (tmp_path / "log.txt").read_text()


@pytest.mark.slow
def test_they_may_save_for_longer_than_half_a_minute_and_are_not_started_again(start, tmp_path: Path) -> None:
    """torch's agent kills after 30 seconds whom it has told to end."""
    launcher = start("save", "33", options=("--max_restarts", "3"))
    os.kill(launcher.pid, signal.SIGTERM)
    assert launcher.wait(60) == 75
    for rank in range(2):
        assert (tmp_path / f"saved-{rank}").exists()
        assert len((tmp_path / f"ready-{rank}").read_text().split()) == 1
    assert (tmp_path / "log.txt").read_text().count("failed (exitcode") == 1  # of those started again each fails


@pytest.mark.slow
def test_asked_before_the_trainers_listen(start) -> None:
    launcher = start("unprepared", "0")
    os.kill(launcher.pid, signal.SIGTERM)
    assert launcher.wait(60) == 75
