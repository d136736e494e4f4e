"""The command on images with planted copies. The features are pixels, so that the tests need no trained encoder."""

import io
import json
from importlib.util import find_spec

import numpy as np
import pytest
from PIL import Image
from pyarrow import parquet
from threadpoolctl import threadpool_limits

pytest.importorskip("faiss")

from tessera import encoders
from tessera.data.exclude import read_names
from tessera.encoders.base import Preprocessing
from tessera.evaluation.embed import EmbedSettings
from tessera.evaluation.embed import run as embed
from tessera.evaluation.features import EvaluationError
from tessera.extras.explore import embedding, explore
from tessera.extras.explore.explore import ExploreSettings, run
from tessera.extras.explore.findings import ACROSS, WITHIN_DATA
from tessera.extras.explore.thumbnails import Thumbnails
from tests.data.batches import write_tar
from tests.pretrain.small import on_processes

# not importorskip: each worker that collects would import umap, which takes five seconds
absent = pytest.mark.skipif(find_spec("umap") is None, reason="umap-learn is not installed (pip install umap-learn)")
pytestmark = [pytest.mark.medium, absent]
IMAGES, SIDE = 150, 16
BLANK, COPY, MIRROR = 7, IMAGES, IMAGES + 1
"""Index of a blank image, and of copies of the images 3 and 5 at the end of the data set."""


def encoded(pixels, quality=95):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=quality)
    return file.getvalue()


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """A data set of 152 images in two shards, two of them copies, and a validation set of 20 with a copy of image 9."""
    folder, rng = tmp_path_factory.mktemp("photographs"), np.random.default_rng(0)
    coarse = rng.integers(0, 256, (IMAGES + 19, 4, 4, 3), dtype=np.uint8)
    images = [np.asarray(Image.fromarray(one).resize((SIDE, SIDE), Image.Resampling.BICUBIC)) for one in coarse]
    images[BLANK] = np.full((SIDE, SIDE, 3), 90, np.uint8)
    data, val = images[:IMAGES], images[IMAGES:]
    files = [encoded(one) for one in data] + [encoded(data[3], 60), encoded(data[5][:, ::-1].copy())]
    samples = [(f"d{n:03d}", file, n % 3) for n, file in enumerate(files)]
    for number, part in enumerate((samples[:80], samples[80:])):
        write_samples(folder / f"data-{number}.tar", part)
    files = [encoded(one) for one in val] + [encoded(data[9], 70)]
    write_samples(folder / "val.tar", [(f"d{n:03d}", file, n % 3) for n, file in enumerate(files)])
    return folder


def write_samples(path, samples):
    write_tar(
        path,
        [(f"{key}.{e}", c) for key, file, label in samples for e, c in (("jpg", file), ("cls", f"{label}".encode()))],
    )


def settings(photographs, output, **others):
    given = {"checkpoint": "pixels", "image_size": SIDE, "workers": 0, "data": str(photographs / "data-{0..1}.tar")}
    return ExploreSettings(**given | {"val": str(photographs / "val.tar"), "output": output} | others)


