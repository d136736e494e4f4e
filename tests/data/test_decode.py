"""Every kind of image against Pillow, and everything that is not a good image."""

import struct
import tarfile
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

import tessera.data.decode
from tessera.data.decode import ImageError, Picture, decode
from tests.data.batches import chunk, png, saved

SAMPLE = Path(__file__).parents[2].parent / "shared" / "data" / "imagenet-sample"
RNG = np.random.default_rng(0)
COLORS = Image.fromarray(RNG.integers(0, 256, (5, 7, 4), dtype=np.uint8)).resize((35, 25), Image.Resampling.BICUBIC)

pytestmark = [
    pytest.mark.filterwarnings("ignore:The image decoding:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:PIL"),
]


def deep(values: np.ndarray, color: int, chunks: bytes = b"") -> bytes:
    """A PNG of 16 bits, whose colours Pillow cannot write."""
    rows = b"".join(b"\0" + row.tobytes() for row in values.astype(">u2"))
    return png(values.shape[1], values.shape[0], rows, color, 16, chunks)


def without_rows(jpeg: bytes) -> bytes:
    """A JPEG whose header says that it has no rows yet: libjpeg does not read a height that comes later."""
    frame = jpeg.index(b"\xff\xc0")
    return jpeg[: frame + 5] + b"\0\0" + jpeg[frame + 7 :]


def pillow(encoded: bytes) -> torch.Tensor:
    """Oracle: upright RGB over white."""
    image = ImageOps.exif_transpose(Image.open(BytesIO(encoded)))
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image.convert("RGBA"))
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


