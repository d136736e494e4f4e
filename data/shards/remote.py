"""Files on other machines: what fsspec opens, and the output of a command, with limits on time and attempts.

A file system is made in the process that uses it, so that forked workers have their own.
"""

import gzip
import hashlib
import logging
import os
import re
import signal
import subprocess
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol
from urllib.parse import urlsplit

import fsspec.config
from fsspec.core import url_to_fs

from data.shards.retry import NoRangesError, SourceConfig, missing, patiently, within
from data.shards.tar import REMEDY, ShardError

PIPE = "pipe:"
CHUNK = 2**20  # bytes
SLOWEST = 2**20  # bytes a second, below which a request of known size is given up
log = logging.getLogger(__name__)
EXTRAS = {"http": "http", "https": "http", "s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs"}


class Sink(Protocol):
    """Where bytes go."""

    def write(self, data: bytes) -> None: ...
    def restart(self) -> None: ...


class Readable(Protocol):
    """Where bytes come from."""

    def read(self, size: int, /) -> bytes: ...


def is_remote(path: str) -> bool:
    """Whether a path is a URL or `pipe:COMMAND`."""
    return bool(re.match(r"[A-Za-z][A-Za-z0-9+.-]*://|pipe:", path))


def without_query(path: str) -> str:
    """A URL as far as its `?`, where signatures stand; other paths as they are."""
    return path.partition("?")[0] if path.startswith(("http://", "https://")) else path


def host(url: str) -> str:
    """The server of a URL; that of a path is empty."""
    return urlsplit(url).netloc if url.startswith(("http://", "https://")) else ""


def read_small(url: str, source: SourceConfig, limit: int) -> bytes | None:
    """The whole file; None where there is none, or none for us.

    Raises:
        ShardError: it is larger than `limit` bytes, or does not come.
    """

    def once() -> bytes | None:
        try:
            with _stream(url, source) as file:
                content = _upto(file, limit)
        except Exception as error:
            if missing(error):
                return None
            raise
        if len(content) > limit:
            raise ShardError(f"{url}: more than {limit} bytes; remove it")
        return content

    return patiently(url, source, once)


def describe(url: str, source: SourceConfig) -> tuple[int, str]:
    """Size in bytes, 0 where it is not known, and what changes when the file does, as far as its server says.

    Raises:
        ShardError: there is no such file, or no answer.
    """
    if url.startswith(PIPE):
        return 0, ""

    def once() -> tuple[int, str]:
        system, path = _system(url, source)
        info = within(source.timeout, lambda: system.info(path))
        names = ("ETag", "etag", "md5Hash", "Last-Modified", "LastModified", "mtime", "created")
        return int(info.get("size") or 0), next((str(info[name]) for name in names if info.get(name)), "")

    return patiently(url, source, once)


def matches(pattern: str, source: SourceConfig) -> list[str]:
    """URLs that match a glob, sorted.

    Raises:
        ShardError: its server has no listings, or does not answer.
    """
    if pattern.startswith(("http://", "https://")):
        raise ShardError(
            f"{pattern}: a web server has no listing; name a brace range such as a-{{000..099}}.tar, or an index.json"
        )

    def once() -> list[str]:
        system, path = _system(pattern, source)
        found = within(source.timeout * 10, lambda: system.glob(path))  # a listing takes many requests
        return sorted(str(system.unstrip_protocol(name)) for name in found)

    return patiently(pattern, source, once)


def read_range(url: str, start: int, end: int, expected: int, source: SourceConfig) -> bytes:
    """Bytes `start` to `end` of a file of `expected` bytes (0: not known).

    Raises:
        NoRangesError: the server sends whole files only.
        ShardError: the file is another one, or does not come.
    """

    def once() -> bytes:
        if url.startswith("http"):
            data = _http_range(url, start, end, expected, source)
        else:
            system, path = _system(url, source)
            limit = source.timeout + (end - start) / SLOWEST
            data = within(limit, lambda: system.cat_file(path, start=start, end=end))
        if len(data) != end - start:
            size = describe(url, source)[0] if len(data) < end - start else 0
            if 0 < size < end:
                raise ShardError(f"{url}: has {size} bytes where {end} or more were expected; {REMEDY}")
            raise OSError(f"sent {len(data)} of {end - start} bytes")
        return data

    return patiently(url, source, once)


def takes_ranges(url: str, source: SourceConfig) -> bool:
    """Whether parts of a file can be had; a web server is asked once a process.

    Raises:
        ShardError: there is no such file, or no answer.
    """
    if not url.startswith("http"):
        return True
    server = host(url)
    if server not in _ranges:
        try:
            read_range(url, 0, 1, 0, source)
            _ranges[server] = True
        except NoRangesError:
            _ranges[server] = False
            log.warning("%s sends no byte ranges: its shards are fetched whole, and kept below $TESSERA_CACHE", server)
    return _ranges[server]


def fetch(url: str, sink: Sink, source: SourceConfig, *, size: int = 0, sha256: str | None = None) -> None:
    """Writes a whole shard to `sink`, decompressed if it is a `.tar.gz`; also a local one.

    Args:
        size: in bytes as it is stored; 0 where it is not known.
        sha256: of what is stored, in hexadecimal, where it is known.

    Raises:
        ShardError: it cannot be read or decompressed, or is not what size and checksum say.
    """

    def once() -> None:
        sink.restart()
        with _stream(url, source) as file:
            stored = _Counted(file, size, url)
            try:
                body = gzip.GzipFile(fileobj=stored) if without_query(url).endswith(".gz") else stored  # pyright: ignore[reportArgumentType]
                while chunk := body.read(CHUNK):
                    sink.write(chunk)
                while stored.read(CHUNK):
                    pass
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                if size and stored.count < size and isinstance(error, EOFError):
                    raise OSError(f"sent {stored.count} of {size} bytes") from error
                raise ShardError(f"{url}: cannot be decompressed ({error}); {REMEDY}") from error
        if size and stored.count != size:
            raise OSError(f"sent {stored.count} of {size} bytes")
        if sha256 and stored.digest.hexdigest() != sha256.lower():
            raise OSError("its SHA-256 is not the one in index.json: the shard or the index has changed")

    patiently(url, source, once)


