"""Reading run folders: complete, unfinished and damaged ones."""

import json
from pathlib import Path

import pytest

from tessera.evaluation.results import data_name
from tessera.extras.report.run_folders import ReportError, read_runs
from tests.extras.report.made import MACHINE, add_result, make_run, record


def test_a_run_is_read(tmp_path: Path) -> None:
    records = [{"step": 0, "images": 0, "knn_top1": 0.1, "knn_pixels": 0.9}, record(10, 3.0), record(20, 2.0, 64.0)]
    folder = make_run(tmp_path / "a", records, optim={"lr": 0.1})
    (run,), problems = read_runs([folder])
    assert (run.name, run.method, run.last_step, run.finished) == ("a", "dino", 20, True)
    assert run.settings["optim.lr"] == 0.1
    assert run.curve("loss") == {10: 3.0, 20: 2.0}
    assert run.scores == {"20-NN in training, val": {0: 0.1}}
    assert run.training_seconds == 640 / 32 + 640 / 64
    assert list(run.pictures) == ["attention"]
    assert run.machines[0]["processor"] == "Some CPU"
    assert run.problems == problems == []


def test_results_of_all_layouts_are_read_by_step(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", [record(20, 1.0)])
    probe = {"protocol": "linear probe", "data": "cifar10-test"}
    add_result(folder, "probe-1.json", top1=0.5, step=10, time="2026-11-22T10:00:00+00:00", **probe)
    add_result(folder, "probe-2.json", top1=0.6, step=10, time="2026-11-22T11:00:00+00:00", **probe)  # a second time
    add_result(folder, "probe-3.json", top1=0.7, step=20, time="2026-11-22T09:00:00+00:00", **probe)
    add_result(folder, "step-00000005/knn.json", top1=0.2, protocol="20-NN")
    add_result(folder, "knn.json", top1=0.3, protocol="20-NN", checkpoint="runs/a/encoder.safetensors")
    add_result(folder, "found.json", protocol="retrieval", mean_average_precision=0.25, step=20)
    add_result(folder, "ood.json", protocol="distance to neighbour 50", auroc=0.75, step=20)
    add_result(folder, "no-protocol.json", top1=1, step=20)
    add_result(folder, "step-00000005/encoder.json", variant="vit_micro")
    (folder / "evaluation" / "step-00000005" / "encoder.safetensors").touch()
    (run,), _ = read_runs([folder])
    assert run.scores == {
        "20-NN": {5: 0.2, 20: 0.3},
        "retrieval (mAP)": {20: 0.25},
        "distance to neighbour 50 (AUROC)": {20: 0.75},
        "no-protocol": {20: 1.0},
        "linear probe, cifar10-test": {10: 0.6, 20: 0.7},
    }
    assert run.problems == []


def test_results_of_another_bank_or_of_another_name_are_kept(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", [record(20, 1.0)])
    small = {"protocol": "20-NN", "step": 20, "top1": 0.5, "train_images": 500}
    add_result(folder, "knn-1.json", time="2026-11-22T10:00:00+00:00", **small | {"top1": 0.8, "train_images": 50_000})
    add_result(folder, "knn-2.json", time="2026-11-22T11:00:00+00:00", **small)
    add_result(folder, "knn.json", time="2026-11-22T11:00:00+00:00", **small)  # a copy of the newest
    add_result(folder, "probe.json", protocol="probe", step=20, top1=0.1)
    add_result(folder, "probe-low.json", protocol="low probe", step=20, top1=0.2)
    (run,), _ = read_runs([folder])
    assert run.scores == {
        "20-NN of 50,000 images": {20: 0.8},
        "20-NN of 500 images": {20: 0.5},
        "probe": {20: 0.1},
        "low probe": {20: 0.2},
    }


def test_an_evaluation_may_name_its_score(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", [record(20, 1.0)])
    add_result(folder, "a.json", protocol="classes", score="silhouette", silhouette=0.25, top1=0.5, step=20)
    add_result(folder, "b.json", protocol="classes", score="silhouette", silhouette=-0.1, step=20)
    add_result(folder, "c.json", protocol="classes", score=["top1"], top1=0.5, step=20)
    (run,), _ = read_runs([folder])
    assert run.scores == {"classes (silhouette)": {20: 0.25}}
    below, no_text = run.problems
    assert below.endswith("b.json: the score silhouette is not from 0 to 1. The result is left out.")
    assert "contains no number ['top1']" in no_text


def test_a_data_set_has_one_name_wherever_it_is_stored(tmp_path: Path) -> None:
    for name, val, content in (
        ("a", "photos", "11aa22bb"),
        ("b", "shards/val-*.tar", "11aa22bb"),
        ("c", "photos", "33"),
    ):
        folder = make_run(tmp_path / name, [record(10, 1.0, knn_top1=0.5)], evaluation={"val": f"x/{val}", "k": 20})
        (folder / "machine.jsonl").write_text(json.dumps(MACHINE | {"evaluation.val": content}) + "\n")
        protocol = {"protocol": "linear probe", "step": 10, "data": data_name(f"x/{val}")}
        add_result(folder, "probe.json", top1=0.6, data_content=content, **protocol)
    runs, _ = read_runs([tmp_path])
    columns = ["20-NN in training, photos (11aa22)", "linear probe, photos (11aa22)"]
    assert [sorted(run.scores) for run in runs[:2]] == [columns] * 2, "a folder and shards of the same images"
    assert sorted(runs[2].scores) == [one.replace("11aa22", "33") for one in columns], "other images, the same name"
    assert sorted(read_runs([tmp_path / "b"])[0][0].scores) == [
        "20-NN in training, shards-val",
        "linear probe, shards-val",
    ]


def test_scores_of_images_that_a_run_no_longer_scores_are_left_out(tmp_path: Path) -> None:
    records = [record(0, 1.0, knn_top1=0.1), record(20, 1.0, knn_top1=0.2), record(20, 1.0, knn_top1=0.7)]
    folder = make_run(tmp_path / "a", [*records, record(30, 1.0, knn_top1=0.8)], evaluation={"val": "b", "k": 20})
    starts = [(0, "11"), (10, "11"), (20, "22"), (30, None)]
    lines = [MACHINE | {"step": step} | ({"evaluation.val": one} if one else {}) for step, one in starts]
    (folder / "machine.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run,), _ = read_runs([folder])
    assert run.scores == {"20-NN in training, b": {20: 0.7, 30: 0.8}}
    assert (run.content("evaluation.val"), sorted(run.curve("loss"))) == ("22", [0, 20, 30])


def test_damaged_files_are_named_and_the_rest_is_read(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", [record(10, 1.0)])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": \n[1]\n{"step": 12, "loss": NaN}\n{"loss": 3}\n{"step": 13, "lo')  # the end of a kill
    (folder / "evaluation" / "broken.json").write_text("{")
    add_result(folder, "list.json", top1="high")
    (folder / "evaluation" / "array.json").write_text("[1]")
    (folder / "config.yaml").write_text("a: [")
    (run,), problems = read_runs([folder])
    assert problems == []
    assert run.curve("loss") == {10: 1.0}
    assert (run.last_step, run.method, run.finished) == (12, "?", False)
    text = "\n".join(run.problems)
    assert len(run.problems) == 6
    for words in ("config.yaml", "Line 2 of", "Line 3 of", "broken.json is not a JSON", "list.json", "array.json"):
        assert words in text


def test_unfinished_run_without_knn_and_without_machine(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", [record(5, 1.0)])
    (folder / "machine.jsonl").unlink()
    (run,), _ = read_runs([folder])
    assert (run.finished, run.machines, run.scores) == (False, [], {})
    (folder / "metrics.jsonl").unlink()
    (run,), _ = read_runs([folder])
    assert "no metrics" in run.problems[0]
    assert run.training_seconds == 0


def test_folders_of_runs_are_searched(tmp_path: Path) -> None:
    for name in ("b", "a"):
        make_run(tmp_path / "runs" / name, [record(20, 1.0)])
    (tmp_path / "empty").mkdir()
    runs, problems = read_runs([tmp_path / "runs" / "b", tmp_path / "runs", tmp_path / "empty", tmp_path / "none"])
    assert [run.name for run in runs] == ["b", "a"]
    assert len(problems) == 2
    assert "empty is not a run folder" in problems[0]
    assert "none is not a folder" in problems[1]
    with pytest.raises(ReportError, match="is not a run folder"):
        read_runs([tmp_path / "empty"])
