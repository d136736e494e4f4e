"""Submit a pretraining run and its evaluations to SLURM, see how far they are, cancel them.

    python launch/slurm.py submit --config X.yaml --nodes 2 --gpus 8 [--after-pretraining probe,knn]
                                  [--every-checkpoint knn] [--dry_run] [-- FLAGS OF pretrain/run.py]
    python launch/slurm.py status OUTPUT
    python launch/slurm.py cancel OUTPUT

OUTPUT/submitted/ keeps what was submitted, and the jobs read their settings from there: the settings file, the engine
file, the jobs with their ids and whole command lines (jobs.json), and their logs.
"""

import argparse
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from followed import follow, status
from jobs import (
    EVALUATIONS,
    LAUNCH,
    Job,
    LaunchError,
    evaluation,
    fresh_folder,
    frozen,
    is_over,
    log,
    read_record,
    read_settings,
    release,
    scancel,
    states,
    submit_chain,
    write_record,
)

CPUS_PER_GPU = 8
DDP = LAUNCH.parent / "configs" / "accelerate" / "ddp.yaml"
OF_THE_CHAIN = ("--config", "--output", "--resume")
"""flags of pretrain/run.py that `submit` takes itself"""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 2 the user has something to change."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    split = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser().parse_args(arguments[:split])
    try:
        if options.command == "submit":
            submit_run(options, arguments[split + 1 :])
        else:
            {"status": status, "cancel": cancel, "follow": follow}[options.command](options.output.absolute())
    except LaunchError as error:
        print(f"slurm.py: {error}", file=sys.stderr)
        return 2
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(description="Pretraining and its evaluations as jobs of SLURM.", allow_abbrev=False)
    commands = top.add_subparsers(dest="command", required=True)
    new = commands.add_parser(
        "submit",
        help="fill and submit the scripts in launch/",
        epilog="Flags of pretrain/run.py follow after --.",
        allow_abbrev=False,
    )
    new.add_argument("--config", required=True, type=Path, metavar="FILE.yaml", help="settings of pretrain/run.py")
    new.add_argument("--output", type=Path, help="run folder; without it, a fresh one under runs/")
    new.add_argument("--resume", action="store_true", help="continue the run in --output")
    new.add_argument(
        "--accelerate", type=Path, default=DDP, metavar="FILE", help="engine (configs/accelerate/ddp.yaml)"
    )
    new.add_argument("--nodes", type=int, default=1, help="number of nodes (1)")
    new.add_argument("--gpus", type=int, default=1, help="GPUs of each node (1); 0 trains on CPUs")
    new.add_argument("--processes", type=int, help="with --gpus 0: trainers on each node (1)")
    new.add_argument("--cpus", type=int, help=f"CPUs of each node ({CPUS_PER_GPU} for each GPU)")
    new.add_argument("--mem", help="memory of each node that pretrains, as 200G")
    new.add_argument("--time", help="time limit of pretraining, as 24:00:00; evaluations have those of their scripts")
    for name in ("partition", "account", "qos"):
        new.add_argument(f"--{name}", help="of all jobs")
    new.add_argument(
        "--sbatch",
        action="append",
        default=[],
        metavar="OPTIONS",
        help="more options of sbatch for all jobs: --sbatch='--constraint=a100 --reservation=x'",
    )
    names = ",".join(EVALUATIONS)
    new.add_argument("--after-pretraining", default="", metavar=names, help="evaluate once pretraining succeeded")
    new.add_argument("--every-checkpoint", default="", metavar=names, help="evaluate each checkpoint meanwhile")
    new.add_argument("--evaluation-gpus", type=int, help="GPUs of an evaluation (1, or 0 with --gpus 0)")
    for kind in EVALUATIONS:
        new.add_argument(
            f"--{kind}-flags", default="", metavar="FLAGS", help=f"of {kind}: --{kind}-flags='--workers 2'"
        )
    new.add_argument("--dry_run", "--dry-run", action="store_true", help="show all that would be done, and stop")
    for name, meaning in (
        ("status", "jobs, steps and results of a run"),
        ("cancel", "cancel all jobs of a run"),
        ("follow", "evaluate the checkpoints that are not yet; the pretraining job does so by itself"),
    ):
        commands.add_parser(name, help=meaning).add_argument("output", type=Path, metavar="OUTPUT", help="run folder")
    return top


