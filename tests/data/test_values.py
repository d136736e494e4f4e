"""Images whose values have more than 8 bits are decoded to the values that were stored."""

import struct
import zlib
from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image

from tessera.data.decode import ImageError, Picture, decode, stored_type
from tessera.data.values import fitted

LEVELS = np.arange(4096, dtype=np.uint16).reshape(64, 64)
"""Each value of a 12-bit camera, once."""
RNG = np.random.default_rng(0)


def png(values: np.ndarray, **chunks: bytes) -> bytes:
    """Encode values (H, W, bands) uint16 as a PNG, written here because Pillow writes no 16-bit colours."""
    height, width, bands = values.shape

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 16, {1: 0, 2: 4, 3: 2, 4: 6}[bands], 0, 0, 0)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    parts = [chunk(b"IHDR", header), *(chunk(name.encode(), data) for name, data in chunks.items())]
    return b"\x89PNG\r\n\x1a\n" + b"".join([*parts, chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")])


def pixels(image, channels: int, pixel_type: str, **options) -> np.ndarray:
    """Decode an image to (H, W, C)."""
    found = decode(image, channels=channels, pixel_type=pixel_type, **options)  # pyright: ignore
    assert found.dtype == getattr(torch, pixel_type)
    return found.permute(1, 2, 0).numpy()


@pytest.mark.parametrize("bands", [1, 3, 4])
def test_16_bit_pngs_keep_every_level(bands):
    values = np.stack([np.roll(LEVELS, 5 * band, 1) for band in range(bands)], axis=2)
    assert np.array_equal(pixels(png(values), bands, "uint16"), values)
    assert np.array_equal(pixels(png(values), bands, "float32"), values)
    assert np.array_equal(pixels(png(values), bands, "int16"), values)
    assert stored_type(png(values)) == "uint16"


def test_16_bit_pngs_with_alpha_show_a_white_background():
    values = RNG.integers(0, 65536, (9, 8, 4), dtype=np.uint16)
    color, alpha = values[..., :3].astype(np.float64), values[..., 3:] / 65535
    wanted = np.rint(color * alpha + 65535 * (1 - alpha))
    assert np.array_equal(pixels(png(values), 3, "uint16"), wanted)
    gray = values[..., 2:]  # gray and alpha
    wanted = np.rint(gray[..., :1] * alpha + 65535 * (1 - alpha))
    assert np.array_equal(pixels(png(gray), 1, "uint16"), wanted)
    assert np.array_equal(pixels(png(gray), 4, "uint16"), np.concatenate([gray[..., [0, 0, 0]], gray[..., 1:]], 2))


def test_gray_and_rgb_are_converted_in_the_type():
    values = RNG.integers(0, 65536, (9, 8, 3), dtype=np.uint16)
    gray = values.astype(np.float64) @ [0.299, 0.587, 0.114]
    assert np.abs(pixels(png(values), 1, "uint16")[..., 0] - gray).max() <= 0.51
    assert np.array_equal(pixels(png(values[..., :1]), 3, "uint16"), values[..., [0, 0, 0]])
    assert np.array_equal(pixels(png(values), 4, "uint16")[..., 3], np.full((9, 8), 65535))


def test_a_transparent_value_of_16_bit_gray_is_white():
    values = np.array([[[5], [6]], [[7], [5]]], dtype=np.uint16)
    found = pixels(png(values, tRNS=struct.pack(">H", 5)), 1, "uint16")
    assert found[..., 0].tolist() == [[65535, 6], [7, 65535]]


def test_16_bit_colours_are_turned_upright():
    values = RNG.integers(0, 65536, (4, 6, 3), dtype=np.uint16)
    exif = Image.Exif()
    exif[0x0112] = 6  # turn clockwise
    found = pixels(png(values, eXIf=exif.tobytes().removeprefix(b"Exif\0\0")), 3, "uint16")
    assert np.array_equal(found, np.rot90(values, -1))


@pytest.mark.parametrize("bands", [1, 3])
def test_truncated_16_bit_pngs_are_refused(bands):
    whole = png(RNG.integers(0, 65536, (64, 64, bands), dtype=np.uint16))
    with pytest.raises(ImageError, match=r"damaged (PNG|image)"):
        decode(whole[: len(whole) // 2], channels=bands, pixel_type="uint16")


@pytest.mark.parametrize(
    ("mode", "dtype", "pixel_type"),
    [("I;16", np.uint16, "uint16"), ("I", np.int32, "int16"), ("I", np.int32, "float32"), ("F", np.float32, "float32")],
)
def test_pillow_images_keep_their_values(mode, dtype, pixel_type):
    values = (np.arange(12).reshape(3, 4) * 300 - (0 if dtype == np.uint16 else 900)).astype(dtype)
    image = Image.fromarray(values)
    assert image.mode == mode
    assert np.array_equal(pixels(image, 1, pixel_type)[..., 0], values)
    assert stored_type(image) == {"I": "int16"}.get(mode, pixel_type)


@pytest.mark.parametrize("dtype", ["uint16", "int16", "float32", "int32", "float16"])
def test_arrays_and_tensors_keep_their_values(dtype):
    values = np.arange(5 * 6 * 7).reshape(5, 6, 7).astype(dtype)
    assert np.array_equal(pixels(values, 7, "float32"), values.astype(np.float32))
    tensor = torch.from_numpy(values.transpose(2, 0, 1).copy())
    assert np.array_equal(pixels(tensor, 7, "float32"), values.astype(np.float32))


@pytest.mark.parametrize(
    ("values", "pixel_type"),
    [
        (np.array([[-1, 2]], dtype=np.int16), "uint16"),
        (np.array([[1, 40000]], dtype=np.uint16), "int16"),
        (np.array([[1, 2**24 + 1]], dtype=np.int32), "float32"),
        (np.array([[0.5, 2]], dtype=np.float32), "int16"),
        (np.array([[0.5, 2]], dtype=np.float32), "uint8"),
        (np.array([[1, 2]], dtype=np.uint8), "uint16"),
    ],
)
def test_values_that_a_type_does_not_hold_are_refused_by_both_names(values, pixel_type):
    with pytest.raises(ImageError, match=f"type {values.dtype} in a data set of the type {pixel_type}"):
        decode(values, channels=1, pixel_type=pixel_type)


def test_float64_is_rounded_to_float32():
    values = np.random.default_rng(0).normal(0, 1, (4, 5, 2))
    assert np.array_equal(fitted(values, "float32"), values.astype(np.float32))


def test_8_bit_files_do_not_mix_with_wider_types():
    file = BytesIO()
    Image.new("RGB", (8, 8)).save(file, "JPEG")
    with pytest.raises(ImageError, match=r"type uint8 in a data set of the type uint16.* data\.pixel_type uint8"):
        decode(file.getvalue(), pixel_type="uint16")
    assert stored_type(file.getvalue()) == "uint8"


def test_wide_integers_have_a_type_that_no_dark_image_changes():
    kinds = {(0, 9): "uint16", (0, 65535): "uint16", (-9, 9): "int16", (0, 65536): "float32"}
    for values, wanted in kinds.items():
        assert stored_type(np.array([values], dtype=np.int64)) == wanted


def test_pixels_without_data_get_the_fill_of_their_band():
    values = np.arange(24, dtype=np.float32).reshape(3, 4, 2)
    values[0, 0, 0], values[1, 2, 1], values[2, 3, 0] = np.nan, -9999, np.inf
    picture = Picture(values, channels=2, pixel_type="float32", nodata=-9999, fill=(0.25, 7.5))
    wanted = values.copy()
    wanted[0, 0, 0] = wanted[2, 3, 0] = 0.25
    wanted[1, 2, 1] = 7.5
    assert np.array_equal(picture.pixels().permute(1, 2, 0).numpy(), wanted)
    assert picture.absent is not None
    assert picture.absent.sum() == 3
    assert np.isnan(values[0, 0, 0])  # the image of the user stays as it is


def test_nodata_may_lie_outside_of_the_type():
    values = np.array([[[-9999], [7]]], dtype=np.int32)
    assert pixels(values, 1, "uint16", nodata=-9999, fill=(3.0,)).tolist() == [[[3], [7]]]


@pytest.mark.parametrize("pixel_type", ["uint8", "uint16"])
def test_images_without_data_are_refused(pixel_type):
    with pytest.raises(ImageError, match="no pixel of the image holds data"):
        decode(np.full((4, 4), 5, dtype=pixel_type), channels=1, pixel_type=pixel_type, nodata=5, fill=(0.0,))


def test_jpegs_cannot_mark_pixels():
    file = BytesIO()
    Image.new("RGB", (8, 8)).save(file, "JPEG")
    with pytest.raises(ImageError, match=r"a JPEG in a data set with data\.nodata"):
        decode(file.getvalue(), nodata=0)
