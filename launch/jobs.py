"""The jobs of a run: their command lines, what was submitted, and what SLURM says of them."""

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

LAUNCH = Path(__file__).resolve().parent
EVALUATIONS = {"knn": "knn", "probe": "linear_probe"}
"""what the command line calls an evaluation, and what its script and its result are called"""
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE", "BOOT_FAIL")
"""states that a job does not leave"""
FORGOTTEN = "over (SLURM has forgotten how; see its log)"


class LaunchError(RuntimeError):
    """Something that cannot be done as asked. The message is meant for the user."""


@dataclass
class Job:
    """One sbatch command line."""

    name: str
    options: list[str]
    """of sbatch"""
    script: str
    """in launch/"""
    flags: list[str]
    """of what the script runs"""
    environment: dict[str, str] = field(default_factory=dict)
    """what the script reads beside its flags"""
    after: str | None = None
    """name of the job that has to succeed before"""
    id: str | None = None
    """what SLURM calls it"""

    def command(self, *, hold: bool = False, dependency: str | None = None) -> list[str]:
        """What runs; `dependency` is the id of `after`."""
        waits = [f"--dependency=afterok:{dependency}", "--kill-on-invalid-dep=yes"] if dependency else []
        script = str(LAUNCH / self.script)
        return ["sbatch", "--parsable", *["--hold"] * hold, *waits, *self.options, script, *self.flags]

    def shown(self, *, hold: bool = False) -> str:
        """The same for a shell, where the variable of the name `after` holds its id."""
        words = self.command(hold=hold, dependency="ID" if self.after else None)
        line = shlex.join(words).replace("--dependency=afterok:ID", f'--dependency=afterok:"${self.after}"', 1)
        before = "".join(f"{name}={shlex.quote(value)} " for name, value in self.environment.items())
        return before + line


def log(folder: Path, name: str) -> str:
    """Option of sbatch for the log of a job; %j is its id."""
    return f"--output={str(folder).replace('%', '%%')}/{name}-%j.log"


def evaluation(kind: str, options: list[str], flags: list[str], output: Path, step: str | None = None) -> Job:
    """The job that evaluates the finished run in `output`, or the encoder that was kept of its checkpoint `step`."""
    result = EVALUATIONS[kind]
    what, name, after = ["--checkpoint", str(output)], kind, "pretrain"
    if step is not None:
        kept = output / "evaluation" / step
        what = ["--checkpoint", str(kept / "encoder.safetensors"), "--output", str(kept / f"{result}.json")]
        name, after = f"{kind}-{step}", None
    own = [f"--job-name={output.name}-{name}", log(output / "submitted", name)]
    return Job(name, own + options, f"{result}.sbatch", what + flags, after=after)


def submit(job: Job, *, hold: bool = False, dependency: str | None = None) -> None:
    """Submit one job; it has an id then.

    Raises:
        LaunchError: SLURM does not take it, in SLURM's words.
    """
    # a job that submits another must not hand it its own allocation
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SRUN_")) or k == "SLURM_CONF"}
    command = job.command(hold=hold, dependency=dependency)
    done = _run(command, inherited | job.environment)
    if done.returncode:
        said = done.stderr.strip() or f"sbatch ended with {done.returncode}"
        raise LaunchError(f"SLURM does not take the job {job.name}: {said}\nsubmitted was: {shlex.join(command)}")
    job.id = done.stdout.strip().splitlines()[-1].partition(";")[0]  # ID;CLUSTER where there are several


def submit_chain(jobs: Sequence[Job]) -> None:
    """Submit all of them or none.

    Raises:
        LaunchError: SLURM does not take one.
    """
    hold = len(jobs) > 1  # nothing starts before all are there
    ids: dict[str, str] = {}
    try:
        for job in jobs:
            submit(job, hold=hold and job.after is None, dependency=ids.get(job.after or ""))
            ids[job.name] = job.id or ""
    except BaseException:
        scancel(list(ids.values()))
        raise


def release(jobs: Sequence[Job]) -> None:
    """Let a chain start.

    Raises:
        LaunchError: SLURM does not.
    """
    if len(jobs) > 1:
        done = _run(["scontrol", "release", jobs[0].id or ""])
        if done.returncode:
            raise LaunchError(f"SLURM does not release the job {jobs[0].id}: {done.stderr.strip()}")


def scancel(ids: Sequence[str]) -> None:
    """Cancel jobs; those that are over are no error.

    Raises:
        LaunchError: SLURM does not, in its words.
    """
    if ids:
        done = _run(["scancel", *ids])
        if done.returncode:
            raise LaunchError(f"could not cancel {', '.join(ids)}: {done.stderr.strip()}")


