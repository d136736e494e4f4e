"""Submit a pretraining run and its evaluations to SLURM, show their progress, and cancel them.

    tessera slurm submit --config X.yaml --nodes 2 --gpus 8 [--after-pretraining probe,knn,finetune]
                         [--dry_run] [-- FLAGS OF tessera pretrain]
    tessera slurm status OUTPUT
    tessera slurm cancel OUTPUT

The jobs read copies of the settings file and of the engine file, which are in the folder OUTPUT/submitted/. This folder
also holds the logs of the jobs, and jobs.json with the id and the command line of each job. An engine file is a file
that accelerate takes as `--config_file`, such as configs/accelerate/zero2.yaml.
"""

import argparse
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tessera.launch.jobs import (
    Evaluation,
    Job,
    LaunchError,
    OneLineParser,
    engine_file,
    evaluation,
    evaluation_job,
    evaluations,
    frozen_files,
    is_over,
    log_option,
    preset_file,
    quoted,
    read_jobs,
    read_settings,
    read_settings_of_run,
    scancel,
    states,
    submit_chain,
    write_jobs,
)
from tessera.launch.status import status

CPUS_PER_GPU = 12
"""A loader worker reads about 250 images/s for DINO with ViT-S/16, of which an H200 trains 3,001 images/s at most: 11
workers, and the training process (docs/performance.md)."""
FLAGS_OF_SUBMIT = ("--config", "--output", "--resume")
"""Flags of `tessera pretrain` that must be given as options of `submit`, before the separator `--`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code: 0 on success, 2 if the user has to change something."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    split = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser().parse_args(arguments[:split])
    try:
        if options.command == "submit":
            submit_run(options, arguments[split + 1 :])
        else:
            {"status": status, "cancel": cancel}[options.command](options.output.absolute())
    except LaunchError as error:
        print(f"tessera slurm: {error}", file=sys.stderr)
        return 2
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    top = OneLineParser(
        "tessera slurm", description="Run pretraining and its evaluations as SLURM jobs.", allow_abbrev=False
    )
    commands = top.add_subparsers(dest="command", required=True)
    add_submit_options(
        commands.add_parser(
            "submit",
            help="submit pretraining and its evaluations",
            epilog="Flags of `tessera pretrain` follow after --.",
            allow_abbrev=False,
        )
    )
    for name, meaning in (
        ("status", "show the current step, the jobs and the results of a run"),
        ("cancel", "cancel all jobs of a run"),
    ):
        commands.add_parser(name, help=meaning).add_argument("output", type=Path, metavar="OUTPUT", help="run folder")
    return top


def add_submit_options(new: argparse.ArgumentParser) -> None:
    """Add the options of the command `submit`."""
    new.add_argument(
        "--config", type=preset_file, metavar="FILE.yaml", help="settings file of the run, or name of a preset"
    )
    new.add_argument("--output", type=Path, help="run folder (default: a new folder under runs/)")
    new.add_argument(
        "--resume",
        nargs="?",
        const=True,
        metavar="RUN",
        help="continue the run in --output, or the run RUN. It keeps its settings: only a changed --config and flags "
        "after -- override them",
    )
    new.add_argument(
        "--accelerate",
        type=engine_file,
        default="ddp",
        metavar="ENGINE",
        help="name or path of an engine file, such as zero2 (default: ddp)",
    )
    new.add_argument(
        "--nodes",
        type=node_range,
        default="1",
        metavar="N or MIN-MAX",
        help="number of nodes (default: 1). The range 2-4 starts with as many nodes as are free, and continues with "
        "fewer after one was lost",
    )
    new.add_argument(
        "--gpus",
        type=int,
        help="GPUs per node, whereas --gpus of `tessera pretrain --dry_run` counts the GPUs of all nodes; 0 trains on "
        "CPUs (default: 1, or 0 with --processes)",
    )
    new.add_argument("--processes", type=int, help="trainers per node without GPUs (default: 1)")
    new.add_argument("--cpus", type=int, help=f"CPUs per node (default: {CPUS_PER_GPU} per GPU)")
    new.add_argument("--mem", help="memory per node for pretraining, such as 200G")
    new.add_argument("--time", help="time limit of pretraining, such as 24:00:00")
    for name in ("partition", "account", "qos"):
        new.add_argument(f"--{name}", help=f"SLURM {name} of all jobs")
    new.add_argument(
        "--sbatch",
        action="append",
        default=[],
        metavar="OPTIONS",
        help="further options of sbatch for all jobs, such as --sbatch='--constraint=a100 --reservation=x'",
    )
    new.add_argument(
        "--setup",
        metavar="LINES",
        help="shell lines at the start of each job, such as --setup='source venv/bin/activate' or "
        "--setup='module load cuda; conda activate tessera'",
    )
    new.add_argument(
        "--python",
        metavar="COMMAND",
        help="command that starts Python in each job, such as --python='apptainer exec --nv tessera.sif python'",
    )
    names = ",".join(evaluations())
    new.add_argument("--after-pretraining", default="", metavar=names, help="evaluations to run after pretraining")
    new.add_argument("--evaluation-gpus", type=int, help="GPUs per evaluation (default: 1, or 0 with --gpus 0)")
    for kind in evaluations():
        new.add_argument(
            f"--{kind}-flags",
            default="",
            metavar="FLAGS",
            help=f"flags of {kind}, such as --{kind}-flags='--workers 2'",
        )
    new.add_argument("--dry_run", "--dry-run", action="store_true", help="print the commands instead of running them")


def node_range(text: str) -> str:
    """Return a number of nodes or a range of it, such as `2-4`, as sbatch takes it.

    Raises:
        argparse.ArgumentTypeError: it is neither.
    """
    found = re.fullmatch(r"([1-9][0-9]*)(?:-([1-9][0-9]*))?", text)
    if found is None or (found[2] and int(found[1]) > int(found[2])):
        raise argparse.ArgumentTypeError(
            f"{text} is no number of nodes. Give a number, such as 2, or a range, such as 2-4"
        )
    return text


def submit_run(options: argparse.Namespace, flags: list[str]) -> None:
    """Copy the settings and submit all jobs of a run. With `--dry_run`, only print the commands.

    Raises:
        LaunchError: an option is missing or wrong, the folder holds a run, SLURM is not installed, or SLURM
            refuses a job.
    """
    if options.gpus is None:
        options.gpus = 0 if options.processes else 1
    if options.resume not in (None, True):
        run = Path(options.resume)
        if options.output and options.output.expanduser().resolve() != run.expanduser().resolve():
            raise LaunchError(
                f"--resume {run} and --output {options.output} contradict each other. To continue {run}, leave "
                f"--output out. To start a new run from its weights, leave --resume out and give -- --init_from {run}."
            )
        options.output, options.resume = run, True
    settings, kept = settings_of_run(options)
    after = evaluation_names(options.after_pretraining)
    check_options(options, settings, flags)
    default = Path("runs") / f"{options.config.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    output = Path(options.output or settings.get("output") or default).expanduser().absolute()
    check_folder(output, options.resume)
    given = [] if kept else ["--config", str(options.config)]
    again = ["--output", str(output), "--resume"] if options.resume else []
    check_settings(options.config, [*given, *again, *flags])
    jobs = [pretraining_job(options, output, flags, kept=kept)]
    for kind in after:
        name = f"{kind}-flags"
        own = split_words(f"--{name}", getattr(options, name.replace("-", "_")))
        shards = evaluation_shards(options.config, settings, flags, own)
        if evaluation(kind).script == "pretrain.sbatch":
            check_own_run(kind, output / evaluation(kind).command, own)
        reading = reading_flags(evaluation(kind), settings, flags, own)
        jobs.append(evaluation_job(kind, evaluation_options(options), [*shards, *reading, *own], output))
    for job in jobs:
        job.environment |= environment_of_jobs(options)
    texts = frozen_files(None if kept else options.config, options.accelerate, output / "submitted")
    if options.dry_run:
        print_plan(output, jobs, texts)
        return
    if shutil.which("sbatch") is None:
        raise LaunchError("SLURM is not installed here (no sbatch). Run this command on a machine with SLURM.")
    check_queue(output)
    folder = output / "submitted"

    def prepare() -> None:
        """Write the files that the jobs read, and jobs.json, which the command `cancel` also needs."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, text in texts.items():
                (folder / name).write_text(text)
            write_jobs(folder, jobs)
        except OSError as error:
            raise LaunchError(f"cannot write to {folder}: {error.strerror}. Choose another --output.") from error

    submit_chain(jobs, prepare)
    for job in jobs:
        print(f"job {job.id}: {job.name}")
    print(f"run folder: {output}\nits progress: tessera slurm status {quoted(str(output))}")


