"""A checkpoint that k processes wrote is read by m processes, whatever the engine of either."""

import re
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from tessera.pretrain.engines import writing
from tessera.pretrain.engines.local_state import LocalTensor, read, unsharded
from tessera.pretrain.engines.metadata import CheckpointReader
from tessera.pretrain.engines.writing import read_once, share, write
from tessera.runtime.collectives import RankError, all_reduce_sum, run_on_all_ranks
from tests.ranks import on_processes

Split = Callable[[Tensor, int, int], LocalTensor]


def everywhere(tensor: Tensor, rank: int, processes: int) -> LocalTensor:
    """DDP."""
    return LocalTensor(tensor.reshape(-1), 0, tensor.numel(), copies=processes, copy=rank)


def rows(tensor: Tensor, rank: int, processes: int) -> LocalTensor:
    """FSDP2: what torch.chunk gives of the first dimension."""
    chunks = tensor.chunk(processes)
    own = chunks[rank] if rank < len(chunks) else tensor[:0]
    return LocalTensor(own.reshape(-1), sum(c.numel() for c in chunks[:rank]), tensor.numel())


def copied_rows(tensor: Tensor, rank: int, processes: int) -> LocalTensor:
    """HSDP: as many copies as the number of processes allows, two or three, and the rows of FSDP2 in each copy."""
    copies = next((n for n in (2, 3) if processes % n == 0), 1)
    shards = processes // copies
    return replace(rows(tensor, rank % shards, shards), copies=copies, copy=rank // shards)


def ranges(tensor: Tensor, rank: int, processes: int) -> LocalTensor:
    """ZeRO-3: equal ranges of the flattened numbers, the last ones shorter or empty."""
    each = -(-tensor.numel() // processes)
    return LocalTensor(
        tensor.reshape(-1)[rank * each : (rank + 1) * each], min(rank * each, tensor.numel()), tensor.numel()
    )


def uneven(tensor: Tensor, rank: int, processes: int) -> LocalTensor:
    """ZeRO-1 and 2: ranges of all tensors in a row, so that one tensor may end anywhere."""
    cuts = [0, *(tensor.numel() * (i * i + 1) // (processes * processes + 1) for i in range(1, processes))]
    cuts.append(tensor.numel())
    return LocalTensor(tensor.reshape(-1)[cuts[rank] : cuts[rank + 1]], cuts[rank], tensor.numel())


SPLITS = [everywhere, rows, copied_rows, ranges, uneven]


def in_threads(processes: int, function: Callable[[int], Any]) -> None:
    """Call `function(rank)` on threads, which take the place of processes in `write`."""
    own, meeting, given = threading.local(), threading.Barrier(processes, timeout=30), {}

    def of_all(value: Any) -> list[Any]:
        meeting.wait()
        given[own.rank] = value
        meeting.wait()
        return [given[rank] for rank in range(processes)]

    def all_to_all(sent: Tensor, counts: list[int], expected: list[int], _: None) -> Tensor:
        received = [one[own.rank] for one in of_all(sent.split(counts))]
        assert [len(one) for one in received] == expected
        return torch.cat(received)

    def run(rank: int) -> None:
        own.rank = rank
        try:
            function(rank)
        except BaseException:
            meeting.abort()
            raise

    with pytest.MonkeyPatch.context() as patched, ThreadPoolExecutor(processes) as pool:
        patched.setattr(writing, "rank", lambda: own.rank)
        patched.setattr(writing, "world_size", lambda: processes)
        patched.setattr(writing, "_all_to_all", all_to_all)
        patched.setattr(writing, "gather_on_main", lambda value, _: (of_all(value), None)[own.rank > 0])
        for future in [pool.submit(run, rank) for rank in range(processes)]:
            future.result()


class OldPlanner(DefaultSavePlanner):
    """Planner of checkpoints of older versions, in which each process stores its own ranges."""

    def __init__(self, state: dict[str, LocalTensor]) -> None:
        super().__init__()
        self.state = state

    def create_local_plan(self) -> SavePlan:
        items = [
            WriteItem(
                MetadataIndex(name, torch.Size([one.offset])),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    one.chunk(), TensorProperties.create_from_tensor(one.data), torch.Size([one.numel])
                ),
            )
            for name, one in self.state.items()
            if len(one.data)
        ]
        self.plan = SavePlan(items, planner_data={name: (name,) for name in self.state})
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.state[index.fqn].data


def old_share(tensor: LocalTensor) -> LocalTensor:
    """Return an equal share of the elements that several processes hold."""
    each = -(-len(tensor.data) // tensor.copies)
    first = tensor.copy * each
    return LocalTensor(tensor.data[first : first + each], tensor.offset + first, tensor.numel)


def write_as_before(folder: Path, of_each: list[dict[str, LocalTensor]]) -> None:
    """Write as older versions did: torch.distributed.checkpoint.save, but one process after the other."""
    planners = [OldPlanner({name: old_share(tensor) for name, tensor in own.items()}) for own in of_each]
    writer = FileSystemWriter(folder)
    for rank, planner in enumerate(planners):
        planner.set_up_planner({}, is_coordinator=rank == 0)
    writer.set_up_storage_writer(True)
    plans = [writer.prepare_local_plan(planner.create_local_plan()) for planner in planners]
    plans, metadata = planners[0].create_global_plan(plans)
    plans = writer.prepare_global_plan(plans)
    results = [
        writer.write_data(planner.finish_plan(plan), planner).wait()
        for planner, plan in zip(planners, plans, strict=True)
    ]
    writer.finish(metadata, results)


@settings(deadline=None)  # the disk of a busy machine may be slow
@given(
    shapes=st.lists(st.lists(st.integers(1, 7), max_size=3), min_size=1, max_size=4),
    writers=st.integers(1, 5), readers=st.integers(1, 5), written=st.sampled_from(SPLITS),
    loaded=st.sampled_from(SPLITS), old=st.booleans(),
)  # fmt: skip
def test_any_split_is_read_in_any_other(
    shapes: list[list[int]], writers: int, readers: int, written: Split, loaded: Split, old: bool
) -> None:
    if {rows, copied_rows} & {written, loaded}:  # a tensor without dimensions has no rows
        shapes = [shape or [1] for shape in shapes]
    data = {f"t{n}": torch.randn(shape) for n, shape in enumerate(shapes)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "checkpoint"
        folder.mkdir()
        of_each = [{n: written(t, r, writers) for n, t in data.items()} for r in range(writers)]
        if old:
            write_as_before(folder, of_each)
        else:
            in_threads(writers, lambda r: write(share(of_each[r], r, writers), folder))
        for rank in range(readers):
            into = {n: torch.full_like(t, torch.nan) for n, t in data.items()}
            own = {n: loaded(t, rank, readers) for n, t in into.items()}
            read(own, folder)
            for n, piece in own.items():
                expected = loaded(data[n], rank, readers)
                assert torch.equal(piece.data, expected.data)
                # and nothing beside it
                inside = piece.data.numel()
                assert int(into[n].isnan().sum()) == (into[n].numel() - inside)
        dcp_to_torch_save(folder, Path(name) / "whole.pt")  # torch's own reader
        other = torch.load(Path(name) / "whole.pt")
        assert {n: t.numel() for n, t in other.items()} == {n: t.numel() for n, t in data.items()}
        assert all(torch.equal(t, data[n].reshape(-1)) for n, t in other.items())


@pytest.mark.parametrize(("processes", "count"), [(1, 1), (2, 2), (8, 8), (64, 8), (512, 64), (1024, 64), (4096, 64)])
def test_few_processes_write_about_equal_bytes(processes: int, count: int) -> None:
    sizes = [2**24, *([2**20] * 200), *range(1, 100)]
    state = {str(n): LocalTensor(torch.empty(0), 0, size) for n, size in enumerate(sizes)}
    assigned = writing.assign(state, processes)
    assert len(assigned) == count
    assert sorted(name for names in assigned.values() for name in names) == sorted(state)
    loads = [sum(state[name].numel for name in names) for names in assigned.values()]
    assert max(loads) <= max(2**24, sum(sizes) / count) + 2**20
    if count < processes:
        assert len({rank // 8 for rank in assigned}) == count  # one a node of eight


def test_empty_tensors_are_written_and_read(tmp_path: Path) -> None:
    held = {"none": unsharded(torch.empty(0, 4)), "some": unsharded(torch.ones(3))}
    write(held, tmp_path)
    into = {"none": unsharded(torch.empty(0, 4)), "some": unsharded(torch.zeros(3))}
    read(into, tmp_path)
    assert into["some"].data.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"a": 4, "b": 2}, None),
        ({"a": 4}, "tensor sizes differ: b (2 elements instead of 0)"),
        ({"a": 4, "b": 2, "c": 1}, "tensor sizes differ: c (0 elements instead of 1)"),
        ({"a": 5, "b": 2}, "tensor sizes differ: a (4 elements instead of 5)"),
    ],
)
def test_other_names_and_sizes_are_refused(tmp_path: Path, wanted: dict[str, int], message: str | None) -> None:
    write({"a": unsharded(torch.ones(4)), "b": unsharded(torch.ones(2))}, tmp_path)
    into = {name: unsharded(torch.zeros(size)) for name, size in wanted.items()}
    if message is None:
        read(into, tmp_path)
        return
    with pytest.raises(CheckpointException, match=re.escape(message)):
        read(into, tmp_path)
    assert all(piece.data.eq(0).all() for piece in into.values())


def test_a_subset_of_the_tensors_is_read(tmp_path: Path) -> None:
    write({"a": unsharded(torch.ones(4)), "b": unsharded(torch.ones(2))}, tmp_path)
    into = unsharded(torch.zeros(2))
    read({"b": into}, tmp_path, strict=False)
    assert into.data.tolist() == [1, 1]
    with pytest.raises(CheckpointException, match=r"c \(0 elements instead of 2\)"):
        read({"c": into}, tmp_path, strict=False)


def test_missing_parts_of_a_tensor_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the processes do not hold each element of a once"):
        write({"a": LocalTensor(torch.ones(3), 0, 8)}, tmp_path / "none")
    write_as_before(tmp_path, [{"a": LocalTensor(torch.ones(3), 0, 8)}])
    read({"a": LocalTensor(torch.zeros(2), 1, 8)}, tmp_path)
    with pytest.raises(CheckpointException, match="the checkpoint holds only a part of a"):
        read({"a": unsharded(torch.zeros(8))}, tmp_path)


def _over_processes(rank: int, folder: str) -> None:
    data = {f"{split.__name__}{n}": torch.arange(float(n)) for split in SPLITS for n in (1, 2, 9)}
    split = {name: next(s for s in SPLITS if name.startswith(s.__name__)) for name in data}
    run_on_all_ranks(lambda: write(share({n: split[n](t, rank, 2) for n, t in data.items()}, rank, 2), Path(folder)))
    for other in SPLITS:
        own = {n: other(torch.full_like(t, torch.nan), rank, 2) for n, t in data.items()}
        read(own, Path(folder))
        assert all(torch.equal(p.data, other(data[n], rank, 2).data) for n, p in own.items())
        _read_once(own, {n: other(t, rank, 2) for n, t in data.items()}, Path(folder))
    other = Path(folder) / "b"
    other.mkdir(exist_ok=True)
    # one process's trouble is everyone's, and says what the disk said
    if rank == 1:
        writing.torch.save = _full
    with pytest.raises(RankError, match=r"^process 1: No space left on device: /the/disk$"):
        run_on_all_ranks(lambda: write(share({n: split[n](t, rank, 2) for n, t in data.items()}, rank, 2), other))
    assert not (other / ".metadata").exists()
    dist.barrier()


def _read_once(own: dict[str, LocalTensor], wanted: dict[str, LocalTensor], folder: Path) -> None:
    """Read tensors that both processes hold in full, each by one of them, and shards by their own processes."""
    sizes, original = list[int](), CheckpointReader._read_range

    def counted(*arguments: Any) -> Tensor:
        found = original(*arguments)
        sizes.append(found.nbytes)
        return found

    for tensor in own.values():
        tensor.data.fill_(torch.nan)
    CheckpointReader._read_range = counted
    read_once(own, folder)
    CheckpointReader._read_range = original
    assert all(torch.equal(tensor.data, wanted[name].data) for name, tensor in own.items())
    full = sum(4 * tensor.numel for tensor in own.values() if tensor.copies == 2)
    shards = sum(tensor.data.nbytes for tensor in own.values() if tensor.copies == 1)
    total = int(all_reduce_sum(torch.tensor(sum(sizes))))
    assert total == full + int(all_reduce_sum(torch.tensor(shards)))
    assert sizes
    assert sum(sizes) < total  # both read


def _full(*_: Any) -> None:
    raise OSError(28, "No space left on device", "/the/disk")


@pytest.mark.slow
def test_over_two_processes(tmp_path: Path, free_port: int) -> None:
    on_processes(_over_processes, free_port, str(tmp_path), group=True)
    dcp_to_torch_save(tmp_path, tmp_path / "whole.pt")
    for name, tensor in torch.load(tmp_path / "whole.pt").items():
        assert torch.equal(tensor, torch.arange(float(name[-1]))), name
