"""Map-style data sets of the user, read like one shard: item i of the data set is sample i.

A map-style data set has `__len__` and `__getitem__`: the data sets of torchvision, `datasets.Dataset` of Hugging Face,
arrays of images, and classes of the user. An item is an image, a tuple (image, label, ...) or a dictionary. An image is
a Pillow image, an array, a tensor or an encoded file (`data.decode`).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, IterableDataset

from tessera.data.decode import ImageError, Undecoded, check_kind, upright
from tessera.data.given import kind, named_object
from tessera.data.shards.failures import SampleError, ShardError
from tessera.data.shards.index import unique_names
from tessera.data.shards.source import DEFAULT, SampleForm, Shard, SourceConfig
from tessera.data.shards.stored_index import Header, header_of
from tessera.data.shards.tar import IMAGES, LABEL, Index, whole_number
from tessera.data.user_code import named_errors, seeded

IMAGE_KEYS = ("image", "img", *IMAGES)
"""Keys under which an item that is a dictionary may hold its image. The first key that the item has is used."""
LABEL_KEYS = ("label", LABEL)
"""Keys under which an item that is a dictionary may hold its label."""


class NumberedIndex(Index):
    """Index of samples whose names are their numbers. Its arrays take no memory."""

    __slots__ = ()

    @classmethod
    def of(cls, samples: int, labelled: bool) -> "NumberedIndex":
        """Return the index of `samples` samples, which all have a label or all have none."""
        places = np.broadcast_to(np.int64(0), (samples, 2))
        labels = places if labelled else np.broadcast_to(np.int64(-1), (samples, 2))
        summary = np.array([samples, samples * labelled, 0], dtype=np.int64)
        return cls(np.empty(0, dtype=np.uint8), np.empty(0, dtype=np.int64), places, labels, summary)

    def raw_key(self, sample: int) -> bytes:
        return b"%d" % sample


class Item(NamedTuple):
    """Image and label of an item."""

    image: Undecoded
    label: Any
    """Label as the data set returns it; None if the item has no label."""


@dataclass(frozen=True)
class MapStyle(Shard):
    """A map-style data set. Its path is the name under which a program has passed it (`data.given`)."""

    dataset: Any = field(default=None, repr=False, compare=False)
    samples: int = 0
    """Length of the data set when it was opened."""
    labelled: bool = False
    """True if the first item has a label."""
    last: list[tuple[int, Item]] = field(default_factory=list, repr=False, compare=False)
    """The item that was read last, so that the label of a sample does not read its item again."""

    runs_code: ClassVar[bool] = True

    @classmethod
    def at(cls, path: str, config: SourceConfig = DEFAULT) -> "MapStyle":
        """Return the data set with the name `path`. The first item is read as a check.

        Raises:
            ShardError: no data set has this name, the data set is empty, or its first item is not an image.
        """
        try:
            dataset = named_object(path)
        except KeyError:
            raise ShardError(
                f"{path} stands for a data set object of Python, which settings cannot hold. Pass the object again, "
                "for example with tessera.pretrain(data=DATASET, resume=True, output=RUN)."
            ) from None
        opened = cls(path, 0, "", config=config, dataset=dataset, samples=len(dataset))
        if not opened.samples:
            raise ShardError(f"the data set {opened.name} is empty.")
        try:
            with seeded(0, 0):
                item = opened.item(0)
        except ImageError:  # the image is corrupt, so a run would replace it
            return opened
        return cls(path, 0, "", config=config, dataset=dataset, samples=opened.samples, labelled=item.label is not None)

    @property
    def name(self) -> str:
        return kind(self.dataset)

    @property
    def names_classes(self) -> str:
        return self.path

    def identities(self) -> list[Any]:
        return [id(self.dataset)]

    def class_names(self) -> tuple[str, ...] | None:
        """Return the class names of Hugging Face's `features` or of torchvision's `classes`; None if there are none."""
        features = getattr(self.dataset, "features", None)
        if isinstance(features, Mapping):
            key = next((key for key in _label_keys(self.config.form) if key in features), None)
            names = getattr(features.get(key), "names", None)
        else:
            names = getattr(self.dataset, "classes", None)
        return unique_names(names)

    def make_index(self) -> Index:
        return NumberedIndex.of(self.samples, self.labelled)

    def index(self) -> Index:
        return self.make_index()

    def header(self) -> Header:
        return header_of(self.index())

    def image(self, index: Index, sample: int) -> Undecoded:
        item = self.item(sample)
        self.last[:] = [(sample, item)]
        return item.image

    def label(self, index: Index, sample: int) -> int:
        if not self.last or self.last[0][0] != sample:
            self.last[:] = [(sample, self.item(sample))]
        return label_number(self.last.pop()[1].label, f"{self.name}/{sample}")

    def members(self, index: Index, sample: int) -> dict[str, Any]:
        with named_errors(f"{self.name}/{sample}"):
            item = self.dataset[sample]
        image, label = item_of(item, self.config.form, f"{self.name}/{sample}")
        others = {str(key): value for key, value in item.items()} if isinstance(item, Mapping) else {}
        found = {"__key__": str(sample), "__url__": self.path, **others, self.config.form.image or "jpg": image}
        return found if label is None else found | {"cls": label}

    def item(self, sample: int) -> Item:
        """Return an item of the data set.

        Raises:
            ImageError: the data set cannot decode the image.
            ShardError: the data set raises another error, or the item has no image.
        """
        name = f"{self.name}/{sample}"
        with named_errors(name):
            item = self.dataset[sample]
        found = item_of(item, self.config.form, name)
        if isinstance(found.image, Image.Image) and _only_opens(self.dataset):
            return found._replace(image=upright(found.image))
        return found


def check_map_style(dataset: Any) -> None:
    """Check that an object is a map-style data set. Nothing is read.

    Raises:
        ShardError: the object is read as a stream, so that a run could not be resumed, or it is no data set.
    """
    name = kind(dataset)
    if isinstance(dataset, DataLoader):
        raise ShardError(
            f"data: a {name} cannot be resumed at an exact sample. Give its data set: data=LOADER.dataset."
        )
    if not isinstance(dataset, IterableDataset) and hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        return
    if hasattr(dataset, "__iter__"):
        raise ShardError(
            f"data: a {name} is read as a stream, which cannot be resumed at an exact sample. Give a data set with "
            "`__len__` and `__getitem__`, or the files behind the stream, such as 'train-{000000..000099}.tar'."
        )
    raise ShardError(f"data: a {name} is no data set. Give SHARDS, or a data set with `__len__` and `__getitem__`.")


def item_of(item: Any, form: SampleForm, name: str) -> Item:
    """Return the image and the label of an item: an image, a tuple (image, label, ...) or a dictionary.

    Args:
        item: item of a data set.
        form: names of image and label in a dictionary.
        name: name of the sample in error messages.

    Raises:
        ShardError: the item has no image.
    """
    image, label = item, None
    if isinstance(item, Mapping):
        image_keys = IMAGE_KEYS if form.image is None else (form.image,)
        key = next((key for key in image_keys if key in item), None)
        if key is None:
            raise ShardError(
                f"{name} has no image under {' or '.join(map(repr, image_keys))}. It has the keys "
                f"{', '.join(map(repr, item))}. Name the key of the image with data.image."
            )
        image = item[key]
        label = next((item[key] for key in _label_keys(form) if key in item), None)
        label = field_of(label, form.label_field, name) if form.label_field and label is not None else label
    elif isinstance(item, tuple | list) and item:
        image, label = item[0], item[1] if len(item) > 1 and _is_number(item[1]) else None
    if isinstance(image, Mapping) and image.keys() >= {"bytes"}:  # Hugging Face's `Image(decode=False)`
        image = image["bytes"] if image["bytes"] is not None else _file(image.get("path"), name)
    try:
        check_kind(image)
    except TypeError as error:
        raise ShardError(f"the image of {name} cannot be used: {error}") from None
    return Item(image, label)


def label_number(label: Any, name: str) -> int:
    """Return a label as a number.

    Raises:
        SampleError: the label is None or not an integer.
    """
    if label is None:
        raise SampleError(
            f"{name} has no label, but labels are needed. Let the data set return (image, label), or name the key of "
            "the label with data.label."
        )
    if not _is_number(label):
        raise SampleError(f"the label of {name} is {label!r:.100}, not an integer. Number the classes from 0.")
    return int(label)


def field_of(content: Any, field: str, name: str) -> Any:
    """Return a field of a JSON object, which may be encoded. `field` is a dotted name, such as `object.category`.

    Raises:
        SampleError: the content is not a JSON object, or has no such field.
    """
    try:
        found = json.loads(content) if isinstance(content, bytes | str) else content
        for part in field.split("."):
            found = found[part]
        return found
    except (ValueError, RecursionError):
        raise SampleError(f"the label of {name} is not valid JSON. Correct the member that data.label names.") from None
    except (KeyError, TypeError, IndexError):
        raise SampleError(f"the label of {name} has no field {field!r}. Correct data.label or the sample.") from None


def _label_keys(form: SampleForm) -> tuple[str, ...]:
    return LABEL_KEYS if form.label_name is None else (form.label_name,)


def _only_opens(dataset: Any) -> bool:
    """Return True for torchvision's folders without a transform, whose images are in memory, but not turned upright."""
    while type(dataset) is torch.utils.data.Subset:
        dataset = dataset.dataset
    loader = getattr(dataset, "loader", None)
    return getattr(loader, "__module__", "") == "torchvision.datasets.folder" and dataset.transform is None


def _is_number(label: Any) -> bool:
    if isinstance(label, bytes):  # an undecoded .cls member
        return whole_number(label) is not None
    label = label.numpy() if isinstance(label, torch.Tensor) else label
    if isinstance(label, np.ndarray):
        return label.ndim == 0 and label.dtype.kind in "iu"
    return isinstance(label, int | np.integer) and not isinstance(label, bool)


def _file(path: Any, name: str) -> bytes:
    with named_errors(name), open(path, "rb") as file:
        return file.read()
