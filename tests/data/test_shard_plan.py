"""Which image goes where, and images that are there twice."""

import numpy as np

from tessera.data.make_shards import find_duplicates, same, split
from tessera.data.shards.listing import list_folder
from tessera.data.tools import pack
from tests.data.made import SMALL, content, make, picture, rows, samples


def test_duplicates(photos, tmp_path, capsys):
    files = {f"{kind}/{n}.jpg": picture(n) for n in range(10) for kind in ("a", "b")}
    folder = photos({**files, "b/bad1.jpg": b"no image", "b/bad2.jpg": b"no image"})
    make(folder, tmp_path / "keep", SMALL)
    assert len(samples(tmp_path / "keep")) == 20
    assert "10, 10 with another label, kept" in capsys.readouterr().out
    for workers in (1, 3):
        make(folder, tmp_path / f"drop{workers}", SMALL, "--duplicates=drop", f"--workers={workers}")
        assert sorted(key for key, *_ in samples(tmp_path / f"drop{workers}")) == [f"a/{n}" for n in range(10)]
    assert content(tmp_path / "drop1") == content(tmp_path / "drop3")
    same = {f"b/{n}.jpg": f"a/{n}.jpg" for n in range(10)} | {"b/bad2.jpg": "b/bad1.jpg"}
    reasons = dict(rows(tmp_path / "drop1" / "left_out.csv"))
    assert reasons.pop("b/bad1.jpg").startswith("the file is not a JPEG")
    assert reasons == {path: f"the same content as {first}" for path, first in same.items()}


def test_duplicates_are_looked_for_in_parts(photos, tmp_path, monkeypatch):
    monkeypatch.setattr("tessera.data.make_shards.IMAGES_PER_TASK", 3)
    files = {f"{n:02d}.jpg": bytes([n % 5]) * 10 for n in range(20)}
    folder = photos({**files, "20.jpg": b"x" * 10, "21.jpg": b"y" * 10})
    listing = list_folder(folder, labels="none", links="inside", besides=tmp_path / "out")
    for name in ("20.jpg", "21.jpg"):  # what cannot be read is nobody's duplicate
        (folder / name).unlink()
    assert find_duplicates(listing, pack.Recipe(), workers=2).tolist() == [[n, n % 5] for n in range(5, 20)]


def test_same_beside_a_dictionary():
    rng = np.random.default_rng(0)
    entries = rng.permutation(500)
    digests = np.zeros((500, 16), dtype=np.uint8)
    digests[:, 3], digests[:, 12] = rng.integers(0, 9, 500), rng.integers(0, 9, 500)
    first, expected = {}, []
    for entry, row in sorted(zip(entries.tolist(), map(bytes, digests), strict=True)):
        if row in first:
            expected.append([entry, first[row]])
        first.setdefault(row, entry)
    parts = [(entries[some], digests[some].tobytes()) for some in (slice(200), slice(200, None))]
    assert same(parts).tolist() == expected


def test_split_covers_everything_in_order(photos, tmp_path):
    folder = photos({f"{n:03d}.jpg": bytes(1 + 997 * n % 5000) for n in range(300)})
    listing = list_folder(folder, labels="none", links="inside", besides=tmp_path)
    order = np.random.default_rng(0).permutation(300)
    cut = split(listing, order, 50_000, 1.0)
    assert np.concatenate([cut.entries(n) for n in range(len(cut))]).tolist() == order.tolist()
    padded = 512 + -(-listing.sizes // 512) * 512
    assert [int(padded[cut.entries(n)].sum()) for n in range(len(cut))] == cut.bytes.tolist()
    listing.labels = np.where(np.arange(300) < 150, 7, -1)  # 1,024 bytes for each label
    labelled = split(listing, order, 50_000, 1.0)
    assert int(labelled.bytes.sum()) == int(padded.sum()) + 150 * 1024
    assert cut.bytes.max() < 50_000 + 6000
    assert cut.bytes.min() > 30_000
