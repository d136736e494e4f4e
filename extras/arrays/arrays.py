"""NumPy arrays as images: .npy files, and .npz files of one array.

An array is (H, W), (H, W, C) or (C, H, W). The number of channels of the data set says which of the last two it is.
Pickled arrays are refused. The header is compared with the limits and with the size of the file before the values are
read, and no more bytes of a .npz file are unpacked than its header announces.
"""

import zipfile
from io import BytesIO
from math import prod

import numpy as np

from tessera.data.decoders import Decoded
from tessera.data.headers import HeaderError, check_sides, raise_lack_of_memory, read_array_header

EXTENSION = "npy"
ZIP = b"PK\x03\x04"
"""First bytes of a .npz file."""
LONGEST_HEADER = 2**12  # maximum number of bytes before the values; NumPy writes about 128


def matches(encoded: bytes) -> bool:
    """Return True if the first bytes of a file are those of a NumPy array or of a zip file."""
    return encoded.startswith((np.lib.format.MAGIC_PREFIX, ZIP))


def read(encoded: bytes, *, most_bands: int, max_pixels: int) -> Decoded:
    """Read an image from a .npy file, or from a .npz file of one array.

    Raises:
        HeaderError: the file is damaged, is too large, holds pickled values or several arrays, or has another number of
            axes.
    """
    if not encoded.startswith(ZIP):
        return _decoded(_array(encoded, most_bands, max_pixels))
    try:
        with zipfile.ZipFile(BytesIO(encoded)) as archive:
            members = archive.infolist()
            if len(members) != 1 or not members[0].filename.endswith(".npy"):
                raise HeaderError(
                    f"a zip file of {len(members)} members, but one array is expected. Write it with "
                    "numpy.savez_compressed(path, image)"
                )
            if members[0].compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise HeaderError("a .npz file whose compression NumPy does not write, which is not supported")
            with archive.open(members[0]) as file:
                start = file.read(LONGEST_HEADER)
                size = _size(start, most_bands, max_pixels)
                return _decoded(_array(start + file.read(max(size - len(start), 0) + 1), most_bands, max_pixels))
    except (HeaderError, MemoryError):
        raise
    except Exception as error:  # zipfile and zlib raise many kinds of errors for damaged files
        raise_lack_of_memory(error)
        raise HeaderError(f"a damaged .npz file: {error}") from error


def _size(start: bytes, most_bands: int, max_pixels: int) -> int:
    """Return the size in bytes of a .npy file, given its first bytes.

    Raises:
        HeaderError: the header is damaged, or announces more than the limits.
    """
    file = BytesIO(start)
    shape, _, dtype = read_array_header(file)
    if dtype.kind not in "biuf":
        raise HeaderError(f"a NumPy array of the type {dtype}, which is not supported. Save real numbers")
    if len(shape) not in (2, 3):
        raise HeaderError(
            f"a NumPy array with {len(shape)} axes {shape}, but an image has 2 or 3. Save every image as an array "
            "(H, W), (H, W, C) or (C, H, W)"
        )
    bands = 1 if len(shape) == 2 else min(shape[0], shape[2])
    if bands > most_bands:
        raise HeaderError(f"a NumPy array of the shape {shape}, but only 1 to {most_bands} bands are supported")
    sides = shape if len(shape) == 2 else shape[1:] if bands == shape[0] else shape[:2]
    check_sides(sides[1], sides[0], max_pixels)
    return file.tell() + prod(shape) * dtype.itemsize


def _array(encoded: bytes, most_bands: int, max_pixels: int) -> np.ndarray:
    """Return the array of a .npy file, which is as large as its header announces."""
    size = _size(encoded, most_bands, max_pixels)
    if len(encoded) != size:
        raise HeaderError(f"a damaged NumPy array: its header announces {size} bytes, but {len(encoded)} are there")
    file = BytesIO(encoded)
    shape, columns_first, dtype = read_array_header(file)
    return np.frombuffer(encoded, dtype, offset=file.tell()).reshape(shape, order="F" if columns_first else "C")


def _decoded(values: np.ndarray) -> Decoded:
    values = values.astype(np.uint8 if values.dtype == np.bool_ else values.dtype.newbyteorder("="), copy=False)
    if values.ndim == 2:
        return Decoded(values[..., None], 1, "L")
    return Decoded(values, 1, None, any_order=True)