@pytest.fixture(scope="module", autouse=True)
def small_parts():
    """Parts are small, so that there are several. The page has tests of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embedding, "IMAGES", 64)
        patch.setattr(explore, "write_page", lambda findings, thumbnails, output: output / "index.html")
        yield


@pytest.fixture(scope="module")
def explored(small_parts, photographs, tmp_path_factory):
    """The findings, and their folder. The libraries use 3 threads."""
    output = tmp_path_factory.mktemp("found")
    with threadpool_limits(3):
        return run(settings(photographs, output)), output


def test_planted_copies_and_leaks_are_the_pairs(explored):
    found, _ = explored
    kinds = {tuple(pair): kind for pair, kind in zip(found.pairs.tolist(), found.pair_kind.tolist(), strict=True)}
    leaked = len(found.keys) - 1
    assert kinds[3, COPY] == WITHIN_DATA
    assert kinds[5, MIRROR] == WITHIN_DATA
    assert kinds[9, leaked] == ACROSS
    assert len(kinds) <= 5  # the three of above, and at most 1 % of the images
    assert found.flags["near_copy"][[COPY, MIRROR]].all()
    assert not found.flags["near_copy"][[3, 5, 9, leaked]].any()
    assert found.flags["leak"][[9, leaked]].all()
    assert found.flags["leak"].sum() <= 6
    assert (np.diff(found.pair_margin) <= 0).all()
    similarity = (found.features[found.pairs[:, 0]] * found.features[found.pairs[:, 1]]).sum(1)
    np.testing.assert_allclose(found.pair_similarity, similarity, atol=1e-5)


def test_recall_by_kind_is_measured_and_printed(explored, photographs, capsys):
    found, output = explored
    recall = found.notes["recall"]
    assert recall["mirrored"] > 0.7
    assert recall["mirrored"] > recall["re-encoded"] > recall["cropped"]  # pixels hardly find crops
    assert found.notes["planted_images"] == 152
    run(settings(photographs, output))
    text = capsys.readouterr().out
    assert "recall on copies planted in 152 of your images: re-encoded" in text
    assert "expected false finds: at most 2 images (1.0%)" in text
    assert f"pairs: {(found.pair_kind == WITHIN_DATA).sum()} in data," in text


def test_accuracy_without_leaks_leaves_out_the_leaked_images(explored):
    found, _ = explored
    knn = found.notes["knn"]
    clean = ~found.flags["leak"][found.sets == 1]
    similarity = found.features[found.sets == 1] @ found.features[found.sets == 0].T
    labels, of_val = found.labels[found.sets == 0], found.labels[found.sets == 1]
    right = []
    for row, label in zip(similarity.astype(float), of_val, strict=True):
        near = np.argsort(-row)[:20]
        votes = np.bincount(labels[near], np.exp(row[near] / 0.07), minlength=3)
        right.append(votes.argmax() == label)
    assert knn["all"] == pytest.approx(np.mean(right))
    assert knn["without_leaks"] == pytest.approx(np.mean(np.array(right)[clean]))


def test_the_table_has_the_keys_of_embed_and_is_read_by_exclude(explored, photographs, tmp_path):
    found, output = explored
    given = settings(photographs, output)
    embed(
        EmbedSettings(checkpoint="pixels", image_size=SIDE, workers=0, data=given.data, output=str(tmp_path / "f.npz"))
    )
    table = parquet.read_table(output / "findings.parquet").to_pydict()
    assert table["key"] == np.load(tmp_path / "f.npz")["keys"].tolist()
    assert set(table["set"]) == {"data"}
    expected = [found.keys[n] for n in np.flatnonzero(found.flags["near_copy"] & (found.sets == 0))]
    assert list(read_names(f"{output / 'findings.parquet'}:near_copy")) == expected
    assert len(parquet.read_table(output / "val.parquet")) == 20
    pairs = parquet.read_table(output / "pairs.parquet").to_pydict()
    assert ("data-0.tar/d009", "val.tar/d019") in zip(pairs["key"], pairs["other_key"], strict=True)


def test_a_blank_image_is_flagged_and_thumbnails_show_the_images(explored, photographs):
    found, output = explored
    assert np.flatnonzero(found.flags["blank"]).tolist() == [BLANK]
    thumbnails = Thumbnails(output)
    assert len(thumbnails) == len(found.keys)
    shown = np.asarray(Image.open(io.BytesIO(thumbnails[BLANK])))
    assert shown.shape == (SIDE, SIDE, 3)
    assert np.abs(shown.astype(int) - 90).max() <= 2


def test_images_of_five_bands_of_16_bits(tmp_path):
    tifffile = pytest.importorskip("tifffile")
    rng = np.random.default_rng(0)
    tiles = rng.integers(1, 4096, (40, SIDE, SIDE, 5), dtype=np.uint16)
    tiles[3].reshape(-1, 5)[8:] = 0  # nearly without data
    tiles[39] = tiles[20][:, ::-1]
    for number, tile in enumerate(tiles):
        (tmp_path / "tiles" / "ab"[number % 2]).mkdir(parents=True, exist_ok=True)
        path = tmp_path / "tiles" / "ab"[number % 2] / f"{number:02d}.tif"
        tifffile.imwrite(path, tile, photometric="minisblack", planarconfig="contig")
    encoder = encoders.build("vit_micro", channels=5, image_size=SIDE, patch_size=4)
    encoder.preprocessing = Preprocessing((0.5,) * 5, (0.3,) * 5, "uint16", (0.0,) * 5, (4095.0,) * 5, nodata=0.0)
    encoders.save(encoder, tmp_path / "encoder.safetensors")
    given = {"checkpoint": str(tmp_path / "encoder.safetensors"), "image_size": None, "val": None}
    found = run(settings(tmp_path, tmp_path / "found", data=str(tmp_path / "tiles"), **given))
    names = [key.rpartition("/")[2] for key in found.keys]
    assert [names[n] for n in np.flatnonzero(found.flags["blank"])] == ["03.tif"]
    assert ["20.tif", "39.tif"] in [sorted(names[n] for n in pair) for pair in found.pairs]
    shown = np.asarray(Image.open(io.BytesIO(Thumbnails(tmp_path / "found")[names.index("03.tif")])))
    assert shown[8:].max() < 20 < shown[0, :8].mean()


def test_mirrored_copies_of_wide_images_are_found_by_pixels(tmp_path):
    """A crop of an odd width from the centre is not symmetric."""
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 256, (40, 6, 8, 3), dtype=np.uint8)
    images = [
        np.asarray(Image.fromarray(one).resize((60 + n, 45), Image.Resampling.BICUBIC)) for n, one in enumerate(coarse)
    ]
    images += [one[:, ::-1].copy() for one in images[:10]]
    write_samples(tmp_path / "data-0.tar", [(f"d{n:02d}", encoded(one), 0) for n, one in enumerate(images)])
    found = run(settings(tmp_path, tmp_path / "found", data=str(tmp_path / "data-0.tar"), val=None, image_size=None))
    assert {(n, 40 + n) for n in range(10)} <= {tuple(pair) for pair in found.pairs.tolist()}
    assert np.asarray(Image.open(io.BytesIO(Thumbnails(tmp_path / "found")[0]))).shape == (64, 64, 3)


def test_different_images_of_a_small_validation_set_are_no_copies(tmp_path):
    """There are fewer images than features, so that the training images alone span a part of the space."""
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 256, (84, 7, 7, 3), dtype=np.uint8)
    images = [np.asarray(Image.fromarray(one).resize((64, 64), Image.Resampling.BICUBIC)) for one in coarse]
    for name, some in (("data-0", images[:60]), ("val", [*images[60:], images[9]])):
        write_samples(tmp_path / f"{name}.tar", [(f"{name}{n:02d}", encoded(one), 0) for n, one in enumerate(some)])
    given = {"data": str(tmp_path / "data-0.tar"), "val": str(tmp_path / "val.tar"), "image_size": None}
    found = run(settings(tmp_path, tmp_path / "found", **given))
    assert [tuple(pair) for pair in found.pairs.tolist()] == [(9, 84)]


def test_a_set_that_can_hardly_be_read_is_refused(tmp_path):
    rng = np.random.default_rng(0)
    files = [encoded(rng.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)) for _ in range(5)]
    write_samples(tmp_path / "data-0.tar", [(f"d{n}", file if n < 2 else b"none", 0) for n, file in enumerate(files)])
    with pytest.raises(EvaluationError, match=r"Only 2 of 5 images of --data can be read"):
        run(settings(tmp_path, tmp_path / "found", data=str(tmp_path / "data-0.tar"), val=None))


def test_a_stopped_command_goes_on_and_other_settings_are_refused(explored, photographs):
    _, output = explored
    first, second, *_ = sorted((output / "work").glob("data-*.npz"))
    content, kept = second.read_bytes(), first.stat().st_mtime_ns
    second.unlink()
    run(settings(photographs, output))
    assert (first.stat().st_mtime_ns, len(content)) == (kept, len(second.read_bytes()))
    with pytest.raises(EvaluationError, match="does not belong to these settings and images"):
        run(settings(photographs, output, resize=20))


def _explore(rank, given):
    """Run the command on one thread."""
    embedding.IMAGES, explore.write_page = 64, lambda findings, thumbnails, output: output
    with threadpool_limits(1):
        run(given)


@pytest.mark.slow
def test_two_processes_find_what_one_finds(explored, photographs, tmp_path, free_port):
    _, output = explored
    on_processes(_explore, free_port, settings(photographs, tmp_path))
    for name in ("findings.parquet", "val.parquet", "pairs.parquet"):
        one, two = (parquet.read_table(folder / name) for folder in (output, tmp_path))
        assert one.equals(two)
    one, two = (json.loads((folder / "findings.json").read_text()) for folder in (output, tmp_path))
    assert one == two
