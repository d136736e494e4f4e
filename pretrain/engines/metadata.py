"""Read a checkpoint's file .metadata, which may come from an untrusted source.

torch.distributed.checkpoint writes the file as a pickle, and a pickle can make its reader call any function. This
module calls only constructors of the classes that the file needs, and checks the result.
"""

import io
import pathlib
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as of_torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from tessera.runtime.files import read_bounded
from tessera.runtime.user_error import UserError, printable

MAX_BYTES = 2**30
"""Largest size of the file in bytes. The file holds a few hundred bytes for each tensor, and in checkpoints of older
versions for each tensor of each process."""
CLASSES = ("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta")
CLASSES += ("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING")


class MetadataError(UserError, ValueError):
    """The file .metadata of a checkpoint is damaged or hostile."""


def _memory_format(kind: object, name: object, /) -> object:
    """Return the memory format with this name. The unpickler calls this function instead of `getattr`.

    Python 3.11.2 and other Python versions of that time pickle a member of an enumeration as `getattr(class, name)`.
    """
    formats = of_torch._MEM_FORMAT_ENCODING
    if kind is not formats or not isinstance(name, str) or name not in formats.__members__:
        raise MetadataError("it calls builtins.getattr, which could run code")
    return formats[name]


_ALLOWED: dict[tuple[str, str], Any] = {(of_torch.__name__, name): getattr(of_torch, name) for name in CLASSES}
_ALLOWED |= {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,  # looks a name up in a dict
    ("pathlib", "PosixPath"): pathlib.PurePosixPath,  # the name of the folder in which the checkpoint was written
    ("pathlib._local", "PosixPath"): pathlib.PurePosixPath,
    ("builtins", "getattr"): _memory_format,
}
_ALLOWED |= {("torch", name): kind for name in dir(torch) if isinstance(kind := getattr(torch, name), torch.dtype)}


class _Unpickler(pickle.Unpickler):
    """Unpickler that resolves only the names in `_ALLOWED`."""

    def find_class(self, module: str, name: str, /) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise MetadataError(
                f"it names {printable(f'{module}.{name}')}, which no checkpoint needs and which could run code"
            ) from None

    def persistent_load(self, pid: Any, /) -> Any:
        raise MetadataError("it holds a persistent id, which no checkpoint needs")


class CheckpointReader(FileSystemReader):
    """Reader of checkpoint files that runs no code from these files.

    Raises:
        MetadataError: the file .metadata is damaged, names objects that could run code, or names a file in another
            folder.
        OSError: the file cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        # Read the file here. If the method `read_metadata` raised an error during a load, torch would log a traceback.
        self._metadata = read_metadata(folder / ".metadata")

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the bytes of each item of the plan, and no others. Objects in the files are not unpickled."""
        per_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            per_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in per_file.items():
            with (Path(self.path) / name).open("rb") as file:
                for item in items:
                    target = planner.resolve_tensor(item)
                    target.copy_(self._read_range(file, item).view(target.shape))
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_range(self, file: BinaryIO, item: ReadItem) -> Tensor:
        """Return a range of a stored tensor, (n,)."""
        stored, described = self.storage_data[item.storage_index], self._metadata.state_dict_metadata
        tensor = described[item.storage_index.fqn]
        assert isinstance(tensor, TensorStorageMetadata)  # `_fault` checks it
        dtype, (first,), (count,) = tensor.properties.dtype, item.storage_offsets, item.lengths
        size = dtype.itemsize
        start, end = _stored_bytes(file, stored)
        if start + (first + count) * size > end:
            raise MetadataError(
                f"{stored.relative_path} is damaged: the tensor {printable(item.storage_index.fqn)} ends early"
            )
        file.seek(start + first * size)
        content = bytearray(count * size)
        if file.readinto(content) != len(content):  # pyright: ignore[reportAttributeAccessIssue]
            raise MetadataError(f"{stored.relative_path} is damaged: it ends early")
        return torch.frombuffer(content, dtype=dtype)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the content of the file .metadata. Torch calls this method, with arguments that are not needed."""
        del args, kwargs
        self._metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return self._metadata


class _Part(io.RawIOBase):
    """Bytes `start` to `start + length` of a file, as a file."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self.file, self.start, self.length, self.position = file, start, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.length}[whence]
        if origin + offset < 0:
            raise OSError("negative position")  # zipfile expects this class
        self.position = origin + offset
        return self.position

    def readinto(self, buffer: Any, /) -> int:
        self.file.seek(self.start + self.position)
        content = self.file.read(max(min(len(buffer), self.length - self.position), 0))
        buffer[: len(content)] = content
        self.position += len(content)
        return len(content)


