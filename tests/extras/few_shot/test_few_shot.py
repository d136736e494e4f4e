import statistics
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from threadpoolctl import threadpool_limits

from tessera.extras.few_shot import few_shot
from tessera.extras.few_shot.few_shot import FewShotSettings, drawn, places_in_class
from tessera.runtime.settings import validate
from tests.evaluation.conftest import knn_oracle


def settings(**changed: Any) -> FewShotSettings:
    return validate(FewShotSettings, {"checkpoint": "x", "train": "x", "val": "x"} | changed)


def test_every_class_gives_its_share():
    labels = torch.tensor([0] * 1000 + [1] * 30 + [2] * 3 + [4])[torch.randperm(1034)]
    keys = [f"train-0.tar/{i}" for i in range(len(labels))]
    places, sizes = places_in_class(keys, labels, seed=0, draw=0)
    for share, expected in ((1, [10, 1, 1, 0, 1]), (10, [100, 3, 1, 0, 1]), (100, [1000, 30, 3, 0, 1])):
        assert labels[drawn(places, sizes, share)].bincount().tolist() == expected
    assert not (drawn(places, sizes, 2) & ~drawn(places, sizes, 5)).any()  # a larger share holds the smaller one


def test_draws_follow_from_names_and_seed():
    labels, keys = torch.arange(500) % 5, [f"train-{i // 100}.tar/{i}" for i in range(500)]

    def chosen(keys, labels, **draw):
        mask = drawn(*places_in_class(keys, labels, **{"seed": 0, "draw": 0} | draw), 10)
        return {key for key, one in zip(keys, mask.tolist(), strict=True) if one}

    first = chosen(keys, labels)
    order = torch.randperm(500, generator=torch.Generator().manual_seed(0))
    assert chosen([keys[i] for i in order], labels[order]) == first
    for other in ({"draw": 1}, {"seed": 1}):
        assert len(chosen(keys, labels, **other) & first) < 20  # 5 of 50 by chance


def test_accuracies_of_digits_are_those_of_scikit_learn(digits):
    train, val = digits
    rows = few_shot.few_shot(train, val, settings(shares=[1, 10, 100], draws=2, seed=3))
    assert [(row["share"], row["images"], row["draws"], row["k"]) for row in rows] == [
        (1, 10, 2, 1),
        (10, 120, 2, 12),
        (100, 1200, 1, 20),
    ]
    x, y = train.features.double().numpy(), train.labels.numpy()
    z, answers = val.features.double().numpy(), val.labels.numpy()

    def scaled(rows):
        centred = rows - rows.mean(1, keepdims=True)
        return centred / np.linalg.norm(centred, axis=1, keepdims=True)

    for row in rows:
        expected = {"knn": [], "logistic_regression": []}
        for draw in range(row["draws"]):
            mask = drawn(*places_in_class(train.keys, train.labels, 3, draw), row["share"]).numpy()
            expected["knn"].append(knn_oracle(row["k"]).fit(x[mask], y[mask]).score(z, answers))
            with threadpool_limits(1):
                linear = LogisticRegression(C=400, fit_intercept=False, tol=1e-8, max_iter=5000)
                expected["logistic_regression"].append(linear.fit(scaled(x[mask]), y[mask]).score(scaled(z), answers))
        for name, accuracies in expected.items():
            found = row[name]
            assert found["top1_of_draws"] == pytest.approx(accuracies, abs=2.1 / 597)
            assert found["top1"] == pytest.approx(statistics.fmean(found["top1_of_draws"]))
            assert found["top1_std"] == pytest.approx(np.std(found["top1_of_draws"], ddof=min(row["draws"] - 1, 1)))
            assert found["top5"] >= found["top1"]
    assert rows[0]["logistic_regression"]["top1"] < rows[1]["logistic_regression"]["top1"]
    assert rows[0]["knn"]["top1_std"] > 0
