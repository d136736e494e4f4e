"""Images of one to many channels, from the file to the normalised batch."""

import builtins
import struct
from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image

from tessera.data.augment import to_model_input
from tessera.data.crops import RandomCrop, RandomCropConfig
from tessera.data.decode import ImageError, Picture, decode
from tessera.data.masking import MaskedCrop
from tessera.encoders.base import Preprocessing
from tests.data.batches import pixels, saved, tiff, training_batches

RNG = np.random.default_rng(0)
COLORS = RNG.integers(0, 256, (25, 35, 4), dtype=np.uint8)


def array(encoded: bytes, channels: int) -> np.ndarray:
    """(H, W, C)."""
    tensor = decode(encoded, channels=channels)
    assert tensor.dtype == torch.uint8
    assert tensor.permute(1, 2, 0).is_contiguous()  # the memory order that resizing takes
    return tensor.permute(1, 2, 0).numpy()


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_alpha_is_kept_in_four_channels_and_opaque_without(kind):
    lossless = {"lossless": True, "exact": True} if kind == "WEBP" else {}
    assert np.array_equal(array(saved(COLORS, kind, **lossless), 4), COLORS)
    opaque = array(saved(COLORS[..., :3], kind, **lossless), 4)
    assert np.array_equal(opaque[..., :3], COLORS[..., :3])
    assert (opaque[..., 3] == 255).all()


