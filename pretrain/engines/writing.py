"""Write the local states of all processes as one checkpoint of full tensors, in torch's format, and read them.

At most 64 processes write, each one file. Every tensor is written in full by one of them, which receives the ranges
that other processes hold. All processes derive this plan from the names and sizes of the tensors. The number of files,
the size of .metadata and the time for planning therefore do not grow with the number of processes. The same processes
read what all processes hold in full, and send it to the others.
"""

import heapq
import itertools
import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from tessera.pretrain.engines.local_state import LocalState, LocalTensor, read
from tessera.runtime.collectives import broadcast, gather_on_main, rank, run_on_all_ranks, world_size
from tessera.runtime.files import fsync

MIN_WRITERS, MAX_WRITERS = 8, 64
"""Bounds of the number of processes that write. Between them, one of eight processes writes: one a node of 8 GPUs."""
ROUND_BYTES = 2**27
"""Bytes that a process receives before it writes them, unless one tensor is larger."""


def writers(processes: int) -> list[int]:
    """Return the ranks that write, in ascending order and evenly spaced over the nodes."""
    count = min(processes, max(MIN_WRITERS, min(processes // MIN_WRITERS, MAX_WRITERS)))
    return [number * processes // count for number in range(count)]


def assign(state: LocalState, processes: int) -> dict[int, list[str]]:
    """Return the names of the tensors that each writer writes, by its rank. The result is equal on all processes.

    The largest tensors are assigned first, each to the writer with the fewest bytes.
    """
    loads = [(0, writer) for writer in writers(processes)]
    assigned: dict[int, list[str]] = {writer: [] for _, writer in loads}
    for name in sorted(state, key=lambda name: (-_bytes(state[name]), name)):
        if state[name].numel:  # torch's format stores no empty tensors
            load, writer = heapq.heappop(loads)
            assigned[writer].append(name)
            heapq.heappush(loads, (load + _bytes(state[name]), writer))
    return assigned


def share(state: LocalState, own: int, processes: int) -> dict[str, LocalTensor]:
    """Return the ranges that process `own` contributes to a checkpoint. The result has all names of `state`.

    A tensor that all processes hold in full is contributed by the process that writes it. Other ranges are divided
    equally among the processes that hold the same range, as under HSDP.
    """
    mine = set(assign(state, processes).get(own, []))
    shares = {}
    for name, tensor in state.items():
        first, end = 0, len(tensor.data)
        if tensor.copies == processes:
            end = end if name in mine else 0
        elif tensor.copies > 1:
            each = -(-end // tensor.copies)
            first, end = min(tensor.copy * each, end), min((tensor.copy + 1) * each, end)
        shares[name] = replace(tensor, data=tensor.data[first:end], offset=tensor.offset + first)
    return shares


def write(state: LocalState, folder: Path, group: dist.ProcessGroup | None = None) -> None:
    """Write a checkpoint into `folder`. Collective.

    Args:
        state: result of `share`.
        group: group of all processes that supports tensors in host memory.

    Raises:
        OSError: this process could not write.
        ValueError: the processes do not hold all elements of a tensor, or hold some of them twice.
    """
    assigned = assign(state, world_size())
    failure: BaseException | None = None
    lengths: list[int] = []
    path = folder / _file(rank())
    for name, tensor in _full_tensors(state, assigned, group):
        if failure is not None:
            continue  # still take part in the exchanges, because the other processes wait for them
        try:
            if tensor is None:
                raise ValueError(f"the processes do not hold each element of {name} once")
            lengths.append(_append(tensor, path, first=not lengths))
            if len(lengths) == len(assigned[rank()]):
                fsync(path)
        except BaseException as error:
            failure = error
    found = gather_on_main(None if failure else lengths, group)
    if failure is not None:
        raise failure
    if found is not None and None not in found:
        stored = {writer: found[writer] or [] for writer in assigned}
        (folder / ".metadata").write_bytes(pickle.dumps(_metadata(state, assigned, stored)))
        fsync(folder / ".metadata")


def read_once(state: LocalState, folder: Path) -> None:
    """Load the local states of all processes from a checkpoint. Collective.

    A process reads its own shards. A tensor that all processes hold in full is read by one process, which sends it to
    the others; otherwise, N processes would read the whole checkpoint N times from a shared disk.

    Raises:
        RankError: `local_state.read` failed on a process.
    """
    full = {name: tensor for name, tensor in state.items() if tensor.copies == world_size()}
    readers = assign(full, world_size())
    own = {*(state.keys() - full.keys()), *readers.get(rank(), [])}
    run_on_all_ranks(lambda: read(state, folder, names=own))
    for reader, names in readers.items():
        for name in names:
            elements = full[name].data.view(torch.uint8)  # gloo does not send every type
            elements.copy_(broadcast(elements, source=reader))


def _append(tensor: Tensor, path: Path, *, first: bool) -> int:
    """Write a tensor to the end of a file, and return its number of bytes in the file."""
    with path.open("wb" if first else "ab") as file:
        start = file.tell()
        torch.save(tensor, file)
        return file.tell() - start


def _bytes(tensor: LocalTensor) -> int:
    """Return the size of the full tensor in bytes."""
    return tensor.numel * tensor.data.element_size()


def _file(writer: int) -> str:
    return f"__{writer}_0.distcp"


def _full_tensors(
    state: LocalState, assigned: dict[int, list[str]], group: dist.ProcessGroup | None
) -> Iterator[tuple[str, Tensor | None]]:
    """Yield the full tensors that this process writes, in the order of `assigned`. Collective.

    The caller must exhaust the iterator. A tensor is None if its elements are not held once each.
    """
    processes = world_size()
    sharded = {name for name, tensor in state.items() if tensor.copies != processes}
    exchanged = {writer: [name for name in names if name in sharded] for writer, names in assigned.items()}
    received = _received(state, exchanged, group) if any(exchanged.values()) else iter([])
    for name in assigned.get(rank(), []):
        if name in sharded:
            yield next(received)
            continue
        data = state[name].data.detach().cpu()
        # torch.save writes the whole storage of a view
        own = data.clone() if data.untyped_storage().nbytes() != data.nbytes else data
        yield name, own if len(own) == state[name].numel else None
    yield from received  # the other writers may have more rounds than this process


def _received(
    state: LocalState, exchanged: dict[int, list[str]], group: dist.ProcessGroup | None
) -> Iterator[tuple[str, Tensor | None]]:
    """Yield the tensors of `exchanged` that this process writes, joined from the ranges of all processes."""
    processes, own = world_size(), rank()
    mine = exchanged.get(own, [])
    spans = [[(state[name].offset, len(state[name].data)) for name in exchanged.get(to, [])] for to in range(processes)]
    sent = torch.tensor([*itertools.chain.from_iterable(spans)], dtype=torch.int64).flatten()
    heads = _all_to_all(sent, [2 * len(one) for one in spans], [2 * len(mine)] * processes, group)
    heads = heads.view(processes, len(mine), 2)
    rounds = {writer: _rounds(state, names) for writer, names in exchanged.items()}
    for number in range(max(map(len, rounds.values()))):
        names = {writer: own_rounds[number] for writer, own_rounds in rounds.items() if number < len(own_rounds)}
        packed = {to: [state[name].data.detach().cpu().view(torch.uint8) for name in names[to]] for to in names}
        counts = [sum(map(len, packed.get(to, []))) for to in range(processes)]
        sent = torch.cat([torch.empty(0, dtype=torch.uint8), *itertools.chain.from_iterable(packed.values())])
        now = names.get(own, [])
        first = mine.index(now[0]) if now else 0
        of_round = heads[:, first : first + len(now)]
        widths = torch.tensor([state[name].data.element_size() for name in now], dtype=torch.int64)
        sizes = of_round[..., 1] * widths  # bytes of each range, (processes, tensors)
        pieces = _all_to_all(sent, counts, sizes.sum(1).tolist(), group).split(sizes.flatten().tolist())
        for index, name in enumerate(now):
            yield name, _joined(state[name], of_round[:, index], pieces[index :: len(now)])


def _rounds(state: LocalState, names: list[str]) -> list[list[str]]:
    """Divide tensors into rounds of at most `ROUND_BYTES`, or one tensor."""
    rounds: list[list[str]] = []
    size = ROUND_BYTES
    for name in names:
        if size + _bytes(state[name]) > ROUND_BYTES:
            rounds.append([])
            size = 0
        rounds[-1].append(name)
        size += _bytes(state[name])
    return rounds


def _joined(tensor: LocalTensor, spans: Tensor, pieces: tuple[Tensor, ...]) -> Tensor | None:
    """Return the full tensor, or None if the ranges overlap or leave gaps.

    Args:
        spans: offset and number of elements of the range of each process, (processes, 2).
        pieces: bytes of each range.
    """
    order = spans[:, 0].argsort(stable=True)
    order = order[spans[order, 1] > 0]
    offsets, counts = spans[order].unbind(1)
    if not torch.equal(offsets, counts.cumsum(0) - counts) or int(counts.sum()) != tensor.numel:
        return None
    return torch.cat([pieces[number] for number in order.tolist()]).view(tensor.data.dtype)


def _all_to_all(sent: Tensor, counts: list[int], expected: list[int], group: dist.ProcessGroup | None) -> Tensor:
    """Send `counts[r]` elements to each process r, and return the elements of all processes, in rank order.

    Args:
        expected: number of elements that each process sends to this one.
    """
    received = torch.empty(sum(expected), dtype=sent.dtype)
    dist.all_to_all_single(received, sent, expected, counts, group=group)
    return received


def _metadata(state: LocalState, assigned: dict[int, list[str]], stored: dict[int, list[int]]) -> Metadata:
    """Return the contents of the file .metadata.

    Args:
        stored: number of bytes of each tensor in the file of its writer.
    """
    tensors = {
        name: TensorStorageMetadata(
            TensorProperties(tensor.data.dtype),
            torch.Size([tensor.numel]),
            [ChunkStorageMetadata(torch.Size([0]), torch.Size([tensor.numel]))],
        )
        for name, tensor in state.items()
        if tensor.numel
    }
    places = {}
    for writer, names in assigned.items():
        ends = itertools.accumulate(stored[writer])
        for name, length, end in zip(names, stored[writer], ends, strict=True):
            places[MetadataIndex(name, torch.Size([0]), 0)] = _StorageInfo(_file(writer), end - length, length)
    names_for_torch = {name: (name,) for name in state}  # torch's own tools for checkpoints need the names
    return Metadata(tensors, names_for_torch, places, StorageMeta(), CURRENT_DCP_VERSION)
