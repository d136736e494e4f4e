"""launch/check_node.py: problems of a node that are found before a job starts."""

import os
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from tessera.launch import check_node
from tests.ranks import on_processes


@pytest.fixture(autouse=True)
def node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "node7")
    monkeypatch.delenv("SLURM_GPUS_ON_NODE", raising=False)


@pytest.fixture
def tars(tmp_path: Path) -> Path:
    for number in range(3):
        (tmp_path / f"a-{number}.tar").write_bytes(b"x" * 600)
    return tmp_path


@pytest.mark.parametrize("form", ["a-{0..2}.tar", "a-*.tar", "a-1.tar", '["{0}/a-0.tar", "{0}/a-1.tar"]'])
def test_readable_shards_pass(tars: Path, form: str) -> None:
    named = form.replace("{0}/", f"{tars}/") if form.startswith("[") else f"{tars}/{form}"
    assert check_node.main(["--writes", str(tars), "--", "--data", named]) == 0


@pytest.mark.parametrize(
    ("named", "said"),
    [
        (
            "b-{0..4}.tar",
            "cannot read {0}/b-0.tar: No such file or directory. Check that this node sees its disk.",
        ),
        ("a-{0..3}.tar", "cannot read {0}/a-3.tar: No such file or directory. Check that this node sees its disk."),
        ("b-*.tar", "no shard matches {0}/b-*.tar. Check the pattern, and that this node sees its disk."),
        ("empty.tar", "cannot read {0}/empty.tar: the file is empty. Check that this node sees its disk."),
        ("folder.tar", "cannot read {0}/folder.tar: the folder is empty. Check that this node sees its disk."),
    ],
)
def test_unreadable_shards_are_named(tars: Path, capsys: pytest.CaptureFixture[str], named: str, said: str) -> None:
    (tars / "empty.tar").touch()
    (tars / "folder.tar").mkdir()
    assert check_node.main(["--", "--method", "mae", "--data", f"{tars}/{named}"]) == 2
    assert capsys.readouterr().err == f"node7: {said.replace('{0}', str(tars))}\n"
    assert check_node.why_unreadable(str(tars)) is None  # a folder of shards or of images


@pytest.mark.parametrize(
    ("data", "found"),
    [
        ("x.tar", ["x.tar"]),
        (["x.tar", "y.tar"], ["x.tar", "y.tar"]),
        ({"x.tar": 0.3, "y.tar": 0.7}, ["x.tar", "y.tar"]),
        ({"shards": ["x.tar", "y.tar"], "channels": 3}, ["x.tar", "y.tar"]),
        (None, []),
    ],
)
def test_shards_of_settings_and_flags(tmp_path: Path, data: object, found: list[str]) -> None:
    settings = {"data": data, "evaluation": {"train": "t.tar", "val": ["v.tar"]}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    file = ["--config", str(tmp_path / "config.yaml")]
    assert list(check_node.shard_patterns(file)) == [*found, "t.tar", "v.tar"]
    flags = ["--data", "f.tar", "--data.shards=g.tar", "--evaluation.val", '["h.tar"]']
    assert list(check_node.shard_patterns([*file, *flags])) == ["f.tar", "g.tar", "t.tar", "h.tar"]
    resumed = ["--output", str(tmp_path), "--resume"]
    assert list(check_node.shard_patterns(resumed)) == [*found, "t.tar", "v.tar"]
    (tmp_path / "new.yaml").write_text("steps: 9\nevaluation: {val: w.tar}")
    with_file = [*resumed, "--config", str(tmp_path / "new.yaml")]
    assert list(check_node.shard_patterns(with_file)) == [*found, "t.tar", "w.tar"]
    assert list(check_node.shard_patterns(["--output", str(tmp_path)])) == []
    flags = ["--checkpoint", "run", "--train", "a.tar", "--train", "b.tar", "--val", '{"c.tar": 1.0}']
    assert list(check_node.shard_patterns(flags)) == ["a.tar", "b.tar", "c.tar"]


def test_a_preset_names_the_settings_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d.tar").write_text("shard")
    assert list(check_node.check_shards(["--config", "imagenet_dino_vit_small", "--data", "d.tar"])) == []


def test_the_run_to_resume_names_its_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    run.mkdir()
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    (run / "config.yaml").write_text("data: {shards: d.tar, exclude: null}\n")
    (run / "machine.jsonl").write_text(f'{{"folder": "{tmp_path}"}}\n')
    (elsewhere / "x.yaml").write_text("data: {exclude: x.txt}\n")
    assert list(check_node.shard_patterns(["--resume", str(run)])) == ["d.tar"]
    (tmp_path / "d.tar").write_text("shard")
    for given in (["--resume", str(run)], ["--resume", "--output", str(run), "--config", "x.yaml"]):
        assert list(check_node.shard_patterns(given)) == [str(tmp_path / "d.tar")]


def test_unreadable_settings_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_node.main(["--", "--config", str(tmp_path / "none.yaml")]) == 2
    assert "cannot tell which shards the job reads" in capsys.readouterr().err


def test_urls_are_not_opened() -> None:
    assert list(check_node.check_shards(["--data", "https://host/a-{0..3}.tar"])) == []


def test_a_disk_that_is_not_shared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not check_node.appears(tmp_path / "absent", seconds=0.1)
    late = tmp_path / "late"
    threading.Timer(0.3, late.touch).start()
    assert check_node.appears(late, seconds=10)
    assert check_node.main(["--sees", str(late), "--writes", str(tmp_path)]) == 0
    assert capsys.readouterr().err == ""


def test_a_file_of_another_node_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 1000, 5))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(time, "sleep", lambda _: None)
    (problem,) = check_node.check_folder(tmp_path / "absent", tmp_path)
    assert "--output must be on a disk that all nodes share" in problem


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    (problem,) = check_node.check_folder(None, tmp_path / "absent")
    assert problem == f"cannot write to {tmp_path / 'absent'}: No such file or directory. Choose another --output."


