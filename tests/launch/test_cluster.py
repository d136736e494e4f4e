"""Pretraining and its evaluations on a SLURM cluster of two nodes."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.launch.conftest import ROOT, Cluster
from tests.launched import newest_step, records, timeless

pytestmark = pytest.mark.slow
STEPS, EVERY = 200, 100
# SLURM looks for jobs near their limit every 30 seconds. The run must last that long, without using the cores
SLOW = """
import json, os, time
dumps = json.dumps
def slowly(value, **how):
    if "grad_norm" in str(value) and not os.path.exists({fast!r}):
        time.sleep(0.4)
    return dumps(value, **how)
json.dumps = slowly
"""
TWO_NODES = ("--nodes=2", "--cpus-per-task=2")
SLURM = [sys.executable, str(ROOT / "launch" / "slurm.py")]


@dataclass
class Work:
    """A folder with data and settings for the cluster."""

    cluster: Cluster
    config: Path
    settings: dict

    @property
    def folder(self) -> Path:
        return self.cluster.work

    def slurm(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return self.cluster.run(*SLURM, *map(str, arguments))

    def submit(self, output: Path, *arguments: str) -> list[dict]:
        """Submit a chain for two nodes without GPUs, and return its jobs."""
        done = self.slurm(
            "submit", "--config", self.config, "--output", output, "--nodes", "2", "--gpus", "0", "--cpus", "2",
            *arguments,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads((output / "submitted" / "jobs.json").read_text())["jobs"]

    def log(self, job: str) -> Path:
        return self.folder / f"slurm-{job}.out"


@pytest.fixture(scope="module")
def work(cluster: Cluster) -> Work:
    """Make shards of the embedded digits and a settings file with a small encoder."""
    cache = cluster.work / "cache"
    (cluster.work / "slow").mkdir()
    (cluster.work / "slow" / "sitecustomize.py").write_text(SLOW.format(fast=str(cluster.work / "fast")))
    path = filter(None, [str(cluster.work / "slow"), os.environ.get("PYTHONPATH")])
    cluster.environment |= {"TESSERA_CACHE": str(cache), "PYTHONPATH": os.pathsep.join(path)}
    made = cluster.run(sys.executable, "-c", "from tessera.data.demo import demo_shards; print(*demo_shards())")
    assert made.returncode == 0, made.stderr
    train, val = made.stdout.split()
    settings = yaml.safe_load((ROOT / "configs" / "digits_dino.yaml").read_text())
    settings |= {
        "method": "dino", "data": train, "evaluation": {"train": train, "val": val, "pictures": 0}, "workers": 1,
        "steps": STEPS, "batch_size": 16, "record_every": 2, "checkpoint_every": EVERY, "checkpoint": {"keep": 1},
    }  # fmt: skip
    settings["encoder"] |= {"depth": 2, "dim": 24, "heads": 2}
    settings["dino"] |= {"hidden_dim": 32, "bottleneck_dim": 16, "prototypes": 64}
    config = cluster.work / "tiny settings.yaml"
    config.write_text(yaml.safe_dump(settings))
    return Work(cluster, config, settings)


def step_reached(output: Path) -> int:
    return max((record["step"] for record in records(output)), default=0)


@pytest.fixture(scope="module")
def undisturbed(work: Work) -> Path:
    """Run a chain of jobs: pretraining on two nodes, and a probe afterwards."""
    output = work.folder / "it's an $undisturbed run, 100%"
    pretrain, probe = work.submit(
        output, "--after-pretraining", "probe", "--probe-flags=--epochs 5 --no-augment --batch_norm --workers 0",
        "--time=30",
    )  # fmt: skip
    work.config.write_text("an edit: {of: the file, changes: nothing}\n")
    try:
        log = output / "submitted" / f"pretrain-{pretrain['id']}.log"
        work.cluster.wait_for(pretrain["id"], "COMPLETED", log)
        work.cluster.wait_for(probe["id"], "COMPLETED", output / "submitted" / f"probe-{probe['id']}.log")
    finally:
        work.config.write_text(yaml.safe_dump(work.settings))
    return output


def test_two_nodes_train_to_the_end(undisturbed: Path) -> None:
    assert (undisturbed / "encoder.safetensors").exists()
    assert [record["step"] for record in records(undisturbed)] == list(range(0, STEPS + 1, 2))
    trainer = json.loads((undisturbed / "checkpoints" / "latest" / "trainer.json").read_text())
    assert trainer["processes"] == 2


def test_the_probe_starts_after_success(work: Work, undisturbed: Path) -> None:
    pretrain, probe = json.loads((undisturbed / "submitted" / "jobs.json").read_text())["jobs"][:2]
    times = {}
    for job in (pretrain, probe):
        shown = work.cluster.run("scontrol", "show", "job", job["id"]).stdout
        times |= {(job["name"], name): shown.partition(f" {name}=")[2].split()[0] for name in ("StartTime", "EndTime")}
    assert times["probe", "StartTime"] >= times["pretrain", "EndTime"]
    (path,) = (undisturbed / "evaluation").glob(f"linear_probe-*-step-{STEPS:08d}-*.json")
    result = json.loads(path.read_text())
    assert result["checkpoint"] == str(undisturbed / "encoder.safetensors")
    assert 0.2 < result["top1"] <= 1
    shown = work.slurm("status", undisturbed).stdout
    assert all(part in shown for part in (f"step {STEPS} of {STEPS}", "linear_probe-", "COMPLETED"))


def test_a_time_limit_costs_nothing(work: Work, undisturbed: Path) -> None:
    output = work.folder / "limited"
    flags = ("--config", str(work.config), "--output", str(output))
    job = work.cluster.submit("pretrain.sbatch", *flags, options=(*TWO_NODES, "--time=30", "--signal=USR1@600"))
    after = work.cluster.run(
        "sbatch", "--parsable", f"--dependency=afterok:{job}", "--kill-on-invalid-dep=yes", "--wrap=true"
    ).stdout.strip()
    work.cluster.wait(lambda: step_reached(output) >= 20, work.log(job), job)
    assert work.cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=5").returncode == 0
    work.cluster.wait(lambda: work.cluster.restarts(job) == 1, work.log(job), job)
    stopped = newest_step(output)
    assert 20 <= stopped < STEPS
    assert step_reached(output) in range(stopped - 1, stopped + 1)  # the last record before it, and none after it
    assert work.cluster.state(after) == "PENDING"  # a job that returns to the queue has not failed
    assert work.cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=30").returncode == 0
    fast = work.folder / "fast"
    fast.touch()
    try:
        work.cluster.wait_for(job, "COMPLETED", work.log(job))
    finally:
        fast.unlink()
    text = work.log(job).read_text()
    assert f": {output}/checkpoints/step-{stopped:08d}" in text
    assert timeless(output) == timeless(undisturbed)
    work.cluster.wait_for(after, "COMPLETED", work.log(after))


def test_a_job_goes_on_with_fewer_nodes_after_one_was_lost(work: Work, undisturbed: Path) -> None:
    output = work.folder / "fewer"
    (job,) = work.submit(output, "--nodes", "1-2", "--time=30", "--", "--checkpoint_every", "20")
    log = output / "submitted" / f"pretrain-{job['id']}.log"
    fast = work.folder / "fast"
    work.cluster.wait(lambda: step_reached(output) >= 40, log, job["id"])

    def set_node(state: str) -> None:
        done = work.cluster.run("scontrol", "update", "NodeName=127.0.0.3", f"State={state}", "Reason=test")
        assert done.returncode == 0, done.stderr

    set_node("DRAIN")  # so that the node does not return at once
    set_node("DOWN")
    try:
        fast.touch()
        work.cluster.wait_for(job["id"], "COMPLETED", log)
    finally:
        fast.unlink(missing_ok=True)
        set_node("RESUME")
    assert ": 2 node(s)" in log.read_text()
    assert ": 1 node(s) 127.0.0.2, 1 process(es) each" in log.read_text()
    trainer = json.loads((output / "checkpoints" / "latest" / "trainer.json").read_text())
    assert trainer["processes"] == 1
    assert [record["step"] for record in records(output)] == list(range(0, STEPS + 1, 2))
    # 60 of these 100 steps sum over one process instead of two
    found, wanted = ([record["loss"] for record in records(run)[1:51]] for run in (output, undisturbed))
    assert found == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("engine", ["zero2", "fsdp2"])
def test_engines_train_on_two_nodes(work: Work, engine: str) -> None:
    file = ROOT / "configs" / "accelerate" / f"{engine}.yaml"
    output = work.folder / engine
    flags = ("--config", str(work.config), "--output", str(output), "--steps", "4")
    job = work.cluster.submit("pretrain.sbatch", *flags, options=TWO_NODES, TESSERA_ENGINE=str(file))
    work.cluster.wait_for(job, "COMPLETED", work.log(job))
    assert [record["step"] for record in records(output)] == [0, 2, 4]
    assert (output / "encoder.safetensors").exists()


def test_preempted_then_cancelled(work: Work) -> None:
    """A preempted run saves and resumes. After scancel it can be resumed by hand."""
    output = work.folder / "taken"
    flags = ("--config", str(work.config), "--output", str(output))
    job = work.cluster.submit("pretrain.sbatch", *flags, options=("--nodes=1", "--cpus-per-task=8"))
    work.cluster.wait(lambda: step_reached(output) >= 20, work.log(job), job)
    urgent = work.cluster.run(
        "sbatch", "--parsable", "--partition=urgent", "--nodes=2", "--cpus-per-task=8", "--wrap=true"
    ).stdout.strip()
    work.cluster.wait_for(urgent, "COMPLETED", work.log(urgent))
    assert work.cluster.restarts(job) == 1
    first = newest_step(output)
    assert 20 <= first < STEPS
    work.cluster.wait(lambda: step_reached(output) >= first + 6, work.log(job), job)
    assert f": {output}/checkpoints/step-{first:08d}" in work.log(job).read_text()
    assert work.cluster.run("scancel", job).returncode == 0
    work.cluster.wait_for(job, "CANCELLED", work.log(job))
    work.cluster.wait(lambda: newest_step(output) > first, work.log(job))  # it had the time to save
    reached = newest_step(output)
    assert reached >= step_reached(output)
    again = work.cluster.submit("pretrain.sbatch", *flags, "--resume", options=("--nodes=1", "--cpus-per-task=2"))
    work.cluster.wait(lambda: step_reached(output) > reached, work.log(again), again)
    assert f": {output}/checkpoints/step-{reached:08d}" in work.log(again).read_text()
    work.cluster.run("scancel", again)
    work.cluster.wait_for(again, "CANCELLED", work.log(again))


def test_no_evaluation_after_a_failure(work: Work) -> None:
    """Missing shards are found on each node before the start, and the job is not requeued."""
    output = work.folder / "failed"
    data = "/nowhere/train-{000..003}.tar"
    pretrain, probe, knn = work.submit(output, "--after-pretraining", "probe,knn", "--", "--data", data)
    log = output / "submitted" / f"pretrain-{pretrain['id']}.log"
    work.cluster.wait_for(pretrain["id"], "FAILED", log)
    for job in (probe, knn):
        work.cluster.wait_for(job["id"], "CANCELLED", log)
    for node in ("127.0.0.2", "127.0.0.3"):
        message = f"{node}: cannot read /nowhere/train-000.tar: No such file or directory"
        assert message in log.read_text()
    assert not (output / "evaluation").exists()
    shown = work.slurm("status", output).stdout
    assert "not begun" in shown
    assert shown.count("CANCELLED") == 2


def test_a_gpu_that_is_not_there_is_found(work: Work) -> None:
    """SLURM allocates GPUs that do not exist."""
    job = work.cluster.submit("pretrain.sbatch", options=("--nodes=2", "--gpus-per-node=1", "--cpus-per-task=2"))
    work.cluster.wait_for(job, "FAILED", work.log(job))
    for node in ("127.0.0.2", "127.0.0.3"):
        assert f"{node}: 1 GPU(s) were allocated and torch sees 0" in work.log(job).read_text()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--partition", "nope"], "invalid partition specified: nope"),
        (["--gpus", "3"], "Requested node configuration is not available"),
        (["--nodes", "3"], "Node count specification invalid"),
        (["--time", "3-00:00:00"], "Requested time limit is invalid"),
        (["--after-pretraining", "knn", "--evaluation-gpus", "3"], "Requested node configuration is not available"),
    ],
)
def test_refusals_of_slurm_are_reported_at_submission(work: Work, options: list[str], said: str) -> None:
    output = work.folder / "refused"
    before = work.cluster.run("squeue", "--noheader", "--states=PENDING,RUNNING").stdout
    done = work.slurm("submit", "--config", work.config, "--output", output, "--gpus", "1", "--cpus", "2", *options)
    assert done.returncode == 2
    assert said in done.stderr
    assert not output.exists()
    assert work.cluster.run("squeue", "--noheader", "--states=PENDING,RUNNING").stdout == before


def test_a_chain_is_cancelled_as_one(work: Work) -> None:
    output = work.folder / "cancelled"
    work.submit(output, "--after-pretraining", "probe,knn", "--sbatch=--begin=now+1hour")
    shown = work.slurm("status", output).stdout
    assert shown.count("PENDING") == 3
    assert shown.count("(Dependency)  starts after pretraining has succeeded") == 2
    again = work.slurm("submit", "--config", work.config, "--output", output, "--gpus", "0")
    assert again.returncode == 2
    assert "has jobs in the queue" in again.stderr
    assert work.slurm("cancel", output).returncode == 0
    assert work.slurm("status", output).stdout.count("CANCELLED") == 3
