"""Hostile numbers and names in patterns, index files, class names and labels: named errors, at once."""

import json
import time

import pytest

from tessera.data.check_shards import main as check_shards
from tessera.data.shards import ShardError, expand, open_shards, remote
from tessera.data.shards.index import parse_classes, parse_folder
from tessera.data.shards.open import MOST_SHARDS
from tessera.data.shards.tar_index import LARGEST_LABEL
from tests.data.made import make as make_shards
from tests.data.made import picture


def index(entry=(), **extra):
    shard = {"url": "a.tar", "nsamples": 2, "filesize": 10240, **dict(entry)}
    return json.dumps({"__kind__": "wids-shard-index-v1", "wids_version": 1, "shardlist": [shard], **extra}).encode()


@pytest.mark.parametrize(
    "pattern",
    [
        "a-{0..10000000000}.tar",
        "a-{-10000000000..1}.tar",
        "a-{0..9223372036854775808}.tar",
        "a-{0..99999}{0..99999}.tar",
        "{a,b}" * 40 + ".tar",
        "pipe:cat {0..10000000000}.tar",
        "a-{0..10000000000..10000000000}.tar",
        "{" * 5000 + "a,b" + "}" * 5000,
        "http://host/{0..10000000000}.tar",
    ],
)
def test_large_brace_ranges_are_refused_at_once(pattern):
    start = time.process_time()
    with pytest.raises(ShardError, match=r"more than|not valid|no file matches|must end"):
        open_shards(pattern)
    assert time.process_time() - start < 20


def test_usual_brace_ranges_are_expanded():
    assert MOST_SHARDS == 200_000
    assert len(expand("s3://b/a-{000000..099999}.tar")) == 100_000
    assert expand("pipe:cat a\\ {0..1}.tar") == ["pipe:cat a\\ 0.tar", "pipe:cat a\\ 1.tar"]


@pytest.mark.parametrize(
    "change",
    [
        {"nsamples": 2**70},
        {"filesize": 2**70},
        {"nsamples": 10**9},
        {"nsamples": 30},
        {"labelled": 3},
        {"labelled": 2**70},
        {"nsamples": float("nan")},
        {"nsamples": 2.5},
        {"nsamples": "2024-01-01"},
        {"nsamples": 0},
        {"filesize": -1},
        *({"url": url} for url in ("a" * 300 + ".tar", "a\0.tar", "a\x1b[31m.tar", "a\nb.tar", "a\\b.tar", 2024, None)),
        *({"url": url} for url in ("../a.tar", "/a.tar", "", ".", "..", "x/a.tar", "https://x/a.tar")),  # elsewhere
        {"sha256": "ab"},
        {"sha256": 5},
    ],
)
def test_hostile_entries_of_an_index_are_named(change, tmp_path):
    content = index(change)
    with pytest.raises(
        ShardError, match=r"index.json is not an index of shards .*shardlist.0.*--write_index true"
    ) as caught:
        parse_folder(content, "index.json")
    assert len(str(caught.value)) < 1000
    assert "\x1b" not in str(caught.value)
    (tmp_path / "index.json").write_bytes(content)
    with pytest.raises(ShardError, match=r"index.json"):
        open_shards(str(tmp_path / "index.json"))


def test_hostile_statistics_of_an_index_are_named():
    other = {"name": 5, "image_sizes": {"x": 2**70}, "base": "/data"}  # `widsindex create` writes some of them
    assert parse_folder(index({"md5sum": "0"}, **other), "i").shardlist[0].nsamples == 2
    for extra in (
        {"mean": [float("nan")], "std": [0.1]},
        {"mean": [0.5], "std": [float("nan")]},
        {"mean": [2**70], "std": [1]},
        {"mean": [0.1] * 10**5, "std": 1},
        {"mean": [0.5]},
        {"mean": [7], "std": [1]},
    ):
        with pytest.raises(ShardError, match="not an index"):
            parse_folder(index(**extra), "i")


def test_repeated_class_names_are_found_in_linear_time():
    names = [str(number) for number in range(300_000)]
    start = time.process_time()
    with pytest.raises(ShardError, match="names the class '299999' more than once"):
        parse_classes(json.dumps([*names, "299999"]).encode(), "classes.json")
    assert time.process_time() - start < 3


@pytest.mark.parametrize("label", ["1000000000", str(2**63 - 1), str(2**70), "9" * 64, "nan", "1_0e5", "\x1b[31m"])
def test_labels_that_no_memory_holds_are_named(write_tar, png, label, capsys):
    path = write_tar("t.tar", [("a.png", png(0)), ("a.cls", label.encode())])
    with pytest.raises(ShardError, match=r"the label of t.tar/a is"):
        open_shards(path).label(0)
    assert check_shards([path]) == 1
    assert "labels that stop an evaluation" in capsys.readouterr().out


def test_the_largest_label_is_read(write_tar, png):
    path = write_tar("t.tar", [("a.png", png(0)), ("a.cls", b"%d" % LARGEST_LABEL)])
    assert open_shards(path).label(0) == LARGEST_LABEL


def test_a_manifest_with_a_huge_label_is_refused(photos, tmp_path, capsys):
    folder = photos({"a.jpg": picture(0)})
    (folder / "list.csv").write_text("path,label\na.jpg,1000000000\n")
    make_shards(folder / "list.csv", tmp_path / "shards", status=2)
    assert "the label 1000000000 is more than" in capsys.readouterr().err


@pytest.mark.parametrize(
    "path",
    ["a\0.tar", "a\nb.tar", "a\x1b[31m.tar", "a" * 5000 + ".tar", "http://[.tar", "https://a.tar/", "\u202egpj.tar"],
)
def test_hostile_paths_are_named(path, monkeypatch):
    monkeypatch.setattr(remote, "with_timeout", None)  # no request
    with pytest.raises(ShardError) as caught:
        open_shards(path)
    assert not {"\n", "\0", "\x1b", "\u202e"} & set(str(caught.value).replace("\n  ", ""))
