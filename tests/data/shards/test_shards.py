import dataclasses
import functools
import os
from pathlib import Path

import numpy as np
import pytest

from tessera.data import dataset
from tessera.data.check_shards import main as check_shards
from tessera.data.sampler import ShuffledSampler
from tessera.data.shards import ShardError, Source, expand, open_shards, open_sources, source, tar_shard
from tessera.data.shards.access import Access, SourceConfig
from tests.data.shards.batches import train


def test_patterns(write_shards, tmp_path, monkeypatch):
    paths = write_shards([1] * 12)
    assert expand(str(tmp_path / "data-*.tar")) == paths
    assert expand(tmp_path / "data-{000000..000011}.tar") == paths
    assert expand([paths[3], paths[1]]) == [paths[3], paths[1]]
    assert expand([str(tmp_path / "data-00000{0,1}.tar"), str(tmp_path / "d*-00001?.tar")]) == paths[:2] + paths[10:]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert expand("~/data-000004.tar") == [paths[4]]
    odd = tmp_path / "odd[1]{a,b}.tar"
    os.rename(paths[0], odd)
    assert expand(odd) == [str(odd)]


def test_a_folder_is_its_shards(write_shards, tmp_path):
    paths = write_shards([1] * 12)
    for name in (".data-000099.tar", "data-000000.tar.json", "classes.json"):
        (tmp_path / name).write_text("[]")
    assert expand(tmp_path) == expand(f"{tmp_path}/") == expand([f"{tmp_path}"]) == paths
    (tmp_path / "more").mkdir()
    os.rename(paths.pop(), tmp_path / "more" / "x.tar")
    assert expand(str(tmp_path / "{more,data-000000.tar}")) == [str(tmp_path / "more" / "x.tar"), paths[0]]
    assert open_sources({str(tmp_path): 1, str(tmp_path / "more"): 3}).lists[0].images == 11


def test_images_beside_shards_and_shards_that_are_gone_are_said(write_shards, tmp_path, png, caplog):
    paths = write_shards([2, 3])
    check_shards([*paths, "--write_index=true"])
    (tmp_path / "ant").mkdir()
    (tmp_path / "features.npz").touch()  # of `tessera embed`
    assert open_shards(tmp_path).notes == ()
    assert "Only the shards are read" not in caplog.text
    (tmp_path / "ant" / "1.PNG").write_bytes(png(0))
    os.remove(paths[1])
    assert open_shards(tmp_path).images == 2
    assert f"{tmp_path} holds shards (data-000000.tar) and images. Only the shards are read." in caplog.text
    assert "1 shard that index.json lists does not exist" in caplog.text


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            ["train-00.tar", "train-01.tar", "val-00.tar"],
            r"several sets: train-\*.tar, val-\*.tar. Give one",
        ),
        (["in1k-train-0.tar", "in1k-val-0.tar"], r"several sets: in\*k-train-\*.tar, in\*k-val-\*.tar"),
        (["a.tar", "b.tar.gz"], r"several sets: a.tar, b.tar.gz"),
        (["train/a.tar", "val/b.tar.gz"], r"no shards, but its subfolders may: .*/train, .*/val. Give one of these"),
        (["ant/1.jpg", "ant/old.tar"], r"To read the images of .*/my data instead, move the shards away"),
        (["notes.txt"], r"holds no shards \(.tar, .tar.gz, .tgz.*\) and no images"),
    ],
)
def test_folders_that_are_refused(tmp_path, files, message):
    for name in files:
        path = tmp_path / "my data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    with pytest.raises(ShardError, match=message):
        expand(tmp_path / "my data")


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ("/nowhere/x-*.tar", r"no file matches /nowhere/x-\*.tar"),
        ("https://host/a-*.tar", r"https://host/a-\*.tar: globs do not work with web servers, which cannot list files"),
        ("nonsense://host/a.tar", "Protocol not known: nonsense"),
        ("/nowhere/index.json", "/nowhere/index.json was not found"),
        (["a.tar", "a.tar"], "given more than once: a.tar"),
        ([], "no shards were given"),
        ("a-{0..3.tar", "a-{0..3.tar"),
        ({"a.tar": 1.0}, "a mixture with weights was given"),
    ],
)
def test_what_cannot_be_a_list_of_shards(shards, message):
    with pytest.raises(ShardError, match=message):
        open_shards(shards)