def submit_run(options: argparse.Namespace, flags: list[str]) -> None:
    """Freeze the settings and submit the chain of jobs, or show what that would do.

    Raises:
        LaunchError: something is missing, the folder holds another run, there is no SLURM, or SLURM refuses.
    """
    settings = read_settings(options.config)
    after, every = chosen(options.after_pretraining), chosen(options.every_checkpoint)
    check(options, settings, flags)
    fresh = Path("runs") / f"{options.config.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    output = Path(options.output or settings.get("output") or fresh).expanduser().absolute()
    check_folder(output, options.resume)
    record: dict[str, Any] = {"every_checkpoint": every, "options": evaluation_options(options), "flags": {}}
    for kind in {*after, *every}:
        own = shlex.split(getattr(options, f"{kind}_flags"))
        record["flags"][kind] = evaluation_shards(options.config, settings, flags) + own
    jobs = [pretraining(options, output, flags)]
    jobs += [evaluation(kind, record["options"], record["flags"][kind], output) for kind in after]
    if options.dry_run:
        preview(options, output, jobs, record)
        return
    if shutil.which("sbatch") is None:
        raise LaunchError(f"there is no SLURM here (no sbatch). Without it:\n\n{by_hand(options, output, flags)}")
    check_queue(output)
    with fresh_folder(output / "submitted") as folder:
        for name, text in frozen(options.config, options.accelerate, folder).items():
            (folder / name).write_text(text)
        write_record(folder, record, [])  # the first job looks for it
        submit_chain(jobs)
        try:
            write_record(folder, record, jobs)
            release(jobs)
        except BaseException:  # jobs that nobody knows of must not stay
            scancel([job.id for job in jobs if job.id])
            raise
    for job in jobs:
        print(f"job {job.id}: {job.name}")
    print(f"run folder: {output}\nhow it is: python launch/slurm.py status {shlex.quote(str(output))}")


def chosen(text: str) -> list[str]:
    """`probe,knn` as a list.

    Raises:
        LaunchError: there is no such evaluation.
    """
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in EVALUATIONS:
            raise LaunchError(f"there is no evaluation '{name}': choose from {', '.join(EVALUATIONS)}")
    return names


