"""Validation images that are also training images are refused, whatever the names of their shards."""

import hashlib
import os
import shutil
from pathlib import Path

import pytest

from tessera.data.shards import SourceConfig, open_shards
from tessera.data.shards.cache import cache_folder
from tessera.data.shards.index import FolderIndex, ShardEntry, write_folder
from tessera.data.tools.pack import write_samples
from tessera.evaluation.features import EvaluationError
from tessera.evaluation.overlap import _codes, check_contents, check_disjoint
from tests.data.made import picture

ALLOWED = SourceConfig(allow_overlap=True)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path / "cache"))
    assert cache_folder() == tmp_path / "cache"


def write(path, numbers, names=None):
    path.parent.mkdir(exist_ok=True)
    named = zip(names or numbers, numbers, strict=True)
    write_samples(path, [{"__key__": f"{name:03d}", "jpg": picture(number)} for name, number in named])
    return str(path)


def refuses(train, val):
    def check():
        check_disjoint(train, val, SourceConfig())
        check_contents(open_shards(train), open_shards(val))

    with pytest.raises(EvaluationError) as caught:
        check()
    check_disjoint(train, val, ALLOWED)
    check_contents(open_shards(train, source=ALLOWED), open_shards(val, source=ALLOWED))
    assert "--source.allow_overlap true" in str(caught.value)
    return str(caught.value)


def test_the_same_file_under_other_names(tmp_path):
    for name in "abc":
        write(tmp_path / f"{name}.tar", [ord(name)])
    (tmp_path / "alias.tar").symlink_to(tmp_path / "b.tar")
    os.link(tmp_path / "b.tar", tmp_path / "hard.tar")
    both, other = str(tmp_path / "{a,b}.tar"), str(tmp_path / "c.tar")
    check_disjoint(both, other, SourceConfig())
    check_contents(open_shards(both), open_shards(other))
    for name in ("alias.tar", "hard.tar", "b.tar"):
        assert f"{name} is in both --train and --val" in refuses(both, [other, str(tmp_path / name)])


def test_copies_are_found_by_checksum_and_by_content(tmp_path):
    train = [write(tmp_path / "train" / f"t-{n}.tar", range(20 * n, 20 * n + 20)) for n in range(3)]
    copy = tmp_path / "val" / "v-0.tar"
    write(copy, range(100, 110))
    val = [str(copy)]
    check_contents(open_shards(train), open_shards(val))
    shutil.copy(train[1], copy)
    assert "v-0.tar/020 of --val is also in --train, as t-1.tar/020" in refuses(train, val)
    for path in (train[1], val[0]):
        size, digest = Path(path).stat().st_size, hashlib.sha256(Path(path).read_bytes()).hexdigest()
        entry = ShardEntry(url=Path(path).name, nsamples=20, filesize=size, sha256=digest, labelled=0)
        write_folder(Path(path).parent, FolderIndex(shardlist=[entry]))
    assert "v-0.tar of --val is a copy of " in refuses(train, val)


def test_some_images_in_other_shards_are_found(tmp_path):
    train = write(tmp_path / "train.tar", range(50))
    val = write(tmp_path / "val.tar", [100, 101, 7, 102])
    assert "val.tar/007 of --val is also in --train, as train.tar/007" in refuses(train, val)


def test_equal_names_of_other_images_are_no_overlap(tmp_path):
    train = write(tmp_path / "train.tar", range(40))
    val = write(tmp_path / "val.tar", range(100, 140), names=range(40))
    check_contents(open_shards(train), open_shards(val))


def test_hashes_depend_on_names_and_sizes_alone(tmp_path):
    one = open_shards([write(tmp_path / "a.tar", [3, 1]), write(tmp_path / "b.tar", [2])])
    other = open_shards(write(tmp_path / "c.tar", [1, 2, 3]))
    first, second = _codes(one), _codes(other)
    assert len({*first.tolist()}) == 3
    assert [first[1], first[2], first[0]] == second.tolist()
