"""A SLURM cluster of two nodes on this machine, and stand-ins for the commands of one."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HARD = [
    "two words", "it's", 'a "b"', "$HOME", "`id`", "a;b", "*", "-", "--dashes", "--x=-1", "käse/日本", "back\\slash",
    "line\nbreak", "", "!!", "#", "%j", "~", "{a,b}-{0..3}.tar",
]  # fmt: skip
"""values that a shell would like to change"""

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
key = f"{{name}} {{pathlib.Path(sys.argv[1]).name if sys.argv[1:] else ''}}"
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
    """Commands on PATH that record how they are called and answer what they are told."""

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
        """`{"scontrol requeue": [(0, "", "")]}`: exit code, stdout and stderr of each call in turn, the last for all
        others. Of a first argument that is a path its name counts."""
        self.answers |= answers
        (self.folder / "answers.json").write_text(json.dumps(self.answers))

    def calls(self, name: str | None = None) -> list[dict]:
        """How they were called, in order."""
        path = self.folder / "calls.jsonl"
        found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [call for call in found if name in (None, call["name"])]

    @property
    def environment(self) -> dict[str, str]:
        """Nothing of a SLURM around the tests, and no other commands than these and the system's."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_", "TESSERA_"))}
        return kept | {"PATH": f"{self.folder}:/usr/bin:/bin"}


@pytest.fixture
def stand_ins(tmp_path: Path) -> Callable[..., StandIns]:
    def make(*names: str) -> StandIns:
        folder = tmp_path / "commands"
        folder.mkdir()
        return StandIns(folder, *names)

    return make


class Cluster:
    """A running cluster: nodes 127.0.0.2 and 127.0.0.3, partitions `main` and `urgent`."""

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
        """Id of a job of one of the scripts in launch/."""
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
        """Until something holds, which `job` has to live to see."""
        end = time.monotonic() + timeout
        while not condition():
            over = job is not None and self.state(job) in OVER and not condition()
            assert not over, log.read_text()
            assert time.monotonic() < end, log.read_text() if log.exists() else self.run("squeue").stdout
            time.sleep(0.2)

    def wait_for(self, job: str, state: str, log: Path) -> None:
        """Wait until a job is over, and see that it ended as expected."""
        self.wait(lambda: self.state(job) in OVER, log)
        assert self.state(job) == state, log.read_text() if log.exists() else "no log"


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    missing = [name for name in ("munged", "slurmctld", "slurmd", "sbatch") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"no SLURM here ({', '.join(missing)}): apt-get install slurm-wlm munge")
    if os.geteuid() != 0:
        pytest.skip("a SLURM cluster of one's own needs root")
    folder = Path("/tmp") / tmp_path_factory.mktemp("cluster").name  # the path of a socket has 108 characters at most
    script = Path(__file__).parent / "cluster.sh"
    started = subprocess.run([script, "start", folder], capture_output=True, text=True)
    assert started.returncode == 0, started.stderr
    try:
        yield Cluster(folder, tmp_path_factory.mktemp("work"))
    finally:
        subprocess.run([script, "stop", folder], check=True)
        shutil.rmtree(folder)
