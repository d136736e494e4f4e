"""Fuzz test of the shard reader: damaged images, tars and indices.

The reader must return samples, or raise a `ShardError` or an `ImageError` that names the file. If some images of a tar
are damaged, it must return the other images unchanged, and the counts must be correct.
"""

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tessera.data.crops import CenterCrop
from tessera.data.decode import ImageError, decode
from tessera.data.loader import LoaderConfig, Reading, evaluation_batches
from tessera.data.shards import ShardError, open_shards
from tessera.data.shards.index import FolderIndex, ShardEntry, parse_folder, parse_table
from tessera.data.shards.tar_index import scan_tar
from tests.fuzz.cases import CORPUS, bounded, damage, damaged, limited_addresses, members, run, seeds, tar

pytestmark = pytest.mark.filterwarnings("ignore")
MOST_PIXELS = 2**20
PIXELS = [decode(content) for _, content in CORPUS]
FIELDS = {"name": (0, 100), "mode": (100, 8), "size": (124, 12), "type": (156, 1), "link": (157, 100)}
"""Offset and size in bytes of some fields of a tar header."""

sizes = st.sampled_from(
    [b"77777777777", b"\x80" + b"\xff" * 11, b"\xff" * 10 + b"\xfe\0", b"00000000000", b"00000001000"]
)
extreme = st.sampled_from([2**15, 2**31, 2**62, 2**63 - 1, -(2**63)])
types = st.sampled_from([b"x", b"g", b"L", b"K", b"S", b"2", b"5", b"3"])  # extended headers, sparse files, links, ...
names = st.sampled_from([b"../../a.jpg\0", b"/a.png\0", b"\0", b"sample0.jpg\0"])
header = st.one_of(
    st.tuples(st.integers(0, 9), st.sampled_from(sorted(FIELDS)), st.binary(min_size=1, max_size=12)),
    st.tuples(st.integers(0, 9), st.just("size"), sizes),
    st.tuples(st.integers(-1, 0), st.just("size"), st.just(b"\xff" * 12)),  # -1, in the last or the first header
    st.tuples(st.integers(0, 9), st.just("type"), types),
    st.tuples(st.integers(0, 9), st.just("name"), names),
)


def with_false_headers(tar: bytes, changes: list[tuple[int, str, bytes]]) -> bytes:
    """Return a copy of a tar in which some header fields are overwritten and the header checksums are valid."""
    with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
        headers = [member.offset for member in archive]
    raw = bytearray(tar)
    for number, field, value in changes:
        start = headers[number % len(headers)]
        place, size = FIELDS[field]
        raw[start + place : start + place + min(size, len(value))] = value[:size]
        raw[start + 148 : start + 156] = b" " * 8
        raw[start + 148 : start + 156] = b"%06o\0 " % sum(raw[start : start + 512])
    return bytes(raw)


def images(folder: Path) -> Callable[..., None]:
    """Return a test case for valid tars in which some images are damaged."""

    @given(
        st.lists(st.tuples(st.integers(0, len(CORPUS) - 1), st.none() | st.lists(damage, min_size=1, max_size=3)),
                 min_size=1, max_size=6),
    )  # fmt: skip
    @bounded
    def case(samples: list[tuple[int, list | None]]) -> None:
        files = members([kind for kind, _ in samples])
        files = [
            (name, damaged(content, changes) if changes else content)
            for (name, content), (_, changes) in zip(files, samples, strict=True)
        ]
        path = folder / "images.tar"
        path.write_bytes(tar(files))
        keys = [f"images.tar/sample{number}" for number in range(len(samples))]
        delivered, skipped = [], []
        loader = evaluation_batches(
            str(path), CenterCrop(8), 4, labels=False, reading=Reading(loader=LoaderConfig(max_pixels=MOST_PIXELS))
        )
        assert loader.total == len(samples)
        for batch in loader:
            delivered += batch.keys
        opened = open_shards(str(path))
        for number, (kind, changes) in enumerate(samples):
            content = opened.image(number)
            assert content == files[number][1], "the bytes of another member"
            try:
                pixels = decode(content, max_pixels=MOST_PIXELS)
                assert changes or torch.equal(pixels, PIXELS[kind]), "a good image was changed"
            except ImageError:
                assert changes, "a good image was refused"
                skipped.append(keys[number])
        assert delivered == [key for key in keys if key not in skipped], "not exactly the good images were delivered"

    return case