def _stored_bytes(file: BinaryIO, stored: _StorageInfo) -> tuple[int, int]:
    """Return where the elements of a tensor begin and end in a file. `torch.save` wrote the tensor there.

    Raises:
        MetadataError: no tensor is stored there.
    """
    try:
        part = _Part(file, stored.offset, stored.length)
        with zipfile.ZipFile(part) as archive:
            (entry,) = (one for one in archive.infolist() if one.filename.endswith("/data/0"))
            if entry.compress_type != zipfile.ZIP_STORED:
                raise ValueError("compressed")
            part.seek(entry.header_offset)
            header = part.read(30)
        # The lengths of the name and of the extra field in the entry's own header, which precede its content.
        start = stored.offset + entry.header_offset + len(header) + sum(struct.unpack("<HH", header[26:30]))
    except Exception as error:  # zipfile raises errors of many classes for a damaged file
        raise MetadataError(f"{stored.relative_path} is damaged: it holds no tensor at {stored.offset}") from error
    return start, start + entry.file_size


def read_metadata(path: Path) -> Metadata:
    """Return the content of the file `path`.

    Raises:
        MetadataError: the file is damaged, or contains objects or tensors that this project does not write.
        OSError: the file cannot be read.
    """
    content = read_bounded(path, MAX_BYTES)
    try:
        metadata = _Unpickler(io.BytesIO(content)).load()
        fault = None if isinstance(metadata, Metadata) else "it does not describe a checkpoint"
        fault = fault or _fault(metadata)
    except MetadataError as error:
        raise MetadataError(f"{path.name} was not read, because {error}") from None
    except Exception as error:  # the constructors may raise anything for damaged values
        raise MetadataError(f"{path.name} is damaged ({type(error).__name__})") from error
    if fault:
        raise MetadataError(f"{path.name} is damaged: {fault}")
    return metadata


def _fault(metadata: Metadata) -> str | None:
    """Return the reason why `metadata` does not describe flattened tensors in files of one folder, or None."""
    for name, tensor in metadata.state_dict_metadata.items():
        if not isinstance(name, str) or not isinstance(tensor, TensorStorageMetadata):
            return "it describes something that is not a tensor"
        chunks = [(*chunk.offsets, *chunk.sizes) for chunk in tensor.chunks]
        numbers = [*tensor.size, *(number for chunk in chunks for number in chunk)]
        if len(tensor.size) != 1 or any(len(chunk) != 2 for chunk in chunks):
            return f"the tensor {printable(name)} is not flattened"
        if not all(isinstance(number, int) and number >= 0 for number in numbers):
            return f"the tensor {printable(name)} has a negative size"
    for index, stored in metadata.storage_data.items():
        if not isinstance(index, MetadataIndex) or not isinstance(stored, _StorageInfo):
            return "it describes something that is not stored in a file"
        file = stored.relative_path
        if not isinstance(file, str) or file in ("", ".", "..") or "/" in file or "\0" in file:
            return f"it points to the file {printable(str(file))} outside of the checkpoint"
        if not all(isinstance(number, int) and number >= 0 for number in (stored.offset, stored.length)):
            return f"it points to a negative position in {printable(file)}"
        if stored.transform_descriptors:
            return "it holds compressed tensors, which this project does not write"
    return None