def states(ids: Sequence[str]) -> dict[str, str]:
    """State of each job in SLURM's words, with the reason why it waits.

    Raises:
        LaunchError: SLURM cannot be asked.
    """
    found = dict.fromkeys(ids, FORGOTTEN)
    if not ids:
        return found
    done = _run(["squeue", "--noheader", "--states=all", f"--jobs={','.join(ids)}", "--format=%i|%T|%r"])
    if done.returncode and "Invalid job id" not in done.stderr:
        raise LaunchError(f"SLURM cannot be asked: {done.stderr.strip()}")
    for line in done.stdout.splitlines():
        number, state, reason = line.split("|", 2)
        found[number] = f"{state} ({reason})" if state == "PENDING" else state
    gone = [number for number in ids if found[number] == FORGOTTEN]
    if gone and shutil.which("sacct"):  # some minutes after its end only the accounting knows a job
        done = _run(
            ["sacct", "--noheader", "--allocations", "--parsable2", f"--jobs={','.join(gone)}", "-o", "JobID,State"]
        )
        for line in done.stdout.splitlines():
            number, _, state = line.partition("|")
            found[number] = state.split()[0] if state else FORGOTTEN
    return found


def _run(command: list[str], environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, env=environment)
    except FileNotFoundError as error:
        raise LaunchError(f"{command[0]} is not found: there is no SLURM here") from error


def is_over(state: str) -> bool:
    return state.startswith((*OVER, FORGOTTEN))


def read_record(output: Path) -> dict[str, Any]:
    """What was submitted for a run.

    Raises:
        LaunchError: nothing was.
    """
    path = output / "submitted" / "jobs.json"
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise LaunchError(f"{output} has no jobs: `submit` leaves {path} there") from None
    except (OSError, ValueError) as error:
        raise LaunchError(f"cannot read {path}: {error}") from error


def write_record(folder: Path, record: dict[str, Any], jobs: Sequence[Job]) -> None:
    """jobs.json in OUTPUT/submitted, the old one or the new one, never half of it."""
    part = folder / ".jobs.json.part"
    entries = [asdict(job) | {"command": job.command()} for job in jobs]
    part.write_text(json.dumps(record | {"jobs": entries}, indent=1) + "\n")
    part.replace(folder / "jobs.json")


def read_settings(path: Path) -> dict[str, Any]:
    """A YAML file of settings.

    Raises:
        LaunchError: it cannot be read or holds something else.
    """
    try:
        settings = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise LaunchError(f"cannot read {path}: {error}") from error
    if not isinstance(settings or {}, dict):
        raise LaunchError(f"{path} must hold `name: value` lines, not a {type(settings).__name__}")
    return settings or {}


def frozen(config: Path, engine: Path, folder: Path) -> dict[str, str]:
    """Name and text of each file that the jobs will read in OUTPUT/submitted, `folder`.

    Raises:
        LaunchError: a file that they name is not there.
    """
    texts = {"config.yaml": config.read_text(), "engine.yaml": engine.read_text()}
    settings = read_settings(engine)
    section = settings.get("deepspeed_config") or {}
    named = section.get("deepspeed_config_file")
    if named:  # settings in a second file
        if not Path(named).is_file():
            raise LaunchError(f"{engine} names {named}, which is not there: submit from the folder where it is")
        texts["deepspeed.json"] = Path(named).read_text()
        settings["deepspeed_config"] = section | {"deepspeed_config_file": str(folder / "deepspeed.json")}
        texts["engine.yaml"] = yaml.safe_dump(settings, sort_keys=False)
    return texts


@contextmanager
def fresh_folder(folder: Path) -> Iterator[Path]:
    """`folder`, empty; as it was before when the context ends by an error.

    Raises:
        LaunchError: it cannot be made.
    """
    previous = folder.with_name(f".{folder.name}.previous")
    made = [parent for parent in folder.parents if not parent.exists()]
    try:
        shutil.rmtree(previous, ignore_errors=True)
        if folder.exists():
            folder.rename(previous)
        folder.mkdir(parents=True)
    except OSError as error:
        raise LaunchError(f"cannot make {folder}: {error.strerror}; choose another --output") from error
    try:
        yield folder
    except BaseException:
        shutil.rmtree(folder)
        if previous.exists():
            previous.rename(folder)
        for parent in made:
            parent.rmdir()
        raise
    shutil.rmtree(previous, ignore_errors=True)
