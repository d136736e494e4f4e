"""Segmentation maps: decoding, crops that stay aligned with their image, making of shards, and checks."""

import io
import json
import tracemalloc
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from tessera.data.augment import to_model_input
from tessera.data.batch import ViewParameters
from tessera.data.batch_sampler import BatchSampler
from tessera.data.check_shards import main as check
from tessera.data.crops import CenterCrop, RandomCrop, RandomCropConfig, WholeImage
from tessera.data.decode import ImageError
from tessera.data.loader import Reading, evaluation_batches, training_batches
from tessera.data.make_shards import main
from tessera.data.maps import cut_map, decode_depth, decode_map
from tessera.data.shards import ShardError, open_shards
from tessera.data.shards.index import parse_table, write_table
from tessera.data.shards.tar_index import scan_tar
from tessera.evaluation.features import single_view
from tests.data.batches import rng, saved
from tests.data.made import make, picture

png = partial(saved, kind="PNG")


def noise(seed, *shape, below=256):
    return rng(seed).integers(0, below, shape, dtype=np.uint8)


def test_gray_and_palette_maps_hold_their_numbers():
    values = noise(0, 9, 14)
    palette = Image.fromarray(values, "P")
    palette.putpalette(noise(1, 768).tobytes())
    for encoded in (png(values), png(palette)):
        assert np.array_equal(decode_map(encoded), values)
    for bits in (1, 2, 4):
        few = values % 2**bits
        narrow = Image.fromarray(few, "P")
        narrow.putpalette(noise(2, 3 * 2**bits).tobytes())
        assert np.array_equal(decode_map(png(narrow, bits=bits)), few)
    two = noise(3, 5, 7, below=2)
    assert np.array_equal(decode_map(png(Image.fromarray(two * 255).convert("1"))), two)


@pytest.mark.parametrize(("content", "reason"), [
    (png(noise(0, 5, 7, 3)), "mode RGB"),
    (png(np.full((5, 7), 300, np.uint16)), "at most 8 bits"),
    (png(noise(0, 50, 70))[:200], "damaged PNG"),
    (picture(0), "damaged PNG"),
    (b"", "damaged PNG"),
])  # fmt: skip
def test_other_files_are_refused(content, reason):
    with pytest.raises(ImageError, match=reason):
        decode_map(content)


def array(values):
    """A .npy file of an array."""
    file = io.BytesIO()
    np.save(file, values)
    return file.getvalue()


