"""Batches put together image by image: where each crop lies, in whose memory, and from how much of a JPEG."""

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from tessera.data.augment import to_model_input
from tessera.data.batch import Batch, SampleParameters, ViewParameters, largest_shrink
from tessera.data.collate import Collator, CropBuilder, PackBuilder, Sample, Skipped, ViewShape, collate
from tessera.data.crops import CenterCrop, MultiCrop, MultiCropConfig, NativeCrop, RandomCrop, RandomCropConfig
from tessera.data.dataset import decode_sample
from tessera.data.decode import ImageError, Picture
from tessera.data.masking import MaskedCrop
from tests.data.batches import build, collated, noise, pixels, rng, same_colors, saved

SMALL = MultiCrop(MultiCropConfig(global_size=32, local_size=16, local_crops=3))
PACKED = NativeCrop(RandomCropConfig(size=32), 8, 16, 64)


def smooth(height: int, width: int) -> Image.Image:
    """Slow waves of colour."""
    y, x = np.mgrid[0:height, 0:width]
    waves = [128 + 100 * np.sin(6 * x / width + c) * np.cos(5 * y / height - c) for c in range(3)]
    return Image.fromarray(np.stack(waves, axis=2).round().astype(np.uint8))


def put(builder: CropBuilder, picture: Picture, views: SampleParameters) -> None:
    """Decode an image as the dataset does, and add it."""
    sample = decode_sample("", picture, views)
    builder.add(sample.image, sample.views)


def equal(one: Batch, other: Batch) -> bool:
    """In all that reaches a method."""
    one, other = to_model_input(one), to_model_input(other)
    views = [torch.equal(a, b) for a, b in zip(pixels(one), pixels(other), strict=True)]
    return (one.keys, one.skipped) == (other.keys, other.skipped) and all(views)


def test_collate_is_crop_major():
    images = [noise(90, 120, b) for b in range(4)]
    samples = [Sample(str(b), image, SMALL.draw((90, 120), rng(b)), [3, 1, 2, 0][b]) for b, image in enumerate(images)]
    batch = Collator(SMALL, 4)([*samples[:2], Skipped("x: y"), *samples[2:]])
    assert (batch.keys, batch.labels.tolist(), batch.skipped) == (["0", "1", "2", "3"], [3, 1, 2, 0], ["x: y"])
    assert [view.masks for view in batch.views] == [(), ()]
    assert [tuple(view.shape) for view in pixels(batch)] == [(8, 3, 32, 32), (12, 3, 16, 16)]
    for b, image in enumerate(images):
        alone = collate(SMALL, [image], [rng(b)])
        for number, n in enumerate([2, 3]):
            for c in range(n):
                assert torch.equal(pixels(batch)[number][c * 4 + b], pixels(alone)[number][c])
            own = [(operation, numbers[b::4]) for operation, numbers in batch.views[number].colors]
            assert same_colors(own, alone.views[number].colors)
            assert {len(numbers) for _, numbers in own} == {n}
    plain = collate(RandomCrop(RandomCropConfig(size=8)), images[:3], [rng(b) for b in range(3)])
    assert plain.views[0].images.shape == (3, 3, 8, 8)
    assert [view.colors for view in plain.views] == [[]]
    assert plain.keys == ["", "", ""]


def test_damaged_and_missing_images_leave_no_gap():
    good, bad = saved(smooth(60, 80), "JPEG"), saved(smooth(60, 80), "JPEG")[:-400]
    together = CropBuilder(SMALL.views, 4)
    for number, file in enumerate((good, bad, good)):
        picture = Picture(file)
        with pytest.raises(ImageError) if file is bad else nullcontext():
            put(together, picture, SMALL.draw(picture.size, rng(number)))
    batch = build(together, ["a", "b"])
    whole = Picture(good).pixels()
    assert len(batch) == 2
    assert equal(batch, collated(SMALL, [whole, whole], [rng(0), rng(2)], ["a", "b"]))


