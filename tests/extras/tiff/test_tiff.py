"""TIFF images of any number of bands, from the file to the normalised batch."""

import builtins
import io
import struct
import tarfile
from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image

from tessera.data.check_shards import main
from tessera.data.crops import RandomCrop, RandomCropConfig
from tessera.data.decode import ImageError, Picture, decode
from tessera.data.decoders import DECODERS
from tessera.data.headers import HeaderError
from tessera.data.pages import count_pages, single_page
from tessera.data.shards import open_shards, open_sources
from tessera.data.statistics import pixel_statistics
from tessera.encoders.base import Preprocessing
from tests.data.batches import saved, tiff, training_batches
from tests.data.made import make, samples, shards
from tests.data.test_channels import COLORS, RNG, array, check_batches, check_dark_images
from tests.data.test_headers import NOISE


def test_sixteen_bits_are_divided_by_257_and_dark_images_refused():
    values = RNG.integers(0, 65536, (9, 11)).astype(np.uint16)
    assert np.array_equal(array(tiff(values), 1)[..., 0], np.round(values / 257).astype(np.uint8))
    check_dark_images(tiff)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_five_bands(write_tar, workers):
    check_batches(write_tar, 5, workers)


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
        tiff(BANDS, imagej=True, metadata={"axes": "ZYX"}, truncate=True),
        tiff(BANDS, ome=True, photometric="minisblack", metadata={"axes": "ZYX"}, compression="lzw"),
        pages(COLORS[..., :3], COLORS[..., :3], COLORS[..., :3], subfiletype=[2, 2, 2]),
        pages(COLORS[..., :3], COLORS[::2, ::2, :3], COLORS[1:, :, :3], COLORS[::2, ::2, :3], subfiletype=[0, 0, 0, 1]),
    ],
)
def test_several_pages_are_refused(encoded):
    for channels in (1, 3, 4):
        with pytest.raises(ImageError, match=r"with 3 pages, .* set data.channels to their number"):
            decode(encoded, channels=channels)


STACK = RNG.integers(0, 4096, (2, 3, 4, 7, 9)).astype(np.uint16)  # T, Z, C, Y, X
IMAGES = STACK.reshape(6, 4, 7, 9).transpose(0, 2, 3, 1)


def values_of(encoded: bytes, **limits) -> np.ndarray:
    return DECODERS["tiff"].read(encoded, **{"most_bands": 16, "max_pixels": 10**6, **limits}).values


@pytest.mark.parametrize("kind", ["uint8", "uint16", "int16", "float32", "int8", "uint32", "int64", "float64"])
@pytest.mark.parametrize("byteorder", ["<", ">"])
def test_values_keep_their_type(kind, byteorder):
    values = (RNG.normal(0, 50, (23, 19, 3)) if "float" in kind else RNG.integers(0, 120, (23, 19, 3))).astype(kind)
    predictors = (False,) if kind in ("int64", "float64") else (False, 3 if "float" in kind else 2)
    for predictor in predictors:
        options = {"compression": "lzw", "predictor": predictor} if predictor else {}
        encoded = tiff(values, photometric="minisblack", planarconfig="contig", byteorder=byteorder, **options)
        found = values_of(encoded)
        assert found.dtype == np.dtype(kind)
        assert np.array_equal(found, values)


@pytest.mark.parametrize("bits", [10, 12, 14])
def test_packed_values_are_read(bits):
    values = RNG.integers(0, 2**bits, (6, 9)).astype(np.uint16)
    assert np.array_equal(values_of(tiff(values, bitspersample=bits))[..., 0], values)
    inverted = tiff(2**bits - 1 - values, bitspersample=bits, photometric="miniswhite")
    assert np.array_equal(values_of(inverted)[..., 0], values)


