"""A map-style data set gives the same samples as a folder of the same images."""

import dataclasses
import io
import random
import time

import numpy as np
import pandas
import pytest
import torch
import torchvision
import webdataset
from PIL import Image, ImageOps

from tessera.data.crops import CenterCrop, RandomCrop, RandomCropConfig
from tessera.data.shards import ShardError, open_shards, open_sources
from tessera.data.shards.access import Access
from tessera.data.shards.notes import describe
from tessera.data.shards.samples import SampleKeys
from tessera.encoders.base import Preprocessing
from tests.data.batches import evaluation_batches, saved, training_batches

IMAGES = 37


def pixels(number):
    return np.random.default_rng(number).integers(0, 256, (16 + number % 5, 20, 3), dtype=np.uint8)


@pytest.fixture
def folder(photos):
    """A folder of PNGs in two classes, whose order is that of their numbers."""
    return photos({f"{'ab'[number // 20]}/{number:02d}.png": saved(pixels(number), "PNG") for number in range(IMAGES)})


class Items:
    """A data set of the items that a function makes from the number of the image."""

    def __init__(self, item, images=IMAGES):
        self.item, self.images = item, images

    def __len__(self):
        return self.images

    def __getitem__(self, number):
        return self.item(number)


KINDS = {
    "file": lambda n: (saved(pixels(n), "PNG"), n // 20),
    "bytearray": lambda n: [bytearray(saved(pixels(n), "PNG")), np.int64(n // 20), "more"],
    "file as a tensor": lambda n: (torch.frombuffer(bytearray(saved(pixels(n), "PNG")), dtype=torch.uint8), n // 20),
    "Pillow": lambda n: (Image.fromarray(pixels(n)), torch.tensor(n // 20)),
    "Pillow, not loaded": lambda n: (Image.open(io.BytesIO(saved(pixels(n), "PNG"))), n // 20),
    "array": lambda n: (pixels(n), np.array(n // 20)),
    "tensor": lambda n: (torch.from_numpy(pixels(n)).permute(2, 0, 1), n // 20),
    "dictionary": lambda n: {"id": "x", "image": pixels(n), "label": n // 20},
    "undecoded": lambda n: {"img": {"bytes": saved(pixels(n), "PNG"), "path": None}, "label": n // 20},
}


def values(batch):
    return [*(view.images for view in batch.views), batch.labels, torch.from_numpy(batch.positions)]


def batches(shards, **settings):
    """The pixels, labels and positions of training batches over three epochs."""
    crop = RandomCrop(RandomCropConfig(size=12))
    given = {"batch_size": 12, "seed": 3, "steps": 9, "classes": 2} | settings
    return [values(batch) for batch in training_batches(shards, crop, **given)]


def check_equal(ours, theirs):
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        for left, right in zip(one, other, strict=True):
            torch.testing.assert_close(left, right, rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_equals_a_folder(folder, kind):
    check_equal(batches(Items(KINDS[kind])), batches(str(folder)))


def test_torchvision_folder(photos):
    """JPEGs, one with an orientation; the class names are those of torchvision."""
    rotated = Image.Exif()
    rotated[0x0112] = 6
    files = {f"{'ab'[n // 9]}/{n:02d}.jpg": saved(pixels(n), "JPEG", quality=90) for n in range(16)}
    files["b/17.jpg"] = saved(pixels(17), "JPEG", exif=rotated.tobytes())
    folder = photos(files)
    dataset = torchvision.datasets.ImageFolder(str(folder))
    check_equal(batches(dataset), batches(str(folder)))
    parts = [torch.utils.data.Subset(dataset, range(n, n + 9 - n // 9)) for n in (0, 9)]
    check_equal(batches(torch.utils.data.ConcatDataset(parts)), batches(str(folder)))
    assert open_shards(dataset).class_names() == ("a", "b")
    subset = torch.utils.data.Subset(dataset, range(12))
    assert open_shards(subset).class_names() is None
    assert [batch.keys[0] for batch in evaluation_batches(subset, CenterCrop(8), batch_size=6)] == [
        "Subset/0",
        "Subset/6",
    ]


def opened(exif, turn=lambda image: image):
    """A data set of Pillow images from files with EXIF data."""
    return Items(lambda n: (turn(Image.open(io.BytesIO(saved(pixels(n), "PNG", exif=exif)))), n // 20))


def test_images_turned_by_the_user_are_not_turned_again(folder):
    exif = Image.Exif()
    exif[0x0112] = 6
    upright = batches(opened(exif, ImageOps.exif_transpose))
    check_equal(batches(opened(exif)), upright)
    with pytest.warns(UserWarning, match=r"in memory is not applied.* Call PIL.ImageOps.exif_transpose"):
        check_equal(batches(opened(exif, lambda image: image.transpose(Image.Transpose.ROTATE_270))), upright)


def test_hugging_face():
    import datasets

    features = datasets.Features({"img": datasets.Image(), "fine": datasets.ClassLabel(names=["x", "y"])})
    rows = {
        "img": [{"bytes": saved(pixels(n), "PNG"), "path": None} for n in range(14)],
        "fine": [n // 7 for n in range(14)],
    }
    dataset = datasets.Dataset.from_dict(rows, features=features)
    source = Access(keys=SampleKeys(label="fine"))
    expected = Items(lambda n: (pixels(n), n // 7), 14)
    check_equal(batches(dataset, source=source), batches(expected))
    check_equal(batches(dataset.cast_column("img", datasets.Image(decode=False)), source=source), batches(expected))
    assert open_shards(dataset, source=source).class_names() == ("x", "y")
    with pytest.raises(ShardError, match="IterableDataset is read as a stream"):
        open_shards(dataset.to_iterable_dataset())
    with pytest.raises(ShardError, match="'train' has no weight"):
        open_sources(datasets.DatasetDict({"train": dataset}))


def noisy(number):
    """An image that depends on all global generators."""
    noise = random.randrange(50) + np.random.randint(50) + int(torch.randint(50, ()))
    return pixels(number) // 2 + np.uint8(noise), number // 20


def test_random_items_depend_on_the_position_alone():
    """Two ranks, workers and a resumed run give the same images; the generators of the training do not move."""
    dataset, states = Items(noisy), (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state())
    whole = batches(dataset)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[:2]
    assert torch.equal(torch.get_rng_state(), states[2])
    check_equal(batches(dataset, first_step=4), whole[4:])
    check_equal(batches(dataset, workers=2), whole)
    ranks = [batches(dataset, rank=rank, world_size=2, workers=1) for rank in range(2)]
    together = [[torch.cat(parts) for parts in zip(*of_step, strict=True)] for of_step in zip(*ranks, strict=True)]
    for joined, step in zip(together, whole, strict=True):
        order, expected = joined[-1].argsort(), step[-1].argsort()
        check_equal([[one[order] for one in joined]], [[one[expected] for one in step]])
    assert not torch.equal(batches(dataset, seed=4)[0][0], whole[0][0])
    first, second = (next(b for b in whole if 3 in b[-1]), next(b for b in whole if 3 + IMAGES in b[-1]))
    assert not torch.equal(first[0], second[0])


def test_mixture_with_a_folder(folder):
    mixture = {Items(KINDS["Pillow"]): 0.5, str(folder): 0.5}
    crop = RandomCrop(RandomCropConfig(size=12))
    found = list(training_batches(mixture, crop, batch_size=16, seed=0, steps=3))
    assert set(np.concatenate([batch.sources for batch in found if batch.sources is not None])) == {0, 1}


def test_corrupt_images_are_replaced_as_in_a_folder(photos):
    broken = {3: b"no image", 7: saved(pixels(7), "PNG")[:200]}
    files = [broken.get(n) or saved(pixels(n), "PNG") for n in range(IMAGES)]
    folder = photos({f"{'ab'[n // 20]}/{n:02d}.png": content for n, content in enumerate(files)})
    opened = Items(lambda n: (Image.open(io.BytesIO(files[n])).convert("RGB"), n // 20))
    for dataset in (Items(lambda n: (files[n], n // 20)), opened):
        check_equal(batches(dataset), batches(str(folder)))


def test_other_channels():
    gray, rgba = (Items(lambda n, k=k: pixels(n)[..., :1].repeat(k, -1)) for k in (1, 4))
    bands = Items(lambda n: torch.zeros(7, 9, 9, dtype=torch.uint8))
    for dataset, channels in ((gray, 1), (rgba, 4), (gray, 3), (rgba, 3), (bands, 7)):
        config = Preprocessing((0.5,) * channels, (0.5,) * channels)
        batch = next(iter(evaluation_batches(dataset, CenterCrop(8), batch_size=4, labels=False, preprocessing=config)))
        assert batch.views[0].images.shape == (4, channels, 8, 8)
    with pytest.raises(ShardError, match="cannot be converted to 3 channels"):
        batches(bands, classes=None)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield pixels(0)


class Endless(torch.utils.data.Dataset):
    """Has no length, and never ends as a sequence."""

    def __getitem__(self, number):
        return pixels(0)


REFUSED = {
    "a Stream is read as a stream": Stream,
    "a <genexpr> is read as a stream": lambda: (pixels(n) for n in range(3)),
    "a WebDataset is read as a stream": lambda: webdataset.WebDataset("x.tar", shardshuffle=False, resampled=True),
    "a Endless is no data set": Endless,
    "to_csv('train.csv', index=False), and give data='train.csv'": lambda: pandas.DataFrame({"path": ["a.png"]}),
    "Give its data set: data=LOADER.dataset": lambda: torch.utils.data.DataLoader(Items(KINDS["array"])),
    "'train' has no weight": lambda: {"train": Items(KINDS["array"])},
    "a int is no data set": lambda: 3,
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused_at_once(message):
    began = time.monotonic()
    with pytest.raises(ShardError) as error:
        open_sources(REFUSED[message]())
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300
    assert time.monotonic() - began < 5


WRONG = {
    "Items/0 cannot be read: IndexError: list index out of range (test_map_style.py, line": lambda n: [][n],
    "its values are torch.float64. Return values of": lambda n: torch.zeros(3, 8, 8, dtype=torch.float64),
    "Pillow image of the mode LAB": lambda n: Image.new("LAB", (8, 8)),
    "it is a str. Return a Pillow image": lambda n: "a/path.jpg",
    "it has the shape (1, 3, 8, 8)": lambda n: torch.zeros(1, 3, 8, 8, dtype=torch.uint8),
    "Items/0 has no image under 'image' or 'img'": lambda n: {"pixel_values": pixels(n), "text": "x"},
    "Items/0 cannot be read: No such file or directory": lambda n: {"image": {"bytes": None, "path": "/no/file"}},
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_items_are_named_at_the_start(message):
    with pytest.raises(ShardError) as error:
        open_shards(Items(WRONG[message]))
    assert message in str(error.value)


def test_empty():
    with pytest.raises(ShardError, match="the data set Items is empty"):
        open_shards(Items(KINDS["array"], 0))


def test_errors_during_a_run_stop_it():
    def item(number):
        return (pixels(number) if number != 5 else {}[number]), 0

    for workers in (0, 2):
        with pytest.raises(ShardError, match=r"Items/5 cannot be read: KeyError: 5 \(test_map_style.py, line"):
            batches(Items(item), workers=workers)


def test_labels():
    with pytest.raises(ShardError, match="Items/0 has no label, but labels are needed"):
        batches(Items(lambda n: pixels(n)))
    for item in (lambda n: (pixels(n), "cat"), lambda n: {"image": pixels(n), "label": "cat"}):
        with pytest.raises(ShardError, match=r"the label of Items/0 is 'cat', not an integer. .* in a list of pairs"):
            batches(Items(item))
        opened = open_shards(Items(item))
        assert opened.count_labels() == 0
        assert describe(opened.notes) == [
            f"{IMAGES} samples are used without a label: the label of Items/0 is 'cat', not an integer."
        ]
    assert open_shards(Items(lambda n: (pixels(n), {"boxes": []}))).notes == ()  # annotations are no labels
    corrupt = Items(lambda n: (b"no image" if n == 0 else pixels(n), n // 20))
    assert open_shards(corrupt).all_labelled()  # the first image that can be read decides
    assert not open_shards(Items(pixels)).all_labelled()
    assert batches(Items(pixels), classes=None)[0][1] is None


def named_pairs(*names):
    return [(pixels(number), name) for number, name in enumerate(names)]


def labels(dataset, **form):
    opened = open_shards(dataset, source=Access(keys=SampleKeys(**form)))
    opened.require_labels()
    return opened.class_names(), [opened.label(number) for number in range(opened.images)]


def test_texts_of_pairs_are_classes_in_the_order_of_their_names():
    pairs = named_pairs("fox", "cat", "10", "9", "cat")
    expected = ("9", "10", "cat", "fox"), [3, 2, 1, 0, 2]
    assert labels(pairs) == expected
    assert labels(torch.utils.data.ConcatDataset([pairs[:2], pairs[2:]])) == expected
    assert labels(torch.utils.data.Subset(pairs, [4, 0])) == (("cat", "fox"), [0, 1])
    assert sorted(batches(pairs, batch_size=5, classes=4, steps=1)[0][1].tolist()) == [0, 1, 2, 2, 3]
    for missing in (named_pairs("b", None, "a"), named_pairs("b", "", "a"), named_pairs(None, 3, 4)):
        assert open_shards(missing).count_labels() == 2
        with pytest.raises(ShardError, match=r"list/[01] has no label"):
            open_shards(missing).require_labels()
    for mixed in (named_pairs("b", 1), named_pairs(1.5, 2), named_pairs(True, 2)):
        assert open_shards(mixed).count_labels() == 0
        with pytest.raises(ShardError, match=r"the label of list/0 is .*, not an integer"):
            open_shards(mixed).require_labels()


def test_texts_of_hugging_face_are_classes():
    import datasets

    images = [{"bytes": saved(pixels(n), "PNG"), "path": None} for n in range(3)]
    features = datasets.Features({"image": datasets.Image(), "kind": datasets.Value("string")})
    dataset = datasets.Dataset.from_dict({"image": images, "kind": ["b", "a", "b"]}, features=features)
    assert labels(dataset, label="kind") == (("a", "b"), [1, 0, 1])
    assert labels(dataset.select([2, 1]), label="kind") == (("a", "b"), [1, 0])


def test_labels_that_are_missing():
    """Optional labels are -1, also if the first one is missing."""
    import datasets

    images = [{"bytes": saved(pixels(n), "PNG"), "path": None} for n in range(3)]
    for kind in (datasets.Value("int64"), datasets.ClassLabel(names=["x", "y", "z"]), datasets.Value("string")):
        features = datasets.Features({"image": datasets.Image(), "label": kind})
        for labels in ([None, 2, 1], [2, None, 1]):
            texts = [one if one is None or kind.dtype != "string" else "abc"[one] for one in labels]
            dataset = datasets.Dataset.from_dict({"image": images, "label": texts}, features=features)
            opened = dataclasses.replace(open_shards(dataset), optional_labels=True)
            found = [opened.label(number) for number in range(3)]
            first, second = (1, 0) if kind.dtype == "string" else (2, 1)
            assert found == [-1 if one is None else first if one == 2 else second for one in labels]
    later = Items(lambda n: (pixels(n), None if n == 2 else n))
    opened = dataclasses.replace(open_shards(later), optional_labels=True)
    assert [opened.label(number) for number in range(4)] == [0, 1, -1, 3]


def test_parts_that_number_classes_differently():
    def part(*names):
        found = Items(KINDS["array"])
        found.classes = list(names)
        return found

    concat = torch.utils.data.ConcatDataset
    assert open_shards(concat([part("a", "b"), part("a", "b")])).class_names() == ("a", "b")
    message = r"part 0 \(Items\) of python:.* and part 1 .* number their classes differently: class 0 is 'a' in the"
    wrong = concat([part("a", "b"), torch.utils.data.Subset(part("b", "a"), [0])])
    for dataset in (wrong, concat([concat([wrong])]), torch.utils.data.Subset(wrong, [0, 40])):
        for read in (open_shards(dataset).require_labels, lambda one=dataset: batches(one)):
            with pytest.raises(ShardError, match=f"{message}.*ImageFolder: target_transform"):
                read()
        assert open_shards(dataset).count_labels() == 0
    assert len(batches(wrong, classes=None, steps=1)) == 1


def test_labels_read_an_item_once():
    read = []

    def item(number):
        read.append(number)
        return pixels(number), 1

    list(evaluation_batches(Items(item), CenterCrop(8), batch_size=10))
    assert sorted(read) == sorted([0, *range(IMAGES)])  # the first item is also read as a check
