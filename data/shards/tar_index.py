"""Index of a tar: the name of each sample, and the byte positions of its image, label and map.

The layout is that of webdataset: neighbouring members form one sample if their paths are equal up to the first dot of
the file name. Images, labels and maps are read by their byte offsets, and all other members are ignored. Nothing is
unpickled, and the name of a member is never used as a path.

Headers are parsed as bytes, in time linear in their size. Python's `tarfile` is not used, because it decodes names, and
takes quadratic time for some hostile headers. `Headers` reads names, sizes and types, including the additional headers
of GNU tar (long names) and of pax (`path` and `size`).
"""

import logging
import os
import re
import tarfile
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from tessera.data.failures import MAKE_SHARD_AGAIN, ShardError, unreadable
from tessera.data.shards.notes import (
    CHOSEN,
    LINK,
    MAPPED,
    NAME,
    ORPHAN,
    OTHER_IMAGES,
    REST,
    TWICE,
    Note,
    describe,
    packed_notes,
)
from tessera.runtime.user_error import printable

IMAGES = ("jpg", "jpeg", "png", "webp", "tif", "tiff", "dcm", "jfif", "jpe", "jif")
"""File name extensions of images in shards and folders. The last three are those of JPEGs, too."""
ARRAYS = ("npy", "npz")
"""File name extensions of arrays. Arrays are images only in tars and folders without files of `IMAGES`, beside which
they usually hold something else, such as features."""
LABEL = "cls"
MAP = "seg.png"
"""File name extension of segmentation maps in a shard: the map of KEY.jpg is KEY.seg.png."""
MAPS = (MAP, "depth.png", "depth.npy")
"""File name extensions of maps of classes and of depth. A sample has one map: the first of these."""
LARGEST_MEMBER = 256 * 2**20  # maximum size in bytes of an image, label or map
LARGEST_LABEL = 2**22 - 1
"""Largest class number. Evaluations need memory for every class up to the largest one."""
LONGEST_NUMBER = 18  # maximum number of characters of a label
LONGEST_EXTENSION = 64  # number of bytes of an extension that are compared
LONGEST_SHOWN = 200  # maximum number of characters of the name of a member in a message
LONGEST_PLAIN = 92  # from this length on, a key may be in an additional header, because the name field has 100 bytes

LARGEST_HEADER = 2**20  # maximum size in bytes of an additional header; headers in practice are much smaller
BLOCK = tarfile.BLOCKSIZE
REGULAR = (tarfile.REGTYPE, tarfile.AREGTYPE)
LINKS = (tarfile.LNKTYPE, tarfile.SYMTYPE)
_WITHOUT_CONTENT = (*b"123456",)  # links, devices, folders and pipes; their size field is ignored
_LONG_NAME, _LONG_LINK, _PAX_GLOBAL = b"L", b"K", b"g"
_PAX = (b"x", b"X")
_ADDITIONAL = (_LONG_NAME, _LONG_LINK, _PAX_GLOBAL, *_PAX)
_RECORD = re.compile(rb"([0-9]{1,20}) ([^=]{0,4096})=")
_SUM = 8 * 32  # sum of the eight spaces that replace the checksum field when a checksum is computed

log = logging.getLogger(__name__)


class TarError(ValueError):
    """Raised if a header is damaged or too large. The message states the reason."""


class Member(NamedTuple):
    """A member of a tar."""

    name: bytes
    type: bytes
    """One byte: the type field of the header."""
    offset: int
    """Byte of the tar at which the content begins."""
    size: int
    """Size of the content in bytes; 0 for links, folders and other members without content."""

    @property
    def end(self) -> int:
        """Byte of the tar after the content."""
        return self.offset + self.size


def is_header(block: bytes) -> bool:
    """Return True if a block of 512 bytes has the checksum of a tar header."""
    try:
        return len(block) == BLOCK and _number(block[148:156]) == sum(block) - sum(block[148:156]) + _SUM
    except TarError:
        return False


