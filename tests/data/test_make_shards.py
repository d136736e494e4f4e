"""The command: what is in the shards, that nothing depends on how they were made, and what is refused."""

import json
import multiprocessing
import os
import signal
import tarfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tessera.data import make_shards
from tessera.data.check_shards import main as check_shards
from tessera.data.make_shards import main
from tessera.data.shards import ShardError, open_shards, open_sources
from tessera.data.shards.index import parse_folder, parse_table
from tessera.data.shards.tar_index import scan_tar
from tessera.data.statistics import found_type
from tessera.data.tools import pack
from tests.data.made import CLASSES, SMALL, content, make, picture, samples, shards


def test_every_image_with_its_label_and_what_the_index_says(animals, tmp_path, capsys):
    out = tmp_path / "out"
    make(animals, out, SMALL)
    found = {key: (image, label) for key, image, label in samples(out)}
    assert len(found) == 60
    for path in animals.rglob("*.jpg"):
        image, label = found[str(path.relative_to(animals).with_suffix(""))]
        assert image == path.read_bytes()
        assert label == str(CLASSES.index(path.parent.name))
    assert json.loads((out / "classes.json").read_text()) == CLASSES
    index = parse_folder((out / "index.json").read_bytes(), "index.json")
    assert [entry.url for entry in index.shardlist] == [path.name for path in shards(out)]
    assert len(index.shardlist) > 2
    for path, entry in zip(shards(out), index.shardlist, strict=True):
        table, walked = parse_table(Path(f"{path}.index").read_bytes(), "table"), scan_tar(str(path), "shard")
        assert all(np.array_equal(a, b) for a, b in zip(table, walked, strict=True))
        assert (entry.nsamples, entry.labelled, entry.filesize) == tuple(walked.summary)
        assert entry.sha256 == pack.hashlib.sha256(path.read_bytes()).hexdigest()
        with tarfile.open(path) as archive:
            assert {(m.mtime, m.uid, m.gid, m.mode, m.uname) for m in archive} == {(0, 0, 0, 0o644, "")}
    sizes = [entry.filesize for entry in index.shardlist]
    assert max(sizes) - min(sizes) <= 10240
    assert max(sizes) < 0.03e6 + 10240 + 2048
    text = capsys.readouterr().out
    assert "60 images, 3 classes" in text
    assert f"--data {out}\n" in text


def test_the_same_bytes_whatever_the_workers(animals, tmp_path):
    for name, *words in (("a", "--workers=1"), ("b", "--workers=4"), ("c", "--seed=1"), ("d", "--shuffle=false")):
        make(animals, tmp_path / name, SMALL, *words)
    a, b, c = (content(tmp_path / name) for name in "abc")
    assert a == b
    assert sorted(a) == sorted(c)
    assert a["shard-000000.tar"] != c["shard-000000.tar"]
    assert sorted(samples(tmp_path / "a")) == sorted(samples(tmp_path / "c"))
    keys = [key for key, *_ in samples(tmp_path / "d")]
    assert keys == sorted(keys)
    assert [key for key, *_ in samples(tmp_path / "a")] != keys


def in_process(words):
    """A process that runs the command, and its workers, in a group of their own as a shell makes it."""

    def run():
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job inherits an ignored SIGINT
        os._exit(main(words))

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    return process


def test_ctrl_c_says_how_to_go_on(animals, tmp_path, capfd, monkeypatch):
    fast = pack.prepare

    def slow(*arguments):  # after the first record, the others wait for the signal
        time.sleep(60 if list(tmp_path.glob("out/.make_shards/shard-*.json")) else 0.03)
        return fast(*arguments)

    monkeypatch.setattr(pack, "prepare", slow)
    words = [str(animals), str(tmp_path / "out"), SMALL, "--workers=2"]
    process = in_process(words)
    while not list(tmp_path.glob("out/.make_shards/shard-*.json")):
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    process.join()
    assert process.exitcode == 130
    text = capfd.readouterr().err
    assert "The same command continues with the missing shards" in text
    assert "Traceback" not in text
    # A shard counts as finished if its record exists. A stop can come between the two files.
    before = len(list(tmp_path.glob("out/.make_shards/shard-*.json")))
    for given in (tmp_path / "out", tmp_path / "out" / "*.tar"):
        with pytest.raises(ShardError, match=r"out is not complete.*Start the same command again"):
            open_shards(given)
    assert check_shards([str(tmp_path / "out"), "--write_index=true"]) == 1
    assert not (tmp_path / "out" / "index.json").exists()
    assert "is not complete" in capfd.readouterr().out
    assert not list((tmp_path / "out").glob(".shard*"))
    monkeypatch.setattr(pack, "prepare", fast)
    make(*words)
    assert f"{before:,} exist already" in capfd.readouterr().out
    assert len(samples(tmp_path / "out")) == open_shards(tmp_path / "out").images == 60


