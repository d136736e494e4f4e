"""Local state: this process's shards of a run's tensors, and how they are read from a checkpoint.

A process holds full tensors under DDP, rows of the tensors under FSDP2 and HSDP, ranges of the flattened tensors under
ZeRO-3, and full weights and ranges of the flattened moments under ZeRO-1 and ZeRO-2. Each of these shards is a
contiguous range of a flattened tensor. Checkpoints therefore store flattened tensors (writing.py), and each process
reads ranges that it needs, under any engine and with any number of processes (writing.py).
"""

import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load

from tessera.pretrain.engines.metadata import CheckpointReader
from tessera.runtime.collectives import rank, world_size

# torch warns of loading without the other processes, but `read` needs none of them
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


@dataclass(frozen=True)
class LocalTensor:
    """Elements `offset` to `offset + len(data)` of a flattened tensor of `numel` elements."""

    data: Tensor
    """View of the elements that this process holds, (n,). Checkpoints are saved from the view and loaded into the
    view."""
    offset: int
    """Index of the first element of `data` in the flattened tensor."""
    numel: int
    """Number of elements of the full tensor, over all processes."""
    copies: int = 1
    """Number of processes that hold the same elements."""
    copy: int = 0
    """Index of this process among the processes that hold the same elements."""

    def to_host(self) -> "LocalTensor":
        """Return a copy whose elements are in host memory."""
        return replace(self, data=self.data.detach().to("cpu", copy=True))

    def chunk(self) -> ChunkStorageMetadata:
        """Return the description of this range for torch.distributed.checkpoint."""
        return ChunkStorageMetadata(offsets=torch.Size([self.offset]), sizes=torch.Size([len(self.data)]))


LocalState = Mapping[str, LocalTensor]


def unsharded(tensor: Tensor) -> LocalTensor:
    """Return the `LocalTensor` of a contiguous tensor that every process holds in full."""
    return LocalTensor(tensor.detach().view(-1), 0, tensor.numel(), copies=world_size(), copy=rank())


class _LoadPlanner(DefaultLoadPlanner):
    """Load planner of torch.distributed.checkpoint for a process's shards (its local state).

    The tensors of the checkpoint and of the local state must have the same names and sizes.
    """

    def __init__(self, state: LocalState, names: Collection[str], *, strict: bool) -> None:
        super().__init__()
        self.state, self.names, self.strict = state, names, strict

    def create_local_plan(self) -> LoadPlan:
        if self.metadata is None:
            raise ValueError("the checkpoint has no metadata")
        stored = {
            name: tensor
            for name, tensor in self.metadata.state_dict_metadata.items()
            if isinstance(tensor, TensorStorageMetadata) and (name in self.state or self.strict)
        }
        _check_sizes(stored, self.state)
        items = []
        for name, tensor in self.state.items():
            if name not in self.names or not len(tensor.data):
                continue
            found = create_read_items_for_chunk_list(name, stored[name], [tensor.chunk()])
            if sum(item.lengths.numel() for item in found) != len(tensor.data):
                raise ValueError(f"the checkpoint holds only a part of {name}")
            items += found
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state[index.fqn].data


def _check_sizes(stored: Mapping[str, TensorStorageMetadata], state: LocalState) -> None:
    """Raise `ValueError` if names or sizes of tensors differ between the checkpoint and a local state."""
    saved = {name: tensor.size.numel() for name, tensor in stored.items()}
    # leave out empty tensors, because a checkpoint does not store them
    wanted = {name: tensor.numel for name, tensor in state.items() if tensor.numel}
    differ = [name for name in sorted(saved | wanted) if saved.get(name) != wanted.get(name)]
    if not differ:
        return
    sizes = [f"{name} ({saved.get(name, 0)} elements instead of {wanted.get(name, 0)})" for name in differ[:3]]
    more = f" and {len(differ) - 3} more" if len(differ) > 3 else ""
    raise ValueError(f"tensor sizes differ: {', '.join(sizes)}{more}")


def read(state: LocalState, folder: Path, *, names: Collection[str] | None = None, strict: bool = True) -> None:
    """Load this process's local state from the files of a checkpoint.

    Each process reads the bytes of its own ranges, without the other processes. The files may be untrusted: no code in
    them is executed.

    Args:
        names: tensors of `state` to load; None to load all.
        strict: True to raise an error if the checkpoint holds a tensor that is not in `state`.

    Raises:
        CheckpointException: names or sizes of tensors differ between `state` and the checkpoint, or the files cannot be
            read.
    """
    planner = _LoadPlanner(state, state.keys() if names is None else names, strict=strict)
    load({}, storage_reader=CheckpointReader(folder), planner=planner, no_dist=True)
