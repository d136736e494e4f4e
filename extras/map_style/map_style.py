"""Map-style data sets of the user, read like one shard: item i of the data set is sample i.

A map-style data set has `__len__` and `__getitem__`: the data sets of torchvision, `datasets.Dataset` of Hugging Face,
arrays of images, and classes of the user. An item is an image, a tuple (image, label, ...) or a dictionary. An image is
a Pillow image, an array, a tensor or an encoded file (`data.decode`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset

from tessera.data.decode import ImageError, Undecoded, upright
from tessera.data.failures import ShardError
from tessera.data.python_objects import kind, named_object
from tessera.data.shards.access import DEFAULT, Access
from tessera.data.shards.index import composed, unique_names
from tessera.data.shards.listing import class_order
from tessera.data.shards.notes import LABELS, Note
from tessera.data.shards.samples import Item, SampleKeys, is_number, is_scalar, item_of, label_keys, label_number
from tessera.data.shards.shard import Shard
from tessera.data.shards.source import MOST_PROBED, equal_names
from tessera.data.shards.stored_index import Header, header_of
from tessera.data.shards.tar_index import Index, NumberedIndex
from tessera.data.user_code import named_errors, seeded


@dataclass(frozen=True)
class MapStyle(Shard):
    """A map-style data set. Its path is the name under which a program has passed it (`data.python_objects`)."""

    dataset: Any = field(default=None, repr=False, compare=False)
    samples: int = 0
    """Length of the data set when it was opened."""
    labelled: bool = False
    """True if the first readable item has a class number."""
    numbers: np.ndarray | None = field(default=None, repr=False, compare=False)
    """Class number of each item, or -1 for no label, if labels are texts or some are missing: (N,) int64."""
    texts: tuple[str, ...] | None = field(default=None, repr=False, compare=False)
    """Texts of the labels in the order of `numbers`; None if the labels are integers."""
    last: list[tuple[int, Item]] = field(default_factory=list, repr=False, compare=False)
    """The item that was read last, so that the label of a sample does not read its item again."""

    runs_code: ClassVar[bool] = True
    class_remedy: ClassVar[str] = "Give the classes the same numbers in both (ImageFolder: target_transform)"
    cure: ClassVar[str] = "Correct the images that the data set returns."

    @classmethod
    def at(cls, path: str, access: Access = DEFAULT) -> "MapStyle":
        """Return the data set with the name `path`. The first item that is not corrupt is read as a check.

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
        opened = cls(path, 0, "", access=access, dataset=dataset, samples=len(dataset))
        if not opened.samples:
            raise ShardError(f"the data set {opened.name} is empty.")
        for number in range(min(opened.samples, MOST_PROBED)):
            try:
                with seeded(0, 0):
                    item = opened.item(number)
                break
            except ImageError:  # the image is corrupt, so a run would replace it
                continue
        else:
            return opened
        stored = stored_labels(dataset, access.keys)
        numbers, texts = numbered(stored or [])
        notes = ()
        if not (access.stages or item.label is None or numbers is not None or is_number(item.label)):
            group = f"the label of {opened.name}/{number} is {item.label!r:.50}, not an integer"
            notes = (Note(LABELS, opened.samples, group=group),)
        labelled = item.label is not None and not notes
        found = {"samples": opened.samples, "labelled": labelled, "numbers": numbers, "texts": texts, "notes": notes}
        return cls(path, 0, "", access=access, dataset=dataset, **found)

    @property
    def name(self) -> str:
        return kind(self.dataset)

    @property
    def names_classes(self) -> str:
        return self.path

    @classmethod
    def check_object(cls, thing: object) -> None:
        check_map_style(thing)

    def identities(self) -> list[Any]:
        return [id(self.dataset)]

    def items(self) -> Iterator[tuple[int, str, np.ndarray]]:
        for part, numbers in parts_of(self.dataset):
            numbers = np.arange(len(part)) if numbers is None else numbers
            if isinstance(part, list):  # parts of a list, such as pairs[:100], are other lists of the same objects
                numbers = np.array([id(part[number]) for number in numbers.tolist()])
            yield 0 if isinstance(part, list) else id(part), kind(part), numbers

    def class_names(self) -> tuple[str, ...] | None:
        """Return the class names of Hugging Face's `features`, of torchvision's `classes` or of labels that are texts;
        None if there are none.

        Raises:
            ShardError: the parts of a `ConcatDataset` number their classes differently.
        """
        return self.texts or _class_names(self.dataset, self.access.keys, self.path)

    def make_index(self) -> Index:
        index = NumberedIndex.of(self.samples, self.labelled)
        if self.numbers is None:
            return index
        summary = np.array([self.samples, (self.numbers >= 0).sum(), 0], dtype=np.int64)
        return index._replace(labels=np.stack([self.numbers, np.minimum(self.numbers, 0)], axis=1), summary=summary)

    def index(self) -> Index:
        return self.make_index()

    def header(self) -> Header:
        return header_of(self.index())

    def image(self, index: Index, sample: int) -> Undecoded:
        item = self.item(sample)
        self.last[:] = [(sample, item)]
        return item.image

    def label(self, index: Index, sample: int) -> int:
        if self.numbers is not None:
            label = int(self.numbers[sample])
            return label_number(label if label >= 0 else None, f"{self.name}/{sample}")
        if not self.last or self.last[0][0] != sample:
            self.last[:] = [(sample, self.item(sample))]
        return label_number(self.last.pop()[1].label, f"{self.name}/{sample}")

    def members(self, index: Index, sample: int) -> dict[str, Any]:
        with named_errors(f"{self.name}/{sample}"):
            item = self.dataset[sample]
        image, label = item_of(item, self.access.keys, f"{self.name}/{sample}")
        others = {str(key): value for key, value in item.items()} if isinstance(item, Mapping) else {}
        found = {"__key__": str(sample), "__url__": self.path, **others, self.access.keys.image or "jpg": image}
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
        found = item_of(item, self.access.keys, name)
        if isinstance(found.image, Image.Image) and _only_opens(self.dataset):
            return found._replace(image=upright(found.image))
        return found


