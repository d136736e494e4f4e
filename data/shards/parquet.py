"""Parquet files with a column of encoded images, in the layout of Hugging Face. A run reads a file like a shard.

The image column holds encoded files (binary), or structs whose field `bytes` holds them. To read one row, Parquet has
to decode its row group. So the images of a row group are stored in the cache of the node when one of them is first
needed, and read from there, as byte ranges of a remote tar are (`shards.tars`).
"""

import functools
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from tessera.data.shards.failures import SampleError, ShardError, is_exhausted, unreadable
from tessera.data.shards.map_style import IMAGE_KEYS, LABEL_KEYS, NumberedIndex
from tessera.data.shards.source import DEFAULT, Shard, SourceConfig
from tessera.data.shards.tar import LARGEST_MEMBER, Index
from tessera.runtime.user_error import printable

LARGEST_GROUP = 2**31
"""Maximum size in bytes of the images of a row group, all of which are in memory while the row group is decoded."""
KEPT_METADATA = 16
"""Maximum number of Parquet files whose metadata a process keeps in memory."""


@dataclass(frozen=True)
class ParquetFile(Shard):
    """A local Parquet file whose rows are samples. The name of a sample is the number of its row."""

    ends: tuple[int, ...] = field(default=(), repr=False, compare=False)
    """Number of the row at which each row group ends."""
    column: str = ""
    """Name of the column that holds the encoded images: `image.bytes`, or `image` if the column is binary."""
    label_column: str | None = None
    """Name of the column of labels; None if there is none."""
    classes: tuple[str, ...] | None = None
    """Class names from Hugging Face's metadata; None if the metadata has none."""

    downloads: ClassVar[bool] = True
    supports_ranges: ClassVar[bool] = True

    @classmethod
    def at(cls, path: str, config: SourceConfig = DEFAULT) -> "ParquetFile":
        """Return the Parquet file at `path`.

        Raises:
            ShardError: the file cannot be read, is empty, or has no column of images.
        """
        try:
            status = os.stat(path)
        except OSError as error:
            raise unreadable(path, error) from error
        version = f"{status.st_mtime_ns}\n{status.st_ctime_ns}"
        metadata = _metadata(path, version)
        schema = metadata.schema.to_arrow_schema()
        if not metadata.num_rows:
            raise ShardError(f"{path} has no rows. Remove the file from the list.")
        column = _image_column(schema, path, config.form.image)
        labels = LABEL_KEYS if config.form.label is None else (config.form.label,)
        label = next((name for name in labels if name in schema.names), None)
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        sizes = [_column_bytes(group, column) for group in groups]
        if max(sizes) > LARGEST_GROUP:
            raise ShardError(
                f"{path} has a row group with {max(sizes):,} bytes of images, but at most {LARGEST_GROUP:,} are "
                "supported. Write the file again with smaller row groups, such as 100 rows."
            )
        ends = np.cumsum([group.num_rows for group in groups]).tolist()
        classes = None if label is None else _class_names(schema.metadata, label)
        return cls(path, status.st_size, version, config, None, tuple(ends), column, label, classes)

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def folder(self) -> str:
        return self.path.rpartition("/")[0]

    def class_names(self) -> tuple[str, ...] | None:
        return self.classes

    def make_index(self) -> Index:
        samples = self.ends[-1]
        labels = np.full(samples, -1, dtype=np.int64)
        if self.label_column is not None:
            column = self._read(lambda file: file.read([self.label_column], use_threads=False).column(0))
            if str(column.type).startswith(("int", "uint")):
                labels = np.asarray(column.cast("int64").fill_null(-1))
        index = NumberedIndex.of(samples, False)
        summary = np.array([samples, (labels >= 0).sum(), self.size], dtype=np.int64)
        return index._replace(labels=np.stack([labels, np.minimum(labels, 0)], axis=1), summary=summary)

    def index(self) -> Index:
        return NumberedIndex(*super().index())

    def _index_part(self) -> str:
        return f"index {self.label_column}"

    def label(self, index: Index, sample: int) -> int:
        if (label := int(index.labels[sample, 0])) < 0:
            raise SampleError(
                f"{self.name}/{sample} has no label, but labels are needed. Labels are integers in the column label or "
                "cls; name another column with data.label."
            )
        return label

    def image(self, index: Index, sample: int) -> bytes:
        group = int(np.searchsorted(self.ends, sample, side="right"))
        row = sample - (self.ends[group - 1] if group else 0)
        descriptor = self._open_group(group)
        try:
            start, end = np.frombuffer(os.pread(descriptor, 16, 8 * row), dtype="<i8").tolist()
            return os.pread(descriptor, end - start, start)
        finally:
            os.close(descriptor)

    def fetches(self, index: Index, samples: Sequence[int]) -> list[Callable[[], None]]:
        groups = np.unique(np.searchsorted(self.ends, samples, side="right"))
        missing = [group for group in groups.tolist() if not self._is_cached(group)]
        return [lambda group=group: os.close(self._open_group(group)) for group in missing]

    def _group_name(self, group: int) -> str:
        return self.cache_name(f"row group {group} of {self.column}")

    def _is_cached(self, group: int) -> bool:
        if (descriptor := self.cache.find(self._group_name(group))) is None:
            return False
        os.close(descriptor)
        return True

    def _open_group(self, group: int) -> int:
        """Return a descriptor of the cached images of a row group, which the caller closes.

        The file begins with the positions of the n images, n + 1 numbers of 8 bytes. A checksum ends the file.
        """

        def images() -> list[bytes]:
            return [self._read(lambda file: _images(file.read_row_group(group, [self.column], use_threads=False)))]

        return self.cache.open_checked(self._group_name(group), images)

    def _read(self, read: Callable[[Any], Any]) -> Any:
        """Return the result of `read`, which gets the opened file.

        Raises:
            ShardError: the file has changed or is damaged.
        """
        try:
            status = os.stat(self.path)
        except OSError as error:
            raise unreadable(self.path, error) from error
        if (status.st_size, f"{status.st_mtime_ns}\n{status.st_ctime_ns}") != (self.size, self.version):
            raise ShardError(f"{self.path} has changed since it was opened. Restart the run.")
        try:
            from pyarrow import parquet

            # Each call opens the file, because threads must not share an opened file.
            with parquet.ParquetFile(self.path, metadata=_metadata(self.path, self.version)) as file:
                return read(file)
        except ShardError:
            raise
        except Exception as error:  # pyarrow raises many kinds of errors for damaged files
            raise _damaged(self.path, error) from error


