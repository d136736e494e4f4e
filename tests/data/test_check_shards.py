"""What a check finds in shards: the good, what a run would refuse, and what was made to harm."""

import functools
import gzip
import http.server
import io
import json
import pickle
import shutil
import threading
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tessera.data import make_shards
from tessera.data.check_shards import main
from tessera.data.failures import warn_once
from tessera.data.shards import ShardError, open_shards
from tessera.data.shards.index import FolderIndex, parse_folder, parse_table, write_folder, write_table
from tessera.data.shards.notes import CHOSEN, Note, describe, packed_notes
from tessera.data.shards.tar_index import scan_tar
from tests.data.batches import tiff


def check(*words, status=0):
    assert main([str(word) for word in words]) == status


@pytest.fixture
def report(tmp_path):
    """A function: the command's words -> its report."""

    def run(*words, status=0):
        check(*words, f"--output={tmp_path}/report.json", status=status)
        return json.loads((tmp_path / "report.json").read_text())

    return run


def encoded(pixels, format, mode=None, **options):
    file = io.BytesIO()
    Image.fromarray(pixels, mode).save(file, format, **options)
    return file.getvalue()


def noise(seed, *shape):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


# What is counted


def test_moments_are_those_of_all_pixels(write_tar, report):
    """PNG keeps pixels, so that numpy knows what they are."""
    pictures = [noise(n, 5 + 7 * n, 40 - 3 * n, 3) // (n + 1) for n in range(9)]
    paths = [
        write_tar(f"{part}.tar", [(f"{n}.png", encoded(pictures[n], "PNG")) for n in range(part, 9, 2)])
        for part in range(2)
    ]
    found = report(*paths, "--workers=2")
    pixels = np.concatenate([picture.reshape(-1, 3) for picture in pictures]) / 255
    assert np.allclose(found["pixels"]["mean"], pixels.mean(axis=0), rtol=1e-12, atol=0)
    assert np.allclose(found["pixels"]["std"], pixels.std(axis=0), rtol=1e-12, atol=0)
    longer = [1 << int(np.ceil(np.log2(max(40 - 3 * n, 5 + 7 * n)))) for n in range(9)]
    assert found["longer_side"] == {str(side): longer.count(side) for side in sorted(set(longer))}


def test_formats(write_tar, report, capsys):
    images = {f"{n}.{kind}": encoded(noise(n, 8, 8, 3), kind) for n, kind in enumerate(["JPEG", "PNG", "PNG", "WEBP"])}
    found = report(write_tar("t.tar", list(images.items())))
    assert found["formats"] == {"PNG": 2, "JPEG": 1, "WEBP": 1}
    assert "2 PNG, 1 JPEG, 1 WEBP" in capsys.readouterr().out


def test_labels(write_tar, png, report, capsys):
    members = [(f"{n:02d}.png", png(n)) for n in range(10)]
    members += [(f"{n:02d}.cls", str(label).encode()) for n, label in enumerate([5, 5, 5, 2, 2, 9])]
    path = write_tar("t.tar", sorted(members))
    found = report(path)
    assert (found["labelled"], found["classes"], found["good"]) == (6, {"2": 2, "5": 3, "9": 1}, True)
    assert "6 images, 3 classes from 2 to 9" in capsys.readouterr().out
    path = write_tar("u.tar", [("0.png", png(0)), ("0.cls", b"-1")])
    assert report(path, status=1)["good"] is False
    assert "the label of u.tar/0 is -1. Number the classes from 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('["a", "b"]', "has names for the 2 classes 0 to 1, but the largest label is 2. Add the missing names"),
        ('["a", "b", "a"]', "names the class 'a' more than once"),
        ('{"a": 0}', "not a JSON list of class names"),
        ('["a", 1, "c"]', "not a JSON list of class names"),
        ("[]", "not a JSON list of class names"),
        ("[" * 100_000, "not a JSON list of class names"),
    ],
)
def test_class_names_that_do_not_fit(write_shards, report, content, message):
    folder = Path(write_shards([3])[0]).parent
    (folder / "classes.json").write_text(content)
    found = report(str(folder), status=1)
    assert found["refused"] == []  # a run without labels accepts the shards
    assert len(found["bad_labels"]) == 1
    assert found["bad_labels"][0].startswith(f"{folder}/classes.json")
    assert message in found["bad_labels"][0]
    (folder / "classes.json").write_text('["a", "b", "c", "d"]')
    assert report(str(folder))["good"]


