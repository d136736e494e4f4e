"""An evaluation of another package takes the route of the evaluations: its file holds settings and a function."""

import json
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from sklearn.neighbors import NearestCentroid
from torch import Tensor

from tessera.encoders.base import Encoder
from tessera.evaluation.command import LabelledData, LabelledSettings, Result, evaluate
from tessera.runtime.settings import validate
from tests.evaluation.conftest import save_encoder


class CentroidSettings(LabelledSettings):
    """Accuracy of the nearest mean of a class, with the mean of the tokens as features."""

    margin: float = 0.0
    """distance that is added to the other classes"""

    def options(self) -> dict[str, Any]:
        return super().options() | {"feature": mean_token}


def mean_token(encoder: Encoder, images: Tensor) -> Tensor:
    return encoder(images).tokens.unflatten(0, (len(images), -1)).mean(1)


def score(settings: CentroidSettings, data: LabelledData, accelerator: Accelerator) -> Result:
    train, val = data.train, data.val
    one_hot = F.one_hot(train.labels).float()
    centres = one_hot.T @ train.features / one_hot.sum(0)[:, None]
    top1 = (torch.cdist(val.features, centres).argmin(1) == val.labels).double().mean().item()
    entries = {"protocol": "nearest centroid", "top1": top1, "width": train.features.shape[1]}
    expected = NearestCentroid().fit(train.features.numpy(), train.labels.numpy())
    assert top1 == expected.score(val.features.numpy(), val.labels.numpy())
    return Result(entries, ["top-1"], [[top1]])


def test_an_evaluation_is_settings_and_a_function(shards, tmp_path):
    train, val = str(shards / "train-{0..1}.tar"), str(shards / "val-0.tar")
    path = save_encoder(tmp_path / "vit.safetensors", depth=1, dim=24, heads=2)
    given = {"checkpoint": path, "train": train, "val": val, "workers": 0, "margin": 0.5}
    returned = evaluate("centroid", validate(CentroidSettings, given), score)
    (file,) = tmp_path.glob("vit-centroid-*.json")
    assert returned == json.loads(file.read_text())
    assert (returned["evaluation"], returned["protocol"], returned["width"]) == ("centroid", "nearest centroid", 24)
    assert (returned["train_images"], returned["val_images"], returned["classes"]) == (31, 13, 3)
    assert (returned["settings"]["margin"], returned["settings"]["image_size"]) == (0.5, 16)
