"""Values of 16 bits as pixels of 8 bits."""

from math import prod

import numpy as np

from tessera.data.headers import HeaderError

ROWS_AT_ONCE = 2**21  # maximum number of values that are converted from 16 to 8 bits at once
DARK = 4096
"""A 16-bit image is refused if nearly all of its values are below this number, because 17 of 256 gray levels would hold
them in 8 bits. Such images come from 12-bit cameras and satellites, for example."""
MOST_BRIGHT = 1000
"""Up to one value in this number, or one pixel, may reach `DARK` in a refused image, so that no single pixel decides.
Values of 65535 do not count, because they often mark pixels without a measurement."""


def check_range(values: np.ndarray, *, upper_bytes: bool = False) -> None:
    """Check that the values (H, W, ...) of a 16-bit image use enough of the range of 16 bits.

    Args:
        values: values of the image, from 0 to 65535.
        upper_bytes: True if `values` are only the upper byte of each value. The image is then refused even if all its
            bytes are equal, because the lower bytes may differ.

    Raises:
        HeaderError: the values differ, but nearly all are below `DARK` (`MOST_BRIGHT`). With 8 bits, few gray levels
            would be left.
    """
    dark, full = (DARK // 256, 255) if upper_bytes else (DARK, 65535)
    most_bright = max(values.size // MOST_BRIGHT, prod(values.shape[2:]))
    bright, smallest, largest = 0, full, 0
    rows = max(ROWS_AT_ONCE // max(prod(values.shape[1:]), 1), 1)
    for top in range(0, len(values), rows):
        some = values[top : top + rows]
        some = some[some < full]
        bright += np.count_nonzero(some >= dark)
        if bright > most_bright:
            return
        smallest, largest = min(smallest, int(some.min(initial=full))), max(largest, int(some.max(initial=0)))
    if smallest > largest or (smallest == largest and not upper_bytes):
        return
    if bright:
        found, levels = f"whose values are nearly all below {DARK} of 65535", 17
    else:
        largest = largest * 256 + 255 if upper_bytes else largest
        found = f"whose largest value is {'at most ' if upper_bytes else ''}{largest} of 65535"
        levels = (largest + 128) // 257 + 1
    raise HeaderError(
        f"a 16-bit image {found}, so at most {levels} of 256 gray levels would be left. Train with its values: "
        "--data.pixel_type uint16 --data.range auto (or LOW,HIGH)"
    )


def eight_bits(values: np.ndarray) -> np.ndarray:
    """Divide 16-bit values (H, W, ...) by 257, so that 65535 becomes 255. The shape stays the same."""
    pixels = np.empty(values.shape, dtype=np.uint8)
    rows = max(ROWS_AT_ONCE // max(prod(values.shape[1:]), 1), 1)
    for top in range(0, len(values), rows):
        pixels[top : top + rows] = (values[top : top + rows].astype(np.uint32) + 128) // 257
    return pixels
