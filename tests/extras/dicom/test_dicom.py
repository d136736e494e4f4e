"""DICOM images, from the file to the decoded image. The files are written here or come with pydicom."""

import builtins
from io import BytesIO

import numpy as np
import pytest

from tessera.data.decode import ImageError, decode
from tessera.data.decoders import DECODERS, Decoded
from tessera.data.pages import count_pages, single_page
from tessera.data.shards import open_shards

pydicom = pytest.importorskip("pydicom")
RNG = np.random.default_rng(0)
JPEG_2000, DEFLATED, LOSSLESS = (f"1.2.840.10008.1.2.{end}" for end in ("4.90", "1.99", "4.70"))


def dicom(
    values: np.ndarray, *, bits: int = 12, color: str = "MONOCHROME2", syntax: str | None = None, **elements
) -> bytes:
    """DICOM file of stored values: (H, W), (frames, H, W) or (H, W, 3)."""
    dataset = pydicom.Dataset()
    dataset.file_meta = pydicom.dataset.FileMetaDataset()
    dataset.file_meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
    dataset.SOPClassUID, dataset.SOPInstanceUID = pydicom.uid.SecondaryCaptureImageStorage, "1.2.3"
    if values.ndim == 3 and color != "RGB":
        dataset.NumberOfFrames = len(values)
    dataset.set_pixel_data(values, color, bits, generate_instance_uid=False)
    dataset.PixelRepresentation = int(values.dtype.kind == "i")
    for name, value in elements.items():
        setattr(dataset, name, value)
    if syntax is not None:
        dataset.file_meta.TransferSyntaxUID = syntax
    file = BytesIO()
    dataset.save_as(file, enforce_file_format=True)
    return file.getvalue()


def read(encoded: bytes, **limits) -> Decoded:
    return DECODERS["dicom"].read(encoded, **{"most_bands": 4, "max_pixels": 10**6, **limits})


STORED = RNG.integers(0, 4096, (9, 7)).astype(np.uint16)
SIGNED = RNG.integers(-2000, 2000, (9, 7)).astype(np.int16)
COLORS = RNG.integers(0, 256, (9, 7, 3)).astype(np.uint8)


@pytest.mark.parametrize(
    ("encoded", "expected"),
    [
        (dicom(STORED), STORED),
        (dicom(STORED.astype(np.uint8), bits=8), STORED.astype(np.uint8)),
        (dicom(SIGNED), SIGNED),
        (dicom(STORED, RescaleSlope=1, RescaleIntercept=-1024), STORED.astype(np.int16) - 1024),
        (dicom(STORED, RescaleSlope=2, RescaleIntercept=7), STORED * 2 + 7),
        (dicom(STORED, RescaleSlope=0.25, RescaleIntercept=0.5), STORED.astype(np.float32) / 4 + 0.5),
        (dicom(STORED, RescaleSlope=None, RescaleIntercept=None), STORED),
        (dicom(STORED, color="MONOCHROME1"), 4095 - STORED),
        (dicom(SIGNED, color="MONOCHROME1", RescaleIntercept=10, RescaleSlope=1), 9 - SIGNED),
        (dicom(SIGNED, bits=16, RescaleIntercept=-1024, RescaleSlope=1), SIGNED.astype(np.float32) - 1024),
    ],
)
def test_gray_values_are_those_of_the_modality(encoded, expected):
    found = read(encoded)
    assert found.values.dtype == expected.dtype
    assert np.array_equal(found.values[..., 0], expected)
    assert found[1:4] == (1, "L", None)


def test_images_are_rgb_or_become_rgb():
    assert np.array_equal(decode(dicom(COLORS, bits=8, color="RGB")).permute(1, 2, 0), COLORS)
    gray = decode(dicom(COLORS[..., 0], bits=8))
    assert np.array_equal(gray.permute(1, 2, 0), np.repeat(COLORS[..., :1], 3, axis=2))


def test_padding_marks_pixels_without_data():
    encoded = dicom(SIGNED, PixelPaddingValue=-2000, RescaleSlope=1, RescaleIntercept=-24)
    assert read(encoded).nodata == -2024
    inverted = dicom(STORED, color="MONOCHROME1", PixelPaddingValue=95)
    assert read(inverted).nodata == 4000
    ranged = read(dicom(STORED, PixelPaddingValue=0, PixelPaddingRangeLimit=99))
    assert np.array_equal(ranged.values[..., 0], np.where(STORED < 100, 0, STORED))


@pytest.mark.parametrize(("color", "slope"), [("MONOCHROME2", 2), ("MONOCHROME1", 2), ("MONOCHROME2", -1)])
def test_frames_are_pages(color, slope):
    frames = RNG.integers(10, 4000, (3, 9, 7)).astype(np.uint16)
    frames[1, 2, 3] = frames[:, 4, 4] = 4095
    encoded = dicom(frames, color=color, RescaleSlope=slope, RescaleIntercept=5, PixelPaddingValue=4095)
    expected = (4095 - frames.astype(int) if color == "MONOCHROME1" else frames.astype(int)) * slope + 5
    padding = (0 if color == "MONOCHROME1" else 4095) * slope + 5
    assert count_pages(encoded) == 3
    for page in range(3):
        assert np.array_equal(read(single_page(encoded, page)).values[..., 0], expected[page])
    largest = np.where(expected == padding, -(10**6), expected).max(0)
    found = read(single_page(encoded, "max"))
    assert np.array_equal(found.values[..., 0], np.where(largest == -(10**6), padding, largest))
    assert found.nodata == padding
    with pytest.raises(ImageError, match=r"with 3 frames, .* Set data.pages"):
        decode(encoded, channels=1, pixel_type="int16")