@pytest.mark.parametrize("orientation", [1, 6])
@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}, {"keep_rgb": True}])
def test_a_jpeg_in_one_and_four_channels(options, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    y, x = np.mgrid[0:25, 0:35]
    smooth = np.stack([128 + 90 * np.sin(x / 9 + c) * np.cos(y / 7 - c) for c in range(3)], axis=2).astype(np.uint8)
    encoded = saved(smooth, "JPEG", quality=95, exif=exif, **options)
    four = array(encoded, 4)
    assert np.array_equal(four[..., :3], array(encoded, 3))
    assert (four[..., 3] == 255).all()
    gray = np.asarray(Image.fromarray(array(encoded, 3)).convert("L")).astype(int)
    assert np.abs(array(encoded, 1)[..., 0] - gray).max() <= 2
    stored = saved(COLORS[..., 0], "JPEG", exif=exif)
    assert np.array_equal(array(stored, 1), array(stored, 3)[..., :1])


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("options", [{}, {"keep_rgb": True}, {"progressive": True}])
def test_pillow_decodes_jpegs_as_simplejpeg_does(channels, options, monkeypatch):
    encoded = saved(COLORS[..., :3], "JPEG", **options)
    picture = Picture(encoded, channels=channels)
    found = [picture.pixels(shrink) for shrink in (1, 2, 4, 8)]
    monkeypatch.setattr(Picture, "_plain_pixels", lambda *_: None)
    assert all(torch.equal(picture.pixels(shrink), one) for shrink, one in zip((1, 2, 4, 8), found, strict=True))


@pytest.mark.parametrize("shrink", [2, 4, 8])
@pytest.mark.parametrize("channels", [1, 4])
def test_a_jpeg_at_a_fraction_of_its_size(channels, shrink):
    encoded = saved(np.full((64, 96, 3), (200, 100, 50), dtype=np.uint8), "JPEG", quality=95)
    picture = Picture(encoded, channels=channels)
    small = picture.pixels(picture.fraction(shrink))
    assert small.shape == (channels, 64 // shrink, 96 // shrink)
    assert (small.int() - picture.pixels()[:, :1, :1].int()).abs().max() <= 2


def test_gray_is_the_luminance_over_white():
    gray = np.asarray(Image.fromarray(COLORS[..., :3]).convert("L"))
    assert np.array_equal(array(saved(COLORS[..., :3], "PNG"), 1)[..., 0], gray)
    assert np.array_equal(array(saved(COLORS[..., 0], "PNG"), 1)[..., 0], COLORS[..., 0])
    over_white = Image.fromarray(array(saved(COLORS, "PNG"), 3)).convert("L")
    assert np.array_equal(array(saved(COLORS, "PNG"), 1)[..., 0], np.asarray(over_white))


def test_sixteen_bit_gray_is_divided_by_257():
    values = RNG.integers(0, 65536, (9, 11)).astype(np.uint16)
    expected = np.round(values / 257).astype(np.uint8)
    encoded = saved(values, "PNG")
    assert np.array_equal(array(encoded, 1)[..., 0], expected)
    assert np.array_equal(array(encoded, 3), expected[..., None].repeat(3, 2))
    assert np.array_equal(array(encoded, 4)[..., 3], np.full((9, 11), 255))
    assert np.array_equal(array(tiff(values), 1)[..., 0], expected)


@pytest.mark.parametrize("encode", [lambda values: saved(values, "PNG"), tiff])
def test_dark_sixteen_bit_images_are_refused(encode):
    values = RNG.integers(0, 4096, (9, 11)).astype(np.uint16)  # a camera of 12 bits
    values[0, 0] = 4095
    with pytest.raises(
        ImageError, match=r"largest value is 4095 of 65535, so at most 17 of 256 gray levels .*Scale the values"
    ):
        array(encode(values), 1)
    for accident in (4096, 65535):  # a single bright pixel, or one without a measurement, decides nothing
        values[0, 0] = accident
        with pytest.raises(ImageError, match=r"at most 17 of 256 gray levels .*Scale the values"):
            array(encode(values), 1)
    values[0, :2] = 4096
    assert np.array_equal(array(encode(values), 1)[..., 0], np.round(values / 257).astype(np.uint8))
    black_and_white = np.where(values > 2000, 65535, 0).astype(np.uint16)
    assert np.array_equal(array(encode(black_and_white), 1)[..., 0], black_and_white // 257)
    for blank in (0, 300):
        assert np.array_equal(np.unique(array(encode(np.full_like(values, blank)), 1)), [round(blank / 257)])


@pytest.mark.parametrize("compression", [None, "lzw", "deflate", "adobe_deflate", "packbits"])
@pytest.mark.parametrize("layout", ["interleaved", "separate", "tiled"])
@pytest.mark.parametrize("bits", [8, 16])
def test_bands_of_a_tiff(bits, layout, compression):
    values = RNG.integers(0, 2**bits, (25, 35, 12)).astype(f"uint{bits}")
    expected = values if bits == 8 else np.round(values / 257).astype(np.uint8)
    separate = layout == "separate"
    options = {"tile": (16, 16)} if layout == "tiled" else {"rowsperstrip": 7}
    if compression in ("lzw", "deflate"):
        options["predictor"] = True
    encoded = tiff(
        np.moveaxis(values, 2, 0) if separate else values,
        photometric="minisblack", planarconfig="separate" if separate else "contig", compression=compression, **options,
    )  # fmt: skip
    assert np.array_equal(array(encoded, 12), expected)
    for channels in (1, 3, 4, 11, 13):
        with pytest.raises(ImageError, match="12 bands"):
            decode(encoded, channels=channels)


@pytest.mark.parametrize("byteorder", ["<", ">"])
@pytest.mark.parametrize("bigtiff", [False, True])
def test_gray_and_colour_tiffs_are_images_like_others(byteorder, bigtiff):
    options = {"byteorder": byteorder, "bigtiff": bigtiff}
    color = tiff(COLORS[..., :3], photometric="rgb", **options)
    alpha = tiff(COLORS, photometric="rgb", extrasamples=["unassalpha"], **options)
    gray = tiff(COLORS[..., 0], **options)
    gray_alpha = tiff(COLORS[..., :2], photometric="minisblack", planarconfig="contig", extrasamples=["unassalpha"])
    for encoded, values in ((color, COLORS[..., :3]), (alpha, COLORS), (gray, COLORS[..., 0])):
        for channels in (1, 3, 4):
            assert np.array_equal(array(encoded, channels), array(saved(values, "PNG"), channels))
    assert np.array_equal(array(gray_alpha, 2), COLORS[..., :2])
    png = saved(Image.merge("LA", [Image.fromarray(COLORS[..., band]) for band in (0, 1)]), "PNG")
    for channels in (1, 3, 4):
        assert np.array_equal(array(gray_alpha, channels), array(png, channels))
    infrared = tiff(COLORS, photometric="rgb", extrasamples=["unspecified"])
    assert np.array_equal(array(infrared, 4), COLORS)
    with pytest.raises(ImageError, match="4 bands cannot be converted to 3 channels"):
        decode(infrared)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_tiff_is_turned_upright(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    expected = array(saved(COLORS[..., :3], "PNG", exif=exif), 3)
    encoded = tiff(COLORS[..., :3], photometric="rgb", extratags=[(274, "H", 1, orientation, True)])
    assert np.array_equal(array(encoded, 3), expected)
    picture = Picture(encoded)
    assert picture.size == expected.shape[:2]
    assert picture.fraction(8) == 1


SMOOTH = Image.fromarray(COLORS[:9, :13, :3]).resize((35, 25), Image.Resampling.BICUBIC)


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("RGB", {"compression": "jpeg"}),
        ("L", {"compression": "jpeg"}),
        ("CMYK", {"compression": "jpeg"}),
        ("YCbCr", {"compression": "jpeg", "quality": 90}),
        ("CMYK", {}),
        ("P", {}),
        ("P", {"compression": "tiff_lzw"}),
        ("PA", {}),
        ("1", {}),
        ("1", {"compression": "group3"}),
        ("1", {"compression": "group4"}),
        ("1", {"compression": "tiff_ccitt"}),
        ("L", {"tiffinfo": {262: 0}}),  # inverted
    ],
)
def test_other_kinds_of_tiffs_have_pillows_pixels(mode, options):
    image = SMOOTH.convert("P").convert("PA") if mode == "PA" else SMOOTH.convert(mode)
    if mode == "PA":
        image.putalpha(Image.fromarray(COLORS[..., 3]))
    encoded = saved(image, "TIFF", **options)
    check_against_pillow(encoded)
    turned = saved(image, "TIFF", **{**options, "tiffinfo": {**options.get("tiffinfo", {}), 274: 6}})
    assert np.array_equal(array(turned, 4), array(encoded, 4).swapaxes(0, 1)[:, ::-1])
    with pytest.raises(ImageError, match="cannot be converted to 7 channels"):
        decode(encoded, channels=7)


def check_against_pillow(encoded: bytes) -> None:
    stored = Image.open(BytesIO(encoded)).convert("RGBA")
    over_white = Image.alpha_composite(Image.new("RGBA", stored.size, "white"), stored).convert("RGB")
    for channels, expected in ((1, over_white.convert("L")), (3, over_white), (4, stored)):
        assert np.array_equal(array(encoded, channels).squeeze(), np.asarray(expected))


@pytest.mark.parametrize("bits", [8, 16])
def test_tiffs_with_premultiplied_alpha_have_pillows_pixels(bits):
    premultiplied = np.asarray(Image.fromarray(COLORS).convert("RGBa")).astype(f"uint{bits}") * (
        1 if bits == 8 else 257
    )
    check_against_pillow(tiff(premultiplied, photometric="rgb", extrasamples=["assocalpha"], compression="lzw"))
    if bits == 16:
        with pytest.raises(ImageError, match="at most 16 of 256"):
            decode(tiff(premultiplied // 17, photometric="rgb", extrasamples=["assocalpha"]))


def pages(*values: np.ndarray, **options) -> bytes:
    """TIFF with one page for each array (H, W, 3) or (H, W). The option `subfiletype` has one value for each page."""
    file = BytesIO()
    kinds = options.get("subfiletype", [0] * len(values))
    with pytest.importorskip("tifffile").TiffWriter(file) as written:
        for one, kind in zip(values, kinds, strict=True):
            written.write(one, photometric="rgb" if one.ndim == 3 else "minisblack", subfiletype=kind, metadata=None)
    return file.getvalue()


BANDS = np.ascontiguousarray(COLORS[..., :3].transpose(2, 0, 1))


@pytest.mark.parametrize(
    "encoded",
    [
        tiff(BANDS, photometric="minisblack"),
        tiff(BANDS, photometric="minisblack", metadata=None),
        tiff(BANDS, photometric="minisblack", truncate=True),  # one header for three planes
        tiff(BANDS, imagej=True, metadata={"axes": "CYX", "mode": "composite"}),
        tiff(BANDS, imagej=True, metadata={"axes": "ZYX"}, truncate=True),
        tiff(BANDS, ome=True, photometric="minisblack", metadata={"axes": "CYX"}),
        tiff(BANDS, ome=True, photometric="minisblack", metadata={"axes": "ZYX"}, compression="lzw"),
        pages(COLORS[..., :3], COLORS[..., :3], COLORS[..., :3], subfiletype=[2, 2, 2]),
        pages(COLORS[..., :3], COLORS[::2, ::2, :3], COLORS[1:, :, :3], COLORS[::2, ::2, :3], subfiletype=[0, 0, 0, 1]),
    ],
)
def test_several_pages_are_refused(encoded):
    for channels in (1, 3, 4):
        with pytest.raises(ImageError, match=r"with 3 pages, .* set data.channels to their number"):
            decode(encoded, channels=channels)


def test_pages_as_bands_are_read_as_the_error_advises():
    encoded = tiff(BANDS, photometric="minisblack", planarconfig="separate")
    assert np.array_equal(array(encoded, 3), COLORS[..., :3])


def test_smaller_copies_and_masks_of_an_image_are_skipped():
    full, small, mask = COLORS[..., :3], COLORS[::4, ::4, :3], COLORS[..., 3] > 99
    for images, kinds in (
        ([small, full], [1, 0]),
        ([full, small, small[::2, ::2]], [0, 1, 1]),
        ([full, mask, small, mask[::4, ::4]], [0, 4, 1, 5]),
        ([full], [1]),
        ([full], [2]),
    ):
        assert np.array_equal(array(pages(*images, subfiletype=kinds), 3), full)
    with pytest.raises(ImageError, match="2 pages are all marked"):
        decode(pages(small, small, subfiletype=[1, 1]))


@pytest.mark.parametrize("channels", [2, 5])
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_channels_that_an_image_cannot_have(kind, channels):
    with pytest.raises(ImageError, match=f"cannot be converted to {channels} channels"):
        Picture(saved(COLORS[..., :3], kind), channels=channels)


def patched(encoded: bytes, tag: int, value: int) -> bytes:
    """Little-endian TIFF with another value of a tag."""
    (start,) = struct.unpack_from("<I", encoded, 4)
    (count,) = struct.unpack_from("<H", encoded, start)
    for entry in range(start + 2, start + 2 + 12 * count, 12):
        if struct.unpack_from("<H", encoded, entry)[0] == tag:
            return encoded[: entry + 2] + struct.pack("<HII", 4, 1, value) + encoded[entry + 12 :]
    raise KeyError(tag)


TALL_FAX = saved(Image.new("1", (64, 64)), "TIFF", compression="group4")
TALL_FAX = patched(patched(TALL_FAX, 257, 1000), 278, 1000)
TALL_JPEG = saved(Image.new("L", (64, 64)), "TIFF", compression="jpeg")
TALL_JPEG = patched(patched(patched(TALL_JPEG, 257, 1561), 278, 1561), 279, 150)


@pytest.mark.parametrize(
    ("encoded", "reason"),
    [
        (tiff(np.zeros((8, 8), np.float32)), "32 bits per band"),
        (tiff(np.zeros((8, 8), np.int16)), "int16"),
        (tiff(np.zeros((8, 8), np.uint8), compression="zstd"), "compression <COMPRESSION.ZSTD.*Save it with LZW"),
        (tiff(COLORS[..., :3], photometric="cielab"), "CIELAB"),
        (tiff(COLORS[..., :2], photometric="minisblack", planarconfig="contig", compression="jpeg"), "2 bands, which"),
        (tiff(np.zeros((8, 8, 8), np.uint8), volumetric=True, tile=(16, 16, 16)), "depth|pixels"),
        (tiff(COLORS[..., 0])[:-300], "damaged"),
        (tiff(COLORS[..., 0], compression="deflate")[:-60], "damaged"),
        (tiff(COLORS[..., 0], compression="lzw")[:-60], "damaged"),
        (tiff(COLORS[..., 0])[:20], "damaged"),
        (b"II*\0" + b"\xff" * 100, "damaged"),
        (patched(tiff(COLORS[..., 0]), 257, 10**6), "pixels are more than"),
        (patched(tiff(COLORS[..., 0], tile=(16, 16)), 323, 2**24), "pixels, more than the limit"),
        (patched(tiff(COLORS[..., 0]), 277, 60_000), "60000 bands"),
        (patched(tiff(COLORS[..., 0]), 257, 0), "35 x 0 pixels"),
        (TALL_FAX, "cannot hold 64000 pixels"),
        (TALL_JPEG, "cannot hold 99904 pixels"),
        (patched(saved(Image.new("CMYK", (64, 64)), "TIFF", compression="jpeg"), 278, 2**31), "2147483648 rows"),
    ],
)
def test_tiffs_that_are_not_read_say_why(encoded, reason):
    with pytest.raises(ImageError, match=reason):
        decode(encoded, max_pixels=100_000)


def test_a_strip_that_inflates_is_refused():
    """Deflate turns 16 kB into 16 MB. The decoder stops once the strip has the bytes that it should have."""
    encoded = patched(tiff(np.zeros((4096, 4096), np.uint8), compression="deflate", rowsperstrip=4096), 257, 4)
    with pytest.raises(ImageError, match="INSUFFICIENT_SPACE"):
        decode(encoded, channels=1, max_pixels=4 * 4096)


def test_damaged_tiffs_raise_image_errors():
    good = [
        tiff(COLORS, photometric="rgb", compression=compression, **options)
        for compression in (None, "lzw", "deflate", "packbits")
        for options in ({}, {"tile": (16, 16)})
    ]
    outcomes = {True: 0, False: 0}
    for trial in range(600):
        encoded = bytearray(good[trial % len(good)])
        for place in RNG.integers(0, 200 if trial % 2 else len(encoded), 2):
            encoded[place] = RNG.integers(0, 256)
        try:
            outcomes[True] += decode(bytes(encoded), channels=4, max_pixels=100_000).shape[0] == 4
        except ImageError as error:
            outcomes[False] += bool(str(error))
    assert sum(outcomes.values()) == 600
    assert min(outcomes.values()) > 30


def test_a_tiff_needs_the_extra_package(monkeypatch):
    encoded, plain = tiff(COLORS[..., 0]), builtins.__import__

    def without(name, *args, **kwargs):
        if name == "tifffile":
            raise ImportError(name=name)
        return plain(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImageError, match=r"need the package tifffile. Install it .* 'tessera-ssl\[tiff\]'"):
        decode(encoded)
    assert decode(saved(COLORS, "PNG")).shape == (3, 25, 35)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("channels", [1, 4, 5])
def test_batches_of_other_channels(write_tar, channels, workers):
    """All pixels of an image have one colour, so every crop has this colour."""
    colors = RNG.integers(0, 256, (16, channels), dtype=np.uint8)
    images = [np.broadcast_to(color, (20, 30, channels)) for color in colors]
    files = [
        (f"{n:02d}.png", saved(image.squeeze(), "PNG"))
        if channels < 5
        else (f"{n:02d}.tif", tiff(image, photometric="minisblack", planarconfig="contig"))
        for n, image in enumerate(images)
    ]
    preprocessing = Preprocessing(tuple(np.linspace(0.2, 0.6, channels)), tuple(np.linspace(0.1, 0.3, channels)))
    transform = MaskedCrop(RandomCrop(RandomCropConfig(size=8)), 4, "random", 0.5)
    batches = training_batches(
        write_tar("a.tar", files), transform, batch_size=8, seed=0, steps=2, workers=workers,
        preprocessing=preprocessing,
    )  # fmt: skip
    seen = []
    for batch in batches:
        assert not batch.skipped
        assert batch.preprocessing == preprocessing
        (view,) = pixels(to_model_input(batch))
        assert view.shape == (8, channels, 8, 8)
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (preprocessing.mean, preprocessing.std))
        for key, image in zip(batch.keys, view, strict=True):
            number = int(key.rpartition("/")[2])
            expected = torch.from_numpy(colors[number]).view(-1, 1, 1) / 255
            torch.testing.assert_close(image, ((expected - mean) / std).float().expand(-1, 8, 8), rtol=0, atol=1e-5)
            seen.append(number)
    assert sorted(seen) == list(range(16))
