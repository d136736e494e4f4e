"""Hostile headers of images: huge sides, missing pixels, and files that take parsers quadratic time."""

import io
import struct
import time
import tracemalloc

import numpy as np
import pytest
from PIL import Image

from tessera.data.decode import ImageError, Picture, decode
from tessera.data.headers import MAX_SIDE, MOST_SCANS, holds_all_pixels, read_jpeg
from tessera.data.maps import decode_depth, decode_map
from tests.data.batches import chunk, png, saved, tiff
from tests.data.shards.batches import train


def large(jpeg, side=13_000):
    """A JPEG of 40 x 64 pixels whose header says `side` x `side`, which are fewer than the most pixels."""
    return jpeg.replace(struct.pack(">HH", 40, 64), struct.pack(">HH", side, side), 1)


NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 64, 3), dtype=np.uint8))
JPEG = saved(NOISE, "JPEG")
HOSTILE = {
    "wide": png(89_478_486, 1),
    "high, without pixels": png(1, 178_956_970),
    "a side above the limit": png(MAX_SIDE + 1, 1, bytes(3 * MAX_SIDE + 4)),
    "large, without pixels": png(13_000, 13_000),
    "large JPEG of few bytes": large(JPEG),
    "arithmetic coding": large(JPEG).replace(b"\xff\xc0", b"\xff\xc9", 1) + bytes(70_000),
    "progressive arithmetic coding": large(JPEG).replace(b"\xff\xc0", b"\xff\xca", 1) + bytes(70_000),
    "scans of many pixels": large(saved(NOISE, "JPEG", progressive=True))
    + b"\xff\xda\0\x08\x01\x01\0\x01\x05\0" * 12
    + bytes(400_000),
    "large CMYK JPEG": large(saved(NOISE.convert("CMYK"), "JPEG")),
    "large WebP": bytes.fromhex("524946461a000000574542505650384c0e0000002ffebfff0f071011fd0f4444ff03"),  # 16,383²
    "fill bytes": b"\xff\xd8" + b"\xff" * 2**24,
    "fill bytes before a good frame": JPEG[:2] + b"\xff" * 2**24 + JPEG[2:],
    "junk": b"\xff\xd8\xff" + bytes(2**24) + JPEG[2:],
    "stuffed bytes": b"\xff\xd8\xff\0" + b"\xff\0" * 2**23,
    "empty segments": JPEG[:2] + b"\xff\xfe\0\x02" * 2**22 + JPEG[2:],
    "EXIF segments": JPEG[:2] + (b"\xff\xe1\xff\xffExif\0\0" + bytes(65527)) * 300 + JPEG[2:],
    "scans": saved(NOISE, "JPEG", progressive=True).replace(b"\xff\xd9", b"\xff\xda\0\x08\x01\x01\0\x01\x05\0" * 10**5),
    "empty chunks": png(40, 64, bytes(64 * 121), extra=chunk(b"prVt", b"") * 2**20),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("channels", [3, 4])
def test_hostile_headers_are_corrupt_at_once(name, channels):
    start = time.process_time()
    tracemalloc.start()
    with pytest.raises(ImageError):
        decode(HOSTILE[name], channels=channels)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert time.process_time() - start < 2
    assert peak < 2**26


@pytest.mark.parametrize("rows", [0, 1, 20, 39])
@pytest.mark.parametrize("interlaced", [0, 1])
def test_a_png_whose_pixel_data_ends_early_is_corrupt(rows, interlaced):
    raw = b"".join(b"\0" + bytes(range(1, 193)) for _ in range(40))
    assert holds_all_pixels(png(64, 40, raw))
    assert decode(png(64, 40, raw)).shape == (3, 40, 64)
    with pytest.raises(ImageError, match=r"truncated|cannot hold|unrecognized"):
        decode(png(64, 40, raw[: rows * 193], interlaced=interlaced))


def test_a_black_png_is_a_good_image():
    black = Image.new("L", (300, 200))
    assert not decode(saved(black, "PNG")).any()
    assert not decode_map(saved(black, "PNG")).any()
    interlaced = b"".join(  # the seven passes of 5 x 3 pixels, each row with its filter byte
        b"\0" + bytes([value] * columns) for rows, columns, value in
        [(1, 1, 1), (1, 1, 2), (0, 0, 0), (1, 1, 4), (1, 3, 5), (2, 2, 6), (1, 5, 7)] for _ in range(rows)
    )  # fmt: skip
    assert decode(png(5, 3, interlaced, color=0, interlaced=1))[0, 1].tolist() == [7] * 5
    with pytest.raises(ImageError, match="truncated"):
        decode(png(5, 3, interlaced[:-1], color=0, interlaced=1))


def test_a_map_without_pixel_data_is_damaged():
    for size in ((1, 178_956_970), (40, 30)):
        with pytest.raises(ImageError):
            decode_map(png(*size, b"\0" * 41, color=0))


def test_headers_of_good_jpegs_pass():
    for options in ({}, {"progressive": True}, {"comment": b"x" * 60_000}, {"icc_profile": bytes(2**20)}):
        header = read_jpeg(saved(NOISE, "JPEG", **options))
        assert (header.width, header.height, header.components) == (64, 40, 3)
    many = JPEG[:2] + b"\xff\xfe\0\x02" * 4000 + JPEG[2:]
    assert decode(many).shape == (3, 40, 64)
    assert saved(NOISE, "JPEG", progressive=True).count(b"\xff\xda") < MOST_SCANS


def test_conversion_in_parts_gives_the_same_pixels(monkeypatch):
    rgba = Image.fromarray(np.random.default_rng(1).integers(0, 256, (70, 50, 4), dtype=np.uint8))
    palette = saved(NOISE.quantize(16), "PNG", transparency=3)
    deep = saved(Image.fromarray(np.arange(3500, dtype=np.uint16).reshape(70, 50) * 18), "PNG")
    for encoded in (saved(rgba, "PNG"), saved(rgba, "WEBP", lossless=True), palette, deep, saved(NOISE, "PNG")):
        for channels in (1, 3, 4):
            expected = decode(encoded, channels=channels)
            with monkeypatch.context() as patch:
                patch.setattr("tessera.data.decode.ROWS_AT_ONCE", 130)
                assert (decode(encoded, channels=channels) == expected).all()


def test_large_images_are_not_held_together(write_tar, monkeypatch):
    encoded = saved(Image.new("RGB", (1000, 1000), "red"), "PNG")
    path = write_tar("large.tar", [(f"{n:02d}.png", encoded) for n in range(16)])
    alive, most = 0, []
    monkeypatch.setattr("tessera.data.dataset.MOST_HELD", 2**22)
    init = Picture.__init__

    def counted(self, *args, **kwargs):
        nonlocal alive
        init(self, *args, **kwargs)
        alive += 1
        most.append(alive)

    def deleted(self):
        nonlocal alive
        alive -= 1

    monkeypatch.setattr(Picture, "__init__", counted)
    monkeypatch.setattr(Picture, "__del__", deleted, raising=False)
    assert len(list(train(path, batch_size=8, seed=0, steps=2, streams=2))) == 2
    assert len(most) == 16
    assert max(most) <= 4  # two images of 3 MB reach the limit, beside the one that the collator holds


def test_a_lack_of_memory_is_no_corrupt_image(monkeypatch):
    files = (
        JPEG,
        saved(NOISE.convert("CMYK"), "JPEG"),
        saved(NOISE, "PNG"),
        saved(NOISE, "WEBP"),
        tiff(np.asarray(NOISE)),
    )
    depth = io.BytesIO()
    np.save(depth, np.ones((4, 4)))
    places = "simplejpeg.decode_jpeg", "PIL.Image.open", "tifffile.TiffFile", "numpy.lib.format.read_magic"
    for error in (MemoryError(), ValueError("Insufficient memory (case 4)"), ValueError("out of memory error")):
        if not isinstance(error, MemoryError):
            places, depth = places[:3], io.BytesIO(saved(NOISE.convert("I;16"), "PNG"))

        def fail(*_, error=error, **__):
            raise error

        with monkeypatch.context() as patch:
            for place in places:
                patch.setattr(place, fail)
            for encoded in files:
                with pytest.raises(MemoryError):
                    decode(encoded)
            with pytest.raises(MemoryError):
                decode_depth(depth.getvalue())
