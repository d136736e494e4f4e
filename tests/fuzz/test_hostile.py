"""Fuzz test of the shard reader: lying headers, repeated parts, and extreme numbers."""

import io
import json
import struct
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.data.decode import ImageError, decode
from tessera.data.maps import decode_map
from tessera.data.shards import ShardError, expand
from tessera.data.shards.index import ShardEntry, parse_classes, parse_folder
from tessera.data.shards.tar_index import scan_tar
from tests.fuzz.cases import CORPUS, bounded, limited_addresses, run, seeds

pytestmark = pytest.mark.filterwarnings("ignore")
MOST_PIXELS = 2**20


def _check(right: bool, message: str) -> None:
    """Fail a test case if the message of an error is not `right`: not printable, too long, or for a good case."""
    assert right, message


def _chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def _png(sides: tuple[int, int], stored: int, kind: tuple[int, int, int], chunks: int) -> bytes:
    """A PNG whose data has `stored` bytes, or nearly as many as its header asks for if `stored` is negative."""
    width, height = sides
    header = struct.pack(">IIBBBBB", width, height, kind[0], kind[1], 0, 0, kind[2])
    if stored < 0:
        bits = kind[0] * {0: 1, 2: 3, 4: 2, 6: 4}.get(kind[1], 1)
        stored = min(height * (1 - (-width * bits // 8)) - 1 - stored, 2**22)
    raw = zlib.compress(bytes(max(stored, 0)))
    more = _chunk(b"prVt", b"") * chunks
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + more + _chunk(b"IDAT", raw) + _chunk(b"IEND", b"")


def _jpeg(start: bytes, repeated: bytes, count: int, width: int, height: int, good: bytes) -> bytes:
    frame = good.index(b"\xff\xc0")
    lying = good[: frame + 5] + struct.pack(">HH", height, width) + good[frame + 9 :]
    return start + repeated * count + lying[2:]


def _near_jpeg(good: bytes, segment: int, part: bytes, count: int, end: int | None) -> bytes:
    """A JPEG with a repeated part before one of its segments, or cut off near the beginning of a segment."""
    starts, place = [], 2
    while good[place + 1] != 0xDA:
        starts.append(place)
        place += 2 + int.from_bytes(good[place + 2 : place + 4], "big")
    starts.append(place)
    start = starts[segment % len(starts)]
    return good[:start] + part * count + (good[start:] if end is None else good[start : start + end])


def _tar(name: bytes, size: bytes, kind: bytes, records: bytes) -> bytes:
    """A tar of one PNG with a long name and a pax header."""
    content = records * (2**16 // max(len(records), 1))
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for one, body, what in ((b"x", content, kind), (name, b"123", b"0")):
            member = tarfile.TarInfo(one.decode("latin-1"))
            member.size, member.type = len(body), what
            archive.addfile(member, io.BytesIO(body))
    raw = bytearray(file.getvalue())
    if size:
        raw[124 : 124 + len(size[:12])] = size[:12]
        raw[148:156] = b" " * 8
        raw[148:156] = b"%06o\0 " % sum(raw[:512])
    return bytes(raw)


_sides = st.sampled_from([0, 1, 2, 7, 1000, 1024, 1025, 65_535, 65_536, 89_478_486, 178_956_970, 2**31 - 1, 2**32 - 1])
_short = st.integers(0, 65_535) | st.sampled_from([1, 65_500, 65_535])
_counts = st.sampled_from([0, 1, 2, 1000, 2**17, 2**20])
_pieces = st.sampled_from([b"a/", b".", b"/", b"a.", b"a/.", b"\xe9", b"\n", b"\x1b[31m", b"\xff\xfe", b"..", b"\0"])
_numbers = st.sampled_from([0, -1, 1, 2**31, 10**9, 10**10, 2**63 - 1, 2**63, 2**70, 10**400]) | st.integers()
_values = (
    _numbers | st.none() | st.floats() | st.text(max_size=8) | st.sampled_from([True, "2024-01-01", "\0", "x" * 300])
)


_kinds = st.sampled_from([0, 2, 3, 4, 6, 9])
_sizes = st.tuples(_sides, _sides) | st.sampled_from([(1025, 1024), (1024, 1025), (1024, 1024), (1, 2**20 + 1)])


def hostile_images(_folder: Path) -> Callable[..., None]:
    """Return a test case for images whose headers lie or repeat parts."""
    pngs = st.builds(
        _png, _sizes, st.sampled_from([0, 1, 1000, 2**20, -1, -1, -2]),
        st.just((8, 0, 0)) | st.tuples(st.sampled_from([1, 8, 16, 255]), _kinds, st.integers(0, 2)),
        _counts,
    )  # fmt: skip
    parts = [b"\xff", b"\0", b"\xff\0", b"\xff\xfe\0\x02", b"\xff\xd8", b"\xff\xe1\0\x08Exif\0\0", b"\xff\xda\0\x02"]
    starts = st.sampled_from([b"\xff\xd8", b"\xff\xd8\xff", b"\xff\xd8\xff\xe0\0\x10"])
    baseline = CORPUS[0][1]
    jpegs = st.builds(_jpeg, starts, st.sampled_from(parts), _counts, _short, _short, st.just(baseline))
    whole = st.sampled_from([content for kind, content in CORPUS if kind == "jpg"])
    near = st.builds(
        _near_jpeg, whole, st.integers(0, 20), st.sampled_from(parts), st.integers(0, 2), st.none() | st.integers(0, 9)
    )

    @given(pngs | jpegs | near, st.sampled_from([1, 3, 4]))
    @bounded
    def case(encoded: bytes, channels: int) -> None:
        for read in (
            lambda: decode(encoded, max_pixels=MOST_PIXELS, channels=channels),
            lambda: decode_map(encoded),
        ):
            try:
                pixels = read()
            except ImageError as error:
                _check(str(error).isprintable(), str(error))
            else:
                is_map = pixels.ndim == 2
                assert is_map or pixels[0].numel() <= MOST_PIXELS, "more pixels than the limit"

    return case


def _check_entries(entries: list[ShardEntry]) -> None:
    for one in entries:
        assert type(one.nsamples) is type(one.filesize) is int, "a number that is none"
        assert 0 < one.nsamples <= one.filesize, "more samples than bytes"


def hostile_names(folder: Path) -> Callable[..., None]:
    """Return a test case for names, numbers and patterns in tars, index files, class names and brace ranges."""
    entries = st.fixed_dictionaries(
        {}, optional=dict.fromkeys(("url", "nsamples", "filesize", "labelled", "sha256"), _values)
    )
    sizes = st.just(b"") | st.sampled_from([b"77777777777\0", b"\x80" + b"\xff" * 11, b"\xff" * 12, b"0000000000x\0"])
    records = st.just(b"size=1\n") | st.sampled_from(
        [b"9 path=a\n", b"8 size=1", b"12 comment=x\n", b"0 =\n", b"99999999999999999999 a=b\n", b""]
    )
    kinds = st.just(b"x") | st.sampled_from([b"g", b"L", b"K", b"S", b"0", b"5"])

    @given(entries, _pieces, _counts, sizes, kinds, records, _numbers, _numbers)
    @bounded
    def case(
        entry: dict[str, Any], piece: bytes, count: int, size: bytes, kind: bytes, record: bytes, first: int, last: int
    ) -> None:
        path = folder / "names.tar"
        path.write_bytes(_tar(piece * min(count, 2**18) + b".png", size, kind, record))
        shard = {"url": "a.tar", "nsamples": 1, "filesize": 1024} | entry
        content = json.dumps({"__kind__": "wids-shard-index-v1", "wids_version": 1, "shardlist": [shard]}).encode()
        attempts: list[Callable[[], object]] = [
            lambda: scan_tar(str(path), str(path)),
            lambda: _check_entries(parse_folder(content, "index.json").shardlist),
            lambda: parse_classes(json.dumps([str(first), last, *range(3)]).encode(), "classes.json"),
            lambda: parse_classes(b"[" * min(count, 2**18), "classes.json"),
            lambda: expand(f"{folder}/x-{{{first}..{last}}}.tar"),
        ]
        for attempt in attempts:
            try:
                attempt()
            except ShardError as error:
                _check(str(error).isprintable() and len(str(error)) < 5000, str(error))

    return case


KINDS = [(hostile_images, 300), (hostile_names, 80)]


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(1))
@pytest.mark.parametrize(("kind", "cases"), KINDS)
def test_hostile_files_are_refused_in_time(
    kind: Callable[[Path], Callable[..., None]], cases: int, seed: int, tmp_path: Path
) -> None:
    with limited_addresses(2**31):
        run(kind(tmp_path), cases, seed)
