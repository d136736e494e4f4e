"""Files that hold several images, such as stacks of microscopes: the images that are samples (`data.pages`).

A page is an image of a file, with all its channels. `first` takes the first page of each file, `each` takes every page
as a sample of its own, and `max` takes the maximum of all pages, pixel by pixel. A file of one page stays as it is.
"""

from collections.abc import Iterable
from typing import Literal

import numpy as np

from tessera.data.decode import MAX_PIXELS, ImageError
from tessera.data.decoders import MOST_BANDS, Decoded, paged_decoder_of
from tessera.data.failures import ShardError
from tessera.data.headers import HeaderError, MissingPackageError

Pages = Literal["first", "each", "max"]
MOST_DECODED = 64
"""Maximum number of pixels of all pages of a file whose maximum is taken, as a multiple of the limit of one image."""


def count_pages(encoded: bytes) -> int:
    """Return the number of pages of a file. A file that is damaged, or whose format has no pages, counts as one page.

    The values are not decoded. The error of a damaged file is raised where its sample is decoded.

    Raises:
        ShardError: the package that reads the format is not installed.
    """
    decoder = paged_decoder_of(encoded)
    try:
        return 1 if decoder is None else decoder.count(encoded)
    except MissingPackageError as error:
        raise ShardError(str(error)) from error
    except HeaderError:
        return 1


def single_page(encoded: bytes, pages: int | Literal["first", "max"], max_pixels: int = MAX_PIXELS) -> bytes:
    """Return a file of one page: page number `pages`, the first page, or the maximum of all pages.

    Raises:
        ImageError: the pages cannot be decoded, or differ in their size, bands or type.
    """
    decoder = paged_decoder_of(encoded)
    if decoder is None:
        return encoded
    number = 0 if pages == "first" else pages
    try:
        return decoder.single(encoded, number, most_bands=MOST_BANDS, max_pixels=max_pixels)
    except HeaderError as error:
        raise ImageError(str(error)) from error


def check_total(pages: int, pixels: int, max_pixels: int) -> None:
    """Raise `HeaderError` if the maximum of `pages` pages of `pixels` pixels would take too long."""
    if pages * pixels > MOST_DECODED * max_pixels:
        raise HeaderError(
            f"a file with {pages} pages of {pixels} pixels, which are too many for data.pages max. Set data.pages to "
            "first or each"
        )


def maximum(images: Iterable[Decoded]) -> Decoded:
    """Return the maximum of images, value by value. NaN and the value `nodata` count only where all images have them.

    Raises:
        HeaderError: the images differ in their size, bands or type.
    """
    rest = iter(images)
    found = next(rest)
    for image in rest:
        values, more = found.values, image.values
        if (values.shape, values.dtype) != (more.shape, more.dtype):
            raise HeaderError(
                f"a file whose pages differ: {values.shape} {values.dtype} and {more.shape} {more.dtype}. Set "
                "data.pages to first or each"
            )
        largest = np.fmax(values, more)
        if found.nodata is not None:
            largest = np.where(values == found.nodata, more, np.where(more == found.nodata, values, largest))
        found = found._replace(values=largest)
    return found
