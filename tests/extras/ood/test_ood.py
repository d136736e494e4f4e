import json

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from sklearn.metrics import roc_auc_score, roc_curve
from sklearn.neighbors import NearestNeighbors

from tessera import encoders
from tessera.evaluation.features import EvaluationError, extract
from tessera.extras.ood.ood import OODSettings, run, separation
from tests.evaluation.conftest import save_encoder, write_shard


@pytest.mark.parametrize("digits", [1, 6])
@pytest.mark.parametrize(("known", "other"), [(200, 300), (19, 7), (20, 1), (1, 4)])
def test_equals_the_curve_of_scikit_learn(known, other, digits):
    """With one digit, many scores are equal."""
    rng = np.random.default_rng(known)
    scores = [rng.normal(1, size=known).round(digits), rng.normal(size=other).round(digits)]
    labels = np.repeat([1, 0], [known, other])
    false, true, _ = roc_curve(labels, np.concatenate(scores), drop_intermediate=False)
    auroc, fpr = separation(*map(torch.from_numpy, scores))
    assert auroc == pytest.approx(roc_auc_score(labels, np.concatenate(scores)))
    assert fpr == pytest.approx(false[true >= 0.95].min())


def others(tmp_path) -> str:
    """A shard of images without labels that are brighter than those of `shards`."""
    images = np.random.default_rng(1).integers(60, 255, (9, 16, 16, 3), dtype=np.uint8)
    return str(write_shard(tmp_path / "other-0.tar", images, None))


@pytest.mark.parametrize("variant", ["vit_micro", "swin_micro"])
def test_the_command_equals_scikit_learn(shards, tmp_path, variant):
    path, train, val = save_encoder(tmp_path / f"{variant}.safetensors", variant), *data(shards)
    other = others(tmp_path)
    run(OODSettings(checkpoint=path, train=train, val=val, ood=other, k=3, workers=0))
    (file,) = tmp_path.glob(f"{variant}-ood-*.json")
    found = json.loads(file.read_text())
    assert (found["protocol"], found["val_images"], found["ood_images"]) == (
        "distance to neighbour 3, against other", 13, 9,
    )  # fmt: skip
    encoder = encoders.load(path).eval()
    features = [
        extract(encoder, one, Accelerator(), workers=0, labels=False).features.double() for one in (train, val, other)
    ]
    bank, *sets = (one / one.norm(dim=1, keepdim=True) for one in features)
    nearest = NearestNeighbors(n_neighbors=3).fit(bank)
    scores = np.concatenate([-nearest.kneighbors(one)[0][:, 2] for one in sets])
    assert found["auroc"] == pytest.approx(roc_auc_score(np.repeat([1, 0], [13, 9]), scores), abs=0.01)


def data(shards) -> tuple[str, str]:
    return str(shards / "train-{0..1}.tar"), str(shards / "val-0.tar")


def test_too_few_images_are_refused(shards, tmp_path):
    train, val = data(shards)
    given = {
        "checkpoint": "pixels",
        "image_size": 16,
        "train": train,
        "val": val,
        "ood": others(tmp_path),
        "workers": 0,
    }
    with pytest.raises(EvaluationError, match=r"31 readable images.* at least k = 50 images"):
        run(OODSettings(**given))
    with pytest.raises(EvaluationError, match="is in both --train and --val"):
        run(OODSettings(**given | {"val": train}))
    with pytest.raises(EvaluationError, match="is in both --val and --ood"):
        run(OODSettings(**given | {"ood": val}))
    with pytest.raises(EvaluationError, match="is in both --train and --ood"):
        run(OODSettings(**given | {"ood": train}))
