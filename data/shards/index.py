"""Files beside the shards: `index.json`, `SHARD.tar.index` and `classes.json`.

`index.json` lists the shards of its folder in the format of webdataset's `wids` index, with additional optional keys.
`SHARD.tar.index`, the table of a shard, is a NumPy archive with the names and byte positions of the samples. If
`index.json` and the table exist, a run finds the samples without reading the tar headers. `classes.json` lists the
class names in the order of the class numbers. All these files may come from an untrusted source. Therefore nothing is
unpickled, file names cannot point outside the folder, and sizes are checked before memory is allocated.
"""

import io
import json
import os
import unicodedata
import zipfile
from collections import Counter
from collections.abc import Sequence
from math import prod
from operator import lt
from pathlib import Path
from tarfile import BLOCKSIZE
from typing import Annotated, Any, Literal, NamedTuple, Self

import numpy as np
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    FiniteFloat,
    ValidationError,
    model_validator,
)

from tessera.data.failures import REPLACE_INDEX, ShardError, is_exhausted, unreadable
from tessera.data.headers import read_array_header
from tessera.data.shards.tar_index import LARGEST_MEMBER, Index
from tessera.encoders.base import PixelType
from tessera.runtime.files import atomic_write
from tessera.runtime.user_error import CONTROL, printable

FOLDER_INDEX = "index.json"
TABLE = ".index"
"""File name suffix of tables: the table of `a.tar` is `a.tar.index`."""
LARGEST_TABLE = 2**30  # Maximum size of a table in bytes. The table of a million samples has about 60 MB.
LONGEST_NAME = 255  # maximum size in bytes of the name of a file
MOST_SHARDS = 200_000
"""Maximum number of shards that one pattern may match, and that an index.json may list."""
MOST_SAMPLES = 2**32  # maximum number of samples of a shard
LARGEST_SHARD = 2**50  # maximum size of a shard in bytes
MOST_CHANNELS = 4096
LONGEST_REASON = 300  # maximum number of characters of a reason in an error message
LARGEST_FOLDER_INDEX = 2**28  # Maximum size of an index.json in bytes. 100,000 shards take about 20 MB.
STORED = tuple(name for name in Index._fields if name != "pages")
"""Names of the arrays of a table beside a shard. Its samples are files, whatever `data.pages` is."""
OPTIONAL = ("maps", "notes")
"""Names of the arrays that a table may lack."""
CLASSES = "classes.json"
WORK = ".make_shards"
"""Name of the subfolder in which `make_shards` keeps its settings and the records of finished shards."""
PLAN = f"{WORK}/plan.json"
"""File that `make_shards` writes before the first shard. It writes `LEFT_OUT` and `FOLDER_INDEX` after the last one."""
LEFT_OUT = "left_out.csv"
LARGEST_CLASSES = 2**26  # Maximum size of a classes.json in bytes. The names of 22,000 classes take about 0.5 MB.


def _file_name(name: str) -> str:
    if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise ValueError(f"{name!r} is not a plain file name. A shard must be in the same folder as its index")
    if len(os.fsencode(name)) > LONGEST_NAME or CONTROL.search(name):
        raise ValueError("a file name is longer than 255 bytes, or holds control characters")
    return name


_Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class ShardEntry(BaseModel):
    """Entry of one shard in `index.json`."""

    model_config = ConfigDict(extra="ignore")

    url: Annotated[str, AfterValidator(_file_name)]
    """File name of the shard."""
    nsamples: int = Field(ge=1, le=MOST_SAMPLES, strict=True)
    """Number of samples."""
    filesize: int = Field(ge=1, le=LARGEST_SHARD, strict=True)
    """Size of the shard in bytes."""
    labelled: int | None = Field(default=None, ge=0, strict=True)
    """Number of samples with a label; None if unknown, as in an index that another tool wrote."""
    sha256: str | None = Field(default=None, pattern="^[0-9a-fA-F]{64}$")
    """SHA-256 of the shard in hexadecimal; None if unknown."""
    notes: list[Any] | None = None
    """Notes on what is left out of the shard, as `notes.Note`; None if there are none or they are unknown."""

    @model_validator(mode="after")
    def _counts(self) -> Self:
        if self.nsamples > (self.filesize // BLOCKSIZE if self.url.endswith(".tar") else self.filesize):
            raise ValueError(f"{self.filesize} bytes cannot hold {self.nsamples} samples")
        if self.labelled is not None and self.labelled > self.nsamples:
            raise ValueError(f"{self.labelled} labels are more than {self.nsamples} samples")
        return self


class Statistics(NamedTuple):
    """Statistics of the pixels of a data set; see `FolderIndex`."""

    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    pixel_type: PixelType | None = None
    low: tuple[float, ...] | None = None
    high: tuple[float, ...] | None = None
    nodata: float | Literal["auto"] | None = None


class FolderIndex(BaseModel):
    """Content of an `index.json`: the shards of a folder in their order, and statistics of their images."""

    model_config = ConfigDict(extra="ignore", populate_by_name=True)

    kind: Literal["wids-shard-index-v1"] = Field(default="wids-shard-index-v1", alias="__kind__")
    wids_version: Literal[1] = 1
    name: Any = ""
    """Name of the data set, for other tools. This project ignores the name."""
    shardlist: Annotated[list[ShardEntry], FailFast()] = Field(min_length=1)
    mean: tuple[_Share, ...] | None = Field(default=None, max_length=MOST_CHANNELS)
    """Mean of each channel over all pixels, in [0, 1]; None if the mean was not computed."""
    std: tuple[_Share, ...] | None = Field(default=None, max_length=MOST_CHANNELS)
    """Standard deviation of each channel over all pixels, for values in [0, 1]; None if not computed."""
    pixel_type: PixelType | None = None
    """Type of the pixels; None if unknown, as in an index of an older version."""
    low: tuple[FiniteFloat, ...] | None = Field(default=None, max_length=MOST_CHANNELS)
    """Value of each channel that becomes 0, for which mean and std were computed; None for 0 of uint8."""
    high: tuple[FiniteFloat, ...] | None = Field(default=None, max_length=MOST_CHANNELS)
    """Value of each channel that becomes 1, for which mean and std were computed; None for 255 of uint8."""
    nodata: Literal["auto"] | FiniteFloat | None = None
    """Value of the pixels that mean and std leave out; `auto` for the value that each file names, None for none."""

    @property
    def statistics(self) -> "Statistics":
        return Statistics(self.mean, self.std, self.pixel_type, self.low, self.high, self.nodata)

    @model_validator(mode="after")
    def _same_channels(self) -> Self:
        if len(self.mean or ()) != len(self.std or ()):
            raise ValueError("mean and std have different numbers of channels")
        if self.low is None is self.high:
            return self
        low, high = self.low or (), self.high or ()
        if not len(low) == len(high) == len(self.mean or ()) or not all(map(lt, low, high)):
            raise ValueError("low and high must have one value per channel, and each low must be less than its high")
        return self


def parse_folder(content: bytes, path: str) -> FolderIndex:
    """Parse the content of an `index.json`.

    Args:
        content: bytes of the file.
        path: name of the file in error messages.

    Raises:
        ShardError: the content is not a valid `index.json`.
    """
    if content.count(b'"url"') > MOST_SHARDS:  # counted first, because parsing takes 1 kB of memory for each shard
        raise ShardError(f"{path} lists more than {MOST_SHARDS:,} shards. Divide the shards among several folders.")
    try:
        return FolderIndex.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = printable(".".join(map(str, first["loc"])))
        reason = printable(first["msg"])[:LONGEST_REASON]
        raise ShardError(f"{path} is not an index of shards ({where}: {reason}). {REPLACE_INDEX}") from None


def write_folder(folder: str | Path, index: FolderIndex) -> None:
    """Write the `index.json` of a folder atomically."""
    with atomic_write(Path(folder) / FOLDER_INDEX, sync=True) as path:
        path.write_text(index.model_dump_json(by_alias=True, exclude_none=True, indent=1))


def write_table(shard: str | Path, table: Index) -> None:
    """Write the table of a shard to the file `SHARD.tar.index` beside the shard. The write is atomic."""
    with atomic_write(f"{shard}{TABLE}", sync=True) as path, path.open("wb") as file:
        np.savez(file, **{name: getattr(table, name) for name in STORED})


def parse_table(content: bytes, path: str) -> Index:
    """Parse the content of a table (`SHARD.tar.index`).

    Args:
        content: bytes of the file.
        path: name of the file in error messages.

    Raises:
        ShardError: the content is not a valid table, or a byte position in the table lies outside the shard.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            if sum(member.file_size for member in archive.infolist()) > LARGEST_TABLE:
                raise ValueError(f"the arrays have more than {LARGEST_TABLE} bytes")
            for member in archive.infolist():
                with archive.open(member) as file:
                    shape, _, dtype = read_array_header(file)
                if prod(shape) * dtype.itemsize > member.file_size:
                    raise ValueError(f"{member.file_size} bytes cannot hold an array of the shape {shape}")
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            # Tables of older versions lack the arrays `maps` and `notes`.
            table = Index(**{name: arrays[name] for name in STORED if name in arrays or name not in OPTIONAL})
        _check(table)
    except Exception as error:  # NumPy raises many kinds of errors for damaged files
        if is_exhausted(error):
            raise unreadable(path, error) from error
        raise ShardError(
            f"{path} is not a table of samples ({printable(str(error))[:LONGEST_REASON]}). {REPLACE_INDEX}"
        ) from None
    return table


def _check(table: Index) -> None:
    """Raise `ValueError` if the arrays of a table contradict each other."""
    kinds = {name: np.uint8 if name in ("keys", "notes") else np.int64 for name in STORED}
    samples = len(table.ends)
    shapes = {
        "keys": table.keys.shape[:1],
        "ends": (samples,),
        "images": (samples, 2),
        "labels": (samples, 2),
        "summary": (3,),
        "maps": (samples if len(table.maps) else 0, 2),
        "notes": table.notes.shape[:1],
    }
    for name in STORED:
        array = getattr(table, name)
        if array.dtype != kinds[name] or array.shape != shapes[name]:
            raise ValueError(
                f"the array `{name}` has type {array.dtype} and shape {array.shape}, but must have type "
                f"{np.dtype(kinds[name])} and shape {shapes[name]}"
            )
    count, labelled, size = map(int, table.summary)
    labels, maps = (places[places[:, 0] >= 0] for places in (table.labels, table.maps))
    offsets, sizes = np.concatenate([table.images, labels, maps]).T
    inside = (offsets >= BLOCKSIZE) & (sizes >= 0) & (offsets <= size) & (sizes <= size - offsets)
    inside &= sizes <= LARGEST_MEMBER
    if not inside.all() or not samples or count != samples or labelled != (table.labels[:, 0] >= 0).sum():
        raise ValueError("a byte position lies outside the shard, or the number of samples or labels is wrong")
    if (np.diff(table.ends, prepend=0) < 0).any() or table.ends[-1] != len(table.keys):
        raise ValueError("the array `ends` does not split the array `keys` into one name per sample")


def parse_classes(content: bytes, path: str) -> tuple[str, ...]:
    """Parse the content of a `classes.json`.

    Args:
        content: bytes of the file.
        path: name of the file in error messages.

    Raises:
        ShardError: the content is not a list of unique names.
    """
    try:
        names = json.loads(content) if len(content) <= LARGEST_CLASSES else None
    except (ValueError, RecursionError):
        names = None
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ShardError(f"{path} is not a JSON list of class names. Correct or remove the file.")
    if (unique := unique_names(names)) is None:
        ((repeated, _),) = Counter(map(composed, names)).most_common(1)
        raise ShardError(f"{path} names the class {repeated!r} more than once. Correct the file.")
    return unique


def unique_names(names: Any) -> tuple[str, ...] | None:
    """Return class names in Unicode's form NFC; None if an object is not a sequence of unique names.

    macOS stores the letter é of a folder name as two characters, and other systems as one.
    """
    if not isinstance(names, Sequence) or isinstance(names, str) or not names:
        return None
    if not all(isinstance(name, str) for name in names):
        return None
    found = tuple(map(composed, names))
    return found if len({*found}) == len(found) else None


def composed(name: str) -> str:
    """Return a class name in Unicode's form NFC, in which classes are compared."""
    return unicodedata.normalize("NFC", name)
