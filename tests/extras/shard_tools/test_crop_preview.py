"""The preview of a run: its crops and masks are those that the loader of the run yields."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tessera.data.augment import to_model_input
from tessera.data.batch import Batch, View
from tessera.data.batch_sampler import BatchSampler
from tessera.data.collate import Sample
from tessera.data.crops import MultiCrop, MultiCropConfig, RandomCrop, RandomCropConfig
from tessera.data.demo import demo_shards
from tessera.data.loader import training_batches
from tessera.data.masking import MaskedCrop
from tessera.encoders.base import Preprocessing
from tessera.encoders.images import Mask, pack
from tessera.extras.shard_tools.crop_preview import (
    crop_cells,
    first_images,
    hidden_tokens,
    image_cell,
    main,
    shown_limits,
    split,
)
from tessera.pretrain.command_line import load
from tessera.runtime.settings import SettingsError
from tests.pretrain.test_mixed_sizes import command

SMALL = ["--encoder", "vit_micro", "--batch_size", "64", "--seed", "3"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path / "cache"))


def pixels(image: Tensor) -> np.ndarray:
    """Undo the normalisation with the statistics of ImageNet: (3, H, W) -> (H, W, 3) uint8."""
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    return (255 * np.clip(image.permute(1, 2, 0).numpy() * std + mean, 0, 1)).round().astype(np.uint8)


def batch_of_a_run(transform: MultiCrop | MaskedCrop):
    sampler = BatchSampler(batch_size=64, steps=1)
    return to_model_input(next(iter(training_batches(demo_shards()[0], transform, sampler, seed=3))))


def test_images_and_crops_of_12_bits_are_shown_alike() -> None:
    """A crop that is the whole image looks like the image: chosen bands, between NumPy's quantiles."""
    values = np.random.default_rng(0).integers(0, 1500, (4, 8, 8)).astype(np.uint16)
    form = Preprocessing((0.1,) * 4, (0.2,) * 4, "uint16", (100.0,) * 4, (1100.0,) * 4)
    units = np.clip((values.astype(np.float64) - 100) / 1000, 0, 1)
    batch = Batch([View(torch.from_numpy((units - 0.1) / 0.2).float()[None], 1)], [""], preprocessing=form)
    bands = units[[3, 2, 1]].transpose(1, 2, 0)
    low, high = np.quantile(bands, (0.02, 0.98), axis=(0, 1))
    expected = 255 * np.clip((bands - low) / (high - low), 0, 1)
    (crop,) = crop_cells(batch, 0, (4, 3, 2))
    whole = image_cell(Sample("", torch.from_numpy(values), ()), "", form, (4, 3, 2), shown_limits(batch, (4, 3, 2)))
    for cell in (crop, whole):
        np.testing.assert_allclose(cell.image, expected, atol=0.6)


@pytest.mark.medium
def test_crops_are_those_of_a_dino_run() -> None:
    flags = ["--dino.global_size", "16", "--dino.local_size", "8", "--dino.local_crops", "3"]
    batch, samples, captions = first_images(load(["--method", "dino", "--data", demo_shards()[0], *SMALL, *flags]), 5)
    run = batch_of_a_run(MultiCrop(MultiCropConfig(global_size=16, local_size=8, local_crops=3)))
    assert batch.keys == run.keys[:5] == [sample.key for sample in samples]
    assert captions == [f"class {label}" for label in _labels(batch.keys)]
    for number in range(5):
        cells = crop_cells(batch, number)
        names = [cell.caption for cell in cells]
        assert names == ["global 1, 16 px", "global 2, 16 px", "local 1, 8 px", "local 2, 8 px", "local 3, 8 px"]
        expected = [view.images[crop * 64 + number] for view in run.views for crop in range(view.crops)]  # pyright: ignore
        for cell, crop in zip(cells, expected, strict=True):
            np.testing.assert_allclose(cell.image.astype(int), pixels(crop).astype(int), atol=1)


def _labels(keys: list[str]) -> list[int]:
    """Return the digit of each sample `train-000000.tar/digit-0123`, from scikit-learn."""
    from sklearn.datasets import load_digits

    _, labels = load_digits(return_X_y=True)
    return [int(labels[int(key.rpartition("-")[2])]) for key in keys]


def test_masks_are_those_of_a_mae_run() -> None:
    flags = ["--mae.size", "16", "--mae.mask_ratio", "0.5", "--mae.mask", "block"]
    batch, _, _ = first_images(load(["--method", "mae", "--data", demo_shards()[0], *SMALL, *flags]), 4)
    run = batch_of_a_run(MaskedCrop(RandomCrop(RandomCropConfig(size=16)), 4, "block", 0.5))
    hidden = run.views[0].masks[0].hidden.view(64, 4, 4)
    for number in range(4):
        crop, masked = crop_cells(batch, number)
        assert (crop.caption, masked.caption) == ("crop, 16 px", "50 % hidden")
        gray = np.kron(hidden[number].numpy(), np.ones((4, 4))).astype(bool)
        assert (masked.image[gray] == 128).all()
        np.testing.assert_array_equal(masked.image[~gray], crop.image[~gray])
        np.testing.assert_allclose(crop.image.astype(int), pixels(run.views[0].images[number]).astype(int), atol=1)


def test_hidden_tokens_of_crops_of_any_shape() -> None:
    flat = torch.arange(2 * 2 * 6) % 5 == 0
    tensor = View(torch.zeros(2, 3, 8, 24), 1)
    mask = Mask.from_hidden(flat, torch.tensor([[2, 6], [2, 6]]))
    torch.testing.assert_close(hidden_tokens(tensor, mask, 1), flat[12:].view(2, 6))
    packed = pack([torch.zeros(1, 3, 8, 12), torch.zeros(1, 3, 4, 8)], 4)
    mask = Mask.from_hidden(flat[: 6 + 2], packed.grids)
    torch.testing.assert_close(hidden_tokens(View(packed, 1), mask, 1), flat[6:8].view(1, 2))


def test_packed_crops_are_shown(tmp_path: Path) -> None:
    argv = [demo_shards()[0], "--method", "mae", "--encoder", "navit_micro", "--mae.native", "--mae.size", "32"]
    main([*argv, "--mae.smallest_size", "16", "--output", str(tmp_path / "sheet.png"), "--images=3"])
    assert (tmp_path / "sheet.png").stat().st_size > 1000


def test_the_command_line_is_split() -> None:
    settings, rest = split(["a.tar", "b.tar", "--method", "mae", "--images", "3", "--output=x.png", "--seed", "1"])
    assert (settings.images, str(settings.output)) == (3, "x.png")
    assert rest == ["--data", "a.tar", "b.tar", "--method", "mae", "--seed", "1"]
    assert split([])[1] == []
    with pytest.raises(SettingsError, match="--output expects a value"):
        split(["--output"])
    with pytest.raises(SettingsError, match="images"):
        split(["--images", "0"])


def test_a_preview_shows_the_crops_of_the_first_step() -> None:
    captions = {}
    for seed in ("0", "1"):
        batch, _, _ = first_images(load([*command(), "--seed", seed]), 2)
        captions[seed] = [cell.caption for cell in crop_cells(batch, 1) if "hidden" not in cell.caption]
    small = ["global 1, 16 px", "global 2, 16 px", "local 1, 8 px", "local 2, 8 px"]
    large = ["global 1, 24 px", "global 2, 24 px", "local 1, 12 px", "local 2, 12 px"]
    large += ["Gram teacher 1, 32 px", "Gram teacher 2, 32 px"]
    assert sorted(captions.values()) == [small, large]
