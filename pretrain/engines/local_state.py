"""What a process holds of a run's tensors, saved and loaded whatever shards them (torch.distributed.checkpoint).

DDP holds every parameter whole, FSDP2 some of its rows, ZeRO-3 a range of its flattened numbers, ZeRO-1 and 2 such a
range of the optimizer's moments. All of these are contiguous ranges of the flattened tensor, so a checkpoint holds
flat tensors, and any process of any engine reads the range it needs.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

# one process needs no process group
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


@dataclass(frozen=True)
class Piece:
    """Numbers `offset` to `offset + len(data)` of a flattened tensor of `numel` numbers."""

    data: Tensor
    """(n,): what is saved, or loaded into"""
    offset: int
    numel: int
    everywhere: bool = False
    """whether every process holds the same"""

    def share(self, rank: int, processes: int) -> "Piece":
        """The part that process `rank` writes: all of it, or its share of what all hold."""
        if not self.everywhere:
            return self
        each = -(-len(self.data) // processes)
        return replace(self, data=self.data[rank * each : (rank + 1) * each], offset=self.offset + rank * each)

    def copy(self) -> "Piece":
        """The same numbers in the host's memory."""
        return replace(self, data=self.data.detach().to("cpu", copy=True))

    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(offsets=torch.Size([self.offset]), sizes=torch.Size([len(self.data)]))


def whole(tensor: Tensor) -> Piece:
    """A tensor that every process holds whole and contiguous."""
    return Piece(tensor.detach().view(-1), 0, tensor.numel(), everywhere=True)


class _SavePlanner(DefaultSavePlanner):
    """Writes pieces."""

    def __init__(self, pieces: Mapping[str, Piece]) -> None:
        super().__init__()
        self.pieces = pieces

    def create_local_plan(self) -> SavePlan:
        items = [
            WriteItem(
                index=MetadataIndex(name, torch.Size([piece.offset])),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=piece.chunk(),
                    properties=TensorProperties.create_from_tensor(piece.data),
                    size=torch.Size([piece.numel]),
                ),
            )
            for name, piece in self.pieces.items()
            if len(piece.data)
        ]
        names = {name: (name,) for name in self.pieces}  # for whoever reads it with torch's own tools
        self.plan = SavePlan(items, planner_data=names)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.pieces[index.fqn].data


class _LoadPlanner(DefaultLoadPlanner):
    """Reads into pieces. Names and sizes must be those of the checkpoint."""

    def __init__(self, pieces: Mapping[str, Piece], *, some: bool) -> None:
        super().__init__()
        self.pieces, self.some = pieces, some

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        stored = {
            name: tensor
            for name, tensor in self.metadata.state_dict_metadata.items()
            if isinstance(tensor, TensorStorageMetadata) and (name in self.pieces or not self.some)
        }
        there = {name: tensor.size.numel() for name, tensor in stored.items()}
        here = {name: piece.numel for name, piece in self.pieces.items() if piece.numel}  # empty ones are not written
        if there != here:
            differ = [name for name in sorted(there | here) if there.get(name) != here.get(name)]
            said = [f"{name} ({there.get(name, 0)} numbers there, {here.get(name, 0)} here)" for name in differ[:3]]
            more = f" and {len(differ) - 3} more" * (len(differ) > 3)
            raise ValueError(f"it holds other tensors: {', '.join(said)}{more}")
        items = []
        for name, piece in self.pieces.items():
            if not len(piece.data):
                continue
            found = create_read_items_for_chunk_list(name, stored[name], [piece.chunk()])
            if sum(item.lengths.numel() for item in found) != len(piece.data):
                raise ValueError(f"it holds only a part of {name}")
            items += found
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.pieces[index.fqn].data


class _Writer(FileSystemWriter):
    """Says what the disk said: torch's own error of a full disk does not, and loses its cause between processes."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            raise of_the_disk(error) or error from error


def of_the_disk(error: BaseException) -> OSError | None:
    """What the operating system said in the first place, if it did."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return cause


def write(pieces: Mapping[str, Piece], folder: Path, group: dist.ProcessGroup | None = None) -> None:
    """Write the pieces of all processes, each its own, into `folder`. Called on all processes together.

    Raises:
        CheckpointException: a process could not; on all of them.
    """
    save(
        {},  # the planner has them
        storage_writer=_Writer(folder),
        planner=_SavePlanner(pieces),
        process_group=group,
        no_dist=not dist.is_initialized(),
    )


def read(pieces: Mapping[str, Piece], folder: Path, *, some: bool = False) -> None:
    """Fill the pieces from what `write` left in `folder`. Called on all processes together.

    Args:
        some: the checkpoint may hold other tensors too.

    Raises:
        CheckpointException: other names or sizes than those of the checkpoint, or a process could not read; on all of
            them.
    """
    load(
        {},
        storage_reader=FileSystemReader(folder),
        planner=_LoadPlanner(pieces, some=some),
        no_dist=not dist.is_initialized(),
    )