class _Counted:
    """A stream of bytes with their number and checksum, which ends with an error where it is too long."""

    def __init__(self, file: Readable, limit: int, url: str):
        self._file, self._limit, self._url = file, limit, url
        self.count, self.digest = 0, hashlib.sha256()

    def read(self, size: int = CHUNK, /) -> bytes:
        data = self._file.read(min(size, CHUNK) if size >= 0 else CHUNK)
        self.count += len(data)
        if self._limit and self.count > self._limit:
            raise ShardError(f"{self._url}: has more than the {self._limit} bytes that were expected; {REMEDY}")
        self.digest.update(data)
        return data


def _upto(file: Readable, limit: int) -> bytes:
    """The rest of a file, or a little more than `limit` bytes of it."""
    chunks, count = [], 0
    while count <= limit and (chunk := file.read(CHUNK)):
        chunks.append(chunk)
        count += len(chunk)
    return b"".join(chunks)


def _http_range(url: str, start: int, end: int, expected: int, source: SourceConfig) -> bytes:
    system, path = _system(url, source)
    headers = {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
    file = within(source.timeout, lambda: system.open(path, "rb", block_size=0, size=end, headers=headers))
    with file:
        if file.r.status != 206:
            raise NoRangesError(url)
        total = file.r.headers.get("Content-Range", "").rpartition("/")[2]
        if expected and total.isdigit() and int(total) != expected:
            raise ShardError(f"{url}: has {total} bytes where {expected} were expected; {REMEDY}")
        return _upto(_Patient(file, source.timeout), end - start - 1)


class _Patient:
    """A file whose every read ends in time."""

    def __init__(self, file: Any, timeout: float):
        self._file, self._timeout = file, timeout

    def read(self, size: int, /) -> bytes:
        return within(self._timeout, lambda: self._file.read(size))


@contextmanager
def _stream(url: str, source: SourceConfig) -> Iterator[Readable]:
    """A file from its beginning to its end."""
    if url.startswith(PIPE):
        with _output(url.removeprefix(PIPE), source) as file:
            yield file
        return
    if not is_remote(url):
        with open(url, "rb") as file:
            yield file
        return
    system, path = _system(url, source)
    if url.startswith("http"):
        options: dict[str, Any] = {"block_size": 0, "size": 1, "headers": {"Accept-Encoding": "identity"}}
    else:
        options = {}
    with within(source.timeout, lambda: system.open(path, "rb", **options)) as file:
        yield _Patient(file, source.timeout)


@contextmanager
def _output(command: str, source: SourceConfig) -> Iterator[Readable]:
    """What a command of bash writes; it must end well."""
    process = subprocess.Popen(
        ["bash", "-o", "pipefail", "-c", command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield _Patient(process.stdout, source.timeout)
        code = process.wait(source.timeout)
        if code:
            raise OSError(f"the command ended with status {code}")
    finally:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        assert process.stdout is not None
        process.stdout.close()


_ranges: dict[str, bool] = {}
"""web servers that were asked for a part of a file, and whether they sent it"""
_systems: dict[tuple[Any, ...], Any] = {}
_making = threading.Lock()


def _system(url: str, source: SourceConfig) -> tuple[Any, str]:
    """The file system of a URL, one a process, and the path in it."""
    scheme, host = urlsplit(url)[:2]
    name = (os.getpid(), scheme, host, source.timeout)  # a forked process has no threads that would answer
    with _making:
        if name not in _systems:
            try:
                _systems[name] = url_to_fs(url, **_options(scheme, source))[0]
            except ImportError as error:
                extra = EXTRAS.get(scheme)
                install = f"pip install 'tessera-ssl[{extra}]'" if extra else str(error)
                raise ShardError(f"{url}: a package for {scheme}:// is missing; {install}") from error
            except ValueError as error:
                raise ShardError(f"{url}: {error}") from error
            if scheme in ("s3", "s3a"):
                _systems[name].retries = 1  # the attempts are counted here
        system = _systems[name]
    return system, system._strip_protocol(url)


def _options(scheme: str, source: SourceConfig) -> dict[str, Any]:
    """Limits on time where fsspec's own would be other ones; what the user has configured for fsspec goes first."""
    given = fsspec.config.conf.get(scheme, {})
    if scheme in ("http", "https"):
        import aiohttp

        limit = aiohttp.ClientTimeout(total=None, sock_connect=source.timeout, sock_read=source.timeout)
        return {"client_kwargs": {"timeout": limit}} | given
    if scheme in ("s3", "s3a"):
        limits = {
            "connect_timeout": source.timeout,
            "read_timeout": source.timeout,
            "retries": {"max_attempts": 0},
        }
        return {"config_kwargs": limits} | given
    return {}


def _fresh() -> None:
    global _making  # which may have been held; the parent's file systems stay, as ending them would end its connections
    _making = threading.Lock()


os.register_at_fork(after_in_child=_fresh)
