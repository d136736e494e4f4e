"""The folder of a run: continue, refuse or overwrite the run in it."""

from pathlib import Path

import pytest

from pretrain.command_line import load
from pretrain.config import resolve
from pretrain.folder import delete_run, run_folder
from pretrain.run import main
from runtime.settings import SettingsError
from tests.launched import TINY, records


def settings(*arguments: str):
    return resolve(load(["--data", "some.tar", "--steps", "9", *arguments]), 1000)


def test_a_folder_with_a_run_is_refused_unless_it_is_continued_or_deleted(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    newest = tmp_path / "checkpoints" / "step-00000003"
    newest.mkdir(parents=True)
    (newest / "complete").touch()
    output = ["--output", str(tmp_path)]
    with pytest.raises(SettingsError, match="holds another run"):
        run_folder(settings(*output))
    with pytest.raises(SettingsError, match="Give only one of them"):
        run_folder(settings(*output, "--overwrite", "--resume"))
    assert run_folder(settings(*output, "--overwrite")) == (tmp_path, None)
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


@pytest.mark.medium
def test_overwriting_starts_from_the_beginning(tmp_path: Path) -> None:
    words = [*TINY, "--output", str(tmp_path / "run")]
    assert main([*words, "--steps", "4"]) == 0
    assert main([*words, "--steps", "2", "--overwrite"]) == 0
    assert [record["step"] for record in records(tmp_path / "run")] == [0, 1, 2]
    assert main([*words, "--steps", "2", "--overwrite", "--encoder.heads", "5"]) == 2
    assert records(tmp_path / "run")