def test_crops_are_cut_in_the_memory_that_is_given():
    images = [noise(90, 120, b) for b in range(2)]
    memory = torch.zeros(Collator(SMALL, 2).size + 5, dtype=torch.uint8)
    for room, inside in ((memory, True), (memory[:-6], False), (None, False)):
        together = CropBuilder(SMALL.views, 2, memory=room)
        for b, image in enumerate(images):
            together.add(image, SMALL.draw((90, 120), rng(b)))
        batch = build(together, ["", ""])
        assert (batch.memory.data_ptr() == memory.data_ptr()) == inside
        assert equal(batch, collate(SMALL, images, [rng(b) for b in range(2)]))
        first, last = pixels(batch)
        start, end = batch.memory.data_ptr(), batch.memory.data_ptr() + batch.memory.numel()
        assert first.data_ptr() == start
        assert start < last.data_ptr() < end
    assert memory[-5:].sum() == 0
    memory = torch.zeros(Collator(PACKED, 2).size, dtype=torch.uint8)
    packed = PackBuilder(PACKED.packing, memory=memory)
    for b, image in enumerate(images):
        packed.add(image, PACKED.draw((90, 120), rng(b)))
    assert build(packed, ["", ""]).memory.data_ptr() == memory.data_ptr()


@pytest.mark.parametrize(
    "transform",
    [
        SMALL,
        MaskedCrop(RandomCrop(RandomCropConfig(size=32)), 8, "block", 0.5),
        PACKED,
    ],
    ids=["crops", "masked", "packed"],
)
def test_a_batch_moves_with_all_its_views(transform):
    images = [noise(40 + 9 * b, 90 - 7 * b, b) for b in range(3)]
    batch = collate(transform, images, [rng(b) for b in range(3)])
    memory = torch.full((batch.memory.numel() + 7,), 9, dtype=torch.uint8)[7:]
    memory.copy_(batch.memory)
    moved = batch.in_memory(memory)
    batch.memory.fill_(0)
    fresh = collate(transform, images, [rng(b) for b in range(3)])
    for view, expected in zip(pixels(moved), pixels(fresh), strict=True):
        assert torch.equal(view, expected)
        assert view.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
    there = fresh.to("meta")
    assert there.memory.device.type == "meta"
    assert [len(view.images) for view in there.views] == [len(view.images) for view in fresh.views]


def cut(height: int, width: int, *boxes: tuple[int, int, int, int], window=None) -> list[ViewParameters]:
    return [ViewParameters(np.array(boxes), (height, width), np.zeros(len(boxes), bool), window=window)]


@pytest.mark.parametrize(
    ("size", "drawn", "shrink"),
    [
        ((800, 800), cut(100, 100, (0, 0, 800, 800)), 8),
        ((800, 800), cut(100, 100, (0, 0, 800, 799)), 4),
        ((800, 800), cut(100, 100, (0, 0, 800, 800), (5, 5, 200, 300)), 2),
        ((800, 800), cut(100, 100, (0, 0, 800, 800), (5, 5, 199, 300)), 1),
        ((800, 800), cut(100, 100, (0, 0, 20, 30)), 1),
        ((8000, 8000), cut(100, 100, (0, 0, 8000, 8000)), 8),
        ((150, 150), cut(100, 100, (0, 0, 150, 150)), 1),
        ((800, 800), cut(100, 50, (0, 0, 400, 400)), 4),
        ((800, 800), cut(100, 100, (0, 0, 800, 800), window=(0, 0, 50, 50)), 1),
        ((800, 800), [*cut(10, 10, (0, 0, 80, 80)), *cut(50, 50, (0, 0, 100, 200))], 2),
    ],
)
def test_the_fraction_follows_from_the_crops(size, drawn, shrink):
    assert largest_shrink(drawn, size) == shrink


