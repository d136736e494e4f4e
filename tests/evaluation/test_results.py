import datetime
import json

import pytest

from tessera import encoders
from tessera.evaluation.results import (
    Evaluation,
    ResultError,
    check_output,
    data_name,
    result_path,
    write_result,
)

TIME = datetime.datetime(2026, 11, 24, 10, 15, 30, tzinfo=datetime.UTC)


def saved(path, step=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    encoders.save(encoders.build("vit_micro", depth=1), path, step=step)
    return path


@pytest.fixture
def run_folder(tmp_path):
    for step in (10, 20):
        saved(tmp_path / "run" / "checkpoints" / f"step-{step:08d}" / "encoder.safetensors", step)
    saved(tmp_path / "run" / "encoder.safetensors", 30)
    (tmp_path / "run" / "checkpoints" / "latest").symlink_to("step-00000020")
    return (tmp_path / "run").resolve()


def test_a_name_holds_evaluation_data_step_and_time(run_folder):
    def name(encoder):
        data = ["shards/cifar10-test-{0..3}.tar", "shards/cifar10-test-4.tar"]
        evaluation = Evaluation("knn", encoder, data, None, encoders.read_step(encoder))
        return str(result_path(evaluation, TIME).relative_to(run_folder.parent))

    steps = run_folder / "checkpoints"
    stem = "run/evaluation/knn-cifar10-test-step-{}-20261124T101530Z.json"
    assert name(run_folder / "encoder.safetensors") == stem.format("00000030")
    assert name(steps / "step-00000010" / "encoder.safetensors") == stem.format("00000010")
    assert name(steps / "latest" / "encoder.safetensors") == stem.format("00000020")
    kept = saved(run_folder / "evaluation" / "step-00000005" / "encoder.safetensors", 5)
    assert name(kept) == stem.format("00000005")
    assert name(saved(run_folder.parent / "vit.safetensors")) == "vit-knn-cifar10-test-20261124T101530Z.json"
    assert name(saved(run_folder.parent / "b" / "vit.safetensors", 7)).endswith("-step-00000007-20261124T101530Z.json")
    assert result_path(Evaluation("knn", None, "x.tar", None), TIME) is None
    link = run_folder.parent / "cache" / "encoder.safetensors"  # of a cache that stores files by their hash
    link.parent.mkdir()
    link.symlink_to(run_folder / "encoder.safetensors")
    link.with_suffix(".json").symlink_to(run_folder / "encoder.json")
    assert name(link) == "cache/encoder-knn-cifar10-test-step-00000030-20261124T101530Z.json"


def test_a_result_that_cannot_be_written_is_printed(tmp_path, capsys):
    (tmp_path / "file").touch()
    with pytest.raises(ResultError, match=r"Cannot write .*x\.json: .*The result is printed above"):
        show(Evaluation("knn", None, "x.tar", str(tmp_path / "file" / "x.json")), 0.5)
    assert '"top1": 0.5' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("shards", "name"),
    [
        ("data/cifar10-test-*.tar.gz", "cifar10-test"),
        ("cifar10.tar", "cifar10"),
        ("cifar10-test-000003.tar.gz", "cifar10-test"),
        ("photos/shards-val/*.tar", "shards-val"),
        ("imagenet/val-{000000..000099}.tar", "imagenet-val"),
        ("s3://bucket/imagenet/val-000000.tar", "imagenet-val"),
        ("val-*.tar", "val"),
        ("*.tar", "data"),
        ("photos-val/index.json", "photos-val"),
        ("my photos: a & b-*.tar", "my-photos-a-b"),
        (["a-0.tar", "a-1.tar", "b-0.tar"], "a+b"),
        ("textures/val.csv", "textures-val"),
    ],
)
def test_data_sets_are_named_after_their_shards(shards, name):
    assert data_name(shards) == name


def show(evaluation, top1):
    write_result(evaluation, {"top1": top1, "protocol": "20-NN", "val_images": 1234}, ["k", "top-1"], [[20, top1]])


def test_a_repeated_evaluation_replaces_nothing(run_folder, capsys):
    evaluation = Evaluation("knn", run_folder / "encoder.safetensors", "shards/val-*.tar", None, step=30)
    accuracies = [0.25, 0.5, 0.75]
    for top1 in accuracies:  # probably within one second
        show(evaluation, top1)
        printed = capsys.readouterr().out
        assert f"{100 * top1:.2f} %" in printed
        assert "1,234" in printed
    newest = run_folder / "evaluation" / "knn.json"
    assert json.loads(newest.read_text())["top1"] == accuracies[-1]
    files = sorted({*(run_folder / "evaluation").iterdir()} - {newest})
    found = [json.loads(path.read_text()) for path in files]
    assert sorted(one["top1"] for one in found) == accuracies
    for path, one in zip(files, found, strict=True):
        assert path.name.startswith("knn-shards-val-step-00000030-")
        assert (one["evaluation"], one["data"], one["step"]) == ("knn", "shards-val", 30)
        assert datetime.datetime.fromisoformat(one["time"]).strftime("%Y%m%dT%H%M%SZ") in path.name
        assert {"versions", "device"} < set(one)


def test_an_existing_output_is_refused(tmp_path):
    path = tmp_path / "new" / "x.json"
    check_output(None)
    check_output(str(path))
    show(Evaluation("knn", None, "x.tar", str(path)), 0.5)
    assert json.loads(path.read_text())["step"] is None
    with pytest.raises(ResultError, match="exists"):
        check_output(str(path))


def test_a_failed_write_leaves_no_file(tmp_path):
    evaluation = Evaluation("knn", saved(tmp_path / "vit.safetensors"), "x.tar", None)
    with pytest.raises(TypeError):
        write_result(evaluation, {"top1": object(), "protocol": "20-NN", "val_images": 1}, [], [])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["vit.json", "vit.safetensors"]
