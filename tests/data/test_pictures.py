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
