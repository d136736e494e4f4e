"""Fixtures: a SLURM cluster of two nodes on this machine, and fake SLURM commands."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.launched import ROOT

HARD = [
    "two words", "it's", 'a "b"', "$HOME", "`id`", "a;b", "*", "-", "--dashes", "--x=-1", "käse/日本", "back\\slash",
    "line\nbreak", "", "!!", "#", "%j", "~", "{a,b}-{0..3}.tar",
]  # fmt: skip
"""Values that a shell would change if they were not quoted."""

OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")

RECORDER = """#!{python}
import json, os, pathlib, signal, sys
folder = pathlib.Path({folder!r})
name = pathlib.Path(sys.argv[0]).name
environment = {{k: v for k, v in os.environ.items() if k.startswith(("SLURM_", "TESSERA_", "OMP_"))}}
with (folder / "calls.jsonl").open("a") as file:
    call = {{"name": name, "argv": sys.argv[1:], "environment": environment}}
    call["ignores"] = [s for s in ("SIGTERM", "SIGUSR1") if signal.getsignal(getattr(signal, s)) == signal.SIG_IGN]
    file.write(json.dumps(call) + "\\n")
answers = json.loads((folder / "answers.json").read_text())
key = f"{{name}} {{sys.argv[1] if sys.argv[1:] else ''}}"
turns = answers.get(key) or answers.get(name) or [[0, "", ""]]
said = folder / f"said {{key}}"
turn = len(said.read_text()) if said.exists() else 0
said.write_text("x" * (turn + 1))
code, out, error = turns[min(turn, len(turns) - 1)]
print(out, end="")
print(error, end="", file=sys.stderr)
sys.exit(code)
"""


class StandIns:
    """Fake commands on PATH. They record their calls and print prepared answers."""

    def __init__(self, folder: Path, *names: str) -> None:
        self.folder = folder
        self.answers: dict[str, list[tuple[int, str, str]]] = {}
        for name in names:
            self.add(name, RECORDER.format(python=sys.executable, folder=str(folder)))
        self.answer({})

    def add(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)
        (self.folder / name).chmod(0o755)

    def answer(self, answers: dict[str, list[tuple[int, str, str]]]) -> None:
        """Set answers, for example `{"scontrol requeue": [(0, "", "")]}`: exit code, stdout and stderr of each call.

        The last answer repeats. A key is a command and its first argument, or only a command.
        """
        self.answers |= answers
        (self.folder / "answers.json").write_text(json.dumps(self.answers))

    def calls(self, name: str | None = None) -> list[dict]:
        """Return the recorded calls in order, without those that only ask whether a job could run."""
        path = self.folder / "calls.jsonl"
        found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [call for call in found if name in (None, call["name"]) and "--test-only" not in call["argv"]]

    @property
    def environment(self) -> dict[str, str]:
        """Environment without SLURM variables, whose PATH holds only the fake commands and the system's."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_", "TESSERA_"))}
        return kept | {"PATH": f"{self.folder}:/usr/bin:/bin"}


@pytest.fixture
def stand_ins(tmp_path: Path) -> Callable[..., StandIns]:
    def make(*names: str) -> StandIns:
        folder = tmp_path / "commands"
        folder.mkdir()
        return StandIns(folder, *names)

    return make


SETTINGS = "method: mae  # a comment\ndata: shards-{0..3}.tar\nevaluation: {train: [a.tar, b.tar], val: v.tar}\n"


UNCHECKED = """
import sys
from tessera.launch import slurm
slurm.check_settings = lambda *_: None
sys.exit(slurm.main())
"""


