"""The index of a folder of shards: all that a run needs to know before it reads the first image.

`index.json` lists the shards of its folder, in the form of webdataset's own `wids` indices and with a few entries more;
`SHARD.tar.index` beside each says where its samples lie. With them a run starts without reading a header of any shard,
which is what makes a hundred thousand remote ones usable. Both may come from a stranger: nothing in them is unpickled,
becomes a path outside their folder, or is believed about memory.
"""

import io
import os
import uuid
import zipfile
from pathlib import Path
from tarfile import BLOCKSIZE
from typing import Annotated, Literal

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from data.shards.tar import LARGEST_MEMBER, Index, ShardError

FOLDER_INDEX = "index.json"
TABLE = ".index"
"""what is added to the name of a shard"""
LARGEST_TABLE = 2**30  # bytes; a million samples take about 60 MB

REMAKE = "make it again with `python -m data.check_shards SHARDS --write_index true`"
REMEDY = f"{REMAKE}, or remove it"


def _plain(name: str) -> str:
    """A name without a folder."""
    if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise ValueError(f"{name!r} is no name of a file in the folder of the index")
    return name


class ShardEntry(BaseModel):
    """One shard of a folder."""

    model_config = ConfigDict(extra="ignore")

    url: Annotated[str, AfterValidator(_plain)]
    """name of the file"""
    nsamples: int = Field(ge=1)
    filesize: int = Field(ge=1)
    """bytes"""
    labelled: int | None = Field(default=None, ge=0)
    """samples with a label; None in an index that other tools wrote"""
    sha256: str | None = None
    """of the file, in hexadecimal"""


class FolderIndex(BaseModel):
    """The shards of one folder, in their order."""

    model_config = ConfigDict(extra="ignore", populate_by_name=True)

    kind: Literal["wids-shard-index-v1"] = Field(default="wids-shard-index-v1", alias="__kind__")
    wids_version: Literal[1] = 1
    name: str = ""
    shardlist: list[ShardEntry] = Field(min_length=1)
    image_sizes: dict[str, int] = {}
    """images by their longer side: its upper bound in pixels, a power of two -> how many"""


def read_folder(content: bytes, path: str) -> FolderIndex:
    """The index in the bytes of an `index.json`; `path` is for messages.

    Raises:
        ShardError: not such an index.
    """
    try:
        return FolderIndex.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ShardError(f"{path}: not an index of shards ({where}: {first['msg']}); {REMEDY}") from None


def write_folder(folder: str | Path, index: FolderIndex) -> None:
    """Writes `index.json`; a reader meets the old one or the new one."""
    write_whole(Path(folder) / FOLDER_INDEX, index.model_dump_json(by_alias=True, exclude_none=True, indent=1).encode())


def write_table(shard: str | Path, table: Index) -> None:
    """Writes where the samples of a shard lie, beside it."""
    content = io.BytesIO()
    np.savez(content, **table._asdict())
    write_whole(Path(f"{shard}{TABLE}"), content.getvalue())


def read_table(content: bytes, path: str) -> Index:
    """Where the samples of a shard lie, from the bytes of a `SHARD.tar.index`; `path` is for messages.

    Raises:
        ShardError: not such a table, or one that points outside the shard.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            if sum(member.file_size for member in archive.infolist()) > LARGEST_TABLE:
                raise ValueError("too large")
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            table = Index(**{name: arrays[name] for name in Index._fields})
        _check(table)
    except Exception as error:  # a damaged zip or array ends in many ways
        raise ShardError(f"{path}: not a table of samples ({error}); {REMEDY}") from None
    return table


def _check(table: Index) -> None:
    """Refuses arrays that do not belong together."""
    kinds = {"keys": np.uint8, "ends": np.int64, "images": np.int64, "labels": np.int64, "summary": np.int64}
    samples = len(table.ends)
    shapes = {
        "keys": table.keys.shape[:1],
        "ends": (samples,),
        "images": (samples, 2),
        "labels": (samples, 2),
        "summary": (3,),
    }
    for name, array in table._asdict().items():
        if array.dtype != kinds[name] or array.shape != shapes[name]:
            raise ValueError(f"{name} is {array.dtype} {array.shape}")
    count, labelled, size = map(int, table.summary)
    offsets, sizes = np.concatenate([table.images, table.labels[table.labels[:, 0] >= 0]]).T
    inside = (offsets >= BLOCKSIZE) & (sizes >= 0) & (offsets <= size) & (sizes <= size - offsets)
    inside &= sizes <= LARGEST_MEMBER
    if not inside.all() or not samples or count != samples or labelled != (table.labels[:, 0] >= 0).sum():
        raise ValueError("it points outside its shard, or its counts differ")
    if (np.diff(table.ends, prepend=0) < 0).any() or table.ends[-1] != len(table.keys):
        raise ValueError("its names overlap")


def write_whole(target: Path, content: bytes) -> None:
    """Writes a file; a reader meets the old one or the new one, and a kill leaves `.NAME.*.part` at most."""
    part = target.with_name(f".{target.name}.{uuid.uuid4().hex}.part")
    try:
        with part.open("wb") as file:
            file.write(content)
            os.fsync(file.fileno())
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
