"""SLURM jobs of a run: sbatch command lines, the list of the submitted jobs, and their states in SLURM."""

import argparse
import difflib
import glob
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import yaml

LAUNCH = Path(__file__).resolve().parent
ENGINES = LAUNCH.parent / "configs" / "accelerate"
"""Folder of the engine files of this project, which `--config_file` takes by name."""
FINAL_STATES = (
    *("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE", "BOOT_FAIL"),
    *("PREEMPTED", "LAUNCH_FAILED", "RECONFIG_FAIL", "REVOKED"),
)
"""Final states of a SLURM job."""
MAX_SETTINGS_BYTES = 2**18
"""Largest size of a settings file in bytes."""
FORGOTTEN = "over (SLURM no longer knows how it ended; see its log)"
"""State of a job that SLURM no longer knows."""


class Evaluation(NamedTuple):
    """An evaluation that can run as a SLURM job."""

    command: str
    """Name of the `tessera` command. The names of result files begin with it (`evaluation.results.result_path`)."""
    time: str
    """Time limit of the job."""
    script: str = "evaluation.sbatch"
    """File name of the script. An evaluation with pretrain.sbatch is a run of its own."""


OF_CORE = {"knn": Evaluation("knn", "02:00:00"), "probe": Evaluation("linear_probe", "12:00:00")}
"""Evaluations of the core, by their names on the command line."""


@cache
def evaluations() -> dict[str, Evaluation]:
    """Return all evaluations by their names on the command line: those of the core, of extras and of other packages.

    A command of an installed package (entry point `tessera.evaluations`) is one if its module has a line
    `TIME_LIMIT = "02:00:00"`. A line `SCRIPT = "pretrain.sbatch"` says that it is a run of its own. The module is not
    imported.
    """
    found = dict(OF_CORE)
    points = importlib.metadata.entry_points(group="tessera.evaluations")
    for point in sorted(points, key=lambda point: point.name):
        facts = _facts(point.module)
        if "TIME_LIMIT" in facts:
            script = facts.get("SCRIPT", "evaluation.sbatch")
            found[point.name.replace("_", "-")] = Evaluation(point.name, facts["TIME_LIMIT"], script)
    return found


def evaluation(kind: str) -> Evaluation:
    """Return the evaluation with a name.

    Raises:
        LaunchError: the name is unknown.
    """
    known = evaluations()
    if kind not in known:
        raise LaunchError(f"there is no evaluation '{kind}'. Choose from {', '.join(known)}.")
    return known[kind]


def _facts(module: str) -> dict[str, str]:
    """Return the constants of a module that describe its job; none if the module was deleted."""
    try:
        spec = importlib.util.find_spec(module)
        text = Path(spec.origin).read_text() if spec and spec.origin else ""
    except (ImportError, OSError, UnicodeError):
        return {}
    return dict(re.findall(r'^(TIME_LIMIT|SCRIPT) = "([0-9a-z:.-]+)"$', text, re.MULTILINE))


def engine_file(name: str) -> Path:
    """Return the path of an engine file, given its name, such as `zero2`, or its path."""
    named = ENGINES / f"{name}.yaml"
    return named if named.exists() and not Path(name).exists() else Path(name)


def preset_file(name: str) -> Path:
    """Return the path of a settings file, given its path or the name of a preset, such as `imagenet_dino_vit_small`."""
    named = LAUNCH.parent / "configs" / f"{name}.yaml"
    return named if named.exists() and not Path(name).exists() else Path(name)


class OneLineParser(argparse.ArgumentParser):
    """Parser that reports an error in one line, without the usage, and suggests the nearest option."""

    hint = "`--help` lists the options."
    """Sentence for an option that has no near one."""

    def error(self, message: str) -> NoReturn:
        """Print the error, and exit with code 2."""
        kind, _, words = message.partition(": ")
        if kind == "unrecognized arguments" and words:
            unknown = words.split()[0].partition("=")[0]
            options = [option for option in self.every_option() if option.startswith("--")]
            close = difflib.get_close_matches(unknown, options, n=1) if unknown.startswith("-") else []
            message = f"unknown argument {unknown}. "
            message += f"Did you mean {close[0]}?" if close else self.hint
        print(f"{self.prog}: {message}", file=sys.stderr)
        raise SystemExit(2)

    def every_option(self) -> list[str]:
        """Return the options of this parser and of its commands."""
        found = list(self._option_string_actions)
        for action in self._actions:
            if isinstance(action.choices, dict):  # commands
                found += [option for parser in action.choices.values() for option in parser._option_string_actions]
        return found


