import json

import pytest
import torch

from evaluation.results import UNRANKED, report, result_path, true_class_rank


def test_rank_counts_better_scores_and_lower_classes_of_a_tie():
    scores = torch.tensor([[0.1, 0.5, 0.5, 0.2], [3.0, 1.0, 2.0, 0.0]])
    found = [true_class_rank(scores, torch.tensor([c, c])).tolist() for c in range(4)]
    assert found == [[3, 0], [0, 2], [1, 1], [2, 3]]


def test_a_diverged_classifier_is_not_right_by_accident():
    nan, inf = torch.nan, torch.inf
    scores = torch.tensor([[nan, nan, nan], [nan, 0.0, 1.0], [0.0, inf, 1.0]])
    assert true_class_rank(scores, torch.tensor([0, 2, 0])).tolist() == [UNRANKED, 1, 2]


@pytest.fixture
def run_folder(tmp_path):
    for step in ("step-00000010", "step-00000020"):
        (tmp_path / "run" / "checkpoints" / step).mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "latest").symlink_to("step-00000020")
    return (tmp_path / "run").resolve()


def test_each_encoder_has_a_result_file_of_its_own(run_folder):
    results = run_folder / "evaluation"
    steps = run_folder / "checkpoints"
    assert result_path(run_folder / "encoder.safetensors", "knn") == results / "knn.json"
    for step in ("step-00000010", "step-00000020"):
        assert result_path(steps / step / "encoder.safetensors", "knn") == results / step / "knn.json"
    newest = result_path(steps / "latest" / "encoder.safetensors", "linear_probe")
    assert newest == results / "step-00000020" / "linear_probe.json"
    elsewhere = run_folder.parent
    assert result_path(elsewhere / "vit.safetensors", "knn") == elsewhere / "vit.knn.json"
    assert result_path(elsewhere / "encoder.safetensors", "knn") == elsewhere / "encoder.knn.json"
    assert result_path(None, "knn") is None


def test_report_says_when_it_replaces_a_result(tmp_path, capsys):
    path = tmp_path / "evaluation" / "knn.json"
    for top1 in (0.25, 0.5):
        report(path, {"top1": top1, "protocol": "20-NN", "val_images": 1234}, ["k", "top-1"], [[20, top1]])
        printed = capsys.readouterr().out
        assert f"{100 * top1:.2f} %" in printed
        assert "1,234" in printed
        assert ("replaces" in printed) == (top1 == 0.5)
    found = json.loads(path.read_text())
    assert found["top1"] == 0.5
    assert {"time", "versions", "device"} < set(found)
    assert [p.name for p in path.parent.iterdir()] == ["knn.json"]


def test_a_failed_write_leaves_the_old_result(tmp_path):
    path = tmp_path / "knn.json"
    shown = {"top1": 0.5, "protocol": "20-NN", "val_images": 1234}
    report(path, shown, [], [])
    with pytest.raises(TypeError):
        report(path, shown | {"top1": object()}, [], [])
    assert json.loads(path.read_text())["top1"] == 0.5
    assert [p.name for p in tmp_path.iterdir()] == ["knn.json"]