def test_all_bad_shards_are_named(write_shards, tmp_path):
    paths = write_shards([2] * 30)
    for path in paths[:25]:
        Path(path).write_bytes(b"text" * 1000)
    (tmp_path / "notes.txt").write_text("no shard")
    others = [str(tmp_path / name) for name in ("gone.tar", "notes.txt", "mistyped")]
    with pytest.raises(ShardError) as caught:
        open_shards(others + paths)
    message = str(caught.value)
    assert message.startswith("28 of 33 shards cannot be used:")
    assert message.endswith("and 8 more")
    assert "gone.tar cannot be read: No such file" in message
    assert "notes.txt: the file name must end in .tar" in message
    assert "mistyped does not exist. Check the name" in message
    assert [path for path in paths if path in message] == paths[:17]


@pytest.mark.parametrize("ending", [".tar", ".tar.gz"])
def test_samples_by_number(write_shards, png, ending):
    counts = [3, 1, 5]
    shards = open_shards(write_shards(counts, ending))
    assert shards.counts.tolist() == counts
    assert shards.labelled.tolist() == counts
    for number, shard in enumerate(np.repeat(np.arange(3), counts)):
        assert shards.name(number) == f"data-{shard:06d}{ending}/s{number:05d}"
        assert shards.image(number) == png(number)
        assert shards.label(number) == number


def test_labels_that_are_missing_or_no_integers(write_tar, png):
    path = write_tar(
        "t.tar",
        [
            ("a.png", png(0)),
            *(("b.png", png(0)), ("b.cls", b"dog")),
            *(("c.png", png(0)), ("c.cls", b" 7\n")),
            *(("d.png", png(0)), ("d.cls", b"9" * 20)),
            *(("e.png", png(0)), ("e.cls", b"1_2")),
        ],
    )
    shards = open_shards(path)
    assert shards.labelled.tolist() == [4]
    assert shards.label(2) == 7
    with pytest.raises(ShardError, match=r"t.tar/a has no label"):
        shards.label(0)
    with pytest.raises(ShardError, match=r"t.tar/b is b'dog', not an integer"):
        shards.label(1)
    with pytest.raises(ShardError, match=r"t.tar/d is b'9{20}'"):
        shards.label(3)
    with pytest.raises(ShardError, match=r"t.tar/e is b'1_2', not an integer"):
        shards.label(4)


def test_shards_that_change_while_they_are_read(write_shards):
    paths = write_shards([2, 2, 2])
    shards = open_shards(paths)
    os.remove(paths[0])
    with pytest.raises(ShardError, match=r"data-000000.tar cannot be read: No such file"):
        shards.image(0)
    size = os.path.getsize(paths[1])
    shards.image(2)
    os.truncate(paths[1], 1000)
    with pytest.raises(ShardError, match=r"data-000001.tar was truncated to 1000 bytes while in use"):
        shards.image(3)
    tar_shard._opened.cache_clear()  # another process
    with pytest.raises(ShardError, match=rf"data-000001.tar had {size} bytes when it was opened, but now has 1000"):
        dataclasses.replace(shards).image(2)
    before = os.stat(paths[2])
    os.utime(paths[2], ns=(before.st_atime_ns, before.st_mtime_ns + 1))  # written again, with the same size
    with pytest.raises(ShardError, match=r"data-000002.tar has changed since it was opened"):
        shards.image(4)


@pytest.mark.parametrize(
    ("limit", "kept"), [(1024, 512), (100, 50), (tar_shard.resource.RLIM_INFINITY, 4096), (10**6, 4096)]
)
def test_the_limit_of_open_files_decides_how_many_stay_open(limit, kept, monkeypatch):
    monkeypatch.setattr(tar_shard.resource, "getrlimit", lambda _: (limit, limit))
    assert tar_shard.kept_files() == kept


