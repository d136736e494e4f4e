"""Images that are encoded again, and the names of samples."""

import io
import os

import numpy as np
from PIL import Image

from tests.data.batches import saved
from tests.data.made import make, picture, samples, shards


def decoded(image):
    return np.asarray(Image.open(io.BytesIO(image)))


def test_resize_makes_only_large_images_smaller(photos, tmp_path):
    smooth = Image.radial_gradient("L").resize((90, 60)).convert("RGB")
    folder = photos(
        {"large.png": saved(smooth, "PNG"), "tall.jpg": picture(1, (20, 80)), "small.jpg": picture(2, (30, 20))}
    )
    make(folder, tmp_path / "out", "--resize=20")
    found = {key: image for key, image, _ in samples(tmp_path / "out")}
    assert found["small"] == (folder / "small.jpg").read_bytes()
    assert found["tall"] == (folder / "tall.jpg").read_bytes()
    expected = np.asarray(smooth.resize((30, 20), Image.Resampling.BICUBIC))
    assert np.array_equal(decoded(found["large"]), expected)


def test_encoded_images_stand_upright_on_white(photos, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = picture(0, (12, 10), "PNG", exif=exif)
    clear = saved(Image.new("RGBA", (16, 16), (9, 9, 9, 0)), "PNG")
    folder = photos({"turned.png": turned, "clear.png": clear})
    make(folder, tmp_path / "out", "--resize=8")
    found = {key: decoded(image) for key, image, _ in samples(tmp_path / "out")}
    assert found["turned"].shape == (10, 8, 3)
    assert (found["clear"] > 250).all()


def test_keys_are_unique_and_without_dots(photos, tmp_path):
    names = ["a.jpg", "a.png", "a.b.jpg", "a_b.jpg", "x.y/c.jpg", "é ü.jpg", "back\\slash.jpg", f"{'k' * 200}.jpg"]
    folder = photos({name: picture(n) for n, name in enumerate(names)})
    (folder / os.fsdecode(b"\xff.jpg")).write_bytes(picture(50))
    make(folder, tmp_path / "out", "--labels=none")
    keys = [key for key, *_ in samples(tmp_path / "out")]
    assert len(set(keys)) == len(names) + 1
    assert not any("." in key or "\\" in key for key in keys)
    assert {"x_y/c", "é ü", "back_slash", "k" * 200, "_"} <= set(keys)
    assert sum(key.startswith("a-") for key in keys) == 2
    assert sum(key.startswith("a_b-") for key in keys) == 2


def test_an_image_larger_than_a_shard(photos, tmp_path):
    folder = photos({"a.jpg": picture(0), "b.png": picture(1, (200, 200), "PNG"), "c.jpg": picture(2)})
    make(folder, tmp_path / "out", "--shard_size_mb=0.02", "--shuffle=false")
    paths = shards(tmp_path / "out")
    assert [path.name for path in paths] == [f"shard-{n:06d}.tar" for n in range(len(paths))]
    assert len(samples(tmp_path / "out")) == 3