def equal(encoded: bytes) -> bool:
    pixels = decode(encoded)
    return pixels.dtype == torch.uint8 and torch.equal(pixels, pillow(encoded))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_pictures_are_turned_upright(kind, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    encoded = saved(COLORS.convert("RGB"), kind, exif=exif)
    assert equal(encoded)
    picture = Picture(encoded)
    assert picture.size == ((35, 25) if orientation > 4 else (25, 35))  # before the pixels are decoded
    assert picture.plain == (kind == "JPEG" and orientation == 1)
    assert tuple(picture.pixels().shape) == (3, *picture.size)


def test_the_orientation_may_stand_in_xmp():
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    encoded = saved(COLORS.convert("RGB"), "JPEG", xmp=xmp)
    assert decode(encoded).shape == (3, 35, 25)
    assert equal(encoded)


def test_damaged_exif_leaves_the_picture_as_it_is():
    encoded = saved(COLORS.convert("RGB"), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
    assert torch.equal(decode(encoded), decode(saved(COLORS.convert("RGB"), "JPEG")))


@pytest.mark.parametrize(
    "options", [{}, {"progressive": True}, {"subsampling": 0}, {"quality": 30}, {"keep_rgb": True}]
)
def test_jpeg_of_one_and_three_components(options):
    assert equal(saved(COLORS.convert("RGB"), "JPEG", **options))
    options.pop("keep_rgb", None)
    assert equal(saved(COLORS.convert("L"), "JPEG", **options))


def test_cmyk_jpegs_have_the_colours_of_the_picture():
    rgb = Image.new("RGB", (16, 16), (200, 60, 20))
    cmyk = saved(rgb.convert("CMYK"), "JPEG", quality=100)
    assert equal(cmyk)
    # The same values marked as YCCK (Adobe transform 2): other colours, which Pillow and libjpeg agree on.
    adobe = cmyk.index(b"Adobe")
    ycck = cmyk[: adobe + 11] + b"\x02" + cmyk[adobe + 12 :]
    assert equal(ycck)
    assert not torch.equal(decode(ycck), decode(cmyk))
    assert (decode(cmyk).float().mean((1, 2)) - torch.tensor([200.0, 60, 20])).abs().max() < 3


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA"])
@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_modes_of_png_and_webp(kind, mode):
    options: dict[str, object] = {"lossless": True, "exact": True} if kind == "WEBP" else {}
    if mode == "P" and kind == "PNG":
        options["transparency"] = bytes(RNG.integers(0, 256, 200, dtype=np.uint8))
    encoded = saved((COLORS if "A" in mode else COLORS.convert("RGB")).convert(mode), kind, **options)
    assert equal(encoded)


def test_transparent_pixels_are_white():
    values = np.array([[[10, 20, 30, 0], [10, 20, 30, 255], [0, 0, 0, 51]]], dtype=np.uint8)
    assert decode(saved(Image.fromarray(values), "PNG")).permute(1, 2, 0).tolist() == [
        [[255, 255, 255], [10, 20, 30], [204, 204, 204]]
    ]
    keyed = saved(Image.fromarray(values[..., :3].copy()), "PNG", transparency=(10, 20, 30))
    assert decode(keyed).permute(1, 2, 0).tolist() == [[[255, 255, 255], [255, 255, 255], [0, 0, 0]]]


def test_sixteen_bits_are_scaled_and_not_clipped():
    values = RNG.integers(0, 65536, (9, 11, 4))
    exact = torch.from_numpy(values / 257).permute(2, 0, 1)
    gray = decode(deep(values[..., 0], color=0))
    assert torch.equal(gray, exact[:1].round().to(torch.uint8).expand(3, -1, -1))
    assert (decode(deep(values[..., :3], color=2)) - exact[:3]).abs().max() <= 1
    opaque = values.copy()
    opaque[..., 3] = 65535
    assert (decode(deep(opaque, color=6)) - exact[:3]).abs().max() <= 1
    assert (decode(deep(opaque[..., [0, 3]], color=4)) - exact[:1]).abs().max() <= 1
    keyed = decode(deep(np.array([[30000, 30001]]), color=0, chunks=chunk(b"tRNS", struct.pack(">H", 30000))))
    assert keyed[0].tolist() == [[255, 117]]


@pytest.mark.parametrize(("color", "bands"), [(0, [0]), (2, [0, 1, 2]), (4, [0, 3]), (6, [0, 1, 2, 3])])
@pytest.mark.parametrize("accident", [None, 9000, 65535])
def test_values_of_twelve_bits_in_sixteen_are_refused(color, bands, accident):
    values = RNG.integers(0, 4096, (40, 50, 4))
    values[..., 3] = 65535
    if accident:
        values[20, 20, :3] = accident
    with pytest.raises(ImageError, match=r"at most 1[67] of 256 gray levels .*--data.range auto"):
        decode(deep(values[..., bands].squeeze(), color))
    with pytest.raises(ImageError, match=r"at most (2|17) of 256"):  # 8-bit values in 16 bits
        decode(deep(np.where(values < 4096, values // 16, values)[..., bands].squeeze(), color))


@pytest.mark.parametrize(("values", "reason"), [
    (np.array([[-5, 60000], [70, 9]], np.int32), "-5 to 60000, but 16 bits hold 0 to 65535"),
    (np.array([[0, 10**6], [70, 9]], np.int32), "0 to 1000000, but 16 bits hold 0 to 65535"),
    (np.array([[0, 255], [70, 9]], np.int32), "largest value is 255 of 65535"),
    (np.array([[0, 4095], [70, 9]], np.uint16), "largest value is 4095 of 65535"),
])  # fmt: skip
def test_values_outside_of_sixteen_bits_are_refused(values, reason):
    for channels in (1, 3, 4):
        with pytest.raises(ImageError, match=reason):
            decode(Image.fromarray(values), channels=channels)


def test_pillow_images_of_sixteen_bits_are_divided_by_257():
    values = RNG.integers(0, 65536, (9, 11))
    for dtype in (np.uint16, np.int32):
        assert np.array_equal(decode(Image.fromarray(values.astype(dtype)))[0], np.round(values / 257))


def test_pillow_images_that_8_bits_do_not_hold_are_refused():
    with pytest.raises(TypeError, match="Pillow image of the mode LAB"):
        decode(Image.new("LAB", (4, 4)))
    with pytest.raises(ImageError, match=r"mode F .float32. in a data set of the type uint8"):
        decode(Image.new("F", (4, 4)))


@pytest.mark.parametrize("mode", ["La", "RGBa"])
def test_premultiplied_alpha_shows_white(mode):
    straight = COLORS.convert("LA") if mode == "La" else COLORS
    image = straight.convert(mode)
    back = image.convert(straight.mode)
    assert torch.equal(decode(image), pillow(saved(back, "PNG")))
    assert np.array_equal(decode(image, channels=4).permute(1, 2, 0), np.asarray(back.convert("RGBA")))


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_the_transparent_value_of_a_gray_png(bits):
    """tRNS holds the stored value, and a decoder scales the pixels to 8 bits: 255 / (2^bits - 1)."""
    stored = np.arange(2 ** min(bits, 4), dtype=np.uint8).repeat(8 // bits)[None]
    row = np.packbits(np.unpackbits(stored.reshape(-1, 1), axis=1)[:, 8 - bits :]).tobytes()
    for key in (0, 1, int(stored.max())):
        encoded = png(stored.size, 1, b"\0" + row, 0, bits, chunk(b"tRNS", struct.pack(">H", key)))
        gray = stored[0].astype(int) * (255 // (2**bits - 1))
        assert decode(encoded)[0, 0].tolist() == np.where(stored[0] == key, 255, gray).tolist()
        assert decode(encoded, channels=4)[3, 0].tolist() == np.where(stored[0] == key, 0, 255).tolist()


def test_a_transparent_colour_of_sixteen_bits_is_refused():
    encoded = deep(RNG.integers(0, 65536, (4, 5, 3)), 2, chunk(b"tRNS", struct.pack(">HHH", 1, 2, 30000)))
    with pytest.raises(ImageError, match="Save it with alpha"):
        decode(encoded)


@pytest.mark.parametrize("turn", [lambda image: image.rotate(90, expand=True), lambda image: image.convert("L")])
def test_pillow_images_in_memory_are_taken_as_they_are(turn):
    exif = Image.Exif()
    exif[0x0112] = 6
    image = Image.open(BytesIO(saved(COLORS.convert("RGB"), "PNG", exif=exif)))
    assert decode(image).shape == (3, 35, 25)
    turned = turn(image)
    with pytest.warns(UserWarning, match="Call PIL.ImageOps.exif_transpose"):
        assert np.array_equal(decode(turned).permute(1, 2, 0), np.asarray(turned.convert("RGB")))


def test_junk_around_the_segments_of_a_jpeg_is_ignored():
    jpeg = saved(COLORS.convert("RGB"), "JPEG")
    filled = jpeg[:2] + b"\xff\xff" + jpeg[2:] + b"after the end"
    assert torch.equal(decode(filled), decode(jpeg))


@pytest.mark.parametrize(
    ("encoded", "reason"),
    [
        (b"", "empty"),
        (b"\0" * 1000, "not a JPEG"),
        (b"<html>404 not found</html>", "not a JPEG"),
        (b"\xff\xd8\xff", "JPEG|damaged"),
        (saved(COLORS.convert("RGB"), "GIF"), "not a JPEG"),
        (saved(COLORS.convert("RGB"), "JPEG")[:-2], "truncated"),
        (saved(COLORS.convert("RGB"), "JPEG", progressive=True)[:400], "truncated|damaged"),
        (saved(COLORS.convert("CMYK"), "JPEG")[:-200], "truncated"),
        (saved(COLORS, "PNG")[:-100], "truncated|damaged"),
        (saved(COLORS, "PNG").replace(b"IDAT", b"IDAX"), "header is damaged"),
        (saved(COLORS, "WEBP", lossless=True)[:-100], "damaged"),
        (without_rows(saved(COLORS.convert("RGB"), "JPEG")), "35 x 0 pixels"),
    ],
)
def test_what_is_no_good_image_says_why(encoded, reason):
    with pytest.raises(ImageError, match=reason):
        decode(encoded)


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}, {"keep_rgb": True}])
@pytest.mark.parametrize("shrink", [1, 2, 4, 8])
def test_a_jpeg_is_decoded_at_a_fraction(shrink, options):
    y, x = np.mgrid[0:203, 0:301]
    waves = np.stack([128 + 100 * np.sin(x / 40 + c) * np.cos(y / 30 - c) for c in range(3)], axis=2)
    image = Image.fromarray(waves.round().astype(np.uint8))
    for mode in ("RGB", "L", "CMYK"):
        if mode != "RGB" and "keep_rgb" in options:
            continue
        picture = Picture(saved(image.convert(mode), "JPEG", quality=95, **options))
        assert picture.fraction(shrink) == (shrink if mode != "CMYK" else 1)  # its sides do not divide
        pixels = picture.pixels(shrink)
        assert tuple(pixels.shape) == (3, -(-203 // shrink), -(-301 // shrink))
        assert pixels.stride() == (1, 3 * pixels.shape[2], 3)
        whole = decode(picture.encoded)[:, : 203 // shrink * shrink, : 301 // shrink * shrink].float()
        means = torch.nn.functional.avg_pool2d(whole, shrink)
        difference = (pixels[:, : means.shape[1], : means.shape[2]] - means).abs()
        assert difference.max() <= 8  # colours are stored at half the size
        assert difference.mean() < 1


def test_turned_jpegs_shrink_by_divisors_of_their_sides():
    exif = Image.Exif()
    exif[0x0112] = 6
    picture = Picture(saved(Image.new("RGB", (96, 36)), "JPEG", exif=exif))
    assert [picture.fraction(shrink) for shrink in (8, 4, 2, 1)] == [4, 4, 2, 1]
    assert Picture(saved(Image.new("RGB", (96, 36)), "PNG")).fraction(8) == 1
    assert tuple(picture.pixels(4).shape) == (3, 24, 9)


def test_a_header_that_lies_is_not_a_good_image(monkeypatch):
    """Crops are drawn for the size in the header: other pixels must not meet them."""
    good = saved(COLORS.convert("RGB"), "JPEG")
    assert Picture(good).pixels().shape == (3, 25, 35)
    for size in ((35, 24), (36, 25)):
        monkeypatch.setattr(tessera.data.decode, "_plain_jpeg", lambda encoded, size=size: size)
        with pytest.raises(ImageError, match="size in the header differs from the size of the decoded pixels"):
            Picture(good).pixels()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_the_limit_of_pixels_is_the_callers(kind):
    encoded = saved(COLORS.convert("RGB"), kind)
    assert decode(encoded, max_pixels=25 * 35).shape == (3, 25, 35)
    with pytest.raises(ImageError, match="35 x 25 pixels are more than the limit of 874"):
        decode(encoded, max_pixels=25 * 35 - 1)


@pytest.mark.skipif(not SAMPLE.is_dir(), reason=f"no ImageNet sample in {SAMPLE}")
def test_imagenet_jpegs_have_pillows_pixels():
    with tarfile.open(sorted(SAMPLE.glob("*.tar"))[0]) as shard:
        opened = [shard.extractfile(member) for member in shard if member.name.endswith(".jpg")]
        files = [file.read() for file in opened if file]
    assert len(files) > 100
    assert all(equal(encoded) for encoded in files[::3])
