"""Images of one to many channels, from the file to the normalised batch."""

import numpy as np
import pytest
import torch
from PIL import Image

from tessera.data.augment import to_model_input
from tessera.data.crops import RandomCrop, RandomCropConfig
from tessera.data.decode import ImageError, Picture, decode
from tessera.data.masking import MaskedCrop
from tessera.encoders.base import Preprocessing
from tests.data.batches import pixels, saved, tiff, training_batches

RNG = np.random.default_rng(0)
COLORS = RNG.integers(0, 256, (25, 35, 4), dtype=np.uint8)


def array(encoded: bytes, channels: int) -> np.ndarray:
    """(H, W, C)."""
    tensor = decode(encoded, channels=channels)
    assert tensor.dtype == torch.uint8
    assert tensor.permute(1, 2, 0).is_contiguous()  # the memory order that resizing takes
    return tensor.permute(1, 2, 0).numpy()


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_alpha_is_kept_in_four_channels_and_opaque_without(kind):
    lossless = {"lossless": True, "exact": True} if kind == "WEBP" else {}
    assert np.array_equal(array(saved(COLORS, kind, **lossless), 4), COLORS)
    opaque = array(saved(COLORS[..., :3], kind, **lossless), 4)
    assert np.array_equal(opaque[..., :3], COLORS[..., :3])
    assert (opaque[..., 3] == 255).all()


