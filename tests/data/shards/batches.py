"""Batches of shards with short arguments, and index files beside shards."""

import hashlib
import tarfile
from pathlib import Path

from tessera.data.crops import CenterCrop
from tessera.data.shards.index import FolderIndex, ShardEntry, write_folder, write_table
from tessera.data.shards.tar_index import scan_tar
from tests.data.batches import evaluation_batches, training_batches


def train(shards, *, size=4, **settings):
    """Batches of a training run."""
    return training_batches(shards, CenterCrop(size), **{"window_gb": 8} | settings)


def evaluate(shards, batch_size, **settings):
    """Batches of an evaluation."""
    return evaluation_batches(shards, CenterCrop(4), batch_size=batch_size, **settings)


def keys(index):
    """All keys of the table of a shard."""
    return [index.key(sample) for sample in range(index.summary[0])]


def add_index(paths, counts, tables=False, labelled=True, **facts):
    """Write index.json beside shards whose samples all have labels, or none, and the tables of the shards if asked."""
    paths = [Path(path) for path in paths]
    listed = [
        ShardEntry(
            url=path.name, nsamples=count, filesize=path.stat().st_size, labelled=count if labelled else None, **facts
        )
        for path, count in zip(paths, counts, strict=True)
    ]
    write_folder(paths[0].parent, FolderIndex(shardlist=listed))
    for path in paths if tables else []:
        write_table(path, scan_tar(str(path), str(path)))
    return listed


def sha256(path):
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def header(name, size, kind=b"0", format=tarfile.GNU_FORMAT):
    """Header of a member of a tar, with any name of at most 100 bytes and any size."""
    info = tarfile.TarInfo("x")
    info.size, info.type = size, kind
    raw = bytearray(info.tobuf(format))
    raw[: len(name)] = name
    raw[148:156] = b" " * 8
    raw[148:156] = b"%06o\0 " % sum(raw[:512])
    return bytes(raw)
