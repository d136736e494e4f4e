"""Parquet files with a column of encoded images, in the layout of Hugging Face. A run reads a file like a shard.

The image column holds encoded files (binary), or structs whose field `bytes` holds them. To read one row, Parquet has
to decode its row group. So the images of a row group are stored in the cache of the node when one of them is first
needed, and read from there, as byte ranges of a remote tar are (`shards.tar_shard`).
"""

import functools
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from tessera.data.failures import SampleError, ShardError, is_exhausted, unreadable
from tessera.data.shards.access import DEFAULT, Access
from tessera.data.shards.index import unique_names
from tessera.data.shards.notes import LABELS, Note
from tessera.data.shards.samples import IMAGE_KEYS, LABEL_KEYS
from tessera.data.shards.shard import Shard
from tessera.data.shards.tar_index import LARGEST_MEMBER, Index, NumberedIndex
from tessera.runtime.user_error import printable

LARGEST_GROUP = 2**31
"""Maximum size in bytes of the images of a row group, all of which are in memory while the row group is decoded."""
ROWS_AT_ONCE = 4  # number of rows that are expanded before their size is checked
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
    """Name of the column of labels; None if there is none, or if several columns may be meant."""
    classes: tuple[str, ...] | None = None
    """Class names from Hugging Face's metadata; None if the metadata has none."""

    downloads: ClassVar[bool] = True
    supports_ranges: ClassVar[bool] = True
    class_remedy: ClassVar[str] = (
        "Write one of them again with the class numbers of the other (`align_labels_with_mapping` of Hugging Face's "
        "datasets)"
    )

    @classmethod
    def at(cls, path: str, access: Access = DEFAULT) -> "ParquetFile":
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
        if metadata.num_rows > status.st_size:
            raise ShardError(
                f"{path} states {metadata.num_rows:,} rows, but has {status.st_size:,} bytes. Write the file again."
            )
        column = _image_column(schema, path, access.keys.image)
        labels = LABEL_KEYS if access.keys.label is None else (access.keys.label,)
        present = [name for name in schema.names if name in labels]
        label = present[0] if len(present) == 1 else None
        reason = _unread_label(schema, present, access.keys.label)
        notes = (Note(LABELS, metadata.num_rows, group=reason),) if reason else ()
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        if (size := max(_column_bytes(group, column) for group in groups)) > LARGEST_GROUP:
            raise _too_large(path, f"{size:,}")
        ends = np.cumsum([group.num_rows for group in groups]).tolist()
        classes = None if label is None else _class_names(path, schema.metadata, label)
        facts = (path, status.st_size, version, access, None, tuple(ends), column, label, classes)
        return cls(*facts, notes=notes)

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def names_classes(self) -> str:
        return self.path

    def class_names(self) -> tuple[str, ...] | None:
        return self.classes

    def make_index(self) -> Index:
        samples = self.ends[-1]
        labels = np.full(samples, -1, dtype=np.int64)
        if self.label_column is not None:
            labels = self._read(lambda file: _labels(file, self.label_column))
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
                "cls, if the file has only one of them; name another column with data.label."
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
            return self._read(lambda file: self._images(file, group))

        return self.cache.open_checked(self._group_name(group), images)

    def _images(self, file: Any, group: int) -> list[bytes]:
        """Return the content of the cache file of a row group: positions (n + 1 numbers of 8 bytes), encoded images.

        A dictionary of values can expand to many times its stored size, so the size is checked row by row.
        """
        images, total = [], 0
        for batch in file.iter_batches(ROWS_AT_ONCE, row_groups=[group], columns=[self.column], use_threads=False):
            values = batch.column(0)
            values = values.field("bytes") if str(values.type).startswith("struct") else values
            if (total := total + values.nbytes) > LARGEST_GROUP:
                raise _too_large(self.path, f"more than {total:,}")
            images += [value.as_py() or b"" for value in values]  # a missing image counts as corrupt
            if any(len(image) > LARGEST_MEMBER for image in images[-ROWS_AT_ONCE:]):
                raise ShardError(
                    f"an image of {self.path} has more than {LARGEST_MEMBER} bytes. Write the file again without it."
                )
        positions = np.cumsum([8 * (len(images) + 1), *map(len, images)]).astype("<i8")
        return [positions.tobytes(), *images]

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
    found = [column for name in names if (column := encoded(name))]
    if len(found) > 1:
        several = [column.removesuffix(".bytes") for column in found]
        raise ShardError(
            f"{path} has several columns of encoded images: {', '.join(several)}. Choose one with data.image, for "
            f"example --data.image={several[0]}."
        )
    if not found:
        raise ShardError(
            f"{path} has no column of encoded images named {' or '.join(names)}. It has the columns "
            f"{', '.join(map(printable, schema.names))}. Name the column with data.image."
        )
    return found[0]


def _column_bytes(group: Any, column: str) -> int:
    """Return the uncompressed size in bytes of a column of a row group."""
    columns = (group.column(number) for number in range(group.num_columns))
    return sum(one.total_uncompressed_size for one in columns if one.path_in_schema == column)


def _too_large(path: str, found: str) -> ShardError:
    return ShardError(
        f"{path} has a row group with {found} bytes of images, but at most {LARGEST_GROUP:,} are supported. Write "
        "the file again with smaller row groups, such as 100 rows, or remove it."
    )


def _unread_label(schema: Any, columns: list[str], given: str | None) -> str:
    """Return the reason why columns of labels are not read; empty if they are read or there are none.

    `given` is the column that the user has chosen.
    """
    from pyarrow import types

    if given is not None and not columns:
        return f"there is no column {printable(given)}, which data.label names"
    if len(columns) > 1:
        return f"there are the columns {' and '.join(columns)}. Choose one with data.label (--label of other commands)"
    kind = schema.field(columns[0]).type if columns else None
    if kind is None or types.is_integer(kind) or types.is_null(kind):
        return ""
    cure = ", for example with `class_encode_column` of Hugging Face's datasets"
    return f"the column {columns[0]} holds {printable(str(kind))[:50]}, not integers. Number the classes{cure}"


def _labels(file: Any, column: str | None) -> np.ndarray:
    """Return the labels in a column: (N,) int64. A missing label is -1."""
    from pyarrow import types

    kind = file.schema_arrow.field(column).type
    if not types.is_integer(kind):
        return np.full(file.metadata.num_rows, -1, dtype=np.int64)
    values = file.read([column], use_threads=False).column(0)
    return np.asarray(values.cast("int64").fill_null(-1))


def _class_names(path: str, metadata: Any, label: str) -> tuple[str, ...] | None:
    """Return the class names from the metadata that Hugging Face's `datasets` writes; None if there are none."""
    try:
        names = json.loads(metadata[b"huggingface"])["info"]["features"][label]["names"]
    except MemoryError as error:
        raise unreadable(path, error) from error
    except (TypeError, KeyError, ValueError, RecursionError):
        return None
    return unique_names(names)
