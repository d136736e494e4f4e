"""The cells of a comparison as SLURM jobs: the trials, then a job for each training, then one that writes the result.

The jobs run launch/evaluation.sbatch with `tessera compare --only CELL`. If SLURM stops a job, its training saves a
checkpoint, and the job is requeued. OUTPUT/submitted/ holds the logs, and jobs.json for `tessera slurm status` and
`cancel`.
"""

import shutil
from collections.abc import Mapping, Sequence

from tessera.extras.compare.cells import CompareError, is_done, measure
from tessera.extras.compare.plan import TRIALS, CompareSettings, other_cells, read_plan, write_plan
from tessera.launch.jobs import Job, LaunchError, log_option, quoted, submit_stages, write_jobs
from tessera.launch.slurm import check_queue, split_words


def submit(
    settings: CompareSettings, words: Mapping[str, Sequence[str]], argv: Sequence[str], launcher: Sequence[str]
) -> None:
    """Submit all trainings that are not done.

    Raises:
        CompareError: SLURM is not installed, or refuses a job, or jobs of the output folder are in the queue.
    """
    try:
        _submit(settings, words, argv, launcher)
    except LaunchError as error:
        raise CompareError(str(error)) from error


def _submit(
    settings: CompareSettings, words: Mapping[str, Sequence[str]], argv: Sequence[str], launcher: Sequence[str]
) -> None:
    if shutil.which("sbatch") is None:
        raise LaunchError("SLURM is not installed here (no sbatch). Start on a machine with SLURM, or remove --jobs.")
    check_queue(settings.output)
    plan = read_plan(settings, words)
    planned = plan is not None and {*words} <= plan.steps.keys()
    if not planned and settings.steps is not None:
        write_plan(settings, words, measure(settings, words, launcher))  # nothing is measured
        planned = True
    command = [*launcher, "compare", *without_jobs(argv)]
    names = [f"{name}-{seed}" for seed in range(settings.seeds) for name in words]
    names += [f"{name}-{seed}" for name, seed in other_cells(settings)]
    left = [name for name in names if not is_done(settings.output / name)]
    stages = [[_job(TRIALS, [*command, "--only", TRIALS], settings)]] if not planned else []
    stages += [[_job(name, [*command, "--only", name], settings) for name in left]] if left else []
    stages += [[_job("result", command, settings)]]
    jobs = [job for stage in stages for job in stage]
    folder = settings.output / "submitted"
    folder.mkdir(exist_ok=True)
    submit_stages(stages, lambda: write_jobs(folder, jobs))
    for job in jobs:
        print(f"job {job.id}: {job.name}")
    print(f"their progress: tessera slurm status {quoted(str(settings.output))}")


def _job(name: str, command: list[str], settings: CompareSettings) -> Job:
    """Return the job that runs `tessera COMMAND`. Options of the user come last, so that they take precedence."""
    folder = (settings.output / "submitted").absolute()
    own = [f"--job-name={settings.output.name}-{name}", log_option(folder, name), "--signal=USR1@300"]
    return Job(name, [*own, *split_words("--jobs", settings.jobs or "")], "evaluation.sbatch", command)


def without_jobs(argv: Sequence[str]) -> list[str]:
    """Return a command line without --jobs and its value."""
    kept, skip = list[str](), False
    for word in argv:
        if word.partition("=")[0] != "--jobs" and not skip:
            kept.append(word)
        skip = word == "--jobs"
    return kept
