"""Pictures pixel by pixel: encoders that answer with known numbers, scikit-learn's PCA."""

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA

from tessera import encoders
from tessera.data.augment import to_model_input
from tessera.data.batch import Batch, View
from tessera.encoders.base import Encoder, Preprocessing
from tessera.pretrain.monitoring import feature_maps
from tests.evaluation.conftest import Known
from tests.views import GAP, cell, pixels


def test_attention_is_the_class_tokens_over_the_patches_alone() -> None:
    heads, registers = 2, 3
    attention = torch.rand(1, heads, 1 + registers + 4, 1 + registers + 4)
    row = torch.tensor([[0.9, 0.0, 0.0, 0.0, 0.1, 0.2, 0.4, 0.0], [0.0, 0.5, 0.3, 0.1, 0.05, 0.05, 0.0, 0.025]])
    attention[0, :, 0] = row
    images = to_model_input(Batch([View(pixels(1, 3, 8, 8), 1)])).views[0].images
    picture = feature_maps.attention(Known(torch.zeros(1, 4, 5), attention), images, side=8)
    assert picture is not None
    np.testing.assert_array_equal(cell(picture, 0, 0, 8), pixels(1, 3, 8, 8)[0].permute(1, 2, 0).numpy())
    for head, brightest in enumerate((0.4, 0.05)):
        share = row[head, -4:].view(2, 2).numpy() / brightest
        expected = np.kron(np.round(share * 255), np.ones((4, 4)))
        np.testing.assert_allclose(cell(picture, 0, 1 + head, 8)[..., 0], expected, atol=1)
        assert cell(picture, 0, 1 + head, 8).max() == 255


def test_attention_of_encoders_without_class_token_is_none() -> None:
    images = torch.randn(2, 3, 16, 16)
    settings = {"depth": 1, "dim": 24, "heads": 2, "image_size": 16}
    assert (
        feature_maps.attention(encoders.build("vit_micro", pool="mean", class_token=False, **settings), images) is None
    )
    assert feature_maps.attention(Encoder(), images) is None
    picture = feature_maps.attention(encoders.build("vit_micro", registers=2, **settings).eval(), images, side=16)
    assert picture is not None
    assert picture.shape == (2 * (16 + GAP), (1 + 2) * (16 + GAP), 3)


def test_pca_shows_the_components_of_all_images_together() -> None:
    generator = torch.Generator().manual_seed(0)
    scales = torch.tensor([9.0, 5.0, 3.0, 0.1, 0.1, 0.1])
    tokens = torch.randn(3, 4, 6, generator=generator) * scales + 4.0
    images = to_model_input(Batch([View(pixels(3, 3, 8, 8), 1)])).views[0].images
    picture = feature_maps.pca(Known(tokens, tokens), images, side=8)
    assert picture.shape == (2 * (8 + GAP), 3 * (8 + GAP), 3)
    flat = tokens.flatten(0, 1).double().numpy()
    fitted = PCA(3).fit(flat)
    signs = [np.sign(component[np.abs(component).argmax()]) for component in np.asarray(fitted.components_)]
    projected = fitted.transform(flat) * signs
    low, high = np.quantile(projected, 0.02, axis=0), np.quantile(projected, 0.98, axis=0)
    colours = np.clip((projected - low) / (high - low), 0, 1) * 255
    for image in range(3):
        expected = np.kron(colours[image * 4 : image * 4 + 4].reshape(2, 2, 3), np.ones((4, 4, 1)))
        np.testing.assert_allclose(cell(picture, 1, image, 8), expected, atol=1)
        np.testing.assert_array_equal(cell(picture, 0, image, 8), pixels(3, 3, 8, 8)[image].permute(1, 2, 0).numpy())


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 7])
def test_images_with_any_number_of_channels_are_shown(channels: int) -> None:
    preprocessing = Preprocessing(tuple(0.1 * c for c in range(channels)), tuple(0.5 + c for c in range(channels)))
    raw = pixels(1, channels, 8, 8)
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (preprocessing.mean, preprocessing.std))
    images = (raw / 255 - mean) / std
    encoder = Known(torch.randn(1, 4, 6), torch.rand(1, 1, 5, 5))
    encoder.preprocessing = preprocessing
    shown = raw[0].permute(1, 2, 0).numpy()
    if channels == 1:
        shown = shown.repeat(3, 2)
    elif channels == 2:
        shown = np.concatenate([shown, np.zeros((8, 8, 1), np.uint8)], 2)
    attention = feature_maps.attention(encoder, images, side=8)
    assert attention is not None
    for picture in (feature_maps.pca(encoder, images, side=8), attention):
        np.testing.assert_array_equal(cell(picture, 0, 0, 8), shown[..., :3])


def test_pca_of_tokens_that_are_all_alike_is_a_picture_too() -> None:
    picture = feature_maps.pca(Known(torch.ones(2, 4, 6), torch.ones(2, 1, 4, 4)), torch.zeros(2, 3, 8, 8), side=8)
    assert picture.shape == (2 * (8 + GAP), 2 * (8 + GAP), 3)
