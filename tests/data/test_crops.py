"""Crops against torchvision's geometry and Pillow's pixels."""

import pickle

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage, stats
from torchvision.transforms import RandomResizedCrop

from tessera.data.batch import Batch, ViewParameters
from tessera.data.collate import collate
from tessera.data.crops import (
    BOX_DRAWS,
    CenterCrop,
    MixedCrops,
    MultiCrop,
    MultiCropConfig,
    NativeCrop,
    RandomCropConfig,
    ResizedView,
    avoid_nodata,
    boxes,
    random_boxes,
)
from tessera.data.resample import cut, resize, rotate
from tests.data.batches import pixels, rng, same_colors

SMALL = MultiCropConfig(global_size=32, local_size=16, local_crops=3)


def picture(height: int = 90, width: int = 120, seed: int = 0) -> torch.Tensor:
    """Coarse noise with sharp edges, (3, H, W), in the memory order of decoded images."""
    coarse = np.random.default_rng(seed).integers(0, 256, (height // 3 + 1, width // 3 + 1, 3), dtype=np.uint8)
    fine = coarse.repeat(3, 0).repeat(3, 1)[:height, :width]
    return torch.from_numpy(fine.copy()).permute(2, 0, 1)


def crops(transform, image: torch.Tensor, source: np.random.Generator | None = None) -> Batch:
    """Of one image, which is a batch of one."""
    return collate(transform, [image], [source or rng()])


def random_crops(image: torch.Tensor, source: np.random.Generator, n: int, config: RandomCropConfig) -> torch.Tensor:
    """(n, 3, S, S)."""
    out = torch.empty((n, config.size, config.size, 3), dtype=torch.uint8)
    cut(image, random_boxes((image.shape[1], image.shape[2]), source, n, config), out)
    return out.permute(0, 3, 1, 2)


def resized(image: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """(3, height, width)."""
    out = torch.empty((1, height, width, 3), dtype=torch.uint8)
    return resize(image.permute(1, 2, 0)[None], out)[0].permute(2, 0, 1)


def pillow(image: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Oracle: rows first, then columns, which Pillow itself does in either order."""
    whole = Image.fromarray(image.permute(1, 2, 0).numpy())
    bicubic = Image.Resampling.BICUBIC
    resized = whole.resize((width, whole.height), bicubic).resize((width, height), bicubic)
    return torch.from_numpy(np.array(resized)).permute(2, 0, 1)


@pytest.mark.parametrize("scale", [(0.4, 1.0), (0.05, 0.4), (0.9, 1.0)])
@pytest.mark.parametrize(("height", "width"), [(375, 500), (500, 333)])
def test_boxes_follow_torchvision(height, width, scale):
    """Two-sample Kolmogorov-Smirnov at one in a thousand, seeds fixed, 4,000 boxes each."""
    n, ratio = 4000, (3 / 4, 4 / 3)
    torch.manual_seed(0)
    image = torch.empty(3, height, width)
    theirs = np.array([RandomResizedCrop.get_params(image, list(scale), list(ratio)) for _ in range(n)])
    ours = boxes(rng().random((n, BOX_DRAWS)), (height, width), RandomCropConfig(scale=scale))
    for measure in (
        lambda b: b[:, 2] * b[:, 3],
        lambda b: np.log(b[:, 3] / b[:, 2]),
        lambda b: b[:, 0] / np.maximum(height - b[:, 2], 1),
        lambda b: b[:, 1] / np.maximum(width - b[:, 3], 1),
    ):
        assert stats.kstest(measure(ours), measure(theirs)).pvalue > 1e-3
    assert (ours[:, :2] >= 0).all()
    assert (ours[:, :2] + ours[:, 2:] <= [height, width]).all()


@pytest.mark.parametrize(("height", "width"), [(20, 400), (400, 20), (1, 1), (1, 9), (301, 30)])
def test_images_without_room_give_torchvisions_central_box(height, width):
    image = torch.empty(3, height, width)
    config = RandomCropConfig(scale=(0.9, 1.0))
    theirs = {RandomResizedCrop.get_params(image, [0.9, 1.0], list(config.ratio)) for _ in range(20)}
    ours = {tuple(box) for box in boxes(rng().random((20, BOX_DRAWS)), (height, width), config).tolist()}
    assert ours == theirs
    assert len(ours) == 1


@pytest.mark.parametrize(
    ("height", "width", "size"), [(90, 120, 32), (120, 90, 96), (40, 30, 96), (64, 64, 64), (7, 200, 32), (400, 400, 9)]
)
def test_pixels_are_pillows(height, width, size):
    """Within one grey level a pass; the second pass can add to the first in very few places."""
    image = picture(height, width)
    difference = {
        (h, w): (resized(image, h, w).int() - pillow(image, h, w).int()).abs()
        for h, w in ((size, width), (height, size), (size, size))
    }
    assert difference[size, width].max() <= 1
    assert difference[height, size].max() <= 1
    assert difference[size, size].max() <= 2
    assert (difference[size, size] > 1).float().mean() < 1e-4
    assert (difference[size, size] > 0).float().mean() < 0.02


def test_crops_have_the_drawn_boxes_and_flips():
    image = picture()
    config = RandomCropConfig(size=24, scale=(0.1, 0.6))
    u = rng().random((12, BOX_DRAWS))
    view = random_crops(image, rng(), 12, config)
    assert view.shape == (12, 3, 24, 24)
    for crop, (top, left, height, width), flip in zip(view, boxes(u, (90, 120), config), u[:, -2] < 0.5, strict=True):
        expected = pillow(image[:, top : top + height, left : left + width], 24, 24)
        assert (crop.int() - (expected.flip(2) if flip else expected).int()).abs().max() <= 1


def test_memory_order_of_the_image_does_not_matter():
    image = picture()
    assert torch.equal(
        random_crops(image.contiguous(), rng(), 4, RandomCropConfig(size=32)),
        random_crops(image, rng(), 4, RandomCropConfig(size=32)),
    )


def test_rotation_turns_counter_clockwise_about_the_centre():
    y, x = np.mgrid[0:32, 0:32]
    smooth = np.stack([128 + 90 * np.sin(x / 5 + c) * np.cos(y / 6 - c) for c in range(3)])
    view = torch.from_numpy(smooth.round().astype(np.uint8)).expand(2, -1, -1, -1)
    quarter = rotate(view, np.array([90.0, -180.0]))
    assert torch.equal(quarter[0], view[0].rot90(1, (1, 2)))
    assert torch.equal(quarter[1], view[1].rot90(2, (1, 2)))
    angles = np.array([10.0, -25.0])
    for turned, angle in zip(rotate(view, angles), angles, strict=True):
        expected = ndimage.rotate(smooth, angle, axes=(1, 2), reshape=False, mode="reflect")
        assert np.abs(turned.numpy() - expected).max() < 3
    assert torch.equal(rotate(view, np.zeros(2)), view)


def test_rotation_angles_are_drawn_to_both_sides():
    image = picture(40, 40)
    turned = pixels(crops(MultiCrop(SMALL.model_copy(update={"rotation": 20.0})), image))
    plain = pixels(crops(MultiCrop(SMALL), image))
    u = rng().random((2, BOX_DRAWS))
    assert torch.equal(turned[0], rotate(plain[0], 20 * (2 * u[:, -1] - 1)))
    assert not torch.equal(turned[0], plain[0])


def test_multi_crop_gives_views_and_colours():
    transform = MultiCrop(MultiCropConfig())
    batch = crops(transform, picture())
    assert [view.crops for view in transform.views] == [2, 8]
    assert [tuple(view.shape) for view in pixels(batch)] == [(2, 3, 224, 224), (8, 3, 96, 96)]
    assert all(view.dtype == torch.uint8 for view in pixels(batch))
    assert [{len(numbers) for _, numbers in view.colors} for view in batch.views] == [{2}, {8}]
    alone = MultiCrop(SMALL.model_copy(update={"local_crops": 0}))
    assert [view.crops for view in alone.views] == [2]
    assert len(crops(alone, picture()).views) == 1


def same(one: Batch, other: Batch) -> bool:
    return all(
        torch.equal(a.images, b.images) and same_colors(a.colors, b.colors)
        for a, b in zip(one.views, other.views, strict=True)
    )


def test_the_generator_alone_decides():
    image, transform = picture(), MultiCrop(SMALL)
    first = crops(transform, image, rng(5))
    torch.manual_seed(1)
    np.random.seed(1)
    crops(transform, picture(seed=3), rng(6))
    assert same(first, crops(transform, image, rng(5)))
    assert same(first, crops(pickle.loads(pickle.dumps(transform)), image, rng(5)))
    assert same(first, pickle.loads(pickle.dumps(first)))
    assert not same(first, crops(transform, image, rng(6)))


def test_a_setting_does_not_shift_what_others_draw():
    image = picture()
    base = crops(MultiCrop(SMALL), image)
    for change in ({"local_crops": 1}, {"local_scale": (0.3, 0.3)}, {"blur_global1": 0.0}, {"jitter": 0.0}):
        changed = crops(MultiCrop(SMALL.model_copy(update=change)), image)
        assert torch.equal(changed.views[0].images, base.views[0].images), change
    fewer = crops(MultiCrop(SMALL.model_copy(update={"local_crops": 1})), image)
    assert torch.equal(fewer.views[1].images[0], base.views[1].images[0])


@pytest.mark.parametrize(("height", "width"), [(90, 121), (121, 90), (20, 30), (37, 64), (151, 12)])
def test_center_crop_is_resize_and_crop_of_pillow(height, width):
    image = picture(height, width)
    shorter = min(height, width)
    whole = pillow(image, int(37 * height / shorter), int(37 * width / shorter))
    top, left = round((whole.shape[1] - 32) / 2), round((whole.shape[2] - 32) / 2)
    transform = CenterCrop(32)
    batch = crops(transform, image)
    assert transform.resize == 37
    assert [view.crops for view in transform.views] == [1]
    assert [view.colors for view in batch.views] == [[]]
    expected = whole[:, top : top + 32, left : left + 32]
    difference = (batch.views[0].images[0].int() - expected.int()).abs()
    assert difference.max() <= 2  # one grey level a pass; one pixel off, a tenth of all values would differ by more
    assert (difference > 1).float().mean() < 1e-3


def test_center_crop_of_odd_images():
    assert CenterCrop().resize == 256
    assert crops(CenterCrop(8, resize=8), picture(3, 5)).views[0].images.shape == (1, 3, 8, 8)
    assert crops(CenterCrop(32), picture(1, 60_000)).views[0].images.shape == (1, 3, 32, 32)
    with pytest.raises(ValueError, match=r"is 32 pixels\. It must be at least 1 and at most 31"):
        CenterCrop(32, resize=31)


@pytest.mark.parametrize(
    "bad",
    [
        {"global_scale": (0.5, 0.4)},
        {"local_scale": (0.0, 0.4)},
        {"global_scale": (0.4, 1.1)},
        {"ratio": (1.5, 0.5)},
        {"ratio": (0.0, 1.0)},
        {"flip": 1.5},
        {"rotation": -1.0},
        {"local_crops": -1},
        {"local_size": 0},
        {"blur_local": 2},
        {"blur_sigma": (2.0, 0.1)},
        {"local_number": 3},
        {"hue": 0.6},
        {"jitter": 1.1},
        {"brightness": -0.1},
    ],
)
def test_settings_out_of_range_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        MultiCropConfig(**bad)


def test_mixed_crops_are_drawn_from_seed_and_step_alone():
    """The oracle draws with NumPy's uniform doubles from the same generator."""
    sizes, weights = (24, 32, 16), [0.3, 0.6, 0.1]
    transforms = [MultiCrop(MultiCropConfig(global_size=size, local_size=8, local_crops=2)) for size in sizes]
    mixed = pickle.loads(pickle.dumps(MixedCrops(transforms, [3 * weight for weight in weights])))
    found = [mixed.at(7, step).views[0].size for step in range(3000)]
    for step in range(50):
        philox = np.random.Philox(key=np.array([7, 4], dtype=np.uint64), counter=[0, step, 0, 0])
        drawn = np.random.Generator(philox).random()
        assert found[step] == sizes[0 if drawn < 0.3 else 1 if drawn < 0.9 else 2]
    shares = [found.count(size) / len(found) for size in sizes]
    assert stats.chisquare(np.array(shares) * 3000, np.array(weights) * 3000).pvalue > 0.001
    assert [mixed.at(7, step).views[0].size for step in (2999, 5, 0)] == [found[2999], found[5], found[0]]
    assert [mixed.at(8, step).views[0].size for step in range(50)] != found[:50]
    assert MixedCrops(transforms[:1], [0.05]).at(0, 3) is transforms[0]
    # without a step: the largest crops
    assert mixed.views == transforms[1].views
    assert crops(mixed, picture()).views[0].images.shape == (2, 3, 32, 32)


def shares(view: ViewParameters, absent: torch.Tensor) -> np.ndarray:
    """Share of the values of each box that hold data."""
    parts = [absent[:, top : top + height, left : left + width] for top, left, height, width in view.boxes.tolist()]
    return np.array([1 - part.double().mean().item() for part in parts])


def test_crops_avoid_pixels_without_data():
    """Half of the image has no data. Only boxes change; those with enough data stay."""
    absent = torch.zeros(4, 90, 120, dtype=torch.bool)
    absent[:, :, 60:] = True
    transform = ResizedView(MultiCrop(SMALL), 48)
    poor_before, poor_after = 0, 0
    for seed in range(40):
        drawn = transform.draw((90, 120), source := rng(seed))
        state = source.bit_generator.state
        found = avoid_nodata(drawn, absent, transform, source)
        assert source.bit_generator.state == state
        for view, old in zip(found, drawn, strict=True):
            before, after = shares(old, absent), shares(view, absent)
            assert np.array_equal(view.boxes[before >= 0.5], old.boxes[before >= 0.5])
            assert (after >= before).all()
            assert np.array_equal(view.flips, old.flips)
            assert same_colors(view.colors, old.colors)
            poor_before, poor_after = poor_before + (before < 0.5).sum(), poor_after + (after < 0.5).sum()
        assert np.array_equal(found[0].boxes, found[-1].boxes)  # the Gram teacher sees the global crops
    assert poor_after < 0.1 * poor_before
    drawn = transform.draw((90, 120), rng(39))
    again = avoid_nodata(drawn, absent, transform, rng(1))
    assert not np.array_equal(again[1].boxes, avoid_nodata(drawn, absent, transform, rng(2))[1].boxes)


def test_the_best_box_is_kept_if_none_has_enough_data():
    absent = torch.ones(1, 90, 120, dtype=torch.bool)
    absent[:, :9] = False
    transform = MultiCrop(SMALL)
    drawn = transform.draw((90, 120), rng(3))
    found = avoid_nodata(drawn, absent, transform, rng(3))
    assert max(shares(view, absent).max() for view in found) < 0.5
    assert all((shares(a, absent) >= shares(b, absent)).all() for a, b in zip(found, drawn, strict=True))
    assert shares(found[1], absent).mean() > shares(drawn[1], absent).mean()


def test_a_packed_crop_is_replaced_with_its_size():
    absent = torch.zeros(1, 90, 120, dtype=torch.bool)
    absent[:, :, 50:] = True
    transform = NativeCrop(RandomCropConfig(size=64, scale=(0.05, 0.3)), patch=8, smallest=16, token_budget=64)
    for seed in range(20):
        drawn = transform.draw((90, 120), rng(seed))
        (view,) = avoid_nodata(drawn, absent, transform, rng(seed))
        crop = torch.empty(1, *view.size, 1, dtype=torch.uint8)
        cut(torch.zeros(1, 90, 120, dtype=torch.uint8), view, crop)
        assert shares(view, absent)[0] >= min(shares(drawn[0], absent)[0], 0.5)
