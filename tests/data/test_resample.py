"""Crops of images whose values have more than 8 bits, compared with formulas in float64."""

import numpy as np
import pytest
import torch
from PIL import Image

from tessera.data.augment import to_model_input
from tessera.data.batch import ViewParameters
from tessera.data.collate import Collator, Sample, collate
from tessera.data.crops import CenterCrop, MultiCrop, MultiCropConfig, NativeCrop, RandomCrop, RandomCropConfig
from tessera.data.dataset import Decoding
from tessera.data.masking import MaskedCrop
from tessera.data.resample import cut, resize
from tessera.data.shared_memory import BufferRing, SharedBatch
from tessera.encoders.base import PixelType, Preprocessing
from tessera.encoders.images import PackedImages
from tests.data.batches import evaluation_batches

RNG = np.random.default_rng(0)
RANGES: dict[PixelType, tuple[float, float]] = {
    "uint8": (10, 200),
    "uint16": (100, 4095),
    "int16": (-2000, 3000),
    "float32": (-0.5, 1.5),
}


def preprocessing(pixel_type: PixelType, channels: int, **options) -> Preprocessing:
    low, high = RANGES[pixel_type]
    return Preprocessing(
        (0.4,) * channels, (0.2,) * channels, pixel_type, (low,) * channels, (high,) * channels, **options
    )


def image(pixel_type: PixelType, channels: int, height: int = 50, width: int = 40) -> torch.Tensor:
    low, high = RANGES[pixel_type]
    values = low + (high - low) * RNG.random((height, width, channels))
    values = values if pixel_type == "float32" else np.rint(values)
    return torch.from_numpy(values.astype(pixel_type)).permute(2, 0, 1)


def formula(line: int, size: int) -> np.ndarray:
    """Weights (size, line) of Keys' cubic convolution with a = -0.5, stretched to shrink a line, in float64."""
    stretch, found = max(line / size, 1), np.zeros((size, line))
    for row in range(size):
        center = (row + 0.5) * line / size
        for place in range(int(max(center - 2 * stretch + 0.5, 0)), int(min(center + 2 * stretch + 0.5, line))):
            x = abs(place + 0.5 - center) / stretch
            near, far = 1.5 * x**3 - 2.5 * x**2 + 1, -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2
            found[row, place] = near if x < 1 else far if x < 2 else 0
    return found / found.sum(1, keepdims=True)


@pytest.mark.parametrize("size", [(20, 16), (50, 40), (70, 90), (7, 33)])
@pytest.mark.parametrize("pixel_type", ["uint16", "int16", "float32"])
def test_resize_is_bicubic_with_antialiasing(pixel_type, size):
    values = image(pixel_type, 3).permute(1, 2, 0)
    wanted = np.einsum("sh,tw,hwc->stc", formula(50, size[0]), formula(40, size[1]), values.numpy().astype(np.float64))
    pillow = [
        Image.fromarray(channel).resize(size[::-1], Image.Resampling.BICUBIC)
        for channel in values.numpy().astype(np.float32).transpose(2, 0, 1)
    ]
    found, exact = resize(values[None], torch.empty(1, *size, 3, dtype=values.dtype))[0].numpy(), 1e-5
    if pixel_type != "float32":
        limits, exact = np.iinfo(pixel_type), 0.51
        wanted, pillow = (np.clip(one, limits.min, limits.max) for one in (wanted, np.array(pillow)))
    assert np.abs(found - wanted).max() < exact
    assert np.abs(found.transpose(2, 0, 1) - np.array(pillow, dtype=np.float64)).max() < exact


def test_values_beyond_a_type_are_limited():
    values = torch.zeros(1, 8, 8, 1, dtype=torch.uint16)
    values[:, :, 4:] = 65535
    found = resize(values, torch.empty(1, 16, 16, 1, dtype=torch.uint16)).int()
    assert (found.min(), found.max()) == (0, 65535)


@pytest.mark.parametrize("pixel_type", ["uint16", "int16", "float32"])
def test_crops_are_mirrored_windowed_and_rotated_in_their_type(pixel_type):
    values = image(pixel_type, 2, 12, 12)
    boxes, flips = np.array([[0, 0, 12, 12], [0, 0, 12, 12]]), np.array([False, True])
    out = torch.empty(2, 12, 12, 2, dtype=values.dtype)
    cut(values, ViewParameters(boxes, (12, 12), flips), out)
    plain = values.permute(1, 2, 0).numpy()
    assert np.array_equal(out.numpy(), np.stack([plain, plain[:, ::-1]]))
    cut(values, ViewParameters(boxes, (12, 12), flips, np.array([90.0, 180.0])), out)
    wanted = np.stack([np.rot90(plain), np.rot90(plain[:, ::-1], 2)]).astype(np.float64)
    assert np.abs(out.numpy() - wanted).max() <= (1e-3 if pixel_type == "float32" else 1)
    part = torch.empty(1, 5, 6, 2, dtype=values.dtype)
    cut(values, ViewParameters(boxes[:1], (12, 12), flips[:1], window=(2, 3, 5, 6)), part)
    assert np.array_equal(part[0].numpy(), plain[2:7, 3:9])


