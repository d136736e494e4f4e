"""Sources of other packages: by a scheme, by the ending of files, and for objects."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tessera.data.shards import Access, ShardError, expand, open_shards, open_sources
from tessera.data.shards.registry import SOURCES, endings, source_of
from tessera.data.shards.shard import Shard
from tessera.data.shards.tar_index import NumberedIndex
from tessera.runtime.plugins import PluginError


@dataclass(frozen=True)
class Lines(Shard):
    """Images and labels in the lines of a JSON file."""

    rows: tuple[tuple[str, int], ...] = ()

    @classmethod
    def at(cls, path, access=Access()):  # noqa: B008
        file = Path(path.removeprefix("lines:"))
        rows = tuple(map(tuple, map(json.loads, file.read_text().splitlines())))
        return cls(path, file.stat().st_size, str(file.stat().st_mtime_ns), access, rows=rows)

    @property
    def name(self):
        return Path(self.path).name

    @property
    def names_classes(self):
        return self.path

    def class_names(self):
        return None

    def make_index(self):
        labels = np.array([label for _, label in self.rows])
        index = NumberedIndex.of(len(labels), True)
        return index._replace(labels=np.stack([labels, labels * 0], axis=1))

    def index(self):
        return self.make_index()

    def image(self, index, sample):
        return bytes.fromhex(self.rows[sample][0])

    def label(self, index, sample):
        return self.rows[sample][1]


@pytest.fixture
def lines(tmp_path, png):
    """Two files of four images each, and the source that reads them."""
    for name in ("set-0", "set-1"):
        rows = (json.dumps([png(number).hex(), number % 3]) for number in range(4))
        (tmp_path / f"{name}.lines").write_text("\n".join(rows))
    for name in (".lines", "lines"):
        SOURCES.register(name, Lines)
    yield tmp_path
    for name in (".lines", "lines"):
        del SOURCES[name]


def test_files_and_addresses_of_another_package(lines, png):
    assert expand(str(lines)) == [f"{lines}/set-0.lines", f"{lines}/set-1.lines"]
    for given in (str(lines), f"{lines}/*.lines", [f"lines:{lines}/set-{number}.lines" for number in range(2)]):
        source = open_shards(given)
        assert source.counts.tolist() == [4, 4]
        assert source.all_labelled()
        assert source.name(5).endswith("set-1.lines/1")
        assert (source.image(5), source.label(5)) == (png(1), 1)
    mixture = open_sources({f"lines:{lines}/set-0.lines": 0.5, f"{lines}/set-1.lines": 0.5})
    assert [one.images for one in mixture.lists] == [4, 4]
    with pytest.raises(ShardError, match=r"https://nowhere/x\.lines: such files are read from a local disk only"):
        expand("https://nowhere/x.lines")


def test_without_the_source(tmp_path, monkeypatch):
    (tmp_path / "a.lines").touch()
    with pytest.raises(ShardError, match=r"the file name must end in \.tar, .* or \.[a-z]+\."):
        open_shards(str(tmp_path / "a.lines"))
    monkeypatch.setattr(type(SOURCES), "_entry_points", lambda _: {})  # as without extras
    for name in list(SOURCES):  # those that are loaded
        monkeypatch.delitem(SOURCES, name)
    assert endings() == ()
    assert source_of(str(tmp_path / "a.lines")) is None
    with pytest.raises(PluginError, match="unknown source of data 'python'"):
        open_shards([(b"image", 0)])
    with pytest.raises(ShardError, match=r"must end in \.tar, \.tar\.gz or \.tgz\."):
        open_shards(str(tmp_path / "a.lines"))