TEST_FILES = {"CT_small.dcm": np.float32, "MR_small_RLE.dcm": np.int16, "JPEG2000.dcm": np.int16}


@pytest.mark.parametrize(("name", "kind"), TEST_FILES.items())
def test_files_of_pydicom_have_its_values(name, kind):
    path = pydicom.data.get_testdata_file(name, download=False)
    dataset = pydicom.dcmread(path)
    expected = pydicom.pixels.apply_rescale(dataset.pixel_array, dataset)
    with open(path, "rb") as file:
        found = read(file.read())
    assert found.values.dtype == kind
    assert np.array_equal(found.values[..., 0], expected)


@pytest.mark.parametrize("name", ["rtdose.dcm", "rtdose_expb.dcm", "SC_rgb_rle_16bit_2frame.dcm"])
def test_frames_of_files_of_pydicom_have_its_values(name):
    path = pydicom.data.get_testdata_file(name, download=False)
    dataset = pydicom.dcmread(path)
    expected = dataset.pixel_array * float(dataset.get("RescaleSlope", 1))
    with open(path, "rb") as file:
        encoded = file.read()
    for page in range(2):
        assert np.array_equal(read(single_page(encoded, page)).values.squeeze(), expected[page])
    assert np.array_equal(read(single_page(encoded, "max")).values.squeeze(), expected.max(0))


def encapsulated(content: bytes, syntax: str, **elements) -> bytes:
    """DICOM file of 9 x 7 pixels with one compressed frame."""
    data = pydicom.encaps.encapsulate([content])
    encoded = dicom(STORED, **elements)
    dataset = pydicom.dcmread(BytesIO(encoded))
    dataset.file_meta.TransferSyntaxUID, dataset.PixelData = syntax, data
    dataset["PixelData"].is_undefined_length = True
    file = BytesIO()
    dataset.save_as(file)
    return file.getvalue()


J2K = b"\xff\x4f\xff\x51" + bytes(4) + np.array([60000, 60000, 0, 0], ">u4").tobytes() + bytes(40)


@pytest.mark.parametrize(
    ("encoded", "reason"),
    [
        (dicom(STORED, Rows=50_000, Columns=50_000), "more than the limit"),
        (dicom(STORED, Rows=900, Columns=900), "126 bytes cannot hold 1 x 1620000 bytes"),
        (dicom(STORED, NumberOfFrames=900_000), "with 900000 frames"),
        (dicom(STORED)[:-20], "damaged DICOM"),
        (dicom(STORED, PhotometricInterpretation="PALETTE COLOR"), "colour type PALETTE COLOR"),
        (dicom(STORED, ModalityLUTSequence=[]), "need a table"),
        (dicom(STORED, syntax=DEFLATED), "deflated"),
        (encapsulated(J2K, JPEG_2000), r"compressed frame has \(60000, 60000\)"),
        (encapsulated(bytes(4400), "1.2.840.10008.1.2.5"), "its frame has 4400 bytes, more than"),
        (encapsulated(bytes(44), LOSSLESS), "damaged"),
        (encapsulated(bytes(44), "1.2.840.10008.1.2.4.100"), "damaged|not supported"),
        (bytes(128) + b"DICM", "DICOM"),
    ],
)
def test_files_that_are_not_read_say_why(encoded, reason):
    with pytest.raises(ImageError, match=reason):
        decode(encoded, channels=1, pixel_type="uint16", max_pixels=10**6)


def test_a_plugin_that_is_missing_is_named(monkeypatch):
    path = pydicom.data.get_testdata_file("MR_small_jpeg_ls_lossless.dcm", download=False)
    monkeypatch.setattr(pydicom.pixels.decoders.JPEGLSLosslessDecoder, "_available", {})
    with open(path, "rb") as file, pytest.raises(ImageError, match=r"JPEG-LS Lossless .* needs a package: .*pyjpegls"):
        decode(file.read(), pixel_type="int16")


def test_dicom_needs_the_extra_package(monkeypatch):
    encoded, plain = dicom(STORED), builtins.__import__

    def without(name, *args, **kwargs):
        if name == "pydicom":
            raise ImportError(name=name)
        return plain(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImageError, match=r"need the package pydicom. Install it .* 'tessera-ssl\[dicom\]'"):
        decode(encoded)


def test_folders_and_tars_of_dicom_files(photos, write_tar):
    folder = photos({"a/1.dcm": dicom(STORED), "b/2.DCM": dicom(STORED[::-1])})
    tar = write_tar("a.tar", [("1.dcm", dicom(STORED)), ("2.dcm", dicom(STORED[::-1]))])
    for path in (str(folder), tar):
        opened = open_shards(path)
        found = [decode(opened.image(number), channels=1, pixel_type="uint16")[0] for number in range(2)]
        assert np.array_equal(found, [STORED, STORED[::-1]])
