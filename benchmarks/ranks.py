"""Measure what a process of a run of 8 to 4,096 processes does beside its steps, by simulation on one machine.

    python benchmarks/ranks.py [--output benchmarks/results/ranks.md]

One process calls the functions of a run as rank 0 and as another rank. Only the collectives are replaced: they return
what the other processes would send. Tensors have the names of a real method, but few elements, so that the seconds are
those of planning and not those of the disk. The store of the watchdog is a real one.
"""

import io
import os
import pickle
import tarfile
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from PIL import Image
from pydantic import Field
from tables import machine, publish, table, typed_command
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from tessera import encoders
from tessera.data.shards.index import FolderIndex, ShardEntry, write_folder
from tessera.data.shards.open import open_sources
from tessera.pretrain.engines import writing
from tessera.pretrain.engines.engine import MOMENTS, trainable
from tessera.pretrain.engines.local_state import LocalTensor
from tessera.pretrain.method_state import build
from tessera.pretrain.resolve import agree
from tessera.runtime.settings import Settings, parse
from tessera.runtime.watchdog import Watch, _Peer

RANKS = (8, 64, 512, 1024, 4096)
EACH = 4
"""Number of elements of each tensor that a process holds under FSDP2."""


class Ranks(Settings):
    """Measure rank 0 and another rank of runs of 8 to 4,096 processes."""

    encoder: str = "vit_large"
    """encoder of the checkpoint, under DINO"""
    large: str = "rope_vit_7b"
    """encoder of the evaluation and the export"""
    shards: int = Field(default=10_000, ge=1)
    """number of shards to open"""
    output: Path | None = None
    """Markdown file to write"""


def measured(function: Callable[[], object]) -> tuple[float, float]:
    """Return the CPU seconds of a call, and the largest MB of Python's objects and NumPy's arrays in a second call."""
    start = time.process_time()
    function()
    seconds = time.process_time() - start
    tracemalloc.start()
    function()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return seconds, peak / 1e6


def names(encoder: str) -> list[str]:
    """Return the names of the tensors in a checkpoint of DINO."""
    head = {"prototypes": 65536, "hidden_dim": 2048, "bottleneck_dim": 256, "batch_norm": False}
    with torch.device("meta"):
        method = build({"method": "dino", "encoder": {"variant": encoder}, "dino": head, "steps": 100})
    moments = [f"{moment}.{name}" for name in trainable(method) for moment in MOMENTS]
    return [*(f"method.{name}" for name in method.state_dict()), *moments]


def state(tensors: list[str], rank: int, processes: int, *, sharded: bool) -> dict[str, LocalTensor]:
    """Return the local state of a rank: under FSDP2, or under DDP."""
    if sharded:
        return {name: LocalTensor(torch.zeros(EACH), rank * EACH, processes * EACH) for name in tensors}
    return {name: LocalTensor(torch.zeros(EACH), 0, EACH, processes, rank) for name in tensors}


@contextmanager
def ranks(rank: int, processes: int, assigned: dict[int, list[str]]) -> Iterator[None]:
    """Within the context, this process is rank `rank` of a run, and the other ranks send what they hold under FSDP2."""

    def all_to_all(sent: Tensor, counts: list[int], expected: list[int], _: None) -> Tensor:
        if sent.dtype is torch.uint8:
            return torch.zeros(sum(expected), dtype=sent.dtype)
        own = expected[0] // 2
        starts = torch.arange(processes).repeat_interleave(own) * EACH
        return torch.stack([starts, torch.full_like(starts, EACH)], 1).flatten()

    def gather_on_main(value: list[int], _: None) -> list[Any] | None:
        if rank:
            pickle.dumps(value)
            return None
        sent = [pickle.dumps([1000] * len(assigned.get(other, []))) for other in range(processes)]
        return [pickle.loads(one) for one in sent]

    with (
        mock.patch.object(writing, "rank", return_value=rank),
        mock.patch.object(writing, "world_size", return_value=processes),
        mock.patch.object(writing, "_all_to_all", all_to_all),
        mock.patch.object(writing, "gather_on_main", gather_on_main),
    ):
        yield


def checkpoint(held: Mapping[str, LocalTensor], rank: int, processes: int, folder: Path) -> tuple[float, float]:
    """Measure the plan of a checkpoint, the exchange of ranges, and the writing of the small tensors."""
    with ranks(rank, processes, writing.assign(held, processes)):
        return measured(lambda: writing.write(writing.share(held, rank, processes), folder))