def test_labels_that_are_none(write_tar, png, report, capsys):
    texts = [b"1", b"cat", b"", b"1.5", b"9" * 30, b"2"]
    members = [m for n, text in enumerate(texts) for m in ((f"{n}.png", png(n)), (f"{n}.cls", text))]
    found = report(write_tar("t.tar", members), status=1)
    assert (len(found["bad_labels"]), found["classes"]) == (4, {"1": 1, "2": 1})
    assert "the label of t.tar/1 is b'cat', not an integer" in capsys.readouterr().out


def test_corrupt_images_are_named_and_the_others_counted(write_tar, png, report, capsys):
    bad = {3: b"", 5: b"no image", 7: encoded(noise(7, 4, 6, 3), "PNG")[:90], 11: bomb()}
    path = write_tar("t.tar", [(f"{n:02d}.png", bad.get(n, png(n))) for n in range(30)])
    found = report(path, status=1)
    assert (found["images"], found["decoded"]) == (30, 30)
    assert [line.split(":")[0] for line in found["corrupt"]] == [f"t.tar/{n:02d}" for n in bad]
    assert found["formats"] == {"PNG": 26}
    good = np.concatenate([np.full(24, n % 256) for n in range(30) if n not in bad]) / 255
    assert np.isclose(found["pixels"]["mean"][1], good.mean())
    text = capsys.readouterr().out
    assert "4 corrupt images, which a run leaves out" in text
    assert "t.tar/03: the file is empty" in text
    report(write_tar("none.tar", [("0.png", b"no image")]), status=2)


def test_images_of_other_bands_name_the_flag_that_works(tmp_path, capsys):
    for n in range(2):
        (tmp_path / f"{n}.tif").write_bytes(tiff(noise(n, 5, 8, 8), photometric="minisblack", planarconfig="separate"))
    check(tmp_path, status=2)
    assert "They have 5 bands, but 3 channels are read. Give --channels 5." in capsys.readouterr().out
    check(tmp_path, "--channels=5")


def test_shards_that_a_run_refuses_beside_good_ones(write_tar, write_shards, png, report, capsys):
    paths = write_shards([5, 6])
    content = Path(write_tar("whole.tar", [(f"{n}.png", png(n)) for n in range(9)])).read_bytes()
    folder = Path(paths[0]).parent
    (folder / "whole.tar").unlink()
    (folder / "cut.tar").write_bytes(content[:3000])
    (folder / "broken.tar").write_bytes(content[:2048] + b"\xff" * 512 + content[2560:])
    (folder / "gone.tar.gz").write_bytes(gzip.compress(content)[:-20])
    (folder / "empty.tar").write_bytes(b"")
    twice = write_tar("twice.tar", [("a.png", png(0)), ("a.png", png(1))])
    bad = [str(folder / name) for name in ("cut.tar", "broken.tar", "gone.tar.gz", "empty.tar", "nowhere.tar")]
    found = report(*paths, *bad, twice, "--workers=3", status=1)
    assert (found["images"], found["decoded"], found["shards"]) == (11, 11, 8)
    assert len(found["refused"]) == 6
    for path, line in zip([*bad, twice], found["refused"], strict=True):
        assert line.startswith(path)
    with pytest.raises(Exception, match="6 of 8 shards cannot be used"):
        open_shards([*paths, *bad, twice])
    assert "6 reasons for a run to stop:" in capsys.readouterr().out


def test_a_quick_look(write_shards, report, capsys):
    paths = write_shards([40, 30])
    found = report(*paths, "--decode=false")
    assert (found["images"], found["decoded"], found["pixels"]) == (70, 0, None)
    assert len(found["classes"]) == 70
    assert "a run accepts the headers and labels" in capsys.readouterr().out


def test_ways_to_name_shards(write_shards, capsys):
    folder = Path(write_shards([2, 3])[0]).parent
    check(f"{folder}/data-{{000000,000001}}.tar")
    check(f"{folder}/*.tar", "--workers=1")
    check("--workers=1", f"{folder}/data-000000.tar", f"{folder}/data-{{000001..000001}}.tar")
    assert capsys.readouterr().out.count("shards        2,") == 3
    (folder / "data-000001.tar").rename(folder / "held-000001.tar")
    check(folder)
    shown = capsys.readouterr().out
    assert "sets          data-*.tar, held-*.tar; a run takes one of them as SHARDS\nshards        2," in shown
    assert "a run accepts all shards" in shown
    check(f"{folder}/no-*.tar", status=2)
    check(status=2)
    check(f"{folder}/*.tar", "--decod=false", status=2)
    assert "did you mean '--decode'?" in capsys.readouterr().err


