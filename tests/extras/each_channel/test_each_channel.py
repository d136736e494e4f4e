"""An encoder of each channel against its encoder of one channel, called for one channel of one image at a time."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tessera import encoders
from tessera.encoders.base import Encoder, Features, Preprocessing
from tessera.encoders.images import Mask
from tessera.encoders.randomness import random_keys
from tests.pretrain.small import MICRO

PRESENT = (2, 5, 4)
"""Number of channels of each image."""


def make(name: str, **options: Any) -> Any:
    torch.manual_seed(0)
    encoder = encoders.build(f"each:{name}", **({"channels": 5, "image_size": 64} | options)).eval()
    encoder.preprocessing = Preprocessing((0.5,) * 5, (0.5,) * 5, fewer_channels=True)
    return encoder


def images() -> Tensor:
    x = torch.randn(3, 5, 64, 64, generator=torch.Generator().manual_seed(1))
    for image, channels in zip(x, PRESENT, strict=True):
        image[channels:] = float("nan")
    return x


def one_by_one(encoder: Encoder, x: Tensor, hidden: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the mean over channels of pooled and token features, from one call for each channel of each image."""
    pooled, tokens = [], []
    for number, channels in enumerate(PRESENT):
        mask = None if hidden is None else Mask.from_hidden(hidden[number], encoder.grids(x[:1]))
        found = [encoder(x[number : number + 1, c : c + 1], mask, drop=mask is not None) for c in range(channels)]
        pooled.append(torch.stack([one.pooled for one in found]).double().mean(0))
        tokens.append(torch.stack([one.tokens for one in found]).double().mean(0))
    return torch.cat(pooled), torch.cat(tokens)


def assert_near(features: Features, expected: tuple[Tensor, Tensor]) -> None:
    torch.testing.assert_close(features.pooled.double(), expected[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(features.tokens.double(), expected[1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", MICRO)
@torch.no_grad()
def test_features_are_the_mean_over_the_channels_that_an_image_has(name: str) -> None:
    encoder = make(name)
    assert_near(encoder(images()), one_by_one(encoder.encoder, images()))


@torch.no_grad()
def test_a_mask_drops_the_same_tokens_of_all_channels() -> None:
    encoder = make("vit_micro")
    hidden = torch.rand(3, 256, generator=torch.Generator().manual_seed(0)) < 0.6
    features = encoder(images(), Mask.from_hidden(hidden.flatten(), encoder.grids(images())), drop=True)
    assert_near(features, one_by_one(encoder.encoder, images(), hidden))


@torch.no_grad()
def test_the_mean_does_not_depend_on_other_images_or_on_the_order_of_channels() -> None:
    encoder, x = make("vit_micro"), images()[1:2]
    alone = encoder(x).pooled
    torch.testing.assert_close(encoder(images()).pooled[1:2], alone, rtol=0, atol=1e-6)
    torch.testing.assert_close(encoder(x.flip(1)).pooled, alone, rtol=0, atol=1e-6)


@torch.no_grad()
def test_concatenated_features_are_those_of_each_channel() -> None:
    encoder, x = make("vit_micro", join="concat"), images()[1:2].expand(2, -1, -1, -1)
    features, dim = encoder(x), encoder.encoder.dim
    assert features.pooled.shape == (2, 5 * dim) == (2, encoder.dim)
    for channel in range(5):
        own = encoder.encoder(x[:, channel : channel + 1])
        part = slice(channel * dim, (channel + 1) * dim)
        torch.testing.assert_close(features.pooled[:, part], own.pooled, rtol=0, atol=1e-5)
        torch.testing.assert_close(features.tokens[:, part], own.tokens, rtol=0, atol=1e-5)


def test_concatenation_needs_all_channels() -> None:
    with pytest.raises(encoders.EncoderError, match='Use join="mean"'):
        make("vit_micro", join="concat")(images())


def test_an_image_without_channels_is_refused() -> None:
    with pytest.raises(encoders.EncoderError, match="All channels of an image are missing"):
        make("vit_micro")(torch.full((1, 5, 64, 64), float("nan")))


@torch.no_grad()
def test_drop_path_is_a_function_of_the_image_and_not_of_the_batch() -> None:
    encoder = make("vit_micro", drop_path=0.5).train()

    def pooled(numbers: list[int]) -> Tensor:
        with random_keys(0, 3, torch.tensor(numbers)):
            return encoder(images()[numbers]).pooled

    torch.testing.assert_close(torch.cat([pooled([0, 1]), pooled([2])]), pooled([0, 1, 2]), rtol=0, atol=1e-5)
    assert not torch.allclose(pooled([2]), encoder.eval()(images()[2:]).pooled)


def test_the_settings_are_those_of_the_encoder_of_one_channel() -> None:
    own = dict(encoders.build("vit_micro", channels=5, image_size=64).settings)
    assert make("vit_micro").settings == own | {"variant": "each:vit_micro", "join": "mean"}
    assert [*make("vit_micro").encoder.patch_embed.proj.weight.shape][:2] == [own["dim"], 1]


@pytest.mark.parametrize(("name", "reason"), [("each:each:vit_micro", "twice"), ("each:vit_nine", "Unknown encoder")])
def test_an_unknown_name_is_refused(name: str, reason: str) -> None:
    with pytest.raises(encoders.EncoderError, match=reason):
        encoders.build(name)


def test_published_weights_do_not_exist() -> None:
    with pytest.raises(encoders.WeightsError, match="has no published weights"):
        encoders.load("each:vit_small")