def test_a_shard_that_is_gone_or_cut_is_made_again(animals, tmp_path):
    make(animals, tmp_path / "out", SMALL)
    before, paths = content(tmp_path / "out"), shards(tmp_path / "out")
    paths[0].unlink()
    os.truncate(paths[1], 5000)
    make(animals, tmp_path / "out", SMALL)
    assert content(tmp_path / "out") == before


def test_shards_in_the_folder_of_images(animals):
    out = animals / "shards"
    make(animals, out, SMALL)
    before = content(out)
    (out / "picture.jpg").write_bytes(picture(0))
    make(animals, out, SMALL)
    (out / "picture.jpg").unlink()
    assert content(out) == before
    make(animals, animals, SMALL)
    make(animals, animals, SMALL)
    assert {path.name: path.read_bytes() for path in shards(animals)} == {
        path.name: path.read_bytes() for path in shards(out)
    }


def test_other_settings_and_other_images_are_named(animals, tmp_path, capsys):
    make(animals, tmp_path / "out", SMALL)
    before = content(tmp_path / "out")
    make(animals, tmp_path / "out", SMALL, "--seed=3", "--max_pixels=9", status=2)
    assert "made with other max_pixels, seed. Make these shards in another folder" in capsys.readouterr().err
    os.utime(animals / "ant" / "ant_00.jpg", ns=(0, 0))
    make(animals, tmp_path / "out", SMALL, status=2)
    assert "made with other images (names, sizes, dates or labels)." in capsys.readouterr().err
    assert content(tmp_path / "out") == before


def test_out_of_memory(animals, tmp_path, monkeypatch, capsys):
    def short(*_, **__):
        raise MemoryError

    monkeypatch.setattr(pack, "decode", short)
    make(animals, tmp_path / "out", SMALL, status=2)
    assert "fewer --workers" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["train-000000.tar", "x.tar.gz", "index.json"])
def test_a_folder_with_other_shards(animals, tmp_path, name, capsys):
    out = tmp_path / "out"
    out.mkdir()
    (out / name).write_bytes(b"precious")
    make(animals, out, SMALL, status=2)
    assert f"holds other shards ({name})" in capsys.readouterr().err
    assert content(out) == {name: b"precious"}


def test_two_calls_at_once(animals, tmp_path, capsys, monkeypatch):
    folder, held, go_on = make_shards.Folder(tmp_path / "out", "shard"), threading.Event(), threading.Event()

    def hold():
        with folder.locked():
            held.set()
            go_on.wait(20)
            assert not shards(tmp_path / "out")

    other = threading.Thread(target=hold)
    other.start()
    held.wait(20)
    say = make_shards.say
    monkeypatch.setattr(make_shards, "say", lambda *words: (say(*words), words[0] == "waiting" and go_on.set()))
    make(animals, tmp_path / "out", SMALL)
    other.join()
    assert "another command is writing" in capsys.readouterr().out
    assert len(samples(tmp_path / "out")) == 60


def test_a_full_disk_while_writing(animals, tmp_path, monkeypatch, capsys):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pack, "write_table", full)
    make(animals, tmp_path / "out", SMALL, status=2)
    assert "No space left on device" in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("*.tar")) + list((tmp_path / "out").glob(".*.tmp"))


def test_a_worker_that_is_killed(animals, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(make_shards, "write_shard", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    make(animals, tmp_path / "out", SMALL, status=2)
    assert "use fewer --workers. The same command continues" in capsys.readouterr().err


def test_images_of_16_bits_are_not_resized(tmp_path, capsys):
    (tmp_path / "images").mkdir()
    for number in range(4):
        Image.new("I;16", (32 + 64 * (number % 2), 40), 257 * number).save(tmp_path / "images" / f"{number}.png")
    (tmp_path / "images" / "4.jpg").write_bytes(picture(4))
    make(tmp_path / "images", tmp_path / "out", "--resize=48")
    assert [key for key, *_ in samples(tmp_path / "out")] == ["4"]
    assert "4: an image of the type uint16, but --resize makes images of 8 bits" in capsys.readouterr().out
    (tmp_path / "images" / "4.jpg").unlink()
    make(tmp_path / "images", tmp_path / "whole")
    assert open_shards(tmp_path / "whole").images == 4
    assert found_type(open_sources(str(tmp_path / "whole"))) == "uint16"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--resize=4"], "greater than or equal to 8"),
        (["--name=../x"], "name"),
        (["--root=x"], "--root is for manifests"),
        (["--sed=1"], "did you mean '--seed'?"),
    ],
)
def test_settings_that_are_refused(animals, tmp_path, words, message, capsys):
    make(animals, tmp_path / "out", *words, status=2)
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
