"""The cells of a comparison as SLURM jobs: what is submitted, and a comparison on a cluster."""

import json
from pathlib import Path

import pytest

from tessera.extras.compare.cells import CompareError
from tessera.extras.compare.compare import compare
from tessera.extras.compare.jobs import without_jobs
from tests.extras.compare.test_compare import METHODS, without, words
from tests.launch.conftest import Cluster, StandIns
from tests.launch.conftest import cluster as cluster
from tests.launched import records
from tests.pretrain.small import scored_shards

OPTIONS = "--cpus-per-task=2 --time=30"


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIns:
    folder = tmp_path / "commands"
    folder.mkdir()
    found = StandIns(folder, "sbatch", "squeue", "scontrol", "scancel")
    found.answer({"sbatch --parsable": [(0, f"{number}\n", "") for number in range(101, 140)]})
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return found


def submitted(commands: StandIns) -> list[list[str]]:
    return [call["argv"] for call in commands.calls("sbatch")]


def test_cells_wait_for_the_trials_and_the_result_waits_for_the_cells(commands: StandIns, tmp_path: Path) -> None:
    output = tmp_path / "out"
    own = ["--evaluation.val", scored_shards()[1], "--minutes", "1", "--seeds", "2"]
    given = words(output, *own)
    (output / "mae-0").mkdir(parents=True)
    (output / "mae-0" / "encoder.safetensors").touch()  # is done
    compare([*given, f"--jobs={OPTIONS}"], ["--config_file", "zero2"])
    trials, *cells, result = submitted(commands)
    assert "--hold" in trials
    assert [call["argv"] for call in commands.calls("scontrol")] == [["release", "101"]]
    for one in (trials, *cells, result):
        place = one.index("--config_file")
        assert one[place - 1].endswith("evaluation.sbatch")
        assert one[place : place + 3 + len(given)] == ["--config_file", "zero2", "compare", *given]
        assert one[: place - 1][-2:] == OPTIONS.split()
        assert "--signal=USR1@300" in one
    assert [one[-2:] for one in (trials, *cells)] == [
        ["--only", name] for name in ("trials", "lejepa-0", "lejepa-1", "mae-1")
    ]
    assert all("--dependency=afterok:101" in one for one in cells)
    assert "--dependency=afterok:102:103:104" in result
    assert result[-1] == given[-1]
    stored = json.loads((output / "submitted" / "jobs.json").read_text())["jobs"]
    assert [job["name"] for job in stored] == ["trials", "lejepa-0", "lejepa-1", "mae-1", "result"]
    commands.answer({"squeue": [(0, "101|RUNNING|None\n", "")]})
    with pytest.raises(CompareError, match="has jobs in the queue"):
        compare([*given, f"--jobs={OPTIONS}"])


def test_equal_steps_need_no_trials(commands: StandIns, tmp_path: Path) -> None:
    output = tmp_path / "out"
    compare(["--jobs", "", *words(output)])
    assert [one[-1] for one in submitted(commands)[:-1]] == ["lejepa-0", "mae-0"]
    assert [call["argv"] for call in commands.calls("scontrol")] == [["release", "101,102"]]
    assert json.loads((output / "plan.json").read_text())["steps"] == dict.fromkeys(METHODS, 6)


def test_without_slurm_nothing_is_submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CompareError, match="SLURM is not installed here"):
        compare([*words(tmp_path / "out"), "--jobs="])


def test_a_refused_job_cancels_the_others(commands: StandIns, tmp_path: Path) -> None:
    commands.answer({"sbatch --parsable": [(0, "101\n", ""), (1, "", "invalid account")]})
    with pytest.raises(CompareError, match="SLURM refuses the job mae-0: invalid account"):
        compare([*words(tmp_path / "out"), "--jobs="])
    assert [call["argv"] for call in commands.calls("scancel")] == [["101"]]


@pytest.mark.parametrize("given", [["--jobs", "-p x"], ["--jobs=-p x"], ["--jobs=--time=1 -p x"]])
def test_the_jobs_submit_no_further_jobs(given: list[str]) -> None:
    assert without_jobs(["--seeds", "1", *given, "--halve"]) == ["--seeds", "1", "--halve"]


@pytest.mark.slow
def test_jobs_on_a_cluster_are_requeued_and_write_the_result(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, steps = tmp_path / "jobs", 320  # a fast machine, too, is still training when the signal comes
    own = ["--evaluation.val", scored_shards()[1], "--steps", str(steps), "--seeds", "1"]
    flags = words(output, *own)
    flags[flags.index("--methods") + 1] = "mae"
    flags = without(flags, "--lejepa")
    for name, value in (cluster.environment | {"OMP_NUM_THREADS": "1"}).items():
        monkeypatch.setenv(name, value)
    compare([*flags, f"--jobs={OPTIONS}"])
    first, result = json.loads((output / "submitted" / "jobs.json").read_text())["jobs"]
    logs = [output / "submitted" / f"{job['name']}-{job['id']}.log" for job in (first, result)]
    metrics = output / "mae-0" / "metrics.jsonl"
    cluster.wait(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 1, logs[0], first["id"])
    assert cluster.run("scancel", "--signal=USR1", first["id"]).returncode == 0  # as before a time limit
    cluster.wait(lambda: cluster.restarts(first["id"]) == 1, logs[0], first["id"])
    assert cluster.state(result["id"]) == "PENDING"
    assert "To go on, start the same command again" in logs[0].read_text()
    for job, log in zip((first, result), logs, strict=True):
        cluster.wait_for(job["id"], "COMPLETED", log)
    found = json.loads((output / "compare.json").read_text())
    assert (found["arms"]["mae"]["steps"], found["arms"]["mae"]["images"]) == (steps, 16 * steps)
    assert f"{output}/mae-0/checkpoints/step-" in logs[0].read_text()  # it was resumed
    assert len(records(output / "mae-0")) == 1 + 10
