"""The sbatch scripts, run by bash with fake SLURM commands."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tessera.data.workers import free_cores
from tessera.runtime import machine
from tests.installed import needs_extra
from tests.launch.conftest import HARD, ROOT, StandIns

# runs code of the scripts, records calls of modules (`python -m`), and writes a checkpoint if $SAVES is set
PYTHON = """#!/usr/bin/env bash
[[ $1 == -c ]] && exec {python} "$@"
shift
if [[ -n $SAVES && $1 == tessera && $2 != slurm ]]; then
    mkdir -p "$SAVES/checkpoints/step-$(date +%s%N)" && touch "$SAVES/config.yaml"
fi
exec "$(dirname "$0")/called" "$@"
"""
# runs the command for each node in turn; the exit code is the largest one, as for srun
SRUN = """#!/usr/bin/env bash
echo "${@:1:4}" >> "$(dirname "$0")/srun.log"
while [[ $1 == --* ]]; do shift; done
code=0
for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do
    SLURM_NODEID=$node SLURMD_NODENAME=node$node "$@"
    last=$?
    ((code = last > code ? last : code))
done
exit $code
"""


class Script:
    """A script in launch/, run as a job."""

    def __init__(self, name: str, commands: StandIns, folder: Path) -> None:
        self.path, self.commands, self.folder = ROOT / "launch" / name, commands, folder
        commands.add("python", PYTHON.format(python=sys.executable))
        commands.add("srun", SRUN)
        commands.add("sleep", "#!/bin/sh\nexit 1\n")
        commands.answer({"scontrol show": [(0, "nodeA\nnodeB\n", "")]})

    def run(self, *flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
        job = {
            "SLURM_JOB_ID": "1234567", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[A-B]",
            "SLURM_CPUS_PER_TASK": "12", "SLURM_GPUS_ON_NODE": "4",
        }  # fmt: skip
        return subprocess.run(
            ["bash", self.path, *flags], cwd=self.folder, capture_output=True, text=True, timeout=60,
            env=self.commands.environment | job | environment,
        )  # fmt: skip

    def called(self, module: str) -> list[dict]:
        """Return the calls of a module of the project."""
        return [call for call in self.commands.calls("called") if call["argv"][0] == module]

    def trained(self) -> list[dict]:
        """Return the calls of the command that starts the trainers."""
        return [call for call in self.called("tessera") if call["argv"][1] != "slurm"]

    def requeued(self) -> list[list[str]]:
        """Return the calls of scontrol that return the job to the queue."""
        return [call["argv"] for call in self.commands.calls("scontrol") if call["argv"][0] == "requeue"]


@pytest.fixture
def script(stand_ins: Callable[..., StandIns], tmp_path: Path) -> Callable[[str], Script]:
    commands = stand_ins("called", "scontrol")
    return lambda name: Script(name, commands, tmp_path)


@pytest.fixture
def pretrain(script: Callable[[str], Script]) -> Script:
    return script("pretrain.sbatch")


def value(argv: list[str], name: str) -> str:
    return argv[argv.index(name) + 1]


def after(word: str, argv: list[str]) -> list[str]:
    return argv[argv.index(word) + 1 :]


def test_flags_are_passed_unchanged(pretrain: Script) -> None:
    done = pretrain.run(*HARD, "--output", "a $folder's")
    assert done.returncode == 0, done.stderr
    first, second = pretrain.trained()
    for call in (first, second):
        assert after("pretrain", call["argv"]) == [*HARD, "--output", "a $folder's"]
    for call in pretrain.called("tessera.launch.check_node"):
        assert after("--", call["argv"]) == [*HARD, "--output", "a $folder's"]
    assert (pretrain.folder / "a $folder's").is_dir()


def test_evaluation_flags_are_passed_unchanged(script: Callable[[str], Script]) -> None:
    evaluation = script("evaluation.sbatch")
    done = evaluation.run("few_shot", *HARD, SLURM_JOB_NUM_NODES="1")
    assert done.returncode == 0, done.stderr
    (call,) = evaluation.trained()
    assert after("few_shot", call["argv"]) == HARD
    assert value(call["argv"], "--num_processes") == "4"
    (check,) = evaluation.called("tessera.launch.check_node")
    assert after("few_shot", check["argv"]) == HARD


def test_the_prologue_chooses_python(script: Callable[[str], Script], tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "python").write_text("#!/bin/sh\necho the own python >> own.log\n")
    (tmp_path / "own" / "python").chmod(0o755)
    for name, flags in (("pretrain.sbatch", []), ("evaluation.sbatch", ["knn"])):
        (tmp_path / "own.log").unlink(missing_ok=True)
        assert script(name).run(*flags, TESSERA_PROLOGUE=f"PATH='{tmp_path}/own':$PATH").returncode == 0
        assert set((tmp_path / "own.log").read_text().splitlines()) == {"the own python"}
        assert not script(name).commands.calls("called")


@needs_extra("finetune")
def test_fine_tuning_is_a_training_job(pretrain: Script) -> None:
    flags = ["--checkpoint", "a run", "--train", "t.tar"]
    done = pretrain.run("finetune", *flags, "--val", "v.tar", *HARD)
    assert done.returncode == 0, done.stderr
    folder = pretrain.folder / "a run" / "finetune"
    for call in pretrain.trained():
        given = ["--init_from", "a run", "--data", "t.tar", "--evaluation.val", "v.tar", *HARD]
        assert after("pretrain", call["argv"]) == ["--method", "finetune", *given, "--output", str(folder)]
    assert len(pretrain.trained()) == 2
    (folder / "config.yaml").touch()
    assert pretrain.run("finetune", *flags, "--val", "v.tar", SLURM_RESTART_COUNT="1").returncode == 0
    assert pretrain.trained()[-1]["argv"][-1] == "--resume"
    refused = pretrain.run("finetune", *flags)
    assert (refused.returncode, refused.stderr.splitlines()[-1][:34]) == (2, "pretrain.sbatch: --val is missing.")


def test_one_launcher_on_each_node(pretrain: Script) -> None:
    assert pretrain.run("--method", "mae").returncode == 0
    for rank, call in enumerate(pretrain.trained()):
        argv = call["argv"]
        assert value(argv, "--machine_rank") == str(rank)
        assert value(argv, "--num_machines") == "2"
        assert value(argv, "--num_processes") == "8"
        assert value(argv, "--main_process_ip") == "nodeA"
        assert value(argv, "--main_process_port") == "24567"
        assert value(argv, "--config_file") == "ddp"
        assert call["environment"]["OMP_NUM_THREADS"] == "3"
        assert call["ignores"] == ["SIGTERM", "SIGUSR1"]  # until the trainers listen
        assert argv[-4:] == ["--method", "mae", "--output", "runs/slurm-1234567"]
    assert len(pretrain.trained()) == 2


def test_each_start_takes_the_nodes_that_the_job_has(pretrain: Script) -> None:
    """SLURM counts one task for the range 1-2, and srun would start the launcher of one node."""
    script = (ROOT / "launch" / "pretrain.sbatch").read_text()
    assert "#SBATCH --ntasks" not in script  # sbatch would take the smallest number of nodes
    for nodes in (2, 1):
        assert pretrain.run("--output", "run", SLURM_JOB_NUM_NODES=str(nodes), SLURM_NTASKS="1").returncode == 0
        assert value(pretrain.trained()[-1]["argv"], "--num_processes") == str(4 * nodes)
        for line in (pretrain.commands.folder / "srun.log").read_text().splitlines()[-2:]:
            assert line.startswith(f"--nodes={nodes} --ntasks={nodes} --ntasks-per-node=1 ")


def test_engine_and_processes_from_the_environment(pretrain: Script) -> None:
    flags = {"TESSERA_ENGINE": "an engine.yaml", "TESSERA_PROCESSES_PER_NODE": "3", "SLURM_GPUS_ON_NODE": ""}
    assert pretrain.run(**flags).returncode == 0
    argv = pretrain.trained()[0]["argv"]
    assert value(argv, "--config_file") == "an engine.yaml"
    assert value(argv, "--num_processes") == "6"
    assert not {"--multi_gpu", "--mixed_precision"} & set(argv)  # the file says it, and flags would win over it


@pytest.mark.parametrize("given", [["--output=my run"], []])
def test_only_a_restart_resumes(pretrain: Script, given: list[str]) -> None:
    folder = pretrain.folder / ("my run" if given else "runs/slurm-1234567")

    def resumes(**environment: str) -> bool:
        assert pretrain.run(*given, **environment).returncode == 0
        return "--resume" in pretrain.trained()[-1]["argv"]

    assert not resumes()
    assert not resumes(SLURM_RESTART_COUNT="1")  # it had not begun
    (folder / "config.yaml").touch()
    assert not resumes()  # another run's: run.py says so
    assert resumes(SLURM_RESTART_COUNT="1")


@pytest.mark.parametrize(
    ("name", "flags"), [("pretrain", ["--output", "run"]), ("evaluation", ["knn", "--checkpoint", "run"])]
)
@pytest.mark.parametrize("code", [75, 0, 1])
def test_only_a_saved_stop_is_requeued(script: Callable[[str], Script], name: str, flags: list[str], code: int) -> None:
    job = script(f"{name}.sbatch")
    job.commands.answer({"called tessera": [(code, "", "")]})
    assert job.run(*flags, SAVES="run").returncode == code
    assert job.requeued() == [["requeue", "1234567"]] * (code == 75)
    task = {"SLURM_ARRAY_JOB_ID": "1234567", "SLURM_ARRAY_TASK_ID": "3"}
    assert job.run(*flags, SAVES="run", **task).returncode == code
    assert job.requeued()[1:] == [["requeue", "1234567_3"]] * (code == 75)


def test_three_starts_without_a_step_end_the_job(pretrain: Script) -> None:
    """A warning before the first step could requeue the job for ever. One or two such starts may be bad luck."""
    pretrain.commands.answer({"called tessera": [(75, "", "")]})
    requeued, errors = [], []
    for saves in ("", "", "run", "", "", ""):  # a start that saves forgives those before it
        done = pretrain.run("--output", "run", SAVES=saves)
        assert done.returncode == 75
        requeued.append(len(pretrain.requeued()))
        errors.append("stopped three times" in done.stderr)
    assert requeued == [1, 2, 3, 4, 5, 5]
    assert errors == [False] * 5 + [True]


def test_a_refused_requeue_is_reported(pretrain: Script) -> None:
    pretrain.commands.answer({
        "called tessera": [(75, "", "")], "scontrol requeue": [(1, "", "Requeue is disabled\n")],
    })  # fmt: skip
    done = pretrain.run("--output", "run", SAVES="run")
    assert done.returncode == 75
    assert "Requeue is disabled" in done.stderr
    assert "Continue with --output run --resume" in done.stderr


def test_a_bad_node_stops_the_job(pretrain: Script) -> None:
    pretrain.commands.answer({"called tessera.launch.check_node": [(0, "", ""), (2, "", "node1: no GPU\n")]})
    done = pretrain.run("--output", "run")
    assert done.returncode == 2
    assert "node1: no GPU" in done.stderr
    assert "not started" in done.stderr
    assert not pretrain.trained()
    assert not pretrain.requeued()


def test_the_check_of_the_network_takes_options(pretrain: Script) -> None:
    assert pretrain.run("--output", "run", TESSERA_CHECK="--within 100 --between 20").returncode == 0
    for call in pretrain.called("tessera.launch.check_node"):
        assert (value(call["argv"], "--within"), value(call["argv"], "--between")) == ("100", "20")


def test_nodes_meet_at_a_port_that_the_trainers_do_not_use(pretrain: Script) -> None:
    assert pretrain.run("--output", "run").returncode == 0
    meets = {value(call["argv"], "--meets") for call in pretrain.called("tessera.launch.check_node")}
    (trained,) = {value(call["argv"], "--main_process_port") for call in pretrain.trained()}
    (host, port) = meets.pop().split(":")
    assert not meets
    assert host == value(pretrain.trained()[0]["argv"], "--main_process_ip")
    assert port != trained


@pytest.mark.parametrize(("cpus", "warned"), [("31", True), ("32", False)])
def test_too_few_cpus_for_the_gpus_are_named(pretrain: Script, cpus: str, warned: bool) -> None:
    done = pretrain.run("--output", "run", SLURM_GPUS_ON_NODE="4", SLURM_CPUS_PER_TASK=cpus)
    assert done.returncode == 0
    assert ("--cpus-per-task 48" in done.stderr) == warned


@pytest.mark.parametrize("name", ["pretrain", "evaluation"])
def test_a_python_without_the_project_is_reported(script: Callable[[str], Script], name: str) -> None:
    one = script(f"{name}.sbatch")
    one.commands.add("python", "#!/bin/sh\nexit 1\n")
    done = one.run()
    assert done.returncode == 2
    assert "pip install -e ." in done.stderr
    assert not one.called("tessera")


@pytest.mark.parametrize(("allocated", "workers"), [(None, 7), ("16", 3), ("64", 7), ("4", 1)])
def test_loader_processes_follow_the_allocation(
    monkeypatch: pytest.MonkeyPatch, allocated: str | None, workers: int
) -> None:
    """Four trainers on a machine of 32 cores. SLURM sets a number of cores but does not enforce it."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(32)))
    monkeypatch.setattr(machine, "CPU_QUOTA", Path("no file"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.delenv("SLURM_CPUS_ON_NODE", raising=False)
    if allocated is not None:
        monkeypatch.setenv("SLURM_CPUS_ON_NODE", allocated)
    assert free_cores(1) == workers


@pytest.mark.parametrize("given", [["--resume", "a run"], ["--resume=a run"]])
def test_the_run_to_resume_is_the_run_folder(pretrain: Script, given: list[str]) -> None:
    assert pretrain.run(*given, "--steps", "9").returncode == 0
    assert after("pretrain", pretrain.trained()[-1]["argv"]) == [*given, "--steps", "9"]
    refused = pretrain.run("--resume", "--steps", "9")  # a new folder holds no run, and would start one
    assert (refused.returncode, "--resume needs the folder of the run" in refused.stderr) == (2, True)
    assert not (pretrain.folder / "runs").exists()


def test_a_restart_does_not_overwrite_what_the_job_has_begun(pretrain: Script) -> None:
    config = pretrain.folder / "run" / "config.yaml"
    config.parent.mkdir()
    config.touch()

    def flags(**environment: str) -> list[str]:
        assert pretrain.run("--output", "run", "--overwrite", **environment).returncode == 0
        return after("pretrain", pretrain.trained()[-1]["argv"])[2:]

    assert flags() == ["--overwrite"]
    os.utime(config, (1, 1))
    assert flags(SLURM_RESTART_COUNT="1") == ["--overwrite"]  # the job had not begun, so this is the other run
    os.utime(config, (2**33, 2**33))
    assert flags(SLURM_RESTART_COUNT="1") == ["--overwrite", "--no-overwrite", "--resume"]