def files(processes: int) -> int:
    """Return the number of files of a checkpoint."""
    block = max(writing.MIN_WRITERS, -(-processes // writing.MAX_WRITERS))
    others = (".metadata", "manifest.json", "trainer.json", "encoder.json", "encoder.safetensors")
    return len(writing.writers(processes)) + -(-processes // block) + len(others)


def heartbeat(rank: int, processes: int, store: TCPStore) -> tuple[float, float]:
    """Measure one exchange of the watchdog with its store. All processes have sent heartbeats."""
    own = PrefixStore(f"{rank}/{processes}", store)
    for other in range(processes):
        own.set(f"beat/{other}", "1")
        own.set(f"host/{other}", "node")
    watch = Watch.__new__(Watch)
    watch._rank, watch._processes, watch._next, watch._peer = rank, processes, (rank + 1) % processes, _Peer()
    watch._told, watch._awake = "", 0.0
    watch._exchange(own)  # the first one asks for host names
    return measured(lambda: watch._exchange(own))


def make_shards(folder: Path, count: int) -> str:
    """Write shards of one image each with an index.json, and return their folder."""
    file = io.BytesIO()
    Image.new("RGB", (32, 32)).save(file, "PNG")
    names = [f"train-{number:06d}.tar" for number in range(count)]
    with tarfile.open(folder / names[0], "w") as tar:
        entry = tarfile.TarInfo("image.png")
        entry.size = len(file.getvalue())
        tar.addfile(entry, io.BytesIO(file.getvalue()))
    for name in names[1:]:
        os.link(folder / names[0], folder / name)
    size = (folder / names[0]).stat().st_size
    entries = [ShardEntry(url=name, nsamples=1, filesize=size, labelled=0) for name in names]
    write_folder(folder, FolderIndex(name="train", shardlist=entries))
    return str(folder)


def main(chosen: Ranks) -> None:
    rows = []
    tensors = names(chosen.encoder)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for processes in RANKS:
        other = writing.writers(processes)[1]
        numbers = [str(files(processes))]
        for sharded in (False, True):
            for rank in (0, other):
                held = state(tensors, rank, processes, sharded=sharded)
                with tempfile.TemporaryDirectory() as folder:
                    numbers += _shown(checkpoint(held, rank, processes, Path(folder)))
        for rank in (0, other):
            numbers += [f"{1000 * heartbeat(rank, processes, store)[0]:.1f}"]
        rows.append([f"{processes:,}", *numbers])
    places = [
        f"{kind}, {rank}, {unit}" for kind in ("DDP", "FSDP2") for rank in ("rank 0", "other") for unit in ("s", "MB")
    ]
    headings = ["ranks", "files", *places, "watchdog, rank 0, ms", "other, ms"]
    with tempfile.TemporaryDirectory() as folder:
        pattern = make_shards(Path(folder), chosen.shards)
        opened = measured(lambda: agree(open_sources(pattern, progress=False).lists, [1024]))
    with torch.device("meta"):
        large = encoders.build(chosen.large)
    size = sum(parameter.nbytes for parameter in large.parameters()) / 1e9
    largest = max(parameter.nbytes for parameter in large.parameters()) / 1e9
    publish(
        [
            "# What grows with the number of processes",
            f"{typed_command()}: {machine()}.",
            f"A checkpoint of {chosen.encoder} under DINO, {len(tensors):,} tensors of few elements: its files, and "
            "the CPU seconds and MB of its plan. And one exchange of the watchdog with its store, every 2 s.",
            table(headings, rows, text=0),
            f"To open {chosen.shards:,} shards with an index.json and to hash their order takes every process "
            f"{opened[0]:.2f} CPU s and {opened[1]:.0f} MB, whatever the number of processes. The MB are mostly "
            "the buffer of an index.json of the largest size, of which only the pages that are filled take memory.",
            f"Evaluations and the export of {chosen.large} under FSDP2: rank 0 holds {size:.1f} GB in host memory. The "
            f"other ranks hold one parameter at a time, {largest:.2f} GB at most.",
        ],
        chosen.output,
    )


def _shown(measured: tuple[float, float]) -> list[str]:
    return [f"{measured[0]:.2f}", f"{measured[1]:.1f}"]


if __name__ == "__main__":
    main(parse(Ranks))
