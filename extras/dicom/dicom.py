"""DICOM images: gray values in the unit of the modality, and RGB images.

A gray value is the stored value times RescaleSlope, plus RescaleIntercept. Images in which 0 is white (MONOCHROME1) are
inverted first. PixelPaddingValue marks pixels without data. Frames are pages (`data.pages`).

Images may come from untrusted sources. Therefore, the size of a frame is compared with the limits, with the length of
the data and with the size in a compressed frame before values are decoded. Images have H x W pixels.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from tessera.data.decoders import Decoded
from tessera.data.headers import HeaderError, MissingPackageError, check_sides, raise_lack_of_memory, read_jpeg
from tessera.data.pages import check_total, maximum

if TYPE_CHECKING:
    from pydicom import Dataset

EXTENSION = "dcm"
DEFLATED = b"1.2.840.10008.1.2.1.99"
"""Transfer syntax of files that are compressed as a whole, whose size is not known before they are unpacked."""
RLE, JPEG = "1.2.840.10008.1.2.5", "1.2.840.10008.1.2.4."
"""Transfer syntax of run-length encoding, and the beginning of those of the JPEG family."""
GRAY, INVERTED, COLORS = "MONOCHROME2", "MONOCHROME1", ("RGB", "YBR_FULL", "YBR_FULL_422", "YBR_RCT", "YBR_ICT")
"""Photometric interpretations that are read: gray, gray in which 0 is white, and those that become RGB."""
KEPT = (
    *("Rows", "Columns", "SamplesPerPixel", "BitsStored", "HighBit", "PixelRepresentation"),
    *("RescaleSlope", "RescaleIntercept", "PixelPaddingValue", "PixelPaddingRangeLimit"),
)
"""Elements of the file of a frame, beside its values."""
_OF_FRAMES = ("SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence")
_JPEG_2000, _JPEG_LS = b"\xff\x4f\xff\x51", b"\xff\xf7"  # bytes before the size in two kinds of frames


class _Scale(NamedTuple):
    """Map from stored gray values v to those of the modality: v = sum - v if inverted, then slope * v + intercept."""

    sum: int | None
    """Sum of the largest and the smallest stored value; None if the image is not inverted."""
    slope: float
    intercept: float
    padding: float | None
    """Stored value of pixels without data; None if there is none."""

    def __call__(self, values: np.ndarray) -> np.ndarray:
        """Return the values of stored values, in float64."""
        stored = values.astype(np.float64)
        return (stored if self.sum is None else self.sum - stored) * self.slope + self.intercept


def matches(encoded: bytes) -> bool:
    """Return True if the first bytes of a file are those of a DICOM file."""
    return encoded[128:132] == b"DICM"


def read(encoded: bytes, *, most_bands: int, max_pixels: int) -> Decoded:
    """Read the image of a DICOM file of one frame.

    Raises:
        HeaderError: the file is damaged, not supported, too large, holds several frames or no image, or pydicom or a
            package that decodes its frames is not installed.
    """
    with _opened(encoded) as dataset:
        frames = _frames(dataset)
        if frames > 1:
            raise HeaderError(
                f"a DICOM file with {frames} frames, but one image is expected. Set data.pages to first, each or "
                "max (--pages of other commands)"
            )
        return _decoded(dataset, _stored(dataset, 0, max_pixels))


def count(encoded: bytes) -> int:
    """Return the number of frames of a DICOM file. No values are decoded.

    Raises:
        HeaderError: as `read`.
    """
    with _opened(encoded) as dataset:
        return _frames(dataset)


def single(encoded: bytes, pages: int | Literal["max"], *, most_bands: int, max_pixels: int) -> bytes:
    """Return a DICOM file of one frame, or of the maximum of all frames. A file of one frame stays as it is.

    Raises:
        HeaderError: as `read`.
    """
    with _opened(encoded) as dataset:
        frames = _frames(dataset)
        if frames == 1:
            return encoded
        if isinstance(pages, int):
            return _encoded(dataset, _stored(dataset, pages, max_pixels))
        check_total(frames, dataset.Rows * dataset.Columns, max_pixels)
        scale = _scale(dataset)
        falls = (scale.sum is None) == (scale.slope < 0)  # the largest value has the smallest stored value
        nodata = None if scale.padding is None else (-scale.padding if falls else scale.padding)
        stored = (_stored(dataset, frame, max_pixels) for frame in range(frames))
        signed = (Decoded(-one.astype(np.int64) if falls else one, 1, None, nodata) for one in stored)
        largest = maximum(signed).values
        return _encoded(dataset, (-largest if falls else largest).astype(_stored(dataset, 0, max_pixels).dtype))


@contextmanager
def _opened(encoded: bytes) -> "Iterator[Dataset]":
    """Read the elements of a file. All errors in the block become `HeaderError`, except a lack of memory."""
    try:
        from pydicom import dcmread
    except ImportError as error:
        raise MissingPackageError("DICOM", error.name, "dicom") from error
    if DEFLATED in encoded:
        raise HeaderError("a deflated DICOM file, which is not supported. Save it with the explicit transfer syntax")
    try:
        yield dcmread(BytesIO(encoded))
    except HeaderError:
        raise
    except Exception as error:  # pydicom and its plugins raise many kinds of errors for damaged files
        raise_lack_of_memory(error)
        raise HeaderError(f"a damaged DICOM image: {error}") from error


def _frames(dataset: "Dataset") -> int:
    """Return the number of frames.

    Raises:
        HeaderError: there is no image.
    """
    if "PixelData" not in dataset:
        raise HeaderError("a DICOM file without an image of whole numbers (PixelData)")
    frames = int(dataset.get("NumberOfFrames") or 1)
    if frames < 1:
        raise HeaderError(f"a damaged DICOM image: it has {frames} frames")
    return frames


def _stored(dataset: "Dataset", frame: int, max_pixels: int) -> np.ndarray:
    """Return the stored values of a frame: gray (H, W), or RGB (H, W, 3)."""
    from pydicom.pixels.decoders.base import get_decoder
    from pydicom.pixels.utils import pixel_array

    _check(dataset, max_pixels)
    syntax = dataset.file_meta.TransferSyntaxUID
    if syntax.is_compressed:
        _check_frame(dataset, frame)
        if not get_decoder(syntax).is_available:
            needed = "; ".join(get_decoder(syntax).missing_dependencies)
            raise HeaderError(f"a DICOM image with the transfer syntax {syntax.name}, which needs a package: {needed}")
    else:
        size = dataset.Rows * dataset.Columns * dataset.SamplesPerPixel * dataset.BitsAllocated // 8
        size = size * 2 // 3 if dataset.PhotometricInterpretation == "YBR_FULL_422" else size
        stored = len(dataset.PixelData)
        if stored < size * _frames(dataset):
            raise HeaderError(f"a damaged DICOM image: {stored} bytes cannot hold {_frames(dataset)} x {size} bytes")
    try:
        values = pixel_array(dataset, index=frame)
    except Exception as error:  # a plugin may not support a frame, or the frame is damaged
        raise_lack_of_memory(error)
        reason = str(error).rpartition("\n")[2].strip()
        raise HeaderError(
            f"a DICOM image with the transfer syntax {syntax.name} that is not decoded ({reason})"
        ) from error
    return values.astype(values.dtype.newbyteorder("="), copy=False)


def _check(dataset: "Dataset", max_pixels: int) -> None:
    """Raise `HeaderError` if the elements of an image exceed a limit, or need an unsupported feature."""
    check_sides(int(dataset.Columns), int(dataset.Rows), max_pixels)
    kind, samples = dataset.PhotometricInterpretation, int(dataset.SamplesPerPixel)
    if samples != (3 if kind in COLORS else 1) or kind not in (GRAY, INVERTED, *COLORS):
        raise HeaderError(
            f"a DICOM image with the colour type {kind} and {samples} bands, which is not supported. Save it as "
            f"{GRAY} or RGB"
        )
    if "ModalityLUTSequence" in dataset:
        raise HeaderError("a DICOM image whose values need a table (ModalityLUTSequence), which is not supported")
    groups = (group for name in _OF_FRAMES for group in dataset.get(name, ()))
    if any("PixelValueTransformationSequence" in group for group in groups):
        raise HeaderError(
            "a DICOM image with a rescale slope for each frame (PixelValueTransformationSequence), which is not "
            "supported. Convert its frames to single images"
        )


def _check_frame(dataset: "Dataset", frame: int) -> None:
    """Raise `HeaderError` if a compressed frame announces another size than the image, before it is decoded."""
    from pydicom.encaps import get_frame

    encoded = get_frame(dataset.PixelData, frame, number_of_frames=_frames(dataset))
    size, syntax = (int(dataset.Columns), int(dataset.Rows)), dataset.file_meta.TransferSyntaxUID
    if syntax == RLE:
        largest = 2 * size[0] * size[1] * dataset.SamplesPerPixel * dataset.BitsAllocated // 8 + 2**12
        if len(encoded) > largest:
            raise HeaderError(f"a damaged DICOM image: its frame has {len(encoded)} bytes, more than {largest}")
        return
    if not syntax.startswith(JPEG):
        raise HeaderError(f"a DICOM image with the transfer syntax {syntax.name}, which is not supported")
    if (place := encoded.find(_JPEG_2000)) >= 0:
        right, bottom, left, top = np.frombuffer(encoded, ">u4", 4, place + 8).tolist()
        found = right - left, bottom - top
    elif (place := encoded.find(_JPEG_LS)) >= 0 and ".4.8" in syntax:
        found = tuple(np.frombuffer(encoded, ">u2", 2, place + 5).tolist()[::-1])
    else:
        header = read_jpeg(encoded)
        found = header.width, header.height
    if found != size:
        raise HeaderError(f"a damaged DICOM image: {size} pixels, but its compressed frame has {found}")


def _scale(dataset: "Dataset") -> _Scale:
    """Return the map from the stored gray values of an image to its values."""
    padding, low, high = dataset.get("PixelPaddingValue"), *_stored_range(dataset)
    slope, intercept = dataset.get("RescaleSlope"), dataset.get("RescaleIntercept")  # None if missing or empty
    return _Scale(
        low + high if dataset.PhotometricInterpretation == INVERTED else None,
        1.0 if slope is None else float(slope),
        0.0 if intercept is None else float(intercept),
        None if padding is None else float(padding),
    )


def _stored_range(dataset: "Dataset") -> tuple[int, int]:
    """Return the smallest and the largest value that the stored bits can hold."""
    bits, signed = int(dataset.BitsStored), bool(dataset.get("PixelRepresentation", 0))
    return (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)


def _decoded(dataset: "Dataset", stored: np.ndarray) -> Decoded:
    """Return the image of the stored values of a frame."""
    if stored.ndim == 3:
        return Decoded(stored, 1, "RGB")
    scale = _scale(dataset)
    limit = dataset.get("PixelPaddingRangeLimit")
    if scale.padding is not None and limit is not None:  # all values of the range mark pixels without data
        low, high = sorted((scale.padding, float(limit)))
        stored = np.where((stored >= low) & (stored <= high), np.array(scale.padding, stored.dtype), stored)
    if (scale.sum, scale.slope, scale.intercept) == (None, 1, 0):
        values = stored
    else:
        values = scale(stored)
        values = values.astype(_type_of(dataset, scale, values))
    nodata = None if scale.padding is None else float(scale(np.array(scale.padding)).astype(values.dtype))
    return Decoded(values[..., None], 1, "L", nodata)


def _type_of(dataset: "Dataset", scale: _Scale, values: np.ndarray) -> type[np.generic]:
    """Return the type of scaled values: the smallest one that holds these values and all that the stored bits can give.

    The images of a scanner therefore have one type, unless some values need more than the stored bits.
    """
    ends = [*scale(np.array(_stored_range(dataset))).tolist(), values.min(), values.max()]
    if scale.slope.is_integer() and scale.intercept.is_integer():
        for kind in (np.uint8, np.uint16, np.int16):
            if np.iinfo(kind).min <= min(ends) and max(ends) <= np.iinfo(kind).max:
                return kind
    return np.float32


def _encoded(dataset: "Dataset", stored: np.ndarray) -> bytes:
    """Return a DICOM file of one frame with the stored values, from which `read` returns the image of the frame."""
    from pydicom import Dataset
    from pydicom.dataset import FileMetaDataset
    from pydicom.uid import ExplicitVRLittleEndian

    single = Dataset()
    for name in KEPT:
        if name in dataset:
            setattr(single, name, dataset[name].value)
    content = stored.astype(stored.dtype.newbyteorder("<")).tobytes()
    single.PixelData = content + bytes(len(content) % 2)
    single["PixelData"].VR = "OW"
    single.BitsAllocated, single.PlanarConfiguration = 8 * stored.dtype.itemsize, 0
    single.PhotometricInterpretation = "RGB" if stored.ndim == 3 else dataset.PhotometricInterpretation
    single.file_meta, single.preamble = FileMetaDataset(), bytes(128)
    single.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    file = BytesIO()
    single.save_as(file)
    return file.getvalue()
