"""Headers of tar members, read by bytes and in time linear in the size of the headers.

Python's `tarfile` decodes names, and takes quadratic time for some hostile headers. This module reads what is needed to
find the files of a shard: names, sizes and types, with the additional headers of GNU tar (long names) and of pax
(`path` and `size`). All other facts are ignored.
"""

import os
import re
import tarfile
from collections.abc import Iterator
from typing import NamedTuple

LARGEST_HEADER = 2**20  # maximum size in bytes of an additional header; headers in practice are much smaller
BLOCK = tarfile.BLOCKSIZE
REGULAR = (tarfile.REGTYPE, tarfile.AREGTYPE)
_WITHOUT_CONTENT = (*b"123456",)  # links, devices, folders and pipes; their size field is ignored
_LONG_NAME, _LONG_LINK, _PAX_GLOBAL, _SPARSE = b"L", b"K", b"g", b"S"
_PAX = (b"x", b"X")
_ADDITIONAL = (_LONG_NAME, _LONG_LINK, _PAX_GLOBAL, *_PAX)
_RECORD = re.compile(rb"([0-9]{1,20}) ([^=]{0,4096})=")
_SUM = 8 * 32  # the checksum field counts as eight spaces


class TarError(ValueError):
    """Raised if a header is damaged or too large. The message states the reason."""


class Member(NamedTuple):
    """A member of a tar."""

    name: bytes
    type: bytes
    """One byte: the type field of the header, or `S` for a sparse file."""
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
        return len(block) == BLOCK and _number(block[148:156]) in _checksums(block)
    except TarError:
        return False


def _checksums(block: bytes) -> tuple[int, int]:
    """Return the checksum of a header for unsigned bytes, and for signed bytes as in old tars."""
    unsigned = sum(block) - sum(block[148:156]) + _SUM
    if block.isascii():
        return unsigned, unsigned
    high = sum(byte > 127 for byte in block[:148]) + sum(byte > 127 for byte in block[156:])
    return unsigned, unsigned - 256 * high


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
    """Return the member of a header that begins at byte `offset`, as the header alone describes it."""
    name = block[:100].partition(b"\0")[0]
    if block[257:262] == b"ustar" and block[262:264] != b" \0":  # in the format of GNU, the field `prefix` holds times
        prefix = block[345:500].partition(b"\0")[0]
        name = prefix + b"/" + name if prefix else name
    kind = block[156:157]
    size = 0 if kind[0] in _WITHOUT_CONTENT else _number(block[124:136])
    return Member(name, kind, offset + BLOCK, size)


def _pax(content: bytes) -> dict[bytes, bytes]:
    """Return the records of a pax header that matter here: `path`, `size`, and a key that marks sparse files."""
    found, place = {}, 0
    while place < len(content) and content[place]:
        record = _RECORD.match(content, place)
        end = place + int(record[1]) if record else 0
        if record is None or not record.end() < end <= len(content) or content[end - 1 : end] != b"\n":
            raise TarError("a pax header is damaged")
        if record[2] in (b"path", b"size") or record[2].startswith(b"GNU.sparse."):
            found[b"sparse" if record[2].startswith(b"GNU") else record[2]] = content[record.end() : end - 1]
        place = end
    return found


def _with_records(member: Member, records: dict[bytes, bytes]) -> Member:
    """Return a member with the values of its pax records."""
    size, text = member.size, records.get(b"size", b"")
    if text:
        if not text.isdigit() or len(text) > 20:
            raise TarError(f"the size in a pax header is damaged: {text[:40]!r}")
        size = 0 if member.type[0] in _WITHOUT_CONTENT else int(text)
    kind = _SPARSE if b"sparse" in records else member.type
    return Member(records.get(b"path") or member.name, kind, member.offset, size)


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
        self._global: dict[bytes, bytes] = {}

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
        place, name, records = self.place, b"", self._global
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
                offset = self._after_sparse(block, member.offset) if member.type == _SPARSE else member.offset
                return member._replace(name=name or member.name, offset=offset)
            if not 0 <= member.size <= LARGEST_HEADER:
                raise TarError(f"a header of {member.size} bytes is too large")
            content = os.pread(self._descriptor, member.size, member.offset)
            if len(content) < member.size:
                raise TarError(f"the header at byte {place} is truncated")
            if member.type == _LONG_NAME:
                name = content.partition(b"\0")[0]
            elif member.type == _PAX_GLOBAL:
                self._global = self._global | _pax(content)
                records = self._global | records
            elif member.type in _PAX:
                records = self._global | _pax(content)
            place = member.offset + -(-member.size // BLOCK) * BLOCK

    def _after_sparse(self, block: bytes, offset: int) -> int:
        """Return the byte after the additional blocks of an old sparse file of GNU, whose header is `block`."""
        more = block[482:483] if block[156:157] == _SPARSE else b"\0"
        while more not in (b"\0", b""):
            more = os.pread(self._descriptor, BLOCK, offset)[504:505]
            offset += BLOCK
        return offset


def member_before(descriptor: int, offset: int) -> Member | None:
    """Return the member whose content begins at byte `offset` of a file, described by all its headers.

    Additional headers may begin up to `LARGEST_HEADER` bytes before the header. Return None if no additional header
    describes the member.
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