def test_boxes_of_shrunk_images_stay_within():
    source = rng()
    for shrink in (2, 4, 8):
        sides = shrink * 20 + source.integers(0, 50, (500, 2))
        corners = source.integers(0, 100, (500, 2))
        cuts = ViewParameters(np.concatenate([corners, sides], axis=1), (20, 20), np.zeros(500, bool))
        small = cuts.shrunk(shrink).boxes
        assert (small[:, 2:] >= 20).all()
        assert np.abs(small * shrink - cuts.boxes).max() <= shrink
        ends = small[:, :2] + small[:, 2:]
        assert (ends <= -(-(corners + sides) // shrink)).all()  # within an image that ended there


def both_ways(file: bytes, drawn: SampleParameters, monkeypatch) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """The crops from a smaller decoding and from all pixels, and the fractions that were decoded."""
    seen: list[int] = []
    whole = Picture.pixels

    def recorded(self, shrink=1):
        seen.append(shrink)
        return whole(self, shrink)

    shapes = [ViewShape(len(drawn[0].boxes), drawn[0].shape[0])]
    monkeypatch.setattr(Picture, "pixels", recorded)
    views = []
    for full in (False, True):
        together = CropBuilder(shapes, 1)
        if full:
            together.add(Picture(file).pixels(), drawn)
        else:
            put(together, Picture(file), drawn)
        views.append(build(together, [""]).views[0].images)
    return views[0], views[1], seen[:1]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("height", "width", "orientation", "crop"),
    [(960, 1280, 1, 32), (955, 1277, 3, 64), (1283, 961, 1, 128), (964, 1284, 6, 64), (960, 1280, 6, 32)],
)
def test_crops_are_equal_after_decoding_at_a_fraction(height, width, orientation, crop, monkeypatch):
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = saved(smooth(height, width), "JPEG", quality=95, exif=exif)
    size = Picture(file).size
    assert size == ((width, height) if orientation == 6 else (height, width))
    source = RandomCrop(RandomCropConfig(size=crop, scale=(0.3, 1.0), flip=0.5))
    for seed in range(4):
        drawn = source.draw(size, rng(seed))
        small, whole, shrinks = both_ways(file, drawn, monkeypatch)
        turned = [s for s in (8, 4, 2, 1) if orientation == 1 or height % s == width % s == 0]
        assert shrinks == [next(s for s in turned if (drawn[0].boxes[0, 2:] >= s * crop).all())]
        difference = (small.int() - whole.int()).abs()
        assert difference.float().mean() < 1
        assert difference.max() <= 8


def test_png_and_center_crops_are_decoded_whole(monkeypatch):
    drawn = RandomCrop(RandomCropConfig(size=32, scale=(1, 1))).draw((400, 400), rng())
    assert both_ways(saved(smooth(400, 400), "PNG"), drawn, monkeypatch)[2] == [1]
    small, whole, shrinks = both_ways(saved(smooth(400, 400), "JPEG"), CenterCrop(32).draw((400, 400)), monkeypatch)
    assert shrinks == [1]
    assert torch.equal(small, whole)


class Blocks:
    """DINO's crops with several masks per crop, which hide another number of tokens of each crop, or nothing.

    `change` makes masks of another shape.
    """

    packing = None
    views = SMALL.views

    def __init__(self, masks: int = 2, side: int = 4, change=lambda mask: mask) -> None:
        self.masks, self.side, self.change = masks, side, change

    def draw(self, size: tuple[int, int], rng: np.random.Generator) -> list[ViewParameters]:
        first, *rest = SMALL.draw(size, rng)
        shape = (self.masks, 2, self.side, self.side)
        hidden = rng.random(shape) < rng.choice([0, 0.3, 0.9], (self.masks, 2, 1, 1))
        return [replace(first, masks=tuple(map(self.change, hidden))), *rest]


def test_masks_of_a_view_are_crop_major():
    transform = Blocks()
    images = [noise(50, 60, b) for b in range(6)]
    samples = [Sample(str(b), image, transform.draw((50, 60), rng(b))) for b, image in enumerate(images)]
    batch = Collator(transform, 6)(samples)
    view, other = batch.views
    assert (view.crops, len(view.masks), other.masks) == (2, 2, ())
    for number, mask in enumerate(view.masks):
        crops = [sample.views[0].masks[number][crop] for crop in range(2) for sample in samples]
        assert mask.hidden.tolist() == np.concatenate([crop.ravel() for crop in crops]).tolist()
        assert mask.visible.tolist() == np.flatnonzero(~mask.hidden.numpy()).tolist()
        assert mask.lengths.tolist() == [int((~crop).sum()) for crop in crops]
        assert 16 in mask.lengths.tolist()  # a crop that hides nothing
        assert len(set(mask.lengths.tolist())) > 2
        mask.check(torch.full((12, 2), 4))
    moved = batch.to("meta").views[0]
    assert all(mask.hidden.device.type == "meta" and mask.lengths.device.type == "cpu" for mask in moved.masks)


def test_masks_that_do_not_belong_together_are_refused():
    def collated(*transforms):
        images = [noise(50, 60, b) for b in range(len(transforms))]
        samples = [Sample("", image, one.draw((50, 60), rng())) for one, image in zip(transforms, images, strict=True)]
        return Collator(transforms[0], len(images))(samples)

    with pytest.raises(ValueError, match=r"different numbers of masks: \[1, 2\]\. Draw equally many"):
        collated(Blocks(1), Blocks(2))
    assert collated(Blocks(side=4), Blocks(side=3)).views[0].masks[0].lengths.shape == (4,)  # grids may differ
    for change in (lambda mask: mask[:1], lambda mask: mask.reshape(2, -1), lambda mask: mask[0, 0]):
        wrong = Blocks(change=change)
        for transforms in ((Blocks(), wrong), (wrong, wrong)):
            with pytest.raises(ValueError, match=r"image with 2 crops must have the shape \(2, rows, columns\)"):
                collated(*transforms)