def check_map_style(dataset: Any) -> None:
    """Check that an object is a map-style data set. Nothing is read.

    Raises:
        ShardError: the object is read as a stream, so that a run could not be resumed, or it is no data set.
    """
    name = kind(dataset)
    if name == "DataFrame":
        write = "to_csv('train.csv', index=False)" if hasattr(dataset, "to_csv") else "write_csv('train.csv')"
        raise ShardError(
            f"data: a {name} is no data set. Save it as CSV with the columns path and label, frame.{write}, and give "
            "data='train.csv'."
        )
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


def parts_of(dataset: Any) -> Iterator[tuple[Any, np.ndarray | None]]:
    """Yield each data set that a `Subset` or a `ConcatDataset` reads, with the indices of its items (None for all)."""
    if isinstance(dataset, ConcatDataset):
        for part in dataset.datasets:
            yield from parts_of(part)
    elif isinstance(dataset, Subset):
        starts, numbers = 0, np.asarray(dataset.indices, dtype=np.int64)
        for part, own in parts_of(dataset.dataset):
            count = len(part) if own is None else len(own)
            inside = numbers[(numbers >= starts) & (numbers < starts + count)] - starts
            yield part, inside if own is None else own[inside]
            starts += count
    else:
        yield dataset, None


def _class_names(dataset: Any, keys: SampleKeys, name: str) -> tuple[str, ...] | None:
    """Return the class names of a data set and of all its parts."""
    parts = {id(part): part for part, _ in parts_of(dataset)}
    named = []
    for number, part in enumerate(parts.values()):
        features = getattr(part, "features", None)
        if isinstance(features, Mapping):
            key = next((key for key in label_keys(keys) if key in features), None)
            names = getattr(features.get(key), "names", None)
        else:
            names = getattr(part, "classes", None)
        named.append((f"part {number} ({kind(part)}) of {name}", unique_names(names)))
    names = equal_names(named, MapStyle.class_remedy)
    return None if isinstance(dataset, Subset) else names  # a subset may lack classes


def stored_labels(dataset: Any, keys: SampleKeys) -> list[Any] | None:
    """Return the labels of all items if they can be read without the images: those of lists of pairs, and texts and
    integers in columns of Hugging Face. Return None otherwise.
    """
    if isinstance(dataset, Subset):
        labels = stored_labels(dataset.dataset, keys)
        return labels and [labels[number] for number in dataset.indices]
    if isinstance(dataset, ConcatDataset):
        found = [stored_labels(part, keys) for part in dataset.datasets]
        return None if None in found else [label for labels in found for label in labels or ()]
    if isinstance(dataset, list):
        seconds = (one[1] if isinstance(one, tuple | list) and len(one) > 1 else None for one in dataset)
        return [one if is_scalar(one) else None for one in seconds]
    features = getattr(dataset, "features", None) or {}
    key = next((key for key in label_keys(keys) if key in features), None)
    kind_of_label = "" if key is None else str(getattr(features[key], "dtype", ""))
    if keys.label_field or not ("string" in kind_of_label or "int" in kind_of_label):
        return None
    return dataset.select_columns([key]).with_format(None)[:][key]  # the column alone is read item by item


def numbered(labels: list[Any]) -> tuple[np.ndarray | None, tuple[str, ...] | None]:
    """Return the class number of each label (N,) int64, with -1 for no label, and the texts of the labels.

    Texts are numbered as the names of class folders are. Without texts, the second result is None. The first result is
    None if all labels are integers or all are missing, so that they need no numbers, or if they are of several kinds.
    """
    given = [None if isinstance(label, str) and not label.strip() else label for label in labels]
    known = [label for label in given if label is not None]
    if known and all(isinstance(label, str) for label in known):
        texts = tuple(sorted({composed(label) for label in known}, key=class_order))
        numbers = {text: number for number, text in enumerate(texts)}
        return np.array([-1 if one is None else numbers[composed(one)] for one in given], dtype=np.int64), texts
    if 0 < len(known) < len(given) and all(map(is_number, known)):
        return np.array([-1 if one is None else int(one) for one in given], dtype=np.int64), None
    return None, None


def _only_opens(dataset: Any) -> bool:
    """Return True for torchvision's folders without a transform, whose images are in memory, but not turned upright."""
    if type(dataset) in (Subset, ConcatDataset):
        return all(_only_opens(part) for part, _ in parts_of(dataset))
    loader = getattr(dataset, "loader", None)
    return getattr(loader, "__module__", "") == "torchvision.datasets.folder" and dataset.transform is None