class LaunchError(RuntimeError):
    """Raised when a request cannot be carried out. The message tells the user what to do."""


@dataclass
class Job:
    """A SLURM job, with all parts of its sbatch command line."""

    name: str
    options: list[str]
    """Options of sbatch."""
    script: str
    """File name of the job's script in launch/."""
    flags: list[str]
    """Arguments of the script."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables that the script reads."""
    id: str = ""
    """Id that SLURM gave to the job. Empty before the job is submitted."""

    def command(self, *, hold: bool = False, after: str = "") -> list[str]:
        """Return the command line of sbatch.

        Args:
            hold: submit the job without starting it.
            after: id of the job that has to succeed before this job starts.
        """
        words = ["sbatch", "--parsable"]
        if hold:
            words += ["--hold"]
        if after:
            words += [f"--dependency=afterok:{after}", "--kill-on-invalid-dep=yes"]
        return [*words, *self.options, str(LAUNCH / self.script), *self.flags]

    def shell_line(self, *, hold: bool = False, after: str = "") -> str:
        """Return the sbatch command as a shell line.

        Args:
            hold: submit the job without starting it.
            after: name of the shell variable that holds the id of the job to wait for.
        """
        line = quoted_line(self.command(hold=hold, after="ID" if after else ""))
        line = line.replace("--dependency=afterok:ID", f'--dependency=afterok:"${after}"', 1)
        return "".join(f"{name}={quoted(value)} " for name, value in self.environment.items()) + line


def quoted(text: str, *, lines: bool = False) -> str:
    """Quote a text as one word of bash. Nothing in the text can end the word, even if a user pastes it into a terminal.

    Control characters are written as octal numbers, because a terminal acts on them even between quotes, for example on
    the sequence that ends a pasted text. So are line breaks, unless `lines` is true.
    """
    if all(letter.isprintable() or (lines and letter == "\n") for letter in text):
        return shlex.quote(text)
    # `!` is escaped, because the history expansion of interactive bash also expands it inside these quotes.
    kept = {byte for byte in range(32, 127) if chr(byte) not in "\\'!"}
    letters = (chr(byte) if byte in kept else f"\\{byte:03o}" for byte in text.encode("utf-8", "surrogateescape"))
    return f"$'{''.join(letters)}'"


def quoted_line(words: Sequence[str]) -> str:
    """Return a command as one line of bash."""
    return " ".join(map(quoted, words))


def log_option(folder: Path, name: str) -> str:
    """Return the option of sbatch that sets the log file of a job. SLURM replaces %j by the job's id."""
    return f"--output={str(folder).replace('%', '%%')}/{name}-%j.log"


def evaluation_job(kind: str, options: list[str], flags: list[str], output: Path) -> Job:
    """Return the job that evaluates the finished run in `output`.

    Args:
        kind: key of `evaluations`.
        options: options of sbatch.
        flags: flags of the evaluation.
        output: run folder.
    """
    command, time, script = evaluation(kind)
    own = [f"--job-name={output.name}-{kind}", log_option(output / "submitted", kind), f"--time={time}"]
    return Job(kind, own + options, script, [command, "--checkpoint", str(output), *flags])


def submit(job: Job, *, hold: bool = False, after: str = "") -> None:
    """Submit one job and set its id.

    Raises:
        LaunchError: SLURM refuses the job. The message quotes SLURM.
    """
    printed = _sbatch(job, job.command(hold=hold, after=after))
    job.id = printed.strip().splitlines()[-1].partition(";")[0]  # with several clusters, sbatch prints ID;CLUSTER


def check(job: Job) -> None:
    """Ask SLURM whether the job can run, without submitting it. SLURM does not check a job with a hold.

    Raises:
        LaunchError: SLURM refuses the job. The message quotes SLURM.
    """
    sbatch, *words = job.command()
    _sbatch(job, [sbatch, "--test-only", *words])


