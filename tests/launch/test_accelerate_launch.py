"""launch/accelerate_launch.py: exit codes and signals. The trainers are small scripts without torch."""

import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from tessera.__main__ import main as command
from tessera.launch import accelerate_launch
from tessera.runtime import stdio
from tests.launched import wait_until

# After a signal, saves for so many seconds. Or exits with its own code from a list.
TRAINER = """
import os, signal, sys, time

folder, what, *values = sys.argv[1:]
rank = int(os.environ.get("RANK", "0"))
asked = []
if what != "unprepared":
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, lambda number, _: asked.append(number))
open(f"{folder}/ready-{rank}", "a").write(f"{os.getpid()}\\n")
if what == "codes":
    for other in range(int(os.environ.get("WORLD_SIZE", "1"))):  # all have their handlers before one fails
        while not os.path.exists(f"{folder}/ready-{other}"):
            time.sleep(0.02)
    code = int(values[rank])
    if code < 0:
        time.sleep(600)  # until the launcher ends it
    if code == 137:
        os.kill(os.getpid(), signal.SIGKILL)
    if code == 19:  # stopped: it handles no SIGTERM
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.5 if "19" in values else 0)
    sys.exit(code)
while not asked:
    time.sleep(0.02)
open(f"{folder}/asked-{rank}", "w").close()
end = time.monotonic() + float(values[0])
while time.monotonic() < end:
    time.sleep(0.02)
open(f"{folder}/saved-{rank}", "w").write(" ".join(map(str, asked)))
sys.exit(75)
"""


def _run_launcher(log: Path, arguments: list[str]) -> None:
    """Run the launcher in this process, in a process group of its own."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir(log.parent)
    sys.argv = ["accelerate_launch.py", *arguments]
    accelerate_launch.main()


def exit_code(launcher: BaseProcess) -> int | None:
    """Wait for the launcher and return its exit code."""
    launcher.join(60)
    return launcher.exitcode


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., BaseProcess]]:
    """Start a launcher, forked from a server that has imported torch (tests/conftest.py)."""
    started: list[BaseProcess] = []
    (tmp_path / "trainer.py").write_text(TRAINER)

    def start(*arguments: str, processes: int = 2, options: tuple[str, ...] = ()) -> BaseProcess:
        command = ["--num_processes", str(processes), "--num_machines", "1"]
        command += ["--mixed_precision", "no", "--dynamo_backend", "no", *options]
        command += ["--main_process_port", "0"] if processes > 1 else []
        command += [str(tmp_path / "trainer.py"), str(tmp_path), *arguments]
        launcher = multiprocessing.get_context("forkserver").Process(
            target=_run_launcher, args=(tmp_path / "log.txt", command)
        )
        launcher.start()
        started.append(launcher)
        end = time.monotonic() + 60
        while not all((tmp_path / f"ready-{rank}").exists() for rank in range(processes)):
            assert time.monotonic() < end, (tmp_path / "log.txt").read_text()
            time.sleep(0.02)
        return launcher

    yield start
    for launcher in started:
        if launcher.is_alive() and launcher.pid:
            os.killpg(launcher.pid, signal.SIGKILL)
    for file in tmp_path.glob("ready-*"):
        for pid in map(int, file.read_text().split()):
            if Path(f"/proc/{pid}").exists() and str(tmp_path) in Path(f"/proc/{pid}/cmdline").read_text():
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("codes", "asked", "expected"),
    [
        ([75, 75], signal.SIGUSR1, 75),
        ([75, 75], None, 75),  # another machine's trainers received the signal
        ([75, -15], signal.SIGUSR1, 75),  # the launcher's SIGTERM killed the slower trainer
        ([-15, 75], None, 75),
        ([1, -15], None, 1),
        ([-15, 2], None, 2),
        ([69], None, 69),
        ([69, -15], None, 69),
        ([69, 1], None, 1),  # the agent found both at once
        ([69, -9], None, 137),
        ([75, 69], signal.SIGTERM, 75),  # one trainer saved and ended while the other was still in the last collective
        ([75, 69], None, 69),
        ([75, 1], signal.SIGTERM, 1),
        ([1, 75], signal.SIGTERM, 1),
        ([-9, 69], None, 137),
        ([-9, -15], signal.SIGTERM, 137),
        ([75, -9], signal.SIGTERM, 137),
        ([-6], None, 134),
        ([-15, -15], None, 143),
        ([-15, -15], signal.SIGTERM, 75),  # the signal came before they could listen
        ([-10, -15], signal.SIGUSR1, 75),
        ([-10], None, 138),
        ([75, 75], signal.SIGINT, 75),
        ([130, 130], signal.SIGINT, 130),
        ([-2, -15], signal.SIGINT, 130),  # Ctrl-C before they could listen: nothing was saved
    ],
)
def test_exit_codes_of_trainers_become_one(codes: list[int], asked: signal.Signals | None, expected: int) -> None:
    assert accelerate_launch.exit_code(codes, asked) == expected


@pytest.mark.medium
@pytest.mark.parametrize(
    ("codes", "expected"),
    [([75], 75), ([0, 3], 3), ([-1, 2], 2), ([137, -1], 137), ([69, 19], 69)],
)
def test_the_exit_code_is_that_of_the_trainers(start, tmp_path: Path, codes: list[int], expected: int) -> None:
    options = ("--debug",) if codes == [0, 3] else ()  # accelerate then prints nothing about a failure
    began = time.monotonic()
    launcher = start("codes", *map(str, codes), processes=len(codes), options=options)
    for rank, code in enumerate(codes):
        if code == -1:  # its handler only records SIGTERM, so the launcher would kill it after 30 s
            time.sleep(2)
            os.kill(int((tmp_path / f"ready-{rank}").read_text()), signal.SIGKILL)
    assert exit_code(launcher) == expected
    log = (tmp_path / "log.txt").read_text()
    assert "Traceback" not in log
    assert "ChildFailedError" not in log
    both = (
        r"process 0 was killed by SIGKILL\. Either a person, .* \(kill -9\), or the system did, because memory ran out"
    )
    assert bool(re.search(both, log)) == (codes[0] == 137)
    assert 19 not in codes or time.monotonic() - began < 25


@pytest.mark.medium
@pytest.mark.parametrize("options", [("--multi_gpu",), ("--config_file", "fsdp2")])
def test_the_number_of_processes_with_any_engine(start, tmp_path: Path, options: tuple[str, ...]) -> None:
    launcher = start("codes", "0", "0", options=options)  # waits until both trainers run
    assert exit_code(launcher) == 0


@pytest.mark.medium
@pytest.mark.parametrize(("processes", "number"), [(1, signal.SIGTERM), (2, signal.SIGUSR1)])
def test_signals_are_forwarded_to_the_trainers(start, tmp_path: Path, processes: int, number: signal.Signals) -> None:
    launcher = start("save", "2", processes=processes)
    os.kill(launcher.pid, number)
    wait_until(lambda: all((tmp_path / f"asked-{rank}").exists() for rank in range(processes)))
    os.killpg(launcher.pid, signal.SIGTERM)
    os.killpg(launcher.pid, signal.SIGUSR1)
    assert exit_code(launcher) == 75
    for rank in range(processes):
        assert (tmp_path / f"saved-{rank}").read_text().startswith(str(int(number)))
    assert "Traceback" not in (tmp_path / "log.txt").read_text()


@pytest.mark.medium
def test_after_ctrl_c_the_launcher_waits_until_the_trainers_have_saved(start, tmp_path: Path) -> None:
    launcher = start("save", "2", processes=2)
    os.killpg(launcher.pid, signal.SIGINT)  # as a terminal does; the trainers have sessions of their own
    assert exit_code(launcher) == 75
    for rank in range(2):
        assert (tmp_path / f"saved-{rank}").read_text() == "2"  # a second one would end a run without saving
    assert "Traceback" not in (tmp_path / "log.txt").read_text()


@pytest.mark.slow
def test_trainers_may_save_for_longer_than_30_seconds(start, tmp_path: Path) -> None:
    """torch's agent would kill the trainers 30 seconds after its own SIGTERM."""
    launcher = start("save", "33", options=("--max_restarts", "3"))
    os.kill(launcher.pid, signal.SIGTERM)
    assert exit_code(launcher) == 75
    for rank in range(2):
        assert (tmp_path / f"saved-{rank}").exists()
        assert len((tmp_path / f"ready-{rank}").read_text().split()) == 1
    assert (tmp_path / "log.txt").read_text() == ""  # torch's launcher adds nothing to the messages of the trainers