def test_space_for_another_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_node.shutil, "disk_usage", lambda _: SimpleNamespace(free=2_000_000_000))
    assert list(check_node.check_folder(None, tmp_path)) == []
    step = tmp_path / "checkpoints" / "step-00000010"
    step.mkdir(parents=True)
    (step.parent / "latest").symlink_to(step.name)
    with (step / "weights").open("wb") as file:
        file.truncate(3_000_000_000)  # a hole: takes no space
    (problem,) = check_node.check_folder(None, tmp_path)
    assert "2.0 GB free, and a checkpoint needs 3.0 GB" in problem


def test_missing_gpus_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "4")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert check_node.main([]) == 2
    error = capsys.readouterr().err
    assert error.startswith("node7: 4 GPU(s) were allocated and torch sees 0")
    assert "--exclude=node7" in error


def test_failing_gpus_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.ones

    def ones(*size: int, device: str) -> torch.Tensor:
        if device == "cuda:1":
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered\nand more")
        return real(*size) * (1 if device == "cuda:0" else 2)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch, "ones", ones)
    second, third = check_node.check_gpus(3)
    assert "GPU 1 does not compute: CUDA error: uncorrectable ECC error encountered." in second
    assert "GPU 2 does not compute: a product of two 256 x 256 matrices of ones sums to" in third


def test_a_missing_torch_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "4")  # not looked at without torch
    assert check_node.main([]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"node7: {sys.executable} cannot import torch (")
    assert len(error.splitlines()) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_working_gpus_pass() -> None:
    assert list(check_node.check_gpus(torch.cuda.device_count())) == []


def _meet(rank: int, port: int, others: int, folder: str, gpus: int) -> None:
    os.environ |= {"SLURM_JOB_NUM_NODES": str(others + 1), "SLURM_NODEID": str(rank)}
    check_node.MEET_SECONDS = 4
    problems = list(check_node.check_network(f"127.0.0.1:{port}", gpus))
    Path(folder, f"{rank}.txt").write_text("\n".join(problems))


@pytest.mark.medium
@pytest.mark.parametrize("gpus", [0, 1])
@pytest.mark.skipif(torch.cuda.is_available(), reason="the check would use the GPU")
def test_nodes_that_reach_each_other_pass(gpus: int, tmp_path: Path, free_port: int) -> None:
    """Also nodes whose GPUs torch does not see, which `check_gpus` reports."""
    on_processes(_meet, free_port, free_port, 1, str(tmp_path), gpus)
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)] == ["", ""]


@pytest.mark.medium
def test_a_node_that_does_not_answer_is_reported(tmp_path: Path, free_port: int) -> None:
    on_processes(_meet, free_port, free_port, 2, str(tmp_path), 0)
    for rank in range(2):
        (problem,) = (tmp_path / f"{rank}.txt").read_text().splitlines()
        assert "no sum with the other node(s) over " in problem
        assert f"met at 127.0.0.1:{free_port}: " in problem
        assert "This node has: " in problem
        assert "lo" in problem


def test_one_node_meets_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_NUM_NODES", raising=False)
    assert not list(check_node.check_network("127.0.0.1:1", 0))
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    assert not list(check_node.check_network(None, 0))