def test_depth_maps_hold_their_numbers():
    values = rng(0).integers(0, 2**16, (9, 14), dtype=np.uint16)
    assert np.array_equal(decode_depth(png(values), (9, 14)), values)
    for dtype in (np.float16, np.float64, np.int32):
        assert np.array_equal(decode_depth(array((values // 8).astype(dtype))), (values // 8).astype(dtype))
    broken = np.array([[0.5, -1, np.nan], [np.inf, 0, 2]])
    for order in "CF":
        for dtype in ("<f8", ">f4"):
            assert decode_depth(array(np.asarray(broken, dtype, order))).tolist() == [[0.5, 0, 0], [0, 0, 2]]


@pytest.mark.parametrize(("content", "reason"), [
    (png(noise(0, 5, 7)), "mode L, but a depth map has one channel of 16 bits"),
    (png(np.full((7, 5), 300, np.uint16)), "5 x 7 pixels, but the upright image has 7 x 5"),
    (array(np.ones((7, 5))), "5 x 7 pixels, but the upright image has 7 x 5"),
    (array(np.ones((5, 7, 3))), "3 axes, but a depth map has 2"),
    (array(np.full((5, 7), "far")), "type <U3"),
    (array(np.ones((5, 7)))[:-8], "damaged NumPy array"),
    (array(np.array([[None] * 7] * 5)), "type object"),
    (array(np.ones((5, 7))).replace(b"(5, 7)", b"(5,7e9)"), "damaged NumPy array"),
    (array(np.ones((5, 7))).replace(b"(5, 7), }       ", b"(5, 70000000000)}"), "70000000000 x 5 pixels, but"),
    (array(np.ones((5, 7))) + b"more", "284 bytes of values do not fit"),
    (array(np.full((5, 7), 1e308)), r"the value 1e\+308, but the maximum is 3.40282e\+38. Mark pixels without"),
])  # fmt: skip
def test_other_files_are_refused_as_depth(content, reason):
    with pytest.raises(ImageError, match=reason):
        decode_depth(content, (5, 7))


@pytest.mark.parametrize(("shape", "reason"), [
    ("(1000000, 1000000)", "pixels are more than the limit"), ("(9999, 9999)", "280 bytes of values do not fit"),
    ("(0, 999999999)", "0 pixels"), ("(-5, -7)", "-7 x -5 pixels"),
])  # fmt: skip
def test_the_shape_of_an_array_is_checked_before_memory_is_taken(shape, reason):
    content = array(np.ones((5, 7)))
    claimed = content.replace(b"(5, 7), }" + b" " * (len(shape) - 6), f"{shape}, }}".encode())
    assert len(claimed) == len(content)
    tracemalloc.start()
    with pytest.raises(ImageError, match=reason):
        decode_depth(claimed)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20


def test_crops_are_those_of_nearest_neighbours():
    values = torch.from_numpy(noise(0, 37, 53))
    boxes, flips = np.array([[3, 5, 20, 31], [0, 0, 37, 53], [10, 40, 5, 6]]), np.array([False, True, True])
    found = cut_map(values, ViewParameters(boxes, (16, 24), flips))
    windowed = cut_map(values, ViewParameters(boxes, (16, 24), flips, window=(2, 3, 10, 12)))
    for (top, left, height, width), flip, crop, part in zip(boxes, flips, found, windowed, strict=True):
        box = values[top : top + height, left : left + width][None, None].float()
        expected = F.interpolate(box, (16, 24), mode="nearest-exact")[0, 0].to(torch.uint8)
        assert torch.equal(crop, expected.flip(1) if flip else expected)
        inner = expected[2:12, 3:15]
        assert torch.equal(part, inner.flip(1) if flip else inner)


def aligned(seed, height, width):
    """An image whose map is a function of its pixels: the class is the band of the smooth red value."""
    y, x = np.mgrid[:height, :width]
    red = (127 + 120 * np.sin(x / 17 + seed) * np.cos(y / 13)).astype(np.uint8)
    pixels = np.stack([red, np.full_like(red, 40), 255 - red], axis=2)
    return pixels, red // 64


@pytest.fixture
def mapped(write_tar):
    members = []
    for n in range(12):
        pixels, values = aligned(n, 60 + 5 * n, 130 - 3 * n)
        members += [(f"s{n:02d}.png", png(pixels)), (f"s{n:02d}.cls", b"1"), (f"s{n:02d}.seg.png", png(values))]
    return write_tar("mapped.tar", members)


def check_alignment(batch):
    images = single_view(to_model_input(batch))
    mean, std = batch.preprocessing.mean[0], batch.preprocessing.std[0]
    red = (images[:, 0] * std + mean) * 255
    assert batch.maps.shape == red.shape
    assert batch.maps.dtype == torch.uint8
    # interpolation may move a pixel at the border of two bands, but not by a whole band
    same = (red / 64).floor() == batch.maps
    assert same.float().mean() > 0.9
    assert ((red / 64 - batch.maps - 0.5).abs() < 0.75).float().mean() > 0.99
    assert len(batch.maps.unique()) == 4


@pytest.mark.parametrize("workers", [0, 1])
def test_crops_of_image_and_map_are_aligned_in_training(mapped, workers):
    reading = Reading(workers, maps=4)
    crop = RandomCrop(RandomCropConfig(size=48, scale=(0.1, 0.8)))
    batches = training_batches(mapped, crop, BatchSampler(6, steps=4), seed=3, reading=reading)
    found = list(batches)
    assert len(found) == 4
    for batch in found:
        check_alignment(batch)
    mirrored = training_batches(mapped, RandomCrop(RandomCropConfig(size=48, flip=1.0)), BatchSampler(6), seed=3,
                                reading=reading)  # fmt: skip
    check_alignment(next(iter(mirrored)))


@pytest.mark.parametrize("transform", [WholeImage(40), CenterCrop(32, resize=40)])
def test_crops_of_image_and_map_are_aligned_in_evaluation(mapped, transform):
    batches = list(evaluation_batches(mapped, transform, 5, reading=Reading(maps=4)))
    assert [len(batch) for batch in batches] == [5, 5, 2]
    for batch in batches:
        assert batch.labels is not None
        check_alignment(batch)
    assert next(iter(evaluation_batches(mapped, transform, 5))).maps is None


@pytest.mark.parametrize("kind", ["png", "npy"])
def test_crops_of_image_and_depth_are_aligned(write_tar, kind):
    members = []
    for n in range(4):
        pixels, _ = aligned(n, 60 + 5 * n, 130 - 3 * n)
        depth = 100 * pixels[..., 0].astype(np.uint16)
        content = png(depth) if kind == "png" else array(depth / 1000)
        members += [(f"s{n}.png", png(pixels)), (f"s{n}.depth.{kind}", content)]
    path, unit = write_tar("depth.tar", members), {"png": 100, "npy": 0.1}[kind]
    crop = RandomCrop(RandomCropConfig(size=48, scale=(0.3, 0.8)))
    batch = next(iter(training_batches(path, crop, BatchSampler(4, steps=1), seed=3, reading=Reading(maps="depth"))))
    mean, std = batch.preprocessing.mean[0], batch.preprocessing.std[0]
    red = (single_view(to_model_input(batch))[:, 0] * std + mean) * 255
    assert batch.maps is not None
    assert batch.maps.dtype == torch.float32
    assert ((red - batch.maps / unit).abs() < 16).float().mean() > 0.99  # of 240 values
    with pytest.raises(ShardError, match=f"cannot be used: .*Correct the member KEY.depth.{kind}"):
        list(evaluation_batches(path, WholeImage(16), 2, labels=False, reading=Reading(maps=3)))


def test_whole_image_shows_all_of_it(mapped):
    batch = next(iter(evaluation_batches(mapped, WholeImage(40), 1)))
    pixels, _ = aligned(0, 60, 130)
    expected = np.asarray(Image.fromarray(pixels).resize((40, 40), Image.Resampling.BICUBIC))
    assert np.abs(single_view(batch)[0].permute(1, 2, 0).numpy().astype(int) - expected).max() <= 1


def test_broken_and_missing_maps_are_named(write_tar):
    image = png(noise(0, 20, 30, 3))
    good = ("a.png", image), ("a.seg.png", png(noise(1, 20, 30, below=3)))
    cases = {
        "b has no segmentation map.*KEY.seg.png": [],
        "b cannot be used: the map has 20 x 30 pixels, .* image has 30 x 20": [png(noise(0, 30, 20, below=3))],
        "b cannot be used: the map has the value 7, but there are 3 classes": [png(np.full((20, 30), 7, np.uint8))],
        "b cannot be used: a damaged PNG": [png(noise(1, 20, 30))[:80]],
        "b cannot be used: the PNG has the mode RGB": [image],
    }
    for number, (message, maps) in enumerate(cases.items()):
        path = write_tar(f"t{number}.tar", [*good, ("b.png", image), *(("b.seg.png", one) for one in maps)])
        with pytest.raises(ShardError, match=message):
            list(evaluation_batches(path, WholeImage(16), 2, labels=False, reading=Reading(maps=3)))
        crop = RandomCrop(RandomCropConfig(size=16))
        with pytest.raises(ShardError, match=message):
            list(training_batches(path, crop, BatchSampler(2), seed=0, reading=Reading(maps=3)))
        assert sum(map(len, evaluation_batches(path, WholeImage(16), 2, labels=False))) == 2


def test_the_index_knows_maps(write_tar, tmp_path):
    content = [png(noise(n, 8, 8)) for n in range(3)]
    plain, some = [], []
    for n, one in enumerate(content):
        plain += [(f"s{n}.jpg", picture(n)), (f"s{n}.cls", b"0")]
        some += [(f"s{n}.jpg", picture(n)), *([(f"s{n}.seg.png", one)] if n else [])]
    bare, mapped = scan_tar(write_tar("bare.tar", plain), "bare"), scan_tar(write_tar("some.tar", some), "some")
    assert bare.maps.shape == (0, 2)
    assert (mapped.maps[:, 0] >= 0).tolist() == [False, True, True]
    assert mapped.summary.tolist()[:2] == [3, 0]
    for name, table in (("bare", bare), ("some", mapped)):
        write_table(tmp_path / name, table)
        found = parse_table((tmp_path / f"{name}.index").read_bytes(), "table")
        assert all(np.array_equal(a, b) for a, b in zip(found, table, strict=True))
    file = io.BytesIO()
    np.savez(file, **{name: array for name, array in bare._asdict().items() if name != "maps"})
    assert parse_table(file.getvalue(), "table").maps.shape == (0, 2)
    wrong = mapped._replace(maps=mapped.maps + 10**6)
    write_table(tmp_path / "wrong", wrong)
    with pytest.raises(ShardError, match="outside the shard"):
        parse_table((tmp_path / "wrong.index").read_bytes(), "table")
    reader = open_shards(str(tmp_path / "some.tar"))
    assert [reader.target(n) for n in (1, 2)] == content[1:]


def read_back(folder):
    """Map of each sample, as arrays of the image's size and of the map."""
    opened = open_shards(str(folder))
    found = {}
    for number in range(opened.images):
        shard, sample = opened.place(number)
        offset, _ = opened.shards[shard].index().map_place(sample)
        with Image.open(io.BytesIO(opened.image(number))) as image:
            values = None if offset < 0 else np.asarray(decode_map(opened.target(number)))
            found[opened.name(number).partition("/")[2]] = image.size, values
    return found


@pytest.fixture
def scenes(photos):
    """Six images with maps beside them, one without a map, and a map without an image."""
    files = {f"im{n}.jpg": picture(n, (40, 30)) for n in range(7)}
    files |= {f"im{n}.seg.png": png(noise(n, 30, 40, below=5)) for n in range(6)}
    return photos(files | {"alone.seg.png": png(noise(9, 30, 40))})


def test_make_shards_packs_maps_beside_images(scenes, tmp_path, capsys):
    make(scenes, tmp_path / "out")
    text = capsys.readouterr().out
    assert "6 with a map" in text
    found = read_back(tmp_path / "out")
    assert sorted(found) == [f"im{n}" for n in range(7)]
    assert found.pop("im6") == ((40, 30), None)
    for n in range(6):
        assert np.array_equal(found[f"im{n}"][1], noise(n, 30, 40, below=5))
    make(scenes, tmp_path / "out")  # the plan still holds
    (scenes / "im0.seg.png").write_bytes(png(noise(99, 30, 40, below=5)))
    make(scenes, tmp_path / "out", status=2)
    assert "made with other images" in capsys.readouterr().err


def test_make_shards_takes_a_parallel_folder_of_maps(photos, tmp_path, capsys):
    images = photos({f"{kind}/im{n}.jpg": picture(n, (40, 30)) for n, kind in enumerate("aabb")}, "images")
    maps = photos({f"{kind}/im{n}.png": png(noise(n, 30, 40)) for n, kind in enumerate("aabb")}, "annotations")
    make(images, tmp_path / "out", f"--maps={maps}", "--resize=12")
    for n, kind in enumerate("aabb"):
        size, values = read_back(tmp_path / "out")[f"{kind}/im{n}"]
        assert size == (16, 12)
        expected = Image.fromarray(noise(n, 30, 40)).resize((16, 12), Image.Resampling.NEAREST)
        assert np.array_equal(values, np.asarray(expected))
    listed = tmp_path / "images" / "list.csv"
    listed.write_text("path,label\na/im0.jpg,3\nb/im2.jpg,4\n")
    make(listed, tmp_path / "listed", f"--maps={maps}")
    assert np.array_equal(read_back(tmp_path / "listed")["b/im2"][1], noise(2, 30, 40))
    cases = {"nowhere": "is not a folder", "out": "holds no map of any image"}
    for name, message in cases.items():
        folder = tmp_path / name
        assert main([str(images), str(tmp_path / "new"), f"--maps={folder}"]) == 2
        assert message in capsys.readouterr().err


def test_images_with_broken_maps_are_left_out_and_named(scenes, tmp_path):
    (scenes / "im1.seg.png").write_bytes(png(noise(0, 40, 30)))
    (scenes / "im2.seg.png").write_bytes(b"")
    (scenes / "im3.seg.png").write_bytes(picture(3))
    make(scenes, tmp_path / "out")
    assert sorted(read_back(tmp_path / "out")) == ["im0", "im4", "im5", "im6"]
    reasons = (tmp_path / "out" / "left_out.csv").read_text()
    assert 'im1.jpg,"the map cannot be used: the map has 30 x 40 pixels, but the upright image has 40 x 30"' in reasons
    assert "im2.jpg,the map cannot be used: the file is empty" in reasons
    assert "im3.jpg,the map cannot be used: a damaged PNG" in reasons


def test_check_shards_counts_maps_and_names_bad_ones(scenes, write_tar, tmp_path, capsys):
    make(scenes, tmp_path / "out")
    assert check([str(tmp_path / "out"), f"--output={tmp_path}/report.json"]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["mapped"], report["bad_maps"]) == (6, [])
    assert "maps          6 images" in capsys.readouterr().out
    members = [("a.jpg", picture(0, (40, 30))), ("a.seg.png", png(noise(0, 30, 41))), ("b.jpg", picture(1, (40, 30)))]
    path = write_tar("bad.tar", [*members, ("b.seg.png", png(np.full((30, 40), 255, np.uint8)))])
    assert check([path, f"--output={tmp_path}/report.json"]) == 1
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["bad_maps"] == ["bad.tar/a: the map has 41 x 30 pixels, but the upright image has 40 x 30"]


@pytest.mark.parametrize("kind", ["depth.png", "depth.npy"])
def test_depth_maps_go_through_make_shards_and_check_shards(photos, tmp_path, capsys, kind):
    values = [500 * rng(n).integers(0, 9, (30, 40)).astype(np.uint16) for n in range(3)]
    values[2][:] = 0
    encode = png if kind == "depth.png" else array
    files = {f"im{n}.jpg": picture(n, (40, 30)) for n in range(4)}
    scenes = photos(files | {f"im{n}.{kind}": encode(one) for n, one in enumerate(values)})
    make(scenes, tmp_path / "out", "--resize=12")
    assert "4 images, 0 with a label, 3 with a map" in capsys.readouterr().out
    opened = open_shards(str(tmp_path / "out"))
    for number in range(4):
        name = opened.name(number).partition("/")[2]
        if name != "im3":
            expected = Image.fromarray(values[int(name[2])]).resize((16, 12), Image.Resampling.NEAREST)
            assert np.array_equal(decode_depth(opened.target(number)), expected)
    assert check([str(tmp_path / "out"), f"--output={tmp_path}/report.json"]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["mapped"] == 3
    (scenes / "im3.seg.png").write_bytes(png(noise(0, 30, 40, below=5)))
    make(scenes, tmp_path / "both", status=2)
    assert f"maps with the suffixes .seg.png and .{kind}" in capsys.readouterr().err


def test_a_parallel_folder_holds_depth_maps(photos, tmp_path):
    images = photos({"a/im0.jpg": picture(0, (40, 30))}, "images")
    for ending, content in (("png", png(np.full((30, 40), 700, np.uint16))), ("npy", array(np.full((30, 40), 0.7)))):
        maps = photos({f"a/im0.{ending}": content}, f"maps-{ending}")
        make(images, tmp_path / ending, f"--maps={maps}")
        assert open_shards(str(tmp_path / ending)).target(0) == content