def test_values_that_no_type_holds_are_refused():
    for kind, value, held in (("uint32", 2**24 + 1, False), ("uint32", 2**24, True), ("float64", 1e39, False)):
        encoded = tiff(np.full((4, 4), value, kind))
        if held:
            assert decode(encoded, channels=1, pixel_type="float32").unique().item() == value
        else:
            with pytest.raises(ImageError, match=f"{kind} in a data set of the type float32"):
                decode(encoded, channels=1, pixel_type="float32")


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [("-9999", "int16", -9999), ("nan", "float32", np.nan), ("-3.4028234663852886e+38", "float32", np.finfo("f4").min)],
)
def test_the_tag_of_gdal_is_the_value_of_nodata(text, kind, value):
    encoded = tiff(np.zeros((4, 5), kind), extratags=[(42113, "s", 0, text, True)])
    found = DECODERS["tiff"].read(encoded, most_bands=1, max_pixels=100).nodata
    assert np.array_equal(found, value, equal_nan=True)
    with pytest.raises(ImageError, match="GDAL_NODATA"):
        decode(tiff(np.zeros((4, 5), np.uint8), extratags=[(42113, "s", 0, "none", True)]))


@pytest.mark.parametrize(
    ("kind", "options", "value"),
    [
        ("uint8", {"compression": "jpeg"}, 7),
        ("uint8", {"compression": "jpeg", "photometric": "rgb", "shape": (4, 5, 3)}, 7),
        ("uint8", {"photometric": "miniswhite"}, 255 - 7),
        ("uint16", {"photometric": "miniswhite"}, 65535 - 7),
        ("uint8", {"photometric": "palette", "colormap": np.zeros((3, 256), np.uint16)}, None),
    ],
)
def test_the_tag_of_gdal_counts_in_every_storage(kind, options, value):
    values = np.full(options.pop("shape", (4, 5)), 7, kind)
    encoded = tiff(values, extratags=[(42113, "s", 0, "7", True)], **options)
    found = DECODERS["tiff"].read(encoded, most_bands=3, max_pixels=100)
    assert found.nodata == value
    assert value is None or np.abs(found.values.astype(int) - value).max() <= 1


@pytest.mark.parametrize(
    "options",
    [
        {"imagej": True, "metadata": {"axes": "CYX", "mode": "composite"}},
        {"imagej": True, "metadata": {"axes": "CYX"}, "truncate": True},
        {"ome": True, "photometric": "minisblack", "metadata": {"axes": "CYX"}},
        {"photometric": "minisblack", "metadata": {"axes": "CYX"}},
        {"photometric": "minisblack", "metadata": {"axes": "CYX"}, "compression": "deflate"},
    ],
)
def test_pages_that_are_channels_are_bands(options):
    encoded = tiff(STACK[0, 0], **options)
    assert np.array_equal(values_of(encoded), IMAGES[0])
    with pytest.raises(HeaderError, match="4 bands"):
        values_of(encoded, most_bands=3)


@pytest.mark.parametrize(
    "options",
    [
        {"imagej": True, "metadata": {"axes": "TZCYX"}},
        {"imagej": True, "metadata": {"axes": "TZCYX"}, "truncate": True},
        {"ome": True, "photometric": "minisblack", "metadata": {"axes": "TZCYX"}},
        {"photometric": "minisblack", "metadata": {"axes": "TZCYX"}, "compression": "lzw"},
    ],
)
def test_images_of_a_stack_are_pages(options):
    encoded = tiff(STACK, **options)
    assert count_pages(encoded) == 6
    for number, image in enumerate(IMAGES):
        assert np.array_equal(values_of(single_page(encoded, number)), image)
    assert np.array_equal(values_of(single_page(encoded, "first")), IMAGES[0])
    assert np.array_equal(values_of(single_page(encoded, "max")), IMAGES.max(0))
    with pytest.raises(HeaderError, match=r"with 6 pages, .* Set data.pages to first, each or max"):
        values_of(encoded)


def test_lookup_tables_of_stacks_are_no_colours():
    stack, table = STACK[0].astype(np.uint8), RNG.integers(0, 65536, (3, 256)).astype(np.uint16)
    options = {"photometric": "palette", "colormap": table, "ome": True, "metadata": {"axes": "ZCYX"}}
    encoded = tiff(stack, **options)
    for number in range(3):
        assert np.array_equal(values_of(single_page(encoded, number)), stack[number].transpose(1, 2, 0))
    assert values_of(tiff(stack[0, 0], **{**options, "metadata": {}})).shape == (7, 9, 3)