def _sbatch(job: Job, command: list[str]) -> str:
    """Run sbatch for a job, and return what it printed.

    Raises:
        LaunchError: SLURM refuses the job.
    """
    # A job that is submitted inside an allocation must not inherit the SLURM variables of this allocation.
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SRUN_")) or k == "SLURM_CONF"}
    done = _run(command, inherited | job.environment)
    if done.returncode:
        answer = done.stderr.strip() or f"sbatch ended with {done.returncode}"
        if "node configuration" in answer and any(word.startswith("--gpus-per-node") for word in command):
            answer += (
                "\nEach node must have the GPUs, CPUs and memory of the job. For nodes without GPUs, give --gpus 0."
            )
        raise LaunchError(f"SLURM refuses the job {job.name}: {answer}\nThe command was: {quoted_line(command)}")
    return done.stdout


def submit_chain(jobs: Sequence[Job], prepare: Callable[[], None]) -> None:
    """Submit jobs. All other jobs wait for the first job. If anything fails, cancel the jobs that were submitted.

    Args:
        jobs: jobs to submit. The other jobs start only if the first job succeeds.
        prepare: function that is called after SLURM has accepted all jobs, and before the first job can start.

    Raises:
        LaunchError: SLURM refuses a job, or does not release the first job.
    """
    submit_stages([jobs[:1], jobs[1:]], prepare)


def submit_stages(stages: Sequence[Sequence[Job]], prepare: Callable[[], None]) -> None:
    """Submit jobs in stages. If anything fails, cancel the jobs that were submitted.

    Args:
        stages: jobs of each stage. They start only if all jobs of the stage before have succeeded.
        prepare: function that is called after SLURM has accepted all jobs, and before a job can start.

    Raises:
        LaunchError: SLURM refuses a job, or does not release the jobs of the first stage.
    """
    first, *others = stages
    try:
        check(first[0])
        for job in first:
            submit(job, hold=True)
        after = ":".join(job.id for job in first)
        for stage in others:
            for job in stage:
                submit(job, after=after)
            after = ":".join(job.id for job in stage)
        prepare()
        ids = ",".join(job.id for job in first)
        done = _run(["scontrol", "release", ids])
        if done.returncode:
            raise LaunchError(f"SLURM does not release the job {ids}: {done.stderr.strip()}")
    except BaseException:
        scancel([job.id for stage in stages for job in stage if job.id])
        raise


def scancel(ids: Sequence[str]) -> None:
    """Cancel jobs. Jobs that have already ended cause no error.

    Raises:
        LaunchError: SLURM does not cancel a job. The message quotes SLURM.
    """
    if ids:
        done = _run(["scancel", *ids])
        if done.returncode:
            raise LaunchError(f"SLURM does not cancel the jobs {', '.join(ids)}: {done.stderr.strip()}")


def states(ids: Sequence[str]) -> dict[str, str]:
    """Return the state of each job as SLURM names it. For a pending job, the reason follows in parentheses.

    Raises:
        LaunchError: SLURM does not answer.
    """
    found = dict.fromkeys(ids, FORGOTTEN)
    if not ids:
        return found
    done = _run(["squeue", "--noheader", "--states=all", f"--jobs={','.join(ids)}", "--format=%i|%T|%r"])
    if done.returncode and "Invalid job id" not in done.stderr:
        raise LaunchError(f"squeue failed: {done.stderr.strip()}")
    for line in done.stdout.splitlines():
        number, state, reason = line.split("|", 2)
        found[number] = f"{state} ({reason})" if state == "PENDING" else state
    gone = [number for number in ids if found[number] == FORGOTTEN]
    if gone and shutil.which("sacct"):  # squeue forgets a job some minutes after its end, but sacct knows its state
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
        raise LaunchError(f"the command {command[0]} is not found. Run this on a machine with SLURM.") from error


def is_over(state: str) -> bool:
    return state.startswith((*FINAL_STATES, FORGOTTEN))