# The index


def test_shards_of_make_shards_are_good(tmp_path, png, report):
    for n in range(20):
        target = tmp_path / "photos" / str(n % 3) / f"{n}.png"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(png(n))
    assert make_shards.main([f"{tmp_path}/photos", f"{tmp_path}/out", "--shard_size_mb=0.02"]) == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir() if path.is_file()}
    found = report(f"{tmp_path}/out/*.tar")
    assert (found["good"], found["images"]) == (True, 20)
    assert report(f"{tmp_path}/out/index.json")["images"] == 20
    check(f"{tmp_path}/out/*.tar", "--write_index=true")
    after = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir() if path.is_file()}
    assert {**after, "index.json": b""} == {**before, "index.json": b""}
    old, new = (parse_folder(files["index.json"], "") for files in (before, after))
    assert new == old.model_copy(update={"name": "out"})
    assert list(new.mean) == found["pixels"]["mean"]
    assert open_shards(f"{tmp_path}/out/*.tar").statistics.std == tuple(found["pixels"]["std"])


def test_write_index_for_shards_of_others(write_shards, report, capsys):
    paths = write_shards([4, 5], ending=".tar") + write_shards([3], ending=".tar.gz")
    folder = Path(paths[0]).parent
    assert report(*paths, "--write_index=true")["good"]
    index = parse_folder((folder / "index.json").read_bytes(), "")
    assert [(entry.url, entry.nsamples, entry.labelled) for entry in index.shardlist] == [
        ("data-000000.tar", 4, 4),
        ("data-000000.tar.gz", 3, 3),
        ("data-000001.tar", 5, 5),
    ]
    for path in paths[:2]:
        table = parse_table(Path(f"{path}.index").read_bytes(), "")
        assert all(np.array_equal(a, b) for a, b in zip(table, scan_tar(path, ""), strict=True))
    assert open_shards(str(folder / "index.json")).counts.tolist() == [4, 3, 5]


def test_no_index_for_shards_that_are_refused(write_shards, write_tar, report):
    paths = write_shards([4])
    bad = write_tar("x.tar", [("a.txt", b"")])
    report(*paths, bad, "--write_index=true", status=1)
    assert not Path(paths[0]).with_name("index.json").exists()


@pytest.mark.parametrize("kind", ["joined", "repeated", "orphan"])
def test_tars_that_were_joined_updated_or_sorted_wrongly(write_tar, png, report, capsys, caplog, kind):
    """A check fails, and a run warns, also if an index.json lists the shard."""
    members = [("a.png", png(0)), ("b.png", png(1))]
    more = {"repeated": [("a.png", png(2))], "orphan": [("c.cls", b"1")]}
    path = write_tar("x.tar", members + more.get(kind, []))
    said = {
        "joined": "bytes after the end mark of the tar are not read",
        "repeated": "1 sample has the name of an earlier sample",
        "orphan": "1 label or map belongs to no image",
    }[kind]
    if kind == "joined":
        Path(path).write_bytes(2 * Path(path).read_bytes())
    found = report(path, "--write_index=true", status=1)
    assert found["notes"] == found["refused"] == []
    assert len(found["damaged"]) == 1
    assert found["damaged"][0].startswith(f"{path}: ")
    assert said in found["damaged"][0]
    assert "1 signs that tars were joined, updated or sorted wrongly:" in capsys.readouterr().out
    assert json.loads(Path(path).with_name("index.json").read_text())["shardlist"][0]["notes"]
    warn_once.cache_clear()
    open_shards(path)
    assert caplog.messages == found["damaged"]
    write_tar("x.tar", members)
    Path(path).with_name("index.json").unlink()
    Path(f"{path}.index").unlink()
    assert report(path)["good"]


