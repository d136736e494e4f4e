"""Pictures of crops pixel by pixel."""

import numpy as np
import pytest
import torch

from tessera.data import pictures
from tessera.data.augment import to_model_input
from tessera.data.batch import Batch, View
from tessera.encoders.base import Preprocessing
from tests.views import GAP, cell, pixels


def test_crops_of_an_image_are_a_row() -> None:
    raw = [pixels(2 * 3, 3, 8, 8), pixels(3 * 3, 3, 4, 4)]  # 3 images with 2 global and 3 local crops
    batch = Batch([View(raw[0], 2), View(raw[1], 3)])
    picture = pictures.crops(to_model_input(batch), images=2, side=8)
    assert picture.shape == (2 * (8 + GAP), 5 * (8 + GAP), 3)
    assert picture.dtype == np.uint8
    for image in range(2):
        for crop in range(5):
            view, c = (raw[0], crop) if crop < 2 else (raw[1], crop - 2)
            expected = view[c * 3 + image].permute(1, 2, 0).numpy()
            expected = np.kron(expected, np.ones((8 // len(expected),) * 2 + (1,), np.uint8))
            np.testing.assert_array_equal(cell(picture, image, crop, 8), expected)
    assert (picture[:, 8:10] == 255).all()
    assert pictures.crops(to_model_input(batch), images=9, side=8).shape[0] == 3 * (8 + GAP)


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 7])
def test_images_with_any_number_of_channels_are_shown(channels: int) -> None:
    preprocessing = Preprocessing(tuple(0.1 * c for c in range(channels)), tuple(0.5 + c for c in range(channels)))
    raw = pixels(1, channels, 8, 8)
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (preprocessing.mean, preprocessing.std))
    images = (raw / 255 - mean) / std
    shown = raw[0].permute(1, 2, 0).numpy()
    if channels == 1:
        shown = shown.repeat(3, 2)
    elif channels == 2:
        shown = np.concatenate([shown, np.zeros((8, 8, 1), np.uint8)], 2)
    for picture in (
        pictures.panels([[images[0]]], preprocessing, side=8),
        pictures.crops(Batch([View(images, 1)], preprocessing=preprocessing), side=8),
    ):
        np.testing.assert_array_equal(cell(picture, 0, 0, 8), shown[..., :3])


@pytest.mark.parametrize(("bands", "order"), [((4, 3, 2), [3, 2, 1]), ((5,), [4, 4, 4]), ((2, 5), [1, 4, None])])
def test_chosen_bands(bands, order) -> None:
    raw, unchanged = pixels(1, 5, 8, 8), Preprocessing((0.0,) * 5, (1.0,) * 5)
    picture = pictures.panels([[raw[0] / 255]], unchanged, side=8, bands=bands)
    expected = [np.zeros((8, 8), np.uint8) if band is None else raw[0, band].numpy() for band in order]
    np.testing.assert_array_equal(cell(picture, 0, 0, 8), np.stack(expected, 2))


def test_bands_with_a_range_are_shown_between_quantiles_of_all_images() -> None:
    """Oracle: NumPy's quantiles of the first view; the local crops have the same limits."""
    ranged = Preprocessing((0.1,) * 4, (0.5,) * 4, "uint16", (0.0,) * 4, (9000.0,) * 4)
    values = [torch.rand(2, 4, 8, 8) * 0.2, torch.rand(2, 4, 8, 8)]
    values[0][0, :, 0, 0] = 1  # one bright pixel
    batch = Batch([View((one - 0.1) / 0.5, 1) for one in values], preprocessing=ranged)
    picture = pictures.crops(batch, side=8, bands=(4, 3, 2))
    low, high = np.quantile(values[0].numpy()[:, [3, 2, 1]], (0.02, 0.98), axis=(0, 2, 3))[:, :, None, None]
    for image in range(2):
        for view, one in enumerate(values):
            shown = np.clip((one[image].numpy()[[3, 2, 1]] - low) / (high - low), 0, 1).transpose(1, 2, 0)
            np.testing.assert_allclose(cell(picture, image, view, 8), 255 * shown, atol=0.6)


def test_values_without_data_are_black_and_do_not_count() -> None:
    values = torch.rand(1, 1, 20, 20)
    values[..., :10] = torch.nan
    found = pictures.quantiles([values[0]])
    np.testing.assert_allclose(found[:, 0], np.quantile(values[..., 10:].numpy(), (0.02, 0.98)), rtol=1e-6)
    shown = pictures.as_rgb(values, limits=found)
    assert (shown[..., :10] == 0).all()
    assert shown[..., 10:].max() == 1