def test_channels_that_come_before_other_axes_are_bands():
    swapped = np.ascontiguousarray(STACK[0].transpose(1, 0, 2, 3))  # C, Z, Y, X
    encoded = tiff(swapped, ome=True, photometric="minisblack", metadata={"axes": "CZYX"})
    for number in range(3):
        assert np.array_equal(values_of(single_page(encoded, number)), IMAGES[number])


def test_a_page_keeps_its_colours_orientation_and_nodata():
    tags = [(274, "H", 1, 6, False), (42113, "s", 0, "7", False)]
    for values, options, mode in (
        (COLORS, {"photometric": "rgb", "extrasamples": ["unassalpha"]}, "RGBA"),
        (COLORS[..., :2], {"planarconfig": "contig", "extrasamples": ["unassalpha"]}, "LA"),
        (COLORS[..., :3], {"planarconfig": "contig"}, None),
        (COLORS[..., 0], {}, "L"),
    ):
        options = {"photometric": "minisblack", **options}
        two = tiff(np.stack([values, 255 - values]), metadata=None, extratags=tags, **options)
        found = DECODERS["tiff"].read(single_page(two, 1), most_bands=4, max_pixels=10**4)
        assert np.array_equal(found.values.reshape(values.shape), 255 - values)
        assert found[1:4] == (6, mode, 7)


def test_the_maximum_leaves_out_pixels_without_data():
    first, second = np.array([[1, 9, 9], [9, 2, 3]], np.int16), np.array([[4, 9, 5], [6, 1, 9]], np.int16)
    encoded = tiff(
        np.stack([first, second]), photometric="minisblack", metadata=None, extratags=[(42113, "s", 0, "9", False)]
    )
    assert values_of(single_page(encoded, "max"))[..., 0].tolist() == [[4, 9, 5], [6, 2, 3]]
    holes = np.where(np.stack([first, second]) == 9, np.nan, np.stack([first, second])).astype(np.float32)
    found = values_of(single_page(tiff(holes, photometric="minisblack", metadata=None), "max"))[..., 0]
    assert np.array_equal(found, np.array([[4, np.nan, 5], [6, 2, 3]], np.float32), equal_nan=True)
    with pytest.raises(ImageError, match="whose pages differ"):
        single_page(pages(first, first[:1]), "max")
    with pytest.raises(HeaderError, match="too many for"):
        DECODERS["tiff"].single(encoded, "max", most_bands=1, max_pixels=0)


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


def patched(encoded: bytes, tag: int, value: int) -> bytes:
    """Little-endian TIFF with another value of a tag."""
    (start,) = struct.unpack_from("<I", encoded, 4)
    (count,) = struct.unpack_from("<H", encoded, start)
    for entry in range(start + 2, start + 2 + 12 * count, 12):
        if struct.unpack_from("<H", encoded, entry)[0] == tag:
            return encoded[: entry + 2] + struct.pack("<HII", 4, 1, value) + encoded[entry + 12 :]
    raise KeyError(tag)


OME = (
    '<OME xmlns="x"><Image ID="Image:0"><Pixels ID="Pixels:0" DimensionOrder="XYCZT" Type="uint8" SizeX="35" '
    'SizeY="25" SizeC="3" SizeZ="{}" SizeT="{}"><TiffData/></Pixels></Image></OME>'
)
TALL_FAX = saved(Image.new("1", (64, 64)), "TIFF", compression="group4")
TALL_FAX = patched(patched(TALL_FAX, 257, 1000), 278, 1000)
TALL_JPEG = saved(Image.new("L", (64, 64)), "TIFF", compression="jpeg")
TALL_JPEG = patched(patched(patched(TALL_JPEG, 257, 1561), 278, 1561), 279, 150)