def test_the_image_and_the_label_are_chosen_as_in_a_run(write_tar, png, report):
    members = [
        ("a.png", png(0)),
        ("a.webp", b"m"),
        ("a.txt", b"3"),
        ("b.png", png(0)),
        ("c.webp", b"m"),
        ("c.cls", b"4"),
    ]
    path = write_tar("x.tar", members)
    assert "several images, a.png and a.webp" in report(path, status=1)["refused"][0]
    write_folder(Path(path).parent, FolderIndex(shardlist=[{"url": "x.tar", "nsamples": 9, "filesize": 10240}]))
    found = report(path, "--image=png", "--label=txt")
    assert (found["images"], found["labelled"], found["classes"]) == (2, 1, {"3": 1})
    assert found["notes"] == describe([Note(CHOSEN, 1, "x.tar/c.webp", ".webp")])
    check(path, "--image=png", "--write_index=true", status=2)


def test_folders_and_files_that_number_classes_differently(write_shards, tmp_path, report):
    """The check and a run that reads labels refuse the same sets."""
    one, other = tmp_path / "one", tmp_path / "other"
    for folder, names in ((one, ["a", "b"]), (other, ["b", "a"])):
        folder.mkdir()
        (folder / "classes.json").write_text(json.dumps(names))
        shutil.copy(write_shards([2])[0], folder / "x.tar")
    files = [f"{folder}/x.tar" for folder in (one, other)]
    found = report(*files, status=1)
    with pytest.raises(ShardError) as raised:
        open_shards(files).require_labels()
    assert found["bad_labels"] == [str(raised.value)]
    assert found["refused"] == []
    (other / "classes.json").write_text('["a", "b"]')
    assert report(*files)["good"]
    (other / "classes.json").unlink()
    assert "names its classes, but" in report(*files, status=1)["bad_labels"][0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nsamples": 9}, "lists nsamples 9 for data-000000.tar, but the shard has 4"),
        ({"sha256": "00" * 32}, f"lists sha256 {'00' * 32} for data-000000.tar, but the shard has"),
        ({"url": "other.tar"}, "does not list the shard data-000000.tar"),
    ],
)
def test_an_index_that_differs(write_shards, report, change, message):
    paths = write_shards([4, 5])
    folder = Path(paths[0]).parent
    check(*paths, "--write_index=true")
    index = parse_folder((folder / "index.json").read_bytes(), "")
    index.shardlist[0] = index.shardlist[0].model_copy(update=change)
    write_folder(folder, index)
    found = report(*paths, status=1)
    assert message in found["refused"][0]
    assert "--write_index true" in found["refused"][0]
    check(*paths, "--write_index=true")
    check(*paths)


def test_an_index_or_a_table_that_is_none(write_shards, report):
    paths = write_shards([4, 5])
    folder = Path(paths[0]).parent
    check(*paths, "--write_index=true")
    (folder / "index.json").write_text("{}")
    assert "not an index of shards" in report(*paths, status=1)["refused"][0]
    (folder / "index.json").unlink()
    older = parse_table(Path(f"{paths[0]}.index").read_bytes(), "table")._replace(notes=packed_notes([Note(CHOSEN, 9)]))
    write_table(paths[0], older)
    assert report(*paths)["good"]
    Path(f"{paths[0]}.index").write_bytes(Path(f"{paths[1]}.index").read_bytes())
    assert "belongs to another shard" in report(*paths, status=1)["refused"][0]
    Path(f"{paths[0]}.index").write_bytes(pickle.dumps(Harm(folder / "ran")))
    assert "not a table of samples" in report(*paths, status=1)["refused"][0]
    assert not (folder / "ran").exists()


def test_by_http(write_shards, report):
    pytest.importorskip("aiohttp")
    paths = write_shards([4, 5])
    check(*paths, "--write_index=true")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=Path(paths[0]).parent)
    handler.log_message = lambda *_: None
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        found = report(f"{url}/data-{{000000..000001}}.tar", "--source.retries=0")
        assert (found["images"], found["decoded"], found["good"]) == (9, 9, True)
        gone = report(f"{url}/no.tar", "--source.retries=0", status=1)
        assert "no.tar" in gone["refused"][0]
        check(f"{url}/data-000000.tar", "--write_index=true", status=2)
        server.shutdown()


# What was made to harm


class Harm:
    """Unpickling it writes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def bomb():
    """A PNG that says it has 60,000 x 60,000 pixels."""
    png = bytearray(encoded(np.zeros((4, 4, 3), dtype=np.uint8), "PNG"))
    png[16:24] = (60000).to_bytes(4, "big") * 2
    png[29:33] = zlib.crc32(png[12:29]).to_bytes(4, "big")
    return bytes(png)
