"""Decoders of other packages."""

from types import SimpleNamespace

import numpy as np
import pytest

from tessera.data.check_shards import main as check_shards
from tessera.data.decode import ImageError, decode
from tessera.data.decoders import DECODERS, Decoded
from tessera.data.headers import HeaderError
from tests.data.made import make, shards


def read(encoded, *, most_bands, max_pixels):
    height, width, bands = encoded[3:6]
    if bands > most_bands or height * width > max_pixels:
        raise HeaderError(f"a TOY image with {bands} bands of {height} x {width}")
    values = np.frombuffer(encoded, dtype="<u2", offset=6).reshape(height, width, bands)
    return Decoded(values, 6, None if bands > 1 else "L")


@pytest.fixture
def toy():
    """A function: values (H, W, bands) of 16 bits -> file of a format that only another package decodes."""
    DECODERS.register("toy", SimpleNamespace(EXTENSION="tif", matches=lambda it: it.startswith(b"TOY"), read=read))
    yield lambda values: b"TOY" + bytes(values.shape) + values.astype("<u2").tobytes()
    del DECODERS["toy"]


def test_a_format_of_another_package(toy, photos, tmp_path, capsys):
    values = np.random.default_rng(0).integers(0, 65536, (6, 4, 5))
    expected = np.rot90(np.round(values / 257).astype(np.uint8), -1)  # orientation 6
    assert np.array_equal(decode(toy(values), channels=5).permute(1, 2, 0), expected)
    assert decode(toy(values[..., :1])).shape == (3, 4, 6)
    with pytest.raises(ImageError, match="a TOY image with 2 bands cannot be converted to 3 channels"):
        decode(toy(values[..., :2]))
    with pytest.raises(ImageError, match="5 bands of 6 x 4"):
        decode(toy(values), channels=5, max_pixels=20)
    with pytest.raises(ImageError, match="largest value is 4095 of 65535"):
        decode(toy(4095 - values % 2), channels=5)
    folder = photos({f"{name}.tif": toy(values[..., :1]) for name in "abc"})
    make(folder, tmp_path / "out")
    assert check_shards([str(shards(tmp_path / "out")[0]), "--workers", "1"]) == 0
    assert "TOY" in capsys.readouterr().out
    with pytest.raises(ImageError, match=r"not a JPEG, PNG, WebP.* TOY.* image"):
        decode(b"no image")