TRANSFORMS = {
    "multi-crop": MultiCrop(MultiCropConfig(global_size=16, local_size=8, local_crops=2)),
    "MAE": MaskedCrop(RandomCrop(RandomCropConfig(size=16)), 8, "random", 0.75),
    "NaViT": MaskedCrop(NativeCrop(RandomCropConfig(size=32), 8, 16, 16), 8, "random", 0.75),
    "evaluation": CenterCrop(16),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("pixel_type", ["uint8", "uint16", "int16", "float32"])
def test_every_type_through_every_crop(pixel_type, transform):
    """The crops of a batch are those that are cut one by one, and its input is (x - mean) / std by float64."""
    chosen, channels = TRANSFORMS[transform], 2
    given = preprocessing(pixel_type, channels)
    images = [image(pixel_type, channels) for _ in range(3)]
    rngs = [np.random.default_rng(seed) for seed in range(3)]
    batch = collate(chosen, images, rngs, given)
    found = to_model_input(replace_colors(batch))
    for view, normalised in zip(batch.views, found.views, strict=True):
        raw, x = view.images, normalised.images
        if isinstance(raw, PackedImages):
            assert isinstance(x, PackedImages)
            raw, x = raw.patches.view(-1, channels), x.patches.view(-1, channels)
        assert raw.dtype == given.dtype
        low, high = RANGES[pixel_type]
        unit = np.clip((raw.numpy().astype(np.float64) - low) / (high - low), 0, 1)
        assert np.abs(x.numpy() - (unit - 0.4) / 0.2).max() < 1e-5


def replace_colors(batch):
    for view in batch.views:
        view.colors = ()
    return batch


@pytest.mark.parametrize("pixel_type", ["uint8", "uint16", "float32"])
def test_batches_of_every_type_in_shared_memory(pixel_type):
    given, transform = preprocessing(pixel_type, 3), TRANSFORMS["multi-crop"]
    samples = [
        Sample("", one, transform.draw((50, 40), np.random.default_rng(n)))
        for n, one in enumerate(image(pixel_type, 3) for _ in range(3))
    ]
    collator = Collator(transform, 3, given)
    plain = collator(samples)
    assert plain.memory is not None
    assert len(plain.memory) == collator.size == 3 * 3 * (2 * 16**2 + 2 * 8**2) * np.dtype(pixel_type).itemsize
    ring = BufferRing(1, 2, collator.size)
    ring.take(0)
    buffer = ring.take(0)
    assert buffer is not None
    sent = SharedBatch.from_batch(collator(samples, buffer.memory), buffer)
    assert isinstance(sent, SharedBatch)
    opened = sent.open()
    fewer = Collator(transform, 5, given)(samples)
    for wanted, found, other in zip(plain.views, opened.views, fewer.views, strict=True):
        assert torch.equal(wanted.images.float(), found.images.float())
        assert torch.equal(wanted.images.float(), other.images.float())
        assert found.images.dtype == given.dtype


def test_every_level_of_12_bits_survives_to_the_input():
    levels = torch.arange(4096, dtype=torch.int32).to(torch.uint16).view(1, 64, 64)
    given = Preprocessing((0.5,), (0.25,), "uint16", (0,), (4095,))
    found = to_model_input(collate(CenterCrop(64, 64), [levels], [np.random.default_rng(0)], given))
    assert len(found.views[0].images.unique()) == 4096


def test_a_bright_pixel_changes_no_other_pixel():
    dark = image("uint16", 1, 32, 32)
    bright = dark.clone()
    bright[0, 3, 4] = 65535
    given, crop = preprocessing("uint16", 1), CenterCrop(32, 32)
    inputs = [
        to_model_input(collate(crop, [one], [np.random.default_rng(0)], given)).views[0].images
        for one in (dark, bright)
    ]
    assert (inputs[0] != inputs[1]).nonzero().tolist() == [[0, 0, 3, 4]]


def test_dark_images_keep_their_levels():
    dark = torch.from_numpy(RNG.integers(200, 260, (1, 32, 32)).astype(np.uint16))
    batch = collate(CenterCrop(32, 32), [dark], [np.random.default_rng(0)], preprocessing("uint16", 1))
    assert len(to_model_input(batch).views[0].images.unique()) == len(np.unique(dark.numpy()))


@pytest.mark.parametrize("pixel_type", ["uint8", "uint16", "int16", "float32"])
def test_pixels_without_data_are_zero_after_normalisation(pixel_type):
    """The mark is far outside of the range, so a resize that mixed it in would show in its neighbours."""
    given = preprocessing(pixel_type, 1, nodata=255 if pixel_type == "uint8" else 32767)
    low, high = RANGES[pixel_type]
    values = np.full((40, 40, 1), low + 0.4 * (high - low)).round(3).astype(pixel_type)  # the mean
    values[10:20, 10:30] = given.nodata
    if pixel_type == "float32":
        values[30:, :] = np.nan
    picture = Decoding.of(given).picture(values)
    assert picture.absent is not None
    assert picture.absent.sum() == (200 if pixel_type != "float32" else 600)
    batch = collate(CenterCrop(16, 16), [picture.pixels()], [np.random.default_rng(0)], given)
    found = to_model_input(batch).views[0].images.abs().max()
    assert found <= (1e-5 if pixel_type == "float32" else 0.51 / (high - low) / 0.2)  # half a level


@pytest.mark.parametrize("workers", [0, 1])
def test_images_of_16_bits_in_the_loader(tmp_path, workers):
    """An image without data is skipped, and the others arrive with their levels through shared memory."""
    levels = np.arange(4096, dtype=np.uint16).reshape(64, 64)
    for number in range(3):
        Image.fromarray(levels + number if number else np.full_like(levels, 7)).save(tmp_path / f"{number}.png")
    given = Preprocessing((0.5,), (0.25,), "uint16", (0,), (4098,), nodata=7)
    (batch,) = evaluation_batches(
        str(tmp_path), CenterCrop(64, 64), batch_size=4, labels=False, workers=workers, preprocessing=given
    )
    assert len(batch) == 2
    assert len(batch.skipped) == 1
    assert "no pixel of the image holds data" in batch.skipped[0]
    for number, image_ in enumerate(batch.views[0].images.int(), 1):
        wanted = np.where(levels + number == 7, 2049, levels + number)
        assert np.array_equal(image_[0].numpy(), wanted)