def settings_of_run(options: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """Return the settings of the run, and True if the jobs need no other file than the config.yaml of the run.

    A run that continues keeps its settings, also those that flags gave to earlier jobs. The settings file overrides
    those that it has, unless it is the file of the last submission.

    Raises:
        LaunchError: there is no settings file, or it cannot be read.
    """
    settings = {} if options.config is None else read_settings(options.config)
    output = options.output or settings.get("output")
    own = Path(output or "").expanduser() / "config.yaml"
    if not (options.resume and output and own.exists()):
        if options.config is None:
            missing = f"{output} holds no run to continue" if output else "submit needs the settings of the run"
            raise LaunchError(f"{missing}. Give --config FILE.yaml, or --config PRESET.")
        return settings, False
    saved, last = read_settings_of_run(own), own.parent / "submitted" / "config.yaml"
    if options.config is None or (last.exists() and read_settings(last) == settings):
        options.config = own
        print(f"# settings: {quoted(str(own))}, and the flags after --")
        return saved, True
    print(f"# settings: {quoted(str(own))}, {quoted(str(options.config))} over it, and the flags after --")
    for name in ("data", "evaluation"):  # a file that changes one setting of a section, and is no mixture, keeps others
        old, new = saved.get(name), settings.get(name)
        if isinstance(old, dict) and isinstance(new, dict) and new.keys() & old.keys():
            settings = settings | {name: old | new}
    return saved | settings, False


def evaluation_names(text: str) -> list[str]:
    """Split a comma-separated list of evaluations, such as `probe,knn`, into names.

    Raises:
        LaunchError: the list names an unknown evaluation.
    """
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        evaluation(name)
    return names


def check_options(options: argparse.Namespace, settings: dict[str, Any], flags: list[str]) -> None:
    """Check options and flags before submission, because a job may wait for days before it can report a mistake.

    Raises:
        LaunchError: an option or a flag is missing, misplaced or out of range.
    """
    for name in FLAGS_OF_SUBMIT:
        if any(flag.partition("=")[0] == name for flag in flags):
            raise LaunchError(f"{name} is an option of `submit`. Give {name} before the separator `--`.")
    if any(flag.partition("=")[0] == "--dry_run" for flag in flags):
        raise LaunchError(
            "--dry_run is an option of `submit`. Give --dry_run before the separator `--`. To see what a run needs, "
            "call `tessera pretrain --dry_run`."
        )
    if "data" not in settings and not (flag_values("data", flags) or flag_values("data.shards", flags)):
        raise LaunchError(f"{options.config} names no data. Add `data: SHARDS` there, or give `-- --data SHARDS`.")
    if not options.accelerate.is_file():
        raise LaunchError(f"there is no engine file {options.accelerate}. Choose a file of configs/accelerate/.")
    if "-" in options.nodes and "parallelism_config" in read_settings(options.accelerate):
        raise LaunchError(
            f"{options.accelerate} sets the number of process groups (HSDP), which --nodes {options.nodes} leaves "
            "open. Give one number of nodes, or --accelerate fsdp2."
        )
    for name, least in (("gpus", 0), ("processes", 1), ("cpus", 1), ("evaluation_gpus", 0)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise LaunchError(f"--{name.replace('_', '-')} is {value}. It must be {least} or more.")
    if options.processes and options.gpus:
        raise LaunchError(
            "--processes is only for nodes without GPUs (--gpus 0), because each GPU has exactly one trainer. Remove "
            "--processes."
        )


CHECK = """
import os
import sys
from tessera.data.shards import ShardError
from tessera.data.shards.open import expand
from tessera.data.shards.remote import is_remote
from tessera.pretrain.command_line import load
from tessera.runtime.user_error import UserError

try:
    shards = load(sys.argv[1:]).data.shards
    for one in shards if isinstance(shards, dict) else [shards]:
        try:
            missing = [path for path in expand(one) if not (is_remote(path) or os.path.exists(path))]
        except ShardError as error:
            missing = [str(error)]
        if missing:
            print(f"this machine does not have all data of the run: {missing[0]}")
except UserError as error:
    sys.exit(f"settings: {error}")
"""
"""Program that checks the settings of a run. It needs torch, which the other commands of this module do without."""


def check_settings(config: Path, flags: Sequence[str]) -> None:
    """Check the settings of a run as `tessera pretrain` does. Print a warning if this machine does not have the data.

    Without an installation of torch on this machine, nothing is checked, and a warning is printed. `flags` are those of
    `tessera pretrain`.

    Raises:
        LaunchError: a setting is unknown or has a wrong value.
    """
    words = [sys.executable, "-c", CHECK, *flags]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    message = done.stderr.strip()
    if done.returncode and message.startswith("settings: "):
        raise LaunchError(f"{config} or the flags after -- are wrong. {message.removeprefix('settings: ')}")
    warning = done.stdout.strip() if done.returncode == 0 else f"the settings were not checked: {message[-500:]}"
    if warning:
        print(f"tessera slurm: {warning}", file=sys.stderr)


def check_folder(output: Path, resume: bool) -> None:
    """Raise `LaunchError` if a new run would overwrite another run."""
    occupied = any((output / part).exists() for part in ("config.yaml", "metrics.jsonl", "checkpoints"))
    if occupied and not resume:
        raise LaunchError(f"{output} holds a run. Continue it with --resume, or choose another --output.")


def check_own_run(kind: str, folder: Path, own: Sequence[str]) -> None:
    """Raise `LaunchError` if the job of an evaluation that is a run of its own would find an earlier run there."""
    given = {word.partition("=")[0] for word in own}
    if (folder / "config.yaml").exists() and not given & {"--resume", "--overwrite", "--output"}:
        raise LaunchError(
            f"{folder} holds a run of an earlier {kind}. Continue it with --{kind}-flags=--resume, delete it with "
            f"--{kind}-flags=--overwrite, or leave {kind} out of --after-pretraining."
        )


def check_queue(output: Path) -> None:
    """Raise `LaunchError` if jobs of the run folder are still in the queue."""
    if (output / "submitted" / "jobs.json").exists():
        known = states([job.id for job in read_jobs(output)])
        active = [f"{number} {state}" for number, state in known.items() if not is_over(state)]
        if active:
            raise LaunchError(
                f"{output} has jobs in the queue ({', '.join(active)}). Wait until they end, or end them with `cancel`."
            )


def flag_values(name: str, flags: Sequence[str]) -> list[str]:
    """Return all values of the flag `name` in `flags`. The forms are `--name VALUE ...` and `--name=VALUE`."""
    found, current = [], ""
    for word in flags:
        if word.startswith("--"):
            current, equals, value = word.partition("=")
            found += [value] if equals and current == f"--{name}" else []
        elif current == f"--{name}":
            found.append(word)
    return found


def evaluation_shards(config: Path, settings: dict[str, Any], flags: Sequence[str], own: Sequence[str]) -> list[str]:
    """Return `--train SHARDS --val SHARDS` from the flags, or else from the settings file.

    If the `own` flags of the evaluation contain --train or --val, this set is left out. If only the test set is given,
    the result also contains the training set of the run. The evaluation checks that this set has labels.

    Raises:
        LaunchError: neither the flags nor the settings file name the shards.
    """
    section = settings.get("evaluation")
    section = section if isinstance(section, dict) else {}
    arguments = []
    for name in ("train", "val"):
        if flag_values(name, own):
            continue
        shards = flag_values(f"evaluation.{name}", flags) or section.get(name)
        if name == "train" and not shards and (section.get("val") or flag_values("evaluation.val", flags)):
            shards = pretraining_shards(settings, flags)
        if not shards:
            raise LaunchError(
                f"an evaluation needs labelled shards. Add `evaluation: {{train: SHARDS, val: SHARDS}}` to {config}, "
                "or give `-- --evaluation.train SHARDS --evaluation.val SHARDS`."
            )
        patterns = [shards] if isinstance(shards, str) else shards
        if not isinstance(patterns, list) or not all(isinstance(pattern, str) for pattern in patterns):
            raise LaunchError(f"evaluation.{name} in {config} must be SHARDS or a list of SHARDS")
        for pattern in patterns:
            arguments += [f"--{name}", pattern]
    return arguments


def reading_flags(kind: Evaluation, settings: dict[str, Any], flags: Sequence[str], own: Sequence[str]) -> list[str]:
    """Return the flags by which an evaluation takes images and labels from samples as the run does.

    A flag that is among the `own` flags of the evaluation is left out.
    """
    section = settings.get("data")
    section = section if isinstance(section, dict) else {}
    arguments = []
    for name in ("labels", "data.image", "data.label", "data.pages", "data.stages"):
        values = flag_values(name, flags) or (settings if name == "labels" else section).get(name.removeprefix("data."))
        values = [values] if isinstance(values, str) else values
        # a run of its own has the flags of a run
        here = name if kind.script == "pretrain.sbatch" else name.removeprefix("data.")
        if isinstance(values, list) and not flag_values(here, own):
            arguments += [f"--{here}", *(values if name == "data.stages" else values[-1:])]
    return arguments


def split_words(name: str, text: str) -> list[str]:
    """Split the value of the option `name` into words as a shell does.

    Raises:
        LaunchError: a quote is not closed.
    """
    try:
        return shlex.split(text)
    except ValueError as error:
        raise LaunchError(f"{name}={text} is not a list of words: {error}. Quote each word as in a shell.") from error


def pretraining_shards(settings: dict[str, Any], flags: Sequence[str]) -> Any:
    """Return the SHARDS of the run from the flags, or else from the settings file. Return None for a mixture."""
    given = flag_values("data", flags) or flag_values("data.shards", flags) or settings.get("data")
    given = given.get("shards") if isinstance(given, dict) else given
    return None if isinstance(given, dict) else given


def environment_of_jobs(options: argparse.Namespace) -> dict[str, str]:
    """Return the environment variables with which each job finds its Python."""
    given = {"TESSERA_PROLOGUE": options.setup, "TESSERA_PYTHON": options.python}
    return {name: value for name, value in given.items() if value}


def common_options(options: argparse.Namespace) -> list[str]:
    """Return the options of sbatch that all jobs share."""
    given = [f"--{name}={value}" for name in ("partition", "account", "qos") if (value := getattr(options, name))]
    return given + [word for text in options.sbatch for word in split_words("--sbatch", text)]


def pretraining_job(options: argparse.Namespace, output: Path, flags: list[str], *, kept: bool) -> Job:
    """Return the pretraining job, with its sbatch options and its flags of `tessera pretrain`.

    `kept`: the run reads its own config.yaml.
    """
    submitted = output / "submitted"
    cpus = options.cpus or CPUS_PER_GPU * max(options.gpus, 1)
    wanted = [f"--job-name={output.name}", log_option(submitted, "pretrain"), f"--nodes={options.nodes}"]
    wanted += [f"--cpus-per-task={cpus}"]
    if options.gpus:
        wanted += [f"--gpus-per-node={options.gpus}"]
    wanted += [f"--{name}={value}" for name in ("mem", "time") if (value := getattr(options, name))]
    own = [] if kept else ["--config", str(submitted / "config.yaml")]
    own += ["--output", str(output), *(["--resume"] if options.resume else [])]
    environment = {"TESSERA_ENGINE": str(submitted / "engine.yaml")}
    if options.processes:
        environment["TESSERA_PROCESSES_PER_NODE"] = str(options.processes)
    return Job("pretrain", wanted + common_options(options), "pretrain.sbatch", own + flags, environment)


def evaluation_options(options: argparse.Namespace) -> list[str]:
    """Return the options of sbatch for evaluations. The number of CPUs is proportional to the number of GPUs."""
    gpus = min(options.gpus, 1) if options.evaluation_gpus is None else options.evaluation_gpus
    cpus = CPUS_PER_GPU * max(gpus, 1)
    if options.cpus:
        cpus = max(options.cpus * max(gpus, 1) // max(options.gpus, 1), 1)
    wanted = [f"--cpus-per-task={cpus}"]
    if gpus:
        wanted += [f"--gpus-per-node={gpus}"]
    return wanted + common_options(options)


def print_plan(output: Path, jobs: list[Job], texts: dict[str, str]) -> None:
    """Print the shell commands that have the effect of the command `submit`. `texts` are the files that it writes."""
    folder = output / "submitted"
    print(f"# the settings that the jobs will read\nmkdir -p {quoted(str(folder))}")
    for name, text in texts.items():
        print(f"printf %s {quoted(text, lines=True)} > {quoted(str(folder / name))}")
    print("# the jobs")
    first, *others = jobs
    print(f"pretrain=$({first.shell_line(hold=True)})")
    for job in others:
        print(f"{job.name.replace('-', '_')}=$({job.shell_line(after='pretrain')})")
    print('scontrol release "$pretrain"')


def cancel(output: Path) -> None:
    """Cancel all jobs of a run that have not ended."""
    known = states([job.id for job in read_jobs(output)])
    active = [number for number, state in known.items() if not is_over(state)]
    scancel(active)
    print(f"cancelled: {', '.join(active)}" if active else f"no job of {output} is in the queue")


if __name__ == "__main__":
    sys.exit(main())