def _number(field: bytes) -> int:
    """Return the number in a field of a header: octal digits, or a big-endian number after a byte of 0x80 or 0xff."""
    if field[0] in (0x80, 0xFF):
        value = int.from_bytes(field[1:], "big")
        return value if field[0] == 0x80 else value - 256 ** (len(field) - 1)
    digits = field.partition(b"\0")[0].strip()
    if digits.strip(b"01234567"):
        raise TarError(f"a number in a header is damaged: {digits!r}")
    return int(digits or b"0", 8)


def plain_member(block: bytes, offset: int) -> Member:
    """Return the member that a header at byte `offset` describes, ignoring additional headers."""
    name = block[:100].partition(b"\0")[0]
    if block[257:262] == b"ustar" and block[262:264] != b" \0":  # a GNU header stores times in the field `prefix`
        prefix = block[345:500].partition(b"\0")[0]
        name = prefix + b"/" + name if prefix else name
    kind = block[156:157]
    size = 0 if kind[0] in _WITHOUT_CONTENT else _number(block[124:136])
    return Member(name, kind, offset + BLOCK, size)


def _pax(content: bytes) -> dict[bytes, bytes]:
    """Return the records `path` and `size` of a pax header."""
    found, place = {}, 0
    while place < len(content) and content[place]:
        record = _RECORD.match(content, place)
        end = place + int(record[1]) if record else 0
        if record is None or not record.end() < end <= len(content) or content[end - 1 : end] != b"\n":
            raise TarError("a pax header is damaged")
        if record[2] in (b"path", b"size"):
            found[record[2]] = content[record.end() : end - 1]
        place = end
    return found


def _with_records(member: Member, records: dict[bytes, bytes]) -> Member:
    """Return a member with the values of its pax records."""
    size, text = member.size, records.get(b"size", b"")
    if text:
        if not text.isdigit() or len(text) > 20:
            raise TarError(f"the size in a pax header is damaged: {text[:40]!r}")
        size = 0 if member.type[0] in _WITHOUT_CONTENT else int(text)
    return Member(records.get(b"path") or member.name, member.type, member.offset, size)