def check(options: argparse.Namespace, settings: dict[str, Any], flags: list[str]) -> None:
    """Raises LaunchError for what would only fail in the queue."""
    for name in OF_THE_CHAIN:
        if any(flag.partition("=")[0] == name for flag in flags):
            raise LaunchError(f"give {name} before --, to `submit` itself")
    if any(flag.partition("=")[0] == "--dry_run" for flag in flags):
        raise LaunchError("give --dry_run before --; `python pretrain/run.py --dry_run` shows what a run needs, here")
    if "data" not in settings and not values("data", flags):
        raise LaunchError(f"{options.config} names no data: give `data: SHARDS` there, or `-- --data SHARDS` here")
    if not options.accelerate.is_file():
        raise LaunchError(f"there is no engine file {options.accelerate}: see configs/accelerate/")
    for name, least in (("nodes", 1), ("gpus", 0), ("processes", 1), ("cpus", 1), ("evaluation_gpus", 0)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise LaunchError(f"--{name.replace('_', '-')} must be {least} or more, not {value}")
    if options.processes and options.gpus:
        raise LaunchError("--processes is for nodes without GPUs (--gpus 0): each GPU has one trainer")


def check_folder(output: Path, resume: bool) -> None:
    """Raises LaunchError where another run would be in the way."""
    held = any((output / part).exists() for part in ("config.yaml", "metrics.jsonl", "checkpoints"))
    if held and not resume:
        raise LaunchError(f"{output} holds another run: continue it with --resume, or choose another --output")


def check_queue(output: Path) -> None:
    """Raises LaunchError where jobs of the same folder are still in the queue."""
    if (output / "submitted" / "jobs.json").exists():
        known = states([job["id"] for job in read_record(output)["jobs"]])
        active = [f"{number} {state}" for number, state in known.items() if not is_over(state)]
        if active:
            raise LaunchError(
                f"{output} has jobs in the queue ({', '.join(active)}): wait for them, or end them with `cancel`"
            )


def values(name: str, flags: Sequence[str]) -> list[str]:
    """What flags say of a setting, in either form: `--name value` or `--name=value`."""
    found = [flag.partition("=")[2] for flag in flags if flag.startswith(f"--{name}=")]
    return found + [flags[place + 1] for place, flag in enumerate(flags[:-1]) if flag == f"--{name}"]


def evaluation_shards(config: Path, settings: dict[str, Any], flags: Sequence[str]) -> list[str]:
    """`--train SHARDS --val SHARDS` from the flags or else the file.

    Raises:
        LaunchError: they are not named; the data of pretraining need not have the labels that evaluations need.
    """
    section = settings.get("evaluation")
    arguments = []
    for name in ("train", "val"):
        shards = values(f"evaluation.{name}", flags) or (section.get(name) if isinstance(section, dict) else None)
        if not shards:
            raise LaunchError(
                f"an evaluation needs labelled shards: give `evaluation: {{train: SHARDS, val: SHARDS}}` in {config}, "
                "or `-- --evaluation.train SHARDS --evaluation.val SHARDS` here"
            )
        for pattern in [shards] if isinstance(shards, str) else shards:
            arguments += [f"--{name}", str(pattern)]
    return arguments


def common_options(options: argparse.Namespace) -> list[str]:
    """Options of sbatch that all jobs share."""
    given = [f"--{name}={value}" for name in ("partition", "account", "qos") if (value := getattr(options, name))]
    return given + [word for text in options.sbatch for word in shlex.split(text)]


def pretraining(options: argparse.Namespace, output: Path, flags: list[str]) -> Job:
    """The job that pretrains."""
    submitted = output / "submitted"
    cpus = options.cpus or CPUS_PER_GPU * max(options.gpus, 1)
    wanted = [f"--job-name={output.name}", log(submitted, "pretrain"), f"--nodes={options.nodes}"]
    wanted += [f"--cpus-per-task={cpus}", *[f"--gpus-per-node={options.gpus}"] * bool(options.gpus)]
    wanted += [f"--{name}={value}" for name in ("mem", "time") if (value := getattr(options, name))]
    own = ["--config", str(submitted / "config.yaml"), "--output", str(output), *["--resume"] * options.resume]
    environment = {"TESSERA_ENGINE": str(submitted / "engine.yaml")}
    if options.processes:
        environment["TESSERA_PROCESSES_PER_NODE"] = str(options.processes)
    return Job("pretrain", wanted + common_options(options), "pretrain.sbatch", own + flags, environment)


def evaluation_options(options: argparse.Namespace) -> list[str]:
    """Options of sbatch for an evaluation: one node, and of its CPUs the share of its GPUs."""
    gpus = min(options.gpus, 1) if options.evaluation_gpus is None else options.evaluation_gpus
    cpus = CPUS_PER_GPU * max(gpus, 1)
    if options.cpus:
        cpus = max(options.cpus * max(gpus, 1) // max(options.gpus, 1), 1)
    return [f"--cpus-per-task={cpus}", *[f"--gpus-per-node={gpus}"] * bool(gpus), *common_options(options)]


def preview(options: argparse.Namespace, output: Path, jobs: list[Job], record: dict[str, Any]) -> None:
    """Print what `submit` would do, as lines for a shell."""
    folder = output / "submitted"
    print(f"# the settings that the jobs will read\nmkdir -p {shlex.quote(str(folder))}")
    for name, text in frozen(options.config, options.accelerate, folder).items():
        print(f"cat > {shlex.quote(str(folder / name))} <<'END OF FILE'\n{text.rstrip()}\nEND OF FILE")
    print("# the jobs")
    hold = len(jobs) > 1  # nothing starts before all are there
    for job in jobs:
        print(f"{job.name}=$({job.shown(hold=hold and job.after is None)})")
    if hold:
        print('scontrol release "$pretrain"')
    for kind in record["every_checkpoint"]:
        print("# and of each checkpoint, by the pretraining job:")
        print(f"#     {evaluation(kind, record['options'], record['flags'][kind], output, 'step-XXXXXXXX').shown()}")


def by_hand(options: argparse.Namespace, output: Path, flags: list[str]) -> str:
    """What starts the same pretraining without SLURM."""
    trainers = options.nodes * (options.gpus or options.processes or 1)
    words = ["accelerate", "launch", "--config_file", str(options.accelerate), "--num_processes", str(trainers)]
    before = ""
    if options.nodes > 1:
        before = f"on each node, with its RANK from 0 to {options.nodes - 1} and the name of the first as FIRST_NODE:\n"
        words += ["--num_machines", str(options.nodes), "--machine_rank", "RANK"]
        words += ["--main_process_ip", "FIRST_NODE", "--main_process_port", "29500"]
        words += ["--deepspeed_multinode_launcher", "standard"]
    words += [str(LAUNCH.parent / "pretrain" / "run.py"), "--config", str(options.config), "--output", str(output)]
    return before + shlex.join([*words, *["--resume"] * options.resume, *flags])


def cancel(output: Path) -> None:
    """Cancel all jobs of a run."""
    cancelled: list[str] = []
    for _ in range(2):  # until it ends the pretraining job submits others
        known = states([job["id"] for job in read_record(output)["jobs"]])
        active = [number for number, state in known.items() if not is_over(state) and number not in cancelled]
        scancel(active)
        cancelled += active
    print(f"cancelled: {', '.join(cancelled)}" if cancelled else f"no job of {output} is in the queue")


if __name__ == "__main__":
    sys.exit(main())