def read_jobs(output: Path) -> list[Job]:
    """Return the jobs that were submitted for a run.

    Raises:
        LaunchError: no job was submitted, or jobs.json cannot be read.
    """
    path = output / "submitted" / "jobs.json"
    try:
        stored = json.loads(path.read_text())
    except FileNotFoundError:
        raise LaunchError(f"{output} has no jobs, because {path} does not exist. Call `submit` first.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise LaunchError(f"cannot read {path}: {error}") from error
    try:
        known = [item.name for item in fields(Job)]  # jobs.json of another version may have additional entries
        return [Job(**{name: entry[name] for name in known}) for entry in stored["jobs"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise LaunchError(f"{path} is not a list of jobs ({type(error).__name__}: {error})") from error


def write_jobs(folder: Path, jobs: Sequence[Job]) -> None:
    """Write jobs.json into OUTPUT/submitted. Readers see either the old file or the complete new file."""
    temporary = folder / ".jobs.json.part"
    entries = [asdict(job) | {"command": job.command()} for job in jobs]
    temporary.write_text(json.dumps({"jobs": entries}, indent=1) + "\n")
    temporary.replace(folder / "jobs.json")


def read_settings(path: Path) -> dict[str, Any]:
    """Read a YAML file of settings.

    Raises:
        LaunchError: the file cannot be read, or it does not hold a mapping.
    """
    try:
        if path.stat().st_size > MAX_SETTINGS_BYTES or not path.is_file():
            raise LaunchError(
                f"{path} is not a settings file of at most {MAX_SETTINGS_BYTES} bytes. Give another file."
            )
        settings = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError, ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise LaunchError(f"cannot read {path}: {error}") from error
    if not isinstance(settings or {}, dict):
        raise LaunchError(f"the settings file {path} must hold `name: value` lines, not a {type(settings).__name__}")
    return settings or {}


def read_settings_of_run(path: Path) -> dict[str, Any]:
    """Read the config.yaml of a run, or another YAML file of settings.

    Relative SHARDS that do not exist here become absolute if they exist in the folder in which the run was started, as
    `pretrain.command_line.from_folder` does for the run.

    Raises:
        LaunchError: the file cannot be read, or it does not hold a mapping.
    """
    settings = read_settings(path)
    try:
        folder = Path(json.loads(path.with_name("machine.jsonl").read_text().splitlines()[-1])["folder"])
    except (OSError, ValueError, LookupError, TypeError):
        return settings  # not the folder of a run that was started

    def absolute(shards: Any) -> Any:
        if isinstance(shards, list):
            return [absolute(one) for one in shards]
        if isinstance(shards, dict):
            return {absolute(one): weight for one, weight in shards.items()}
        if not isinstance(shards, str) or _exists(shards) or not _exists(str(folder / shards)):
            return shards
        return str(folder / shards)

    found = settings | ({"labels": absolute(settings["labels"])} if "labels" in settings else {})
    for section, names in {"data": ("shards",), "evaluation": ("train", "val")}.items():
        if isinstance(given := settings.get(section), dict):
            found[section] = {name: absolute(value) if name in names else value for name, value in given.items()}
    return found


def _exists(shards: str) -> bool:
    """Return True if a file or folder matches a path, a glob or a brace range."""
    return Path(shards).exists() or bool(glob.glob(re.sub(r"\{[^{}]*\}", "*", shards)))


def frozen_files(config: Path | None, engine: Path, folder: Path) -> dict[str, str]:
    """Return the name and the text of each settings file that the jobs will read.

    Args:
        config: settings file of the run, or None if the jobs read the config.yaml of the run.
        engine: engine file, which accelerate takes as `--config_file`.
        folder: OUTPUT/submitted, to which the files will be copied.

    Raises:
        LaunchError: the engine file names a DeepSpeed file that does not exist.
    """
    texts = {"config.yaml": config.read_text()} if config else {}
    texts["engine.yaml"] = engine.read_text()
    settings = read_settings(engine)
    section = settings.get("deepspeed_config") or {}
    deepspeed = section.get("deepspeed_config_file")
    if deepspeed:
        if not Path(deepspeed).is_file():
            raise LaunchError(
                f"{engine} names the missing file {deepspeed}. Submit from the folder to which this path is relative."
            )
        texts["deepspeed.json"] = Path(deepspeed).read_text()
        settings["deepspeed_config"] = section | {"deepspeed_config_file": str(folder / "deepspeed.json")}
        texts["engine.yaml"] = yaml.safe_dump(settings, sort_keys=False)
    return texts
