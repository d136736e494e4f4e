"""Augmentations of the user: behind the crops of a method or in place of them, seeded by sample."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from tessera.data.batch_sampler import BatchSampler
from tessera.data.collate import Packing
from tessera.data.crops import MultiCrop, MultiCropConfig, NativeCrop, RandomCropConfig, ResizedView
from tessera.data.loader import Reading, StreamConfig
from tessera.data.loader import training_batches as batches_of
from tessera.data.shards import ShardError
from tessera.data.user_code import Augment, load_function
from tessera.runtime.settings import SettingsError

MULTI = MultiCrop(MultiCropConfig(global_size=16, local_size=8, local_crops=3))
IMAGES = [np.random.default_rng(n).integers(0, 256, (40, 30, 3), dtype=np.uint8) for n in range(24)]


FOLDER = []
"""Folder with the images as PNGs."""


@pytest.fixture(scope="module", autouse=True)
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    for number, image in enumerate(IMAGES):
        Image.fromarray(image).save(folder / f"{number:02d}.png")
    FOLDER[:] = [str(folder)]


def run(*functions, replaces=False, transform=MULTI, workers=0, first_step=0, rank=0, world_size=1):
    augment = Augment(functions, 7, replaces) if functions else None
    batches = BatchSampler(8, first_step, 6, rank, world_size)
    reading = Reading(workers, augment=augment)
    return list(batches_of(FOLDER[0], transform, batches, seed=7, stream=StreamConfig(), reading=reading))


def crops(batch):
    return [view.images for view in batch.views]


def invert(crop):
    return 255 - crop


def noise(crop, generator):
    """Draw from the given generator and from all global ones."""
    shift = int(torch.randint(9, (), generator=generator)) + int(torch.randint(9, ())) + random.randrange(9)
    return crop // 2 + shift + np.random.randint(9)


def test_behind_the_crops():
    for ours, plain in zip(run(invert), run(), strict=True):
        for view, other in zip(ours.views, plain.views, strict=True):
            assert torch.equal(view.images, 255 - other.images)
            assert all(np.array_equal(a[1], b[1]) for a, b in zip(view.colors, other.colors, strict=True))


def test_one_function_per_view():
    for ours, plain in zip(run(invert, lambda crop: crop), run(), strict=True):
        assert torch.equal(crops(ours)[0], 255 - crops(plain)[0])
        assert torch.equal(crops(ours)[1], crops(plain)[1])
    with pytest.raises(ValueError, match=r"data.augment has 3 functions, but the method has 2 views"):
        run(invert, invert, invert)


def test_random_numbers_depend_on_the_position_alone():
    whole, states = run(noise), (random.getstate(), torch.get_rng_state())
    assert not torch.equal(crops(whole[0])[0], crops(run()[0])[0] // 2)
    for other in (run(noise), run(noise, workers=2), [*whole[:2], *run(noise, first_step=2)]):
        for one, two in zip(whole, other, strict=True):
            assert all(map(torch.equal, crops(one), crops(two)))
    parts = [run(noise, rank=rank, world_size=2) for rank in range(2)]
    for one, *two in zip(whole, *parts, strict=True):
        for view, *halves in zip(one.views, *(part.views for part in two), strict=True):
            images = view.images.unflatten(0, (view.crops, -1))
            assert torch.equal(torch.cat([half.images.unflatten(0, (view.crops, -1)) for half in halves], 1), images)
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])
    first, second = (
        batch.views[0].images[int(np.flatnonzero(batch.positions % 24 == 3)[0])] for batch in (whole[0], whole[3])
    )
    assert not torch.equal(first, second)


def test_torchvision_in_place_of_the_crops():
    """The crops are those that torchvision draws from the whole image; no colour change is left."""
    sizes = (16, 8)
    transforms = [v2.Compose([v2.RandomResizedCrop(size), v2.RandomHorizontalFlip()]) for size in sizes]
    for batch in run(*transforms, replaces=True):
        assert [view.images.shape[-1] for view in batch.views] == list(sizes)
        assert [view.crops for view in batch.views] == [2, 3]
        assert all(not view.colors for view in batch.views)
    seen = []

    def whole(image):
        seen.append(tuple(image.shape))
        return image[:, :8, :8]

    batch = run(lambda image: image[:, 5:21, 5:21], whole, replaces=True)[0]
    assert set(seen) == {(3, 40, 30)}
    for row, key in enumerate(batch.keys):
        image = torch.from_numpy(IMAGES[int(Path(key).stem)]).permute(2, 0, 1)
        assert torch.equal(crops(batch)[0][row], image[:, 5:21, 5:21])


def test_masks_stay_and_plain_views_are_left_alone():
    transform = ResizedView(MULTI, 24)
    for ours, plain in zip(run(invert, transform=transform), run(transform=transform), strict=True):
        assert torch.equal(crops(ours)[1], 255 - crops(plain)[1])
        assert torch.equal(crops(ours)[2], crops(plain)[2])
    with pytest.raises(ShardError, match="not possible with crops of a Gram teacher"):
        run(invert, transform=transform, replaces=True)


def test_packed_crops():
    transform = NativeCrop(RandomCropConfig(size=16), patch=4, smallest=8, token_budget=64)
    assert isinstance(transform.packing, Packing)
    for ours, plain in zip(run(invert, transform=transform), run(transform=transform), strict=True):
        assert torch.equal(ours.views[0].images.patches, 255 - plain.views[0].images.patches)
    with pytest.raises(ValueError, match="not possible for packed crops"):
        run(invert, transform=transform, replaces=True)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda crop: crop / 255,
            r"returned float32 of shape \(3, 16, 16\) for view 0. It must return a tensor of the type uint8",
        ),
        (lambda crop: crop[:, 1:], r"returned uint8 of shape \(3, 15, 16\)"),
        (lambda crop: None, "returned NoneType"),
        (lambda crop: [][1], r"/\d+\.png cannot be read: IndexError: .* \(test_user_augment.py, line"),
    ],
)
def test_wrong_results_stop_the_run(function, message):
    with pytest.raises(ShardError, match=message):
        run(function, workers=1)


def test_names(tmp_path, monkeypatch):
    (tmp_path / "tessera_test_code.py").write_text("def flip(crop):\n    return crop.flip(2)\nNUMBER = 3\n")
    monkeypatch.chdir(tmp_path)
    assert torch.equal(load_function("tessera_test_code:flip", "x")(torch.eye(2)[None]), torch.eye(2)[None].flip(2))
    for name, message in {
        "tessera_test_code": "must be module:function",
        "tessera_test_code:flop": "cannot be imported: module 'tessera_test_code' has no attribute 'flop'",
        "tessera_no_code:flip": "cannot be imported: No module named 'tessera_no_code'",
        "tessera_test_code:NUMBER": "is a int, which cannot be called",
        "python:flip": "Pass the object again",
    }.items():
        with pytest.raises(SettingsError, match=message):
            load_function(name, "data.augment")