class Headers:
    """Iterator over the members of an uncompressed tar.

    After the iteration, `place` is the byte after the last member, and `rest` is the block that begins there: empty at
    the end of the file, zeros at the end mark, and other bytes if a header is damaged.

    Args:
        descriptor: descriptor of the file. Its position is not used.
        start: byte of the file at which the first header begins.
    """

    def __init__(self, descriptor: int, start: int = 0) -> None:
        self._descriptor, self.place, self.rest = descriptor, start, b""

    def __iter__(self) -> Iterator[Member]:
        """Yield the members in the order of the tar.

        Raises:
            TarError: a header is damaged or too large.
            OSError: the file cannot be read.
        """
        while (member := self._next()) is not None:
            yield member
            self.place = member.offset + -(-member.size // BLOCK) * BLOCK

    def _next(self) -> Member | None:
        place, name, records = self.place, b"", dict[bytes, bytes]()
        while True:
            block = os.pread(self._descriptor, BLOCK, place)
            if not is_header(block) or not any(block):
                if place == self.place:
                    self.rest = block
                    return None
                raise TarError(f"the header at byte {place} is damaged or missing")
            member = plain_member(block, place)
            if member.type not in _ADDITIONAL:
                member = _with_records(member, records)
                return member._replace(name=name or member.name)
            if not 0 <= member.size <= LARGEST_HEADER:
                raise TarError(f"a header of {member.size} bytes is too large")
            content = os.pread(self._descriptor, member.size, member.offset)
            if len(content) < member.size:
                raise TarError(f"the header at byte {place} is truncated")
            if member.type == _LONG_NAME:
                name = content.partition(b"\0")[0]
            elif member.type in _PAX:
                records = _pax(content)
            place = member.offset + -(-member.size // BLOCK) * BLOCK


def member_before(descriptor: int, offset: int) -> Member | None:
    """Return the member whose content begins at byte `offset` of a file, as its additional headers describe it.

    Additional headers may begin up to `LARGEST_HEADER` bytes before the member's own header. Return None if the member
    has no additional header.
    """
    header = offset - BLOCK
    for start in range(header, max(header - LARGEST_HEADER, 0) - 1, -BLOCK):
        block = os.pread(descriptor, BLOCK, start)
        if start == header and not is_header(block):
            return None
        if block[156:157] not in _ADDITIONAL or not is_header(block):
            continue
        try:
            member = next(iter(Headers(descriptor, start)), None)
        except TarError:
            continue
        if member is not None and member.offset == offset:
            return member
    return None


Members = list[tuple[bytes, dict[str, tuple[int, int]]]]
"""Samples of a tar. A sample is its key and a dict that maps the extension of a member to its offset and size."""


class Index(NamedTuple):
    """Names and byte positions of the S samples of one tar, or names and labels of the S images of one folder."""

    keys: np.ndarray
    """Concatenated names of all samples: uint8. The names are bytes as stored in the tar, or paths below the folder."""
    ends: np.ndarray
    """Index in `keys` at which the name of each sample ends: (S,) int64."""
    images: np.ndarray
    """Offset and size of each image in bytes: (S, 2) int64. For a folder, the modification time in nanoseconds since
    1970 and the size of each image."""
    labels: np.ndarray
    """Offset and size of each label in bytes, or -1 for a sample without a label: (S, 2) int64. For a folder, the class
    number and 0."""
    summary: np.ndarray
    """Number of samples, number of samples with a label, and size in bytes of the tar or of all images: (3,) int64."""
    maps: np.ndarray = np.empty((0, 2), dtype=np.int64)
    """Offset and size of each map in bytes, or -1 for a sample without a map: (S, 2) int64. If no sample
    has a map, the array is empty: (0, 2)."""
    notes: np.ndarray = np.empty(0, dtype=np.uint8)
    """Notes on the members that are left out, as `notes.packed_notes` returns them: uint8."""
    pages: np.ndarray = np.empty(0, dtype=np.int64)
    """Number of the page of each sample in its file: (S,) int64. If files are samples, the array is empty: (0,)."""

    def map_place(self, sample: int) -> tuple[int, int]:
        """Return the offset and size of the map of a sample in bytes, or (-1, -1) without a map."""
        offset, size = self.maps[sample] if len(self.maps) else (-1, -1)
        return int(offset), int(size)

    def key(self, sample: int) -> str:
        """Return the name of a sample for messages and results, with unprintable characters escaped.

        The name of a page is that of its file and the number of the page, such as `stack#3`.
        """
        name = printable(self.raw_key(sample).decode(errors="backslashreplace"))
        return f"{name}#{self.pages[sample]}" if len(self.pages) else name

    def raw_key(self, sample: int) -> bytes:
        """Return the name of a sample, or of the file of a page, as it is stored."""
        return self.keys[self.ends[sample - 1] if sample else 0 : self.ends[sample]].tobytes()


def with_pages(index: Index, pages_of: Callable[[int], int]) -> Index:
    """Return the index of the pages of files. `pages_of` returns the number of pages of each sample of `index`."""
    counts = np.array([pages_of(sample) for sample in range(len(index.images))])
    files = np.repeat(np.arange(len(counts)), counts)
    names = [index.raw_key(sample) for sample in files.tolist()]
    labels = index.labels[files]
    return index._replace(
        keys=np.frombuffer(b"".join(names), dtype=np.uint8),
        ends=np.cumsum([len(name) for name in names], dtype=np.int64),
        images=index.images[files],
        labels=labels,
        summary=np.array([len(files), (labels[:, 0] >= 0).sum(), index.summary[2]], dtype=np.int64),
        maps=index.maps[files] if len(index.maps) else index.maps,
        pages=np.arange(len(files)) - (np.cumsum(counts) - counts)[files],
    )


class NumberedIndex(Index):
    """Index of samples whose names are their numbers. Its arrays take no memory."""

    __slots__ = ()

    @classmethod
    def of(cls, samples: int, labelled: bool) -> "NumberedIndex":
        """Return the index of `samples` samples, which all have a label or all have none."""
        places = np.broadcast_to(np.int64(0), (samples, 2))
        labels = places if labelled else np.broadcast_to(np.int64(-1), (samples, 2))
        summary = np.array([samples, samples * labelled, 0], dtype=np.int64)
        return cls(np.empty(0, dtype=np.uint8), np.empty(0, dtype=np.int64), places, labels, summary)

    def raw_key(self, sample: int) -> bytes:
        return b"%d" % sample


def scan_tar(path: str | int, shard: str, image: str | None = None, label: str | None = None) -> Index:
    """Read the headers of an uncompressed tar and return its index.

    If the tar ends after a complete member but without an end-of-archive mark, a warning is logged.

    Args:
        path: path of the tar, or a file descriptor, which this function closes.
        shard: name of the shard in error messages.
        image: file name extension of images, such as `left.jpg`; None for the usual extensions.
        label: file name extension of labels; None for `cls`.

    Raises:
        ShardError: the file is not a tar, is truncated, has a broken header, holds a member that is too large or that
            occurs twice, or holds no images.
    """
    samples: Members = []
    images = IMAGES if image is None else (image.lower().removeprefix("."),)
    wanted = {*images, label or LABEL, *MAPS, *(ARRAYS if image is None else ())}
    unread = _Unread(image is not None)
    try:
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            headers = Headers(file.fileno())
            for member in headers:
                if member.size < 0 or member.end > size:
                    raise ShardError(
                        f"{shard} is truncated or damaged. The tar has {size} bytes, but its member "
                        f"{shown(member.name)} ends at byte {member.end}. {MAKE_SHARD_AGAIN}"
                    )
                if not _add(samples, member, shard, wanted):
                    unread.add(member, len(samples) - 1)
            images = _kind_of_images(samples) if image is None else images
            found = unread.notes(samples, images)
            if _holds_data(file.fileno(), headers.place, size):
                found.append(Note(REST, size - headers.place))
    except OSError as error:
        raise unreadable(shard, error) from error
    except TarError as error:
        raise ShardError(f"{shard} is not a complete tar ({error}). {MAKE_SHARD_AGAIN}") from error
    place = headers.place
    if place > size:
        raise ShardError(f"{shard} is not a complete tar (it ends inside a block). {MAKE_SHARD_AGAIN}")
    if any(headers.rest) and place == 0:
        raise ShardError(f"{shard} is not a complete tar (the first header is damaged). {MAKE_SHARD_AGAIN}")
    if any(headers.rest):
        raise ShardError(f"{shard} has a broken header at byte {place}. {MAKE_SHARD_AGAIN}")
    if not headers.rest:
        log.warning("%s ends at byte %d without an end mark. The file may be truncated.", shard, size)
    if mapped := [key for key, members in samples if sum(name in members for name in MAPS) > 1]:
        found.append(Note(MAPPED, len(mapped), shown(mapped[0])))
    if image is None:
        _refuse_several_images(samples, shard)
    return _index(samples, size, shard, images, label or LABEL, found)


def _kind_of_images(samples: Members) -> Sequence[str]:
    """Return the extensions of the images of a tar. Arrays beside other images are removed from `samples`."""
    holds_images = any(name in members for _, members in samples for name in IMAGES)
    if not holds_images and any(name in members for _, members in samples for name in ARRAYS):
        return ARRAYS
    for _, members in samples:
        for name in ARRAYS:
            members.pop(name, None)
    return IMAGES


def _holds_data(descriptor: int, place: int, size: int) -> bool:
    """Return True if a file holds more than zeros between the byte `place` and its end. Longer parts count as data."""
    most = min(size, place + LARGEST_MEMBER)
    pieces = (os.pread(descriptor, LARGEST_HEADER, start) for start in range(place, most, LARGEST_HEADER))
    return any(piece.strip(b"\0") for piece in pieces) or most < size


class _Unread:
    """Members of a tar that look like images but are not read. `chosen` is true if the user has named the image."""

    def __init__(self, chosen: bool):
        self._chosen = chosen
        self._counts, self._firsts = Counter[str](), dict[str, str]()
        self._beside: dict[int, bytes] = {}  # sample -> name of an image that the user has not chosen

    def add(self, member: Member, sample: int) -> None:
        extension = _extension(member.name)
        if extension not in (*IMAGES, *OTHER_IMAGES):
            return
        if member.type in LINKS:
            self._count(LINK, member)
        elif self._chosen:
            self._beside.setdefault(sample, member.name)
        elif member.type in REGULAR:
            self._count(NAME if extension in IMAGES else f".{extension}", member)

    def _count(self, kind: str, member: Member) -> None:
        self._counts[kind] += 1
        self._firsts.setdefault(kind, shown(member.name))

    def notes(self, samples: Members, images: Sequence[str]) -> list[Note]:
        """Return notes on these members, on labels without an image, and on repeated names."""
        found = [Note(kind, count, self._firsts[kind]) for kind, count in self._counts.items()]
        with_image = [any(name in members for name in images) for _, members in samples]
        skipped = {one: name for one, name in self._beside.items() if one >= 0 and not with_image[one]}
        orphans = [
            shown(key) for one, (key, own) in enumerate(samples) if own and not with_image[one] and one not in skipped
        ]
        keys = Counter(key for (key, _), good in zip(samples, with_image, strict=True) if good)
        twice = [key for key, count in keys.items() if count > 1]
        found += _not_chosen(skipped.values())
        found += [Note(ORPHAN, len(orphans), orphans[0])] if orphans else []
        return found + ([Note(TWICE, keys.total() - len(keys), shown(twice[0]))] if twice else [])


def _not_chosen(names: Iterable[bytes]) -> list[Note]:
    """Return notes on samples that lack the image that the user has chosen, given the name of another image of each."""
    groups: dict[str, list[bytes]] = {}
    for name in names:
        groups.setdefault(f".{_extension(name)}", []).append(name)
    return [Note(CHOSEN, len(found), shown(found[0]), group) for group, found in groups.items()]


def _refuse_several_images(samples: Members, shard: str) -> None:
    """Raise `ShardError` if a sample has images of several extensions, of which one may be a mask."""
    for key, members in samples:
        several = [name for name in members if name in (*IMAGES, *ARRAYS)]
        if len(several) > 1:
            names = " and ".join(f"{shown(key)}.{name}" for name in several)
            raise ShardError(
                f"{shard}: a sample has several images, {names}. Choose one of them with data.image, for example "
                f"--data.image={several[0]} (--image={several[0]} for other commands)."
            )


def read_sample(descriptor: int, start: int, end: int, key: bytes) -> dict[int, tuple[str, bytes]]:
    """Read all members of a sample: byte at which the content begins -> (extension in lower case, content).

    Args:
        descriptor: descriptor of a file that holds a part of a tar.
        start: byte of the file at which a header begins.
        end: byte of the file before which the headers of the sample begin.
        key: name of the sample as it is stored.
    """
    found: dict[int, tuple[str, bytes]] = {}
    with suppress(TarError):  # the part may end within a header
        for member in Headers(descriptor, start):
            if member.offset > end:
                break
            name = split_name(member.name)
            if name and name[0] == key and member.type in REGULAR and 0 <= member.size <= LARGEST_MEMBER:
                content = os.pread(descriptor, member.size, member.offset)
                found[member.offset] = name[1].lower().decode(errors="replace"), content
    return found


def shown(name: bytes) -> str:
    """Return the name of a member for messages: unprintable characters are escaped, and long names are shortened."""
    text = printable(name.decode(errors="backslashreplace"))
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}... ({len(name)} bytes)"


def _extension(name: bytes) -> str:
    return name[-16:].rpartition(b".")[2].lower().decode(errors="replace")


def whole_number(text: bytes) -> int | None:
    """Return the integer that a text consists of, such as `b"-12\\n"`. Return None for all other texts.

    Python's `int` also accepts underscores (`1_2`), a plus sign and digits of other scripts.
    """
    digits = text.strip(b" \t\r\n")
    if not digits.removeprefix(b"-").isdigit() or len(digits) > LONGEST_NUMBER:
        return None
    return int(digits)


def split_name(name: bytes) -> tuple[bytes, bytes] | None:
    """Return the key and the extension of a member by webdataset's rule; None if the member has no key or extension.

    The extension begins after the first dot of the file name. If the file name begins with a dot, the key is the path
    of the folder. If the name of this folder contains a dot, or there is no folder, the result is None.
    """
    slash = name.rfind(b"/")
    dot = name.find(b".", slash + 1)
    if dot < 0:
        return None
    if dot == slash + 1 and (slash < 0 or b"." in name[name.rfind(b"/", 0, slash) + 1 : slash]):
        return None
    return name[:dot], name[dot + 1 :]


def _add(samples: Members, member: Member, shard: str, wanted: Container[str]) -> bool:
    """Add a member to the last sample or to a new sample. Return True if its extension is one of `wanted`."""
    found = split_name(member.name)
    if not found or member.type not in REGULAR:
        return False
    key, extension = found[0], found[1][:LONGEST_EXTENSION].lower().decode(errors="replace")
    if not samples or samples[-1][0] != key:
        samples.append((key, {}))
    if extension not in wanted:
        return False
    if extension in samples[-1][1]:
        raise ShardError(f"{shard} holds {shown(member.name)} twice. Make the shard again with unique names.")
    if member.size > LARGEST_MEMBER:
        raise ShardError(
            f"{shard} holds {shown(member.name)} with {member.size} bytes, but at most {LARGEST_MEMBER} are allowed. "
            "Make the shard again without this file."
        )
    samples[-1][1][extension] = (member.offset, member.size)
    return True


def _index(
    samples: Members, size: int, shard: str, extensions: Sequence[str], label: str, notes: Sequence[Note]
) -> Index:
    keys, images, labels, maps = [], [], [], []
    for key, members in samples:
        if image := next((place for extension, place in members.items() if extension in extensions), None):
            keys.append(key)
            images.append(image)
            labels.append(members.get(label, (-1, -1)))
            maps.append(next((members[name] for name in MAPS if name in members), (-1, -1)))
    if not images:
        names = " or ".join(f"KEY.{extension}" for extension in extensions)
        reasons = " ".join(["", *describe(notes)])
        if extensions not in (IMAGES, ARRAYS):
            raise ShardError(f"{shard} holds no image {names}. Choose another name of the image.{reasons}")
        raise ShardError(
            f"{shard} holds no images. Name image files {names}, without a dot in KEY, or choose other files with "
            f"data.image.{reasons}"
        )
    return Index(
        keys=np.frombuffer(b"".join(keys), dtype=np.uint8),
        ends=np.cumsum([len(key) for key in keys]),
        images=np.array(images, dtype=np.int64),
        labels=np.array(labels, dtype=np.int64),
        summary=np.array([len(images), sum(offset >= 0 for offset, _ in labels), size], dtype=np.int64),
        maps=np.array(maps if max(maps)[0] >= 0 else np.empty((0, 2)), dtype=np.int64),
        notes=packed_notes(notes),
    )


def is_member(header: bytes, key: bytes, size: int) -> bool:
    """Return True if `header` (512 bytes) is the tar header of a member of sample `key` that has `size` bytes.

    A long or non-ASCII name is not compared, because it may be stored in an additional header before this header.
    """
    quick = header.startswith(key + b".") and header[124:136].rstrip(b" \0") == b"%011o" % size
    if quick and header[156:157] in REGULAR:
        return True
    if not is_header(header):
        return False
    found = plain_member(header, 0)
    named = found.name.startswith(key + b".") or not key.isascii() or len(key) >= LONGEST_PLAIN
    return found.size == size and found.type in REGULAR and named


def is_described(descriptor: int, offset: int, key: bytes, size: int) -> bool:
    """Return True if a member of sample `key` with `size` bytes of content begins at byte `offset` of a file.

    Unlike `is_member`, this function reads the additional headers before the member's own header. The additional
    headers may state the name and the size. `offset` is the first byte of the content.
    """
    found = member_before(descriptor, offset)
    return found is not None and found.size == size and found.type in REGULAR and found.name.startswith(key + b".")
