import json

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score

from tessera.evaluation.features import EvaluationError, LabelledFeatures
from tessera.extras.retrieval.retrieval import RetrievalSettings, retrieve, run
from tests.evaluation.conftest import made_up, save_encoder


def oracle(gallery, val=None):
    """Return the mean of scikit-learn's average precision in float64, and the number of queries."""
    scored = gallery if val is None else val
    bank, queries = (
        part.features.double() / part.features.double().norm(dim=1, keepdim=True) for part in (gallery, scored)
    )
    found = []
    for number, (similarity, label) in enumerate(zip(queries @ bank.T, scored.labels, strict=True)):
        keep = torch.ones(len(bank), dtype=torch.bool)
        keep[number if val is None else slice(0)] = False
        relevant = (gallery.labels == label)[keep]
        if relevant.any():
            found.append(average_precision_score(relevant, (similarity[keep] * 2**20).round()))
    return np.mean(found), len(found)


@pytest.mark.parametrize("cells", [2**25, 1000, 1])
def test_precision_is_that_of_scikit_learn_for_any_chunks(cells):
    gallery, val = made_up(300, 1, dim=6), made_up(90, 2, dim=6)
    for scored in (val, None):
        found = retrieve(gallery, scored, cells=cells)
        expected, queries = oracle(gallery, scored)
        assert found.mean_average_precision == pytest.approx(expected, abs=1e-6)
        assert (found.queries, found.left_out) == (queries, 0)
        assert 0.25 < expected < 0.9


def test_equally_similar_images_share_a_rank():
    directions = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    rng = np.random.default_rng(3)
    features = directions[rng.integers(0, 3, 60)] * torch.from_numpy(rng.integers(1, 4, (60, 1))).float()
    gallery = LabelledFeatures(features, torch.from_numpy(rng.integers(0, 3, 60)))
    found = retrieve(gallery, None).mean_average_precision
    assert found == pytest.approx(oracle(gallery)[0], abs=1e-6)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(0))
    shuffled = LabelledFeatures(features[order], gallery.labels[order])
    assert retrieve(shuffled, None).mean_average_precision == pytest.approx(found, abs=1e-9)


def test_a_query_without_a_relevant_image_is_left_out():
    gallery = made_up(80, 4, dim=6)
    gallery.labels[7] = 99
    found = retrieve(gallery, None)
    expected, queries = oracle(gallery)
    assert found.mean_average_precision == pytest.approx(expected, abs=1e-6)
    assert (found.queries, found.left_out, queries) == (79, 1, 79)
    alone = LabelledFeatures(gallery.features[:3], torch.arange(3))
    with pytest.raises(EvaluationError, match="another image of its class"):
        retrieve(alone, None)


@pytest.mark.parametrize("variant", ["vit_micro", "swin_micro"])
def test_the_command_works(shards, tmp_path, variant):
    path = save_encoder(tmp_path / f"{variant}.safetensors", variant)
    run(RetrievalSettings(checkpoint=path, train=str(shards / "train-{0..1}.tar"), workers=0))
    (file,) = tmp_path.glob(f"{variant}-retrieval-shards*-train-*.json")
    found = json.loads(file.read_text())
    assert (found["queries"], found["left_out"], found["protocol"]) == (31, 0, "retrieval, leave one out")
    assert 0.3 < found["mean_average_precision"] < 1