@functools.lru_cache(KEPT_METADATA)
def _metadata(path: str, version: str) -> Any:
    """Return the metadata of a Parquet file. `version` is the version of the file."""
    del version
    try:
        from pyarrow import parquet
    except ImportError:
        raise ShardError(f'{path}: Parquet needs pyarrow. Install it: pip install "tessera-ssl[parquet]"') from None
    try:
        return parquet.read_metadata(path)
    except Exception as error:  # pyarrow raises many kinds of errors for damaged files
        raise _damaged(path, error) from error


def _damaged(path: str, error: Exception) -> ShardError:
    if is_exhausted(error):
        return unreadable(path, error)
    reason = printable(str(error).partition("\n")[0])[:300]
    return ShardError(f"{path} cannot be read as Parquet: {reason}. Download or write the file again.")


def _image_column(schema: Any, path: str, given: str | None) -> str:
    """Return the name of the column that holds the encoded images."""
    from pyarrow import types

    def encoded(name: str) -> str | None:
        if name not in schema.names:
            return None
        kind = schema.field(name).type
        if types.is_struct(kind) and (field := kind.get_field_index("bytes")) >= 0:
            name, kind = f"{name}.bytes", kind.field(field).type
        return name if types.is_binary(kind) or types.is_large_binary(kind) else None

    names = IMAGE_KEYS if given is None else (given,)
    found = next((column for name in names if (column := encoded(name))), None)
    if found is None:
        raise ShardError(
            f"{path} has no column of encoded images named {' or '.join(names)}. It has the columns "
            f"{', '.join(map(printable, schema.names))}. Name the column with data.image."
        )
    return found


def _column_bytes(group: Any, column: str) -> int:
    """Return the uncompressed size of a column of a row group in bytes."""
    columns = (group.column(number) for number in range(group.num_columns))
    return sum(one.total_uncompressed_size for one in columns if one.path_in_schema == column)


def _class_names(metadata: Any, label: str) -> tuple[str, ...] | None:
    """Return the class names from the metadata that Hugging Face's `datasets` writes; None if there are none."""
    try:
        names = json.loads(metadata[b"huggingface"])["info"]["features"][label]["names"]
    except (TypeError, KeyError, ValueError, RecursionError):
        return None
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        return None
    return tuple(names) if len({*names}) == len(names) else None


def _images(table: Any) -> bytes:
    """Return the content of the cache file of a row group: positions (n + 1 numbers of 8 bytes) and encoded images."""
    images = []
    for chunk in table.column(0).chunks:
        values = chunk.field("bytes") if str(chunk.type).startswith("struct") else chunk
        images += [value.as_py() or b"" for value in values]  # a missing image counts as corrupt
    if any(len(image) > LARGEST_MEMBER for image in images):
        raise ShardError(f"an image has more than {LARGEST_MEMBER} bytes. Write the file again without this image.")
    positions = np.cumsum([8 * (len(images) + 1), *map(len, images)]).astype("<i8")
    return b"".join([positions.tobytes(), *images])