@pytest.mark.parametrize("orientation", [1, 6])
@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}, {"keep_rgb": True}])
def test_a_jpeg_in_one_and_four_channels(options, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    y, x = np.mgrid[0:25, 0:35]
    smooth = np.stack([128 + 90 * np.sin(x / 9 + c) * np.cos(y / 7 - c) for c in range(3)], axis=2).astype(np.uint8)
    encoded = saved(smooth, "JPEG", quality=95, exif=exif, **options)
    four = array(encoded, 4)
    assert np.array_equal(four[..., :3], array(encoded, 3))
    assert (four[..., 3] == 255).all()
    gray = np.asarray(Image.fromarray(array(encoded, 3)).convert("L")).astype(int)
    assert np.abs(array(encoded, 1)[..., 0] - gray).max() <= 2
    stored = saved(COLORS[..., 0], "JPEG", exif=exif)
    assert np.array_equal(array(stored, 1), array(stored, 3)[..., :1])


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("options", [{}, {"keep_rgb": True}, {"progressive": True}])
def test_pillow_decodes_jpegs_as_simplejpeg_does(channels, options, monkeypatch):
    encoded = saved(COLORS[..., :3], "JPEG", **options)
    picture = Picture(encoded, channels=channels)
    found = [picture.pixels(shrink) for shrink in (1, 2, 4, 8)]
    monkeypatch.setattr(Picture, "_plain_pixels", lambda *_: None)
    assert all(torch.equal(picture.pixels(shrink), one) for shrink, one in zip((1, 2, 4, 8), found, strict=True))


@pytest.mark.parametrize("shrink", [2, 4, 8])
@pytest.mark.parametrize("channels", [1, 4])
def test_a_jpeg_at_a_fraction_of_its_size(channels, shrink):
    encoded = saved(np.full((64, 96, 3), (200, 100, 50), dtype=np.uint8), "JPEG", quality=95)
    picture = Picture(encoded, channels=channels)
    small = picture.pixels(picture.fraction(shrink))
    assert small.shape == (channels, 64 // shrink, 96 // shrink)
    assert (small.int() - picture.pixels()[:, :1, :1].int()).abs().max() <= 2


def test_gray_is_the_luminance_over_white():
    gray = np.asarray(Image.fromarray(COLORS[..., :3]).convert("L"))
    assert np.array_equal(array(saved(COLORS[..., :3], "PNG"), 1)[..., 0], gray)
    assert np.array_equal(array(saved(COLORS[..., 0], "PNG"), 1)[..., 0], COLORS[..., 0])
    over_white = Image.fromarray(array(saved(COLORS, "PNG"), 3)).convert("L")
    assert np.array_equal(array(saved(COLORS, "PNG"), 1)[..., 0], np.asarray(over_white))


def test_sixteen_bit_gray_is_divided_by_257():
    values = RNG.integers(0, 65536, (9, 11)).astype(np.uint16)
    expected = np.round(values / 257).astype(np.uint8)
    encoded = saved(values, "PNG")
    assert np.array_equal(array(encoded, 1)[..., 0], expected)
    assert np.array_equal(array(encoded, 3), expected[..., None].repeat(3, 2))
    assert np.array_equal(array(encoded, 4)[..., 3], np.full((9, 11), 255))


def test_dark_sixteen_bit_images_are_refused():
    check_dark_images(lambda values: saved(values, "PNG"))


def check_dark_images(encode) -> None:
    """Check that `encode` of dark values of 16 bits is refused, and of other values is not."""
    values = RNG.integers(0, 4096, (9, 11)).astype(np.uint16)  # a camera of 12 bits
    values[0, 0] = 4095
    with pytest.raises(
        ImageError, match=r"largest value is 4095 of 65535, so at most 17 of 256 gray levels .*--data.range auto"
    ):
        array(encode(values), 1)
    for accident in (4096, 65535):  # a single bright pixel, or one without a measurement, decides nothing
        values[0, 0] = accident
        with pytest.raises(ImageError, match=r"at most 17 of 256 gray levels .*--data.range auto"):
            array(encode(values), 1)
    values[0, :2] = 4096
    assert np.array_equal(array(encode(values), 1)[..., 0], np.round(values / 257).astype(np.uint8))
    black_and_white = np.where(values > 2000, 65535, 0).astype(np.uint16)
    assert np.array_equal(array(encode(black_and_white), 1)[..., 0], black_and_white // 257)
    for blank in (0, 300):
        assert np.array_equal(np.unique(array(encode(np.full_like(values, blank)), 1)), [round(blank / 257)])


@pytest.mark.parametrize("channels", [2, 5])
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_channels_that_an_image_cannot_have(kind, channels):
    with pytest.raises(ImageError, match=f"cannot be converted to {channels} channels"):
        Picture(saved(COLORS[..., :3], kind), channels=channels)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("channels", [1, 4])
def test_batches_of_other_channels(write_tar, channels, workers):
    check_batches(write_tar, channels, workers)


def check_batches(write_tar, channels: int, workers: int) -> None:
    """Check the pixels of batches of PNGs, or of TIFFs for five channels and more.

    All pixels of an image have one colour, so every crop has this colour.
    """
    colors = RNG.integers(0, 256, (16, channels), dtype=np.uint8)
    images = [np.broadcast_to(color, (20, 30, channels)) for color in colors]
    files = [
        (f"{n:02d}.png", saved(image.squeeze(), "PNG"))
        if channels < 5
        else (f"{n:02d}.tif", tiff(image, photometric="minisblack", planarconfig="contig"))
        for n, image in enumerate(images)
    ]
    preprocessing = Preprocessing(tuple(np.linspace(0.2, 0.6, channels)), tuple(np.linspace(0.1, 0.3, channels)))
    transform = MaskedCrop(RandomCrop(RandomCropConfig(size=8)), 4, "random", 0.5)
    batches = training_batches(
        write_tar("a.tar", files), transform, batch_size=8, seed=0, steps=2, workers=workers,
        preprocessing=preprocessing,
    )  # fmt: skip
    seen = []
    for batch in batches:
        assert not batch.skipped
        assert batch.preprocessing == preprocessing
        (view,) = pixels(to_model_input(batch))
        assert view.shape == (8, channels, 8, 8)
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (preprocessing.mean, preprocessing.std))
        for key, image in zip(batch.keys, view, strict=True):
            number = int(key.rpartition("/")[2])
            expected = torch.from_numpy(colors[number]).view(-1, 1, 1) / 255
            torch.testing.assert_close(image, ((expected - mean) / std).float().expand(-1, 8, 8), rtol=0, atol=1e-5)
            seen.append(number)
    assert sorted(seen) == list(range(16))