class Slurm:
    """The command, called in a folder with a settings file `x.yaml`."""

    def __init__(self, folder: Path, commands: StandIns) -> None:
        self.folder, self.commands, self.environment = folder, commands, commands.environment
        (folder / "x.yaml").write_text(SETTINGS)
        commands.answer({"sbatch --parsable": [(0, f"{number}\n", "") for number in range(101, 140)]})

    def run(self, *arguments: str, checked: bool = False) -> subprocess.CompletedProcess[str]:
        """Run the command. Settings of the run are checked only if `checked` is True, because this takes seconds."""
        start = [str(ROOT / "launch" / "slurm.py")] if checked else ["-c", UNCHECKED]
        return subprocess.run(
            [sys.executable, *start, *arguments],
            cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=60,
        )  # fmt: skip

    def does(self, *arguments: str) -> str:
        """Run the command, and return what it printed."""
        done = self.run(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def fails(self, *arguments: str) -> str:
        """Run the command, and return why it failed."""
        done = self.run(*arguments)
        assert done.returncode == 2, done.stderr
        assert "Traceback" not in done.stderr
        return done.stderr

    def accepted(self, *arguments: str, output: str = "run") -> str:
        return self.does("submit", "--config", "x.yaml", "--output", output, *arguments)

    def refused(self, *arguments: str, output: str = "run") -> str:
        return self.fails("submit", "--config", "x.yaml", "--output", output, *arguments)

    def submitted(self) -> list[list[str]]:
        return [call["argv"] for call in self.commands.calls("sbatch")]

    def everything(self) -> list[str]:
        """Return all files except those of the fake commands."""
        files = (path.relative_to(self.folder) for path in self.folder.rglob("*"))
        return sorted(str(path) for path in files if path.parts[0] != "commands")


@pytest.fixture
def slurm(stand_ins: Callable[..., StandIns], tmp_path: Path) -> Slurm:
    return Slurm(tmp_path, stand_ins("sbatch", "squeue", "scontrol", "scancel"))


class Cluster:
    """A running cluster with the nodes 127.0.0.2 and 127.0.0.3 and the partitions `main` and `urgent`."""

    def __init__(self, folder: Path, work: Path) -> None:
        self.work = work
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_"))}
        self.environment = kept | {"SLURM_CONF": str(folder / "slurm.conf"), "COLUMNS": "200"}
        self.environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

    def run(self, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=self.work, env=self.environment | environment, capture_output=True, text=True, timeout=60
        )

    def submit(self, script: str, *flags: str, options: tuple[str, ...] = (), **environment: str) -> str:
        """Submit a script in launch/ and return the id of the job."""
        done = self.run("sbatch", "--parsable", *options, str(ROOT / "launch" / script), *flags, **environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def state(self, job: str) -> str:
        shown = self.run("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T")
        return shown.stdout.strip()

    def restarts(self, job: str) -> int:
        shown = self.run("scontrol", "show", "job", job).stdout
        return int(shown.partition("Restarts=")[2].split()[0])

    def wait(self, condition: Callable[[], object], log: Path, job: str | None = None, timeout: float = 240) -> None:
        """Wait until the condition holds. Fail if the job ends or the time is over before."""
        end = time.monotonic() + timeout
        while not condition():
            over = job is not None and self.state(job) in OVER and not condition()
            assert not over, log.read_text()
            assert time.monotonic() < end, log.read_text() if log.exists() else self.run("squeue").stdout
            time.sleep(0.2)

    def wait_for(self, job: str, state: str, log: Path) -> None:
        """Wait until a job is over, and check its final state."""
        self.wait(lambda: self.state(job) in OVER, log)
        assert self.state(job) == state, log.read_text() if log.exists() else "no log"


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    missing = [name for name in ("munged", "slurmctld", "slurmd", "sbatch") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"SLURM is not installed ({', '.join(missing)} not found): apt-get install slurm-wlm munge")
    if os.geteuid() != 0:
        pytest.skip("starting a SLURM cluster needs root")
    folder = Path(tempfile.mkdtemp(prefix="cluster", dir="/tmp"))  # the path of a socket is limited to 108 characters
    script = Path(__file__).parent / "cluster.sh"
    started = subprocess.run([script, "start", folder], capture_output=True, text=True)
    assert started.returncode == 0, started.stderr
    try:
        yield Cluster(folder, tmp_path_factory.mktemp("work"))
    finally:
        subprocess.run([script, "stop", folder], check=True)
        shutil.rmtree(folder)
