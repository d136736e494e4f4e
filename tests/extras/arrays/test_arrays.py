"""NumPy arrays as images, from the file to the decoded image."""

import io
import pickle
import zipfile

import numpy as np
import pytest
import torch

from tessera.data.decode import ImageError, decode
from tessera.data.shards import Access, open_shards
from tessera.data.shards.notes import describe
from tessera.data.shards.samples import SampleKeys
from tests.data.batches import saved
from tests.data.made import make
from tests.data.test_channels import COLORS

RNG = np.random.default_rng(0)


def npy(values: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, values)
    return file.getvalue()


def npz(*values: np.ndarray, compressed: bool = True) -> bytes:
    file = io.BytesIO()
    (np.savez_compressed if compressed else np.savez)(file, *values)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["uint8", "uint16", "int16", "float32", ">u2", ">f4"])
def test_arrays_are_images(kind):
    values = RNG.integers(0, 99, (13, 9, 5)).astype(kind)
    pixel_type = values.dtype.name
    expected = torch.from_numpy(values.astype(pixel_type)).permute(2, 0, 1)
    for stored in (values, np.ascontiguousarray(values.transpose(2, 0, 1)), np.asfortranarray(values)):
        for encoded in (npy(stored), npz(stored), npz(stored, compressed=False)):
            found = decode(encoded, channels=5, pixel_type=pixel_type)
            assert found.dtype == expected.dtype
            assert torch.equal(found, expected)


def test_gray_arrays_become_rgb():
    gray = COLORS[..., 0]
    assert torch.equal(decode(npy(gray)), decode(saved(gray, "PNG")))
    assert decode(npy(gray > 99), channels=1).unique().tolist() == [0, 1]


@pytest.mark.parametrize(
    ("encoded", "channels", "reason"),
    [
        (npy(np.zeros((4, 9, 4))), 4, "neither the first nor the last axis alone has 4 bands. Set data.channels"),
        (npy(np.zeros((4, 9, 8))), 3, "neither the first nor the last axis alone has 3 bands"),
        (npy(np.zeros((2, 3, 9, 8))), 3, "with 4 axes"),
        (npy(np.zeros(9)), 3, "with 1 axes"),
        (npy(np.zeros((9, 9), complex)), 3, "complex128"),
        (npy(np.zeros((2000, 2000))), 1, "more than the limit"),
        (npy(np.zeros((99, 99, 98))), 3, "only 1 to 4 bands"),
        (npy(np.zeros((9, 9)))[:-8], 1, "announces 776 bytes, but 768 are there"),
        (npy(np.zeros((9, 9))) + b"1", 1, "announces 776 bytes, but 777 are there"),
        (npy(np.zeros((9, 9)))[:40], 1, "damaged NumPy array"),
        (npy(np.array([[{}, {}]])), 1, "type object"),
        (npz(np.zeros((9, 9)), np.zeros((9, 9))), 1, "2 members, but one array is expected"),
        (npz(np.zeros((9, 9)))[:-40], 1, "damaged .npz file"),
        (npz(np.zeros((2000, 2000), np.uint8)), 1, "more than the limit"),
    ],
)
def test_arrays_that_are_not_read_say_why(encoded, channels, reason):
    with pytest.raises(ImageError, match=reason):
        decode(encoded, channels=channels, pixel_type="float32", max_pixels=10**6)


def test_no_more_is_unpacked_than_the_header_announces():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", npy(np.zeros((9, 9), np.uint8)) + bytes(10**7))
    with pytest.raises(ImageError, match="announces 209 bytes, but 4097 are there"):
        decode(file.getvalue(), channels=1)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_BZIP2) as archive:
        archive.writestr("a.npy", npy(np.zeros((9, 9), np.uint8)))
    with pytest.raises(ImageError, match="compression NumPy does not write"):
        decode(file.getvalue(), channels=1)


def test_nothing_is_unpickled():
    class Bomb:
        def __reduce__(self):
            return pytest.fail, ("unpickled",)

    for content in (pickle.dumps(Bomb()), npy(np.array([1]))[:10] + pickle.dumps(Bomb())):
        with pytest.raises(ImageError):
            decode(content)


VALUES = RNG.integers(0, 255, (4, 9, 8), dtype=np.uint8)


def test_folders_and_tars_of_arrays(photos, write_tar):
    files = {f"{'ab'[n % 2]}/{n}.{'npy' if n < 2 else 'npz'}": (npy if n < 2 else npz)(VALUES[n]) for n in range(4)}
    depth = npy(np.ones((9, 8), np.float32))
    folder = photos(files | {"a/0.depth.npy": depth})
    tar = write_tar(
        "a.tar", [*((name.replace("/", ""), one) for name, one in sorted(files.items())), ("b3.depth.npy", depth)]
    )
    for path in (str(folder), tar):
        opened = open_shards(path)
        assert opened.images == 4
        for number, value in enumerate((0, 2, 1, 3)):
            assert np.array_equal(decode(opened.image(number), channels=1)[0], VALUES[value])
    assert open_shards(str(folder)).label(3) == 1
    assert open_shards(tar).target(3) == depth


def test_arrays_beside_other_images_are_left_out(photos, write_tar):
    image, features = saved(COLORS, "PNG"), npy(np.zeros(384, np.float32))
    opened = open_shards(str(photos({"0.png": image, "0.npy": features, "1.npy": features})))
    assert opened.images == 1
    assert "2 .npy files are left out, because this format is not read beside images" in describe(opened.notes)[0]
    tar = write_tar("b.tar", [("0.npy", features), ("0.png", image), ("1.npy", features)])
    opened = open_shards(tar)
    assert (opened.images, opened.image(0), opened.notes) == (1, image, ())
    assert open_shards(tar, source=Access(keys=SampleKeys("npy"))).images == 2


def test_make_shards_keeps_arrays(photos, tmp_path):
    folder = photos({f"{n}.npy": npy(VALUES[n]) for n in range(4)})
    make(folder, tmp_path / "out", "--shuffle", "false")
    opened = open_shards(str(tmp_path / "out"))
    assert [opened.image(number) for number in range(4)] == [npy(one) for one in VALUES]