def test_an_image_is_one_read(write_shards, monkeypatch):
    shards, reads, pread = open_shards(write_shards([5])), [], os.pread
    shards.image(0)  # also reads the index
    monkeypatch.setattr(os, "pread", lambda *arguments: reads.append(arguments) or pread(*arguments))
    for number in range(5):
        shards.image(number)
    assert len(reads) == 5


def test_few_files_stay_open(write_shards, tmp_path, monkeypatch):
    monkeypatch.setattr(tar_shard, "_opened", functools.lru_cache(30)(tar_shard._opened.__wrapped__))
    monkeypatch.setattr(source, "KEPT_INDICES", 16)
    shards = open_shards(write_shards([1] * 50))
    sources = [shards, dataclasses.replace(shards)]
    for number in range(shards.images):
        for one in sources:
            one.image(number)
    links = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    assert sum(link.startswith(str(tmp_path)) and link.endswith(".tar") for link in links) == 30
    assert sum(link.startswith(str(tmp_path / "cache")) for link in links) == 2 * 16


def test_sources_of_a_mixture(write_shards):
    paths = write_shards([3, 4, 5])
    sources, weights = open_sources({paths[0]: 1, paths[1][:-6] + "{01,02}.tar": 3})
    assert [source.images for source in sources] == [3, 9]
    assert weights == [1.0, 3.0]
    assert int(sources[1].sizes.sum()) == os.path.getsize(paths[1]) + os.path.getsize(paths[2])


def test_images_before_a_position_are_not_read(write_shards, monkeypatch):
    shards = write_shards([100, 90, 3])
    read, decoded = [], []
    image, picture = Source.image, dataset.Picture
    monkeypatch.setattr(Source, "image", lambda one, number, at: (read.append(number), image(one, number))[1])
    monkeypatch.setattr(dataset, "Picture", lambda *a, **k: (decoded.append(1), picture(*a, **k))[1])
    batches = train(shards, size=8, batch_size=32, seed=0, steps=10**7, first_step=10**6)
    assert not read
    batch = next(iter(batches))
    assert len(read) == len(decoded) == len(batch) == 32
    opened = open_shards(shards)
    _, chosen, places = ShuffledSampler(opened.counts, 0)(np.arange(32 * 10**6, 32 * 10**6 + 32))
    assert sorted(read) == sorted(opened.number(chosen, places).tolist())


def test_a_window_of_few_bytes(write_shards):
    paths = write_shards([400])
    opened = open_shards(paths)
    settings = {"batch_size": 32, "seed": 0, "steps": 12, "streams": 4, "block": 1}
    size = os.path.getsize(paths[0]) / 400
    assert opened.mean_bytes == size
    bounded = train(opened, window_gb=4 * 10 * size / 1e9 + 1e-12, **settings)
    assert [sampler.buffer for sampler in bounded.dataset.sampler.samplers] == [10]
    keys = [[batch.keys for batch in batches] for batches in (
        bounded, train(paths, window=10, **settings),
        train(paths, window=11, **settings))]  # fmt: skip
    assert keys[0] == keys[1] != keys[2]


def test_a_cache_that_is_too_small_is_said(write_shards, caplog):
    paths = write_shards([40, 40], ".tar.gz")
    settings = {"batch_size": 16, "seed": 0, "steps": 1}
    train(paths, source=Access(SourceConfig(cache_gb=0.001)), **settings)
    assert "in use at a time" not in caplog.text
    total = sum(os.path.getsize(path) for path in paths)
    small = open_shards(paths, source=Access(SourceConfig(cache_gb=0.001)))
    small = dataclasses.replace(small, access=Access(SourceConfig(cache_gb=0.9 * total / 1e9)))
    train(small, **settings)
    assert "Raise source.cache_gb or lower stream.window_gb" in caplog.text