@pytest.mark.medium
def test_a_signal_before_the_trainers_set_their_handlers(start) -> None:
    launcher = start("unprepared", "0")
    os.kill(launcher.pid, signal.SIGTERM)
    assert exit_code(launcher) == 75


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--config_file", "fsdp", "knn"], "there is no such file. Did you mean fsdp2? Engines by name: ddp, fsdp2,"),
        (["--config_file", "none.yaml", "knn"], "Engines by name: ddp, fsdp2, hsdp, zero1, zero2, zero3."),
        (["--config_file", "broken.yaml", "knn"], "is not a settings file of accelerate: "),
        (["--num_process", "8", "knn"], "unknown argument --num_process. Did you mean --num_processes?"),
        (["--num_processes", "two", "knn"], "invalid int value: 'two'"),
        (["--checkpoint", "x", "knn"], "unknown argument --checkpoint. Before the command stand the flags of"),
        (["--nproc_per_node=2", "knn"], "unknown flag --nproc_per_node. Did you mean --num_processes?"),
        (["--engine", "zero2", "knn"], "unknown flag --engine. Did you mean --config_file?"),
        (["--num_processes", "2"], "no command follows --num_processes 2."),
        (["--num_processes", "2", "make_shards", "a", "b"], "make_shards runs in one process. Remove --num_processes "),
        (
            ["--cpu", "--num-machines=2", "make_shards"],
            "make_shards runs in one process. Remove --num-machines=2 ",
        ),
    ],
)
def test_a_wrong_flag_is_named_in_one_line(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.yaml").write_text("num_processes: 2\nno_such_setting: 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["tessera", *words])
    monkeypatch.setattr(stdio, "protect", lambda: None)
    with pytest.raises(SystemExit) as stopped:
        command()
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert message in error.splitlines()[-1]
    assert len(error.splitlines()) == 1 or words[-1] != "knn"


def test_ctrl_c_while_modules_are_imported_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("importlib.import_module", interrupted)
    monkeypatch.setattr(sys, "argv", ["tessera", "pretrain"])
    monkeypatch.setattr(stdio, "protect", lambda: None)
    with pytest.raises(SystemExit) as stopped:
        command()
    assert stopped.value.code == 130
    assert capsys.readouterr().err == "\ntessera: interrupted\n"