def tars(folder: Path) -> Callable[..., None]:
    """Return a test case for damaged tars and for tars with overwritten header fields."""

    @given(
        st.lists(st.integers(0, len(CORPUS) - 1), min_size=1, max_size=5),
        st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
        st.lists(header, max_size=2),
        st.just([]) | st.lists(damage, max_size=2),
        st.none() | st.integers(-600, 600),
        st.booleans(),
        st.booleans(),
    )
    @bounded
    def case(
        kinds: list[int], format: int, lies: list, changes: list, end: int | None, empty: bool, long: bool
    ) -> None:
        files = [*members(kinds), *([("empty.jpg", b"")] if empty else [])]
        files = [(("l" * 120 if long else "") + name, content) for name, content in files]
        raw = with_false_headers(tar(files, format), lies)
        if end is not None:  # cut off near the end of the last member
            raw = raw[: raw.rindex(files[-1][1]) + len(files[-1][1]) + end]
        raw = damaged(raw, changes)
        path = folder / "tar.tar"
        path.write_bytes(raw)
        if not raw:
            return
        opened, refusal = None, ""
        try:
            opened = open_shards(str(path), progress=False)
        except ShardError as error:
            refusal = str(error)
        if opened is None:
            assert str(path) in refusal, "the message does not name the shard"
            return
        for offset, size in scan_tar(str(path), "tar.tar").images.tolist():
            assert offset >= 512, "an image before the first header"
            assert 0 <= size <= len(raw) - offset, "an image outside of the tar"
        for number in range(opened.images):
            try:
                decode(opened.image(number), max_pixels=MOST_PIXELS)
            except (ImageError, ShardError):
                continue
        if not lies and not changes and end is None:
            assert opened.images == len(files)

    return case


def indices(folder: Path) -> Callable[..., None]:
    """Return a test case for damaged index files."""
    path = folder / "good.tar"
    path.write_bytes(tar(members([0, 5, 8])))
    arrays = scan_tar(str(path), "good.tar")._asdict()
    which = st.just("images") | st.sampled_from(sorted(arrays))
    numbers = st.integers(-600, 600) | st.sampled_from([2**14, 2**15, 2**17]) | extreme
    places = st.tuples(which, st.integers(0, 9), numbers)
    entry = ShardEntry(url="good.tar", nsamples=3, filesize=path.stat().st_size, labelled=0)
    listing = FolderIndex(shardlist=[entry]).model_dump_json(by_alias=True).encode()

    @given(st.booleans(), st.lists(damage, max_size=3), st.lists(places, max_size=1))
    @bounded
    def case(folder_index: bool, changes: list, edits: list[tuple[str, int, int]]) -> None:
        try:
            if folder_index:
                parse_folder(damaged(listing, changes), "index.json")
                return
            edited = {name: array.copy() for name, array in arrays.items()}
            for name, place, number in edits:  # a valid file of numbers that contradict each other
                if edited[name].size:
                    flat = edited[name].reshape(-1)
                    flat[place % len(flat)] += np.int64(number).astype(flat.dtype)
            buffer = io.BytesIO()
            np.savez(buffer, **edited)
            table = parse_table(damaged(buffer.getvalue(), [] if edits else changes), "good.tar.index")
        except ShardError:
            assert changes or edits, "a good index was refused"
            return
        for offset, size in table.images.tolist():
            assert 512 <= offset <= offset + size <= table.summary[2], "an image outside of the shard"

    return case


KINDS = [(images, 150), (tars, 400), (indices, 400)]


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(1))
@pytest.mark.parametrize(("kind", "cases"), KINDS)
def test_damage_is_named_and_good_images_are_read(
    kind: Callable[[Path], Callable[..., None]], cases: int, seed: int, tmp_path: Path
) -> None:
    with limited_addresses(2**31):
        run(kind(tmp_path), cases, seed)
