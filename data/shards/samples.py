"""Images and labels of samples: the names under which they are found, and the forms that they may have."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from tessera.data.decode import Undecoded, check_kind
from tessera.data.failures import NoLabelError, SampleError, ShardError
from tessera.data.pages import Pages
from tessera.data.shards.tar_index import ARRAYS, IMAGES, LABEL, whole_number
from tessera.data.user_code import named_errors

IMAGE_KEYS = ("image", "img", *IMAGES, *ARRAYS)
"""Keys under which an item that is a dictionary may hold its image. The first key that the item has is used."""
LABEL_KEYS = ("label", LABEL)
"""Keys under which an item that is a dictionary may hold its label."""


class SampleKeys(NamedTuple):
    """How the image and the label are taken from a sample."""

    image: str | None = None
    """Name of the image in a sample; None for the usual names."""
    label: str | None = None
    """Name of the label in a sample, or `NAME:FIELD` for a field of a JSON object; None for the usual names."""
    labels: str | None = None
    """Manifest with the labels of the images in folders (`data.shards.manifest`); None for no manifest."""
    labelled_only: bool = False
    """True to leave out the images of folders that have no label in the manifest."""
    pages: Pages | None = None
    """Images of a file that are samples (`data.pages`); None for files of one image."""

    @property
    def label_name(self) -> str | None:
        """Name of the label without the field; None for the usual names."""
        return self.label and self.label.partition(":")[0]

    @property
    def label_field(self) -> str:
        """Dotted name of the field that holds the label; empty if the member itself is the label."""
        return (self.label or "").partition(":")[2]


class Item(NamedTuple):
    """Image and label of an item."""

    image: Undecoded
    label: Any
    """Label as the data set returns it; None if the item has no label."""


def item_of(item: Any, keys: SampleKeys, name: str) -> Item:
    """Return the image and the label of an item: an image, a tuple (image, label, ...) or a dictionary.

    Args:
        item: item of a data set.
        keys: names of image and label in a dictionary.
        name: name of the sample in error messages.

    Raises:
        ShardError: the item has no image.
    """
    image, label = item, None
    if isinstance(item, Mapping):
        image_keys = IMAGE_KEYS if keys.image is None else (keys.image,)
        key = next((key for key in image_keys if key in item), None)
        if key is None:
            raise ShardError(
                f"{name} has no image under {' or '.join(map(repr, image_keys))}. It has the keys "
                f"{', '.join(map(repr, item))}. Name the key of the image with data.image."
            )
        image = item[key]
        label = next((item[key] for key in label_keys(keys) if key in item), None)
        label = field_of(label, keys.label_field, name) if keys.label_field and label is not None else label
    elif isinstance(item, tuple | list) and item:
        # annotations such as boxes and masks are no labels
        image, label = item[0], item[1] if len(item) > 1 and is_scalar(item[1]) else None
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
        NoLabelError: the label is None.
        SampleError: the label is not an integer.
    """
    if label is None:
        raise NoLabelError(
            f"{name} has no label, but labels are needed. Let the data set return (image, label), or name the key of "
            "the label with data.label."
        )
    if not is_number(label):
        raise SampleError(
            f"the label of {name} is {label!r:.100}, not an integer. Number the classes from 0. Class names are "
            "possible in a CSV, in a list of pairs (image, name), and in data sets of Hugging Face."
        )
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


def label_keys(keys: SampleKeys) -> tuple[str, ...]:
    return LABEL_KEYS if keys.label_name is None else (keys.label_name,)


def is_number(label: Any) -> bool:
    if isinstance(label, bytes):  # an undecoded .cls member
        return whole_number(label) is not None
    label = label.numpy() if isinstance(label, torch.Tensor) else label
    if isinstance(label, np.ndarray):
        return label.ndim == 0 and label.dtype.kind in "iu"
    return isinstance(label, int | np.integer) and not isinstance(label, bool)


def is_scalar(label: Any) -> bool:
    """Return True for a number, a text, or an array or tensor of one value without an axis."""
    return bool(np.isscalar(label)) or getattr(label, "ndim", None) == 0


def _file(path: Any, name: str) -> bytes:
    with named_errors(name), open(path, "rb") as file:
        return file.read()
