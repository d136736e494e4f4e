"""k-NN segmentation: classes of tokens and votes against naive loops and scikit-learn."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier

from tessera.evaluation.features import EvaluationError
from tessera.extras.dense.patch_knn import PatchKNNSettings, chosen_tokens, run, token_classes, votes
from tests.evaluation.conftest import FAMILIES, results_of_one_and_two_processes, save_encoder
from tests.extras.dense.test_segmentation import write_scenes
from tests.pretrain.small import on_processes


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("scenes")
    train, val = write_scenes(folder / "train.tar", range(24)), write_scenes(folder / "val.tar", range(100, 107))
    return {"train": train, "val": val, "workers": 0}


@pytest.mark.parametrize(("size", "rows", "columns"), [((12, 8), 3, 4), ((7, 9), 2, 3)])
def test_a_token_has_the_class_of_most_of_its_pixels(size: tuple[int, int], rows: int, columns: int) -> None:
    targets = torch.randint(0, 3, (2, *size), generator=torch.Generator().manual_seed(0))
    targets[torch.rand(targets.shape, generator=torch.Generator().manual_seed(1)) < 0.5] = 255
    targets[0, :4, :3] = 255
    found = token_classes(targets, rows, columns, 3)
    for b, row, column in np.ndindex(2, rows, columns):
        counts = [0, 0, 0]
        for y, x in np.ndindex(*size):
            inside = int((y + 0.5) * rows / size[0]) == row and int((x + 0.5) * columns / size[1]) == column
            if inside and targets[b, y, x] != 255:
                counts[int(targets[b, y, x])] += 1
        assert found[b, row, column] == (counts.index(max(counts)) if max(counts) else 255)


def test_votes_are_those_of_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    bank, labels, tokens = rng.normal(size=(200, 6)), rng.integers(0, 4, 200), rng.normal(size=(2, 6, 3, 5))
    bank /= np.linalg.norm(bank, axis=1, keepdims=True)
    settings = PatchKNNSettings(checkpoint="x", train="x", val="x", k=[7, 1], temperature=0.1)
    given = (torch.from_numpy(array).float() for array in (tokens, bank))
    found = votes(*given, torch.from_numpy(labels), 4, settings)
    queries = tokens.transpose(0, 2, 3, 1).reshape(-1, 6)
    for k, shares in zip(settings.k, found, strict=True):
        weights: Any = lambda distance: np.exp((1 - distance) / 0.1)  # noqa: E731
        oracle = KNeighborsClassifier(k, metric="cosine", algorithm="brute", weights=weights).fit(bank, labels)
        expected = oracle.predict_proba(queries).reshape(2, 3, 5, 4).transpose(0, 3, 1, 2)
        np.testing.assert_allclose(shares.numpy(), expected, atol=1e-5)


def test_the_tokens_of_an_image_depend_on_its_name_alone() -> None:
    counts = [len(chosen_tokens(f"a.tar/{i}", 16, 0.25)) for i in range(400)]
    assert set(counts) == {0, 1}
    assert sum(counts) == pytest.approx(100, abs=30)
    assert torch.equal(chosen_tokens("a.tar/1", 16, 5), chosen_tokens("a.tar/1", 16, 5))
    assert not torch.equal(chosen_tokens("a.tar/1", 16, 5), chosen_tokens("a.tar/2", 16, 5))
    assert len(chosen_tokens("a.tar/1", 16, 5).unique()) == 5
    assert chosen_tokens("a.tar/1", 16, 99).tolist() == list(range(16))


@pytest.mark.parametrize("variant", FAMILIES)
def test_colours_are_segmented_by_every_encoder(variant: str, scenes: dict[str, Any], tmp_path: Any) -> None:
    path = save_encoder(tmp_path / "encoder.safetensors", variant)
    run(PatchKNNSettings(**scenes, checkpoint=path, k=[5, 1], output=str(tmp_path / "result.json")))
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["mean_iou"] > 0.25  # the colours are seen even with random weights
    assert result["mean_iou"] == result["all"][0]["mean_iou"]
    assert (result["protocol"], result["val_images"], result["classes"]) == ("5-NN of patches", 7, 4)


def test_the_bank_is_bounded_and_must_hold_the_neighbours(scenes: dict[str, Any], tmp_path: Any) -> None:
    given = scenes | {"checkpoint": "pixels", "image_size": 32}
    for name, bank, least in (("more", 24 * 10, 150), ("fewer", 8, 3)):
        file = tmp_path / f"{name}.json"
        run(PatchKNNSettings(**given, bank=bank, k=[3], output=str(file)))
        assert least <= json.loads(file.read_text())["settings"]["tokens"] <= 2 * bank
    with pytest.raises(EvaluationError, match=r"fewer than --k 30\. Lower --k"):
        run(PatchKNNSettings(**given, bank=20, k=[30]))


def _few(rank: int, options: dict[str, Any]) -> None:
    run(PatchKNNSettings(**options))


@pytest.mark.slow
def test_a_process_may_have_no_image(scenes: dict[str, Any], tmp_path: Any, free_port: int) -> None:
    options = scenes | {"val": write_scenes(tmp_path / "one.tar", [100]), "k": [3, 1]}
    options |= {"checkpoint": save_encoder(tmp_path / "encoder.safetensors"), "output": str(tmp_path / "result.json")}
    on_processes(_few, free_port, options)
    assert json.loads((tmp_path / "result.json").read_text())["val_images"] == 1


@pytest.mark.slow
def test_two_processes_give_the_same(scenes: dict[str, Any], tmp_path: Any, free_port: int) -> None:
    options = scenes | {"checkpoint": save_encoder(tmp_path / "encoder.safetensors"), "bank": 200}
    one, two = results_of_one_and_two_processes(tmp_path, free_port, run, PatchKNNSettings, options)
    assert one["settings"]["tokens"] == two["settings"]["tokens"] > 100
    assert one["mean_iou"] == pytest.approx(two["mean_iou"], abs=2e-3)
