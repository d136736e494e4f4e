"""The dense score of a run is that of the command on the same encoder."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tessera import encoders
from tessera.data.demo import demo_shards
from tessera.data.shards import open_shards
from tessera.extras.dense.patch_knn import PatchKNNSettings
from tessera.extras.dense.patch_knn import run as patch_knn
from tessera.extras.report.run_folders import read_runs
from tessera.pretrain.run import main
from tests.extras.dense.test_segmentation import write_scenes
from tests.launched import TINY, records

pytestmark = pytest.mark.usefixtures("fresh_engine")


@pytest.fixture(scope="module")
def maps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("scenes")
    return {
        name: write_scenes(folder / f"{name}.tar", seeds)
        for name, seeds in (("train", range(12)), ("val", range(100, 105)))
    }


@pytest.mark.slow
def test_a_run_measures_what_the_command_measures(maps: dict[str, str], tmp_path: Path, caplog: Any) -> None:
    caplog.set_level("INFO")
    words = [*TINY, "--data", demo_shards()[0], "--steps", "4", "--evaluate_every", "2", "--evaluation.pictures", "0"]
    words += ["--evaluation.maps_train", maps["train"], "--evaluation.maps_val", maps["val"], "--workers", "0"]
    words += ["--evaluation.view_images", "16"]  # to score all images would take most of the time
    assert main([*words, "--output", str(tmp_path / "run")]) == 0
    scores = {line["step"]: line["patch_miou"] for line in records(tmp_path / "run") if "patch_miou" in line}
    assert list(scores) == [0, 2, 4]
    assert "step 4: mean IoU of a k-NN segmentation" in caplog.text
    result = tmp_path / "result.json"
    given = maps | {"checkpoint": str(tmp_path / "run"), "k": [10], "bank": 50_000, "workers": 0}
    patch_knn(PatchKNNSettings(**given, output=str(result)))
    assert scores[4] == pytest.approx(json.loads(result.read_text())["mean_iou"], abs=1e-6)
    (run,), _ = read_runs([tmp_path / "run"])
    (name,) = (name for name in run.scores if name.startswith("10-NN of patches in training (mIoU), "))
    assert run.scores[name] == scores
    images = {"data.shards": demo_shards()[0], "evaluation.maps_val": maps["val"]}
    assert {name: run.content(name) for name in images} == {
        name: open_shards(x).content() for name, x in images.items()
    }
    assert None not in map(run.content, images), "reports recognise the images"
    # the run itself is the same without the score
    plain = [word for word in words if word not in maps.values() and "maps" not in word]
    assert main([*plain, "--output", str(tmp_path / "plain")]) == 0
    ours, theirs = (encoders.load(tmp_path / name).state_dict() for name in ("run", "plain"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_maps_of_both_sets_are_needed(maps: dict[str, str], tmp_path: Path, capsys: Any) -> None:
    words = [*TINY, "--output", str(tmp_path / "run"), "--evaluation.maps_val", maps["val"]]
    assert main(words) == 2
    assert "--evaluation.maps_val needs --evaluation.maps_train" in capsys.readouterr().err
