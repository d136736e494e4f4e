"""The folder of a run: continue, refuse or overwrite the run in it."""

import os
import signal
from pathlib import Path

import pytest

from tessera.data.demo import demo_shards
from tessera.pretrain.command_line import load
from tessera.pretrain.resolve import resolve
from tessera.pretrain.run import main
from tessera.pretrain.run_folder import claimed, delete_run, newest_checkpoint
from tessera.runtime.lock import LockedError, locked
from tessera.runtime.settings import SettingsError
from tests.launched import TINY, records
from tests.pretrain.small import few_digits


def settings(*arguments: str):
    return resolve(load(["--data", "some.tar", "--steps", "9", *arguments]), 1000)


def test_a_folder_with_a_run_is_refused_unless_it_is_continued_or_deleted(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    newest = tmp_path / "checkpoints" / "step-00000003"
    newest.mkdir(parents=True)
    (newest / "complete").touch()
    output = ["--output", str(tmp_path)]
    with pytest.raises(SettingsError, match="holds a run"):
        newest_checkpoint(settings(*output), tmp_path)
    with pytest.raises(SettingsError, match="Give only one of them"):
        newest_checkpoint(settings(*output, "--overwrite", "--resume"), tmp_path)
    assert newest_checkpoint(settings(*output, "--overwrite"), tmp_path) is None
    assert (tmp_path / "config.yaml").exists()  # deleted only after all other settings have been checked


def test_deleting_a_run_keeps_other_files(tmp_path: Path) -> None:
    delete_run(tmp_path / "nowhere")
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").touch()
    run = tmp_path / "run"
    (run / "checkpoints" / "step").mkdir(parents=True)
    for name in ("config.yaml", "metrics.jsonl", "notes.txt"):
        (run / name).touch()
    (run / "pictures").symlink_to(kept)
    delete_run(run)
    assert [path.name for path in run.iterdir()] == ["notes.txt"]
    assert (kept / "file").exists()


@pytest.mark.slow
def test_overwriting_starts_from_the_beginning(tmp_path: Path) -> None:
    words = [*TINY, "--output", str(tmp_path / "run")]
    assert main([*words, "--steps", "4"]) == 0
    assert main([*words, "--steps", "2", "--overwrite"]) == 0
    assert [record["step"] for record in records(tmp_path / "run")] == [0, 1, 2]
    assert main([*words, "--steps", "2", "--overwrite", "--encoder.heads", "5"]) == 2
    assert main([*words, "--steps", "2", "--overwrite", "--evaluation.val", "/nowhere/val"]) == 2
    assert records(tmp_path / "run")


@pytest.mark.slow
def test_other_images_are_scored_when_the_run_is_resumed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train, val = few_digits()
    run, other = tmp_path / "run", demo_shards()[1].replace("{000000..", "{000001..")
    assert (
        main([*TINY, "--steps", "4", "--output", str(run), "--evaluation.train", train, "--evaluation.val", val]) == 0
    )
    before = records(run)[-1]
    assert main(["--resume", str(run), "--steps", "6", "--evaluation.val", other]) == 0
    assert "evaluation.val names other images" in caplog.text
    found = records(run)
    assert [record["step"] for record in found] == list(range(7))
    scores = {name: value for name, value in found[4].items() if name.startswith(("knn_", "linear_"))}
    assert found[4] == before | scores
    assert found[4]["knn_top1"] != before["knn_top1"]
    assert not (run / "metrics.csv").exists()


@pytest.mark.slow
def test_a_second_start_in_the_same_folder_is_refused_at_once(launch, tmp_path: Path, capsys) -> None:
    output = tmp_path / "run"
    words = [*TINY, "--steps", "5000", "--checkpoint_every", "5000", "--output", str(output)]
    run = launch(words)
    run.wait_for(lambda: list(output.glob(".lock-*")))  # long before config.yaml exists
    for more in ([], ["--resume"], ["--overwrite"]):
        assert main([*TINY, "--output", str(output), *more]) == 2
        assert f"{output} is in use by process {run.process.pid}" in capsys.readouterr().err
    run.wait_for(lambda: (output / "metrics.jsonl").exists() and len(records(output)) > 2)
    assert main([*TINY, "--output", str(output), "--overwrite"]) == 2
    assert main([*words, "--resume", "--dry_run"]) == 2
    assert f"{output} is in use by process {run.process.pid}" in capsys.readouterr().err
    os.kill(run.process.pid, signal.SIGKILL)
    run.process.wait(20)
    assert main([*TINY, "--output", str(output), "--steps", "2", "--overwrite"]) == 0
    assert [record["step"] for record in records(output)] == [0, 1, 2]
    assert not list(output.glob(".lock-*"))


def test_a_run_that_is_refused_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["--data", "/nowhere/*.tar", "--output", "a/b/run"]) == 2
    assert main(["--data", "/nowhere/*.tar"]) == 2
    assert not list(tmp_path.iterdir())
    with claimed(settings(), True) as first, claimed(settings(), True) as second:  # in the same second
        assert first != second
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["file", "file/run", "n" * 300, "link"])
def test_a_dry_run_refuses_the_folders_that_a_run_refuses(name: str, tmp_path: Path, capsys) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    said = []
    for more in ([], ["--dry_run"]):
        assert main([*TINY, "--output", str(tmp_path / name), *more]) == 2
        said.append(capsys.readouterr().err)
    assert said[0] == said[1] != ""
    assert {path.name for path in tmp_path.iterdir()} == {"file", "link"}


def test_a_dry_run_refuses_a_folder_in_use_and_leaves_a_free_one_as_it_is(tmp_path: Path, capsys) -> None:
    dry = settings("--dry_run", "--output", str(tmp_path))
    with claimed(dry, True) as output:
        assert output == tmp_path
        assert not list(tmp_path.iterdir())
    with locked(tmp_path), pytest.raises(LockedError, match="is in use by process"), claimed(dry, True):
        pass
    with claimed(settings("--dry_run", "--output", str(tmp_path / "new" / "run")), True):
        assert not (tmp_path / "new").exists()