@pytest.mark.parametrize(
    ("encoded", "reason"),
    [
        (tiff(np.zeros((8, 8), np.complex64)), "64 bits per band .complex64"),
        (tiff(BANDS, metadata=None, photometric="minisblack", description=OME.format(1, 9999999)), "65536 planes"),
        (tiff(BANDS, metadata=None, photometric="minisblack", description=OME.format(1, 2)), "parts? of|missing"),
        (patched(tiff(np.zeros((8, 8), np.int16), photometric="miniswhite"), 262, 0), "colour type"),
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


def test_tiffs_with_missing_strips_are_corrupt():
    tifffile = pytest.importorskip("tifffile")
    good = tiff(np.asarray(NOISE), photometric="rgb", rowsperstrip=10)
    assert decode(good).shape == (3, 40, 64)
    with tifffile.TiffFile(io.BytesIO(good)) as opened:
        tags = opened.pages.first.tags
        offsets, counts = tags["StripOffsets"].valueoffset, tags["StripByteCounts"].valueoffset
    for place in (offsets, counts):
        with pytest.raises(ImageError, match=r"strips or tiles are missing|truncated"):
            decode(good[: place + 4] + bytes(4) + good[place + 8 :])
    with pytest.raises(ImageError, match="truncated"):
        decode(good[:-3000])


def test_tiffs_of_any_number_of_bands_are_stored_as_they_are(photos, tmp_path):
    pytest.importorskip("imagecodecs")
    values = np.random.default_rng(0).integers(0, 256, (20, 12, 16, 5), dtype=np.uint8)
    bands = {"planarconfig": "contig", "photometric": "minisblack"}
    files = {f"{'ab'[n % 2]}/{n:02d}.{'tif' if n < 10 else 'TIFF'}": tiff(one, **bands) for n, one in enumerate(values)}
    folder = photos(files | {"b/99.tif": files["a/00.tif"][:200]})
    make(folder, tmp_path / "out", "--shuffle", "false")
    (shard,) = shards(tmp_path / "out")
    with tarfile.open(shard) as tar:
        stored = {m.name: tar.extractfile(m).read() for m in tar if m.name.endswith("tif")}
    assert stored == {path.partition(".")[0] + ".tif": encoded for path, encoded in files.items()}
    assert "b/99.tif" in (tmp_path / "out" / "left_out.csv").read_text()
    (folder / "b" / "99.tif").unlink()
    transform, five = RandomCrop(RandomCropConfig(size=8)), Preprocessing((0.5,) * 5, (0.2,) * 5)
    for of_folder, of_shards in zip(
        *(
            training_batches(str(path), transform, batch_size=8, seed=0, steps=3, preprocessing=five, classes=2)
            for path in (folder, shard)
        ),
        strict=True,
    ):
        assert torch.equal(of_folder.views[0].images, of_shards.views[0].images)
        assert of_folder.labels.tolist() == of_shards.labels.tolist()
    make(photos({"x.tif": tiff(values[0, ..., :3], photometric="rgb")}, "rgb"), tmp_path / "png", "--resize", "8")
    ((_, image, _),) = samples(tmp_path / "png")
    assert Image.open(io.BytesIO(image)).format == "PNG"
    assert Image.open(io.BytesIO(image)).size == (11, 8)


def test_shards_of_tiffs_are_checked_in_their_channels(write_tar, tmp_path):
    rgb = tiff(np.zeros((9, 7, 3), np.uint8), photometric="rgb")
    assert main([write_tar("b.tar", [("a.tiff", rgb)]), "--workers", "1"]) == 0
    values = np.random.default_rng(0).integers(0, 256, (4, 9, 7, 5), dtype=np.uint8)
    images = [tiff(image, photometric="minisblack", planarconfig="contig") for image in values]
    path = write_tar("a.tar", [(f"{number}.tif", image) for number, image in enumerate(images)])
    assert main([path, "--workers", "1"]) == 2  # as RGB images they are corrupt
    assert main([path, "--workers", "1", "--channels", "5", "--write_index"]) == 0
    opened = open_shards(path)
    np.testing.assert_allclose(opened.statistics.mean, (values / 255).mean((0, 1, 2)), rtol=1e-12)
    assert pixel_statistics(open_sources(path), 5).mean == opened.statistics.mean
