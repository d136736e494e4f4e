"""Fuzz test of the shard reader: lying headers, repeated parts, extreme numbers, and wrong answers of a web server."""

import io
import json
import struct
import tarfile
import threading
import zlib
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.data.decode import ImageError, decode
from tessera.data.maps import decode_map
from tessera.data.shards import ShardError, cache, expand, open_shards, remote
from tessera.data.shards.access import Access, SourceConfig
from tessera.data.shards.index import FolderIndex, ShardEntry, parse_classes, parse_folder
from tessera.data.shards.tar_index import scan_tar
from tests.fuzz.cases import CORPUS, bounded, limited_addresses, members, run, seeds, tar

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


class _Answer(NamedTuple):
    """Faults in a server's answers to requests of one file."""

    status: int | None = None
    """Status in place of the right one; None for the right one."""
    length: int = 0
    """Number that is added to Content-Length."""
    total: int = 0
    """Number that is added to the size in Content-Range."""
    version: str = '"1"'
    """ETag."""
    cut: float = 1.0
    """Share of the body that is sent."""
    header: bytes = b""
    """Additional bytes among the headers."""
    damage: int = -1
    """Byte of the file that is changed; -1 for none."""


class _Server(ThreadingHTTPServer):
    """Web server of a few files, with wrong answers for some of them."""

    daemon_threads = True
    files: dict[str, bytes]
    answers: dict[str, _Answer]

    def handle_error(self, request: object, client_address: object) -> None:
        """A client may close the connection."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        name = self.path.rpartition("/")[2]
        assert isinstance(self.server, _Server)
        content, answer = self.server.files.get(name), self.server.answers.get(name, _Answer())
        if content is None:
            self.send_error(404)
            return
        data = bytearray(content)
        if answer.damage >= 0:
            data[answer.damage % len(data)] ^= 0xFF
        asked = self.headers.get("Range")
        start, end = map(int, asked.removeprefix("bytes=").split("-")) if asked else (0, len(data) - 1)
        body = bytes(data[start : end + 1])
        status, length = answer.status or (206 if asked else 200), max(len(body) + answer.length, 0)
        lines = [f"HTTP/1.1 {status} x", f"Content-Length: {length}", f"ETag: {answer.version}", "Connection: close"]
        lines.append(f"Location: {self.path}")
        if asked:
            lines.append(f"Content-Range: bytes {start}-{end}/{len(data) + answer.total}")
        head = "\r\n".join(lines).encode() + b"\r\n" + answer.header + b"\r\n"
        sent = b"" if self.command == "HEAD" else body[: int(answer.cut * len(body))]
        self.wfile.write(head + sent)
        self.close_connection = True


_headers = [b"", b"x\r\n", b"Content-Encoding: gzip\r\n", b"Transfer-Encoding: chunked\r\n", b"\0: \xff\r\n"]
_answers = st.builds(
    _Answer,
    st.none() | st.sampled_from([204, 200, 206, 301, 302, 304, 401, 404, 416, 429, 500, 503, 999]),
    st.sampled_from([0, 0, 0, -1, 1, -(10**6), 10**12]),
    st.sampled_from([0, 0, 1, -1, 10**30]),
    st.sampled_from(['"1"', '"2"', "", "\x1b[31m", 'W/"1"', "x" * 5000]),
    st.sampled_from([1.0, 1.0, 0.5, 0.0]),
    st.sampled_from([*_headers, b"a: " + b"b" * 10_000 + b"\r\n"]),
    st.sampled_from([-1, -1, -1, 0, 300, 700, 1100]),
)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[_Server]:
    """Web server of a shard with its index files."""
    path = tmp_path / "a.tar"
    path.write_bytes(tar(members([0, 5, 8])))
    buffer = io.BytesIO()
    np.savez(buffer, **scan_tar(str(path), "a.tar")._asdict())
    entry = ShardEntry(url="a.tar", nsamples=3, filesize=path.stat().st_size, labelled=0)
    server = _Server(("127.0.0.1", 0), _Handler)
    server.answers = {}
    server.files = {
        "a.tar": path.read_bytes(),
        "a.tar.index": buffer.getvalue(),
        "index.json": FolderIndex(shardlist=[entry]).model_dump_json(by_alias=True, exclude_none=True).encode(),
    }
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def wrong_answers(server: _Server) -> Callable[..., None]:
    """Return a test case for wrong answers of a web server."""
    samples = [content for _, content in members([0, 5, 8])]
    source, number = Access(SourceConfig(retries=0, timeout=0.5)), count()

    @given(st.dictionaries(st.sampled_from(sorted(server.files)), _answers, max_size=2), st.booleans())
    @bounded
    def case(wrong: dict[str, _Answer], by_index: bool) -> None:
        server.answers = wrong
        remote._servers_with_ranges.clear()
        cache._versions.clear()
        url = f"http://127.0.0.1:{server.server_port}/{next(number)}/{'index.json' if by_index else 'a.tar'}"
        intact = all(answer.damage < 0 and answer.cut == 1 for answer in wrong.values())
        try:
            opened = open_shards(url, source=source, progress=False)
            found = [opened.image(sample) for sample in range(opened.images)]
        except ShardError as error:
            found, message = None, str(error).replace("\n  ", "")
            _check(bool(wrong) and message.isprintable(), message)
        assert found in (samples, None) or not intact, "other bytes than those of the shard"

    return case


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(1))
@pytest.mark.parametrize(("kind", "cases"), KINDS)
def test_hostile_files_are_refused_in_time(
    kind: Callable[[Path], Callable[..., None]], cases: int, seed: int, tmp_path: Path
) -> None:
    with limited_addresses(2**31):
        run(kind(tmp_path), cases, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(1))
def test_wrong_answers_of_a_server_give_no_other_bytes(server: _Server, seed: int) -> None:
    with limited_addresses(2**31):
        run(wrong_answers(server), 40, seed)
