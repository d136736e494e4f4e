"""Functions that read remote files and the output of commands, with time limits and retries. fsspec opens all URLs."""

import functools
import gzip
import hashlib
import logging
import os
import re
import signal
import subprocess
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Protocol
from urllib.parse import urlsplit

import fsspec.config
from fsspec.core import url_to_fs

from tessera.data.shards.errors import MAKE_SHARD_AGAIN, ShardError
from tessera.data.shards.retry import NoRangesError, SourceConfig, is_missing, retry, with_timeout
from tessera.runtime.errors import printable

PIPE = "pipe:"
READ_SIZE = 2**20  # bytes
SLOWEST = 2**16  # minimum mean transfer rate in bytes per second, from which the time limit of a request follows
EXTRAS = {"http": "http", "https": "http", "s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs"}
VERSION_KEYS = ("ETag", "etag", "md5Hash", "Last-Modified", "LastModified", "mtime", "created")
"""Keys of fsspec's file information whose values change when the file changes. The most reliable key comes first."""

Check = Callable[[list[str]], None]
"""Function that takes the versions of a file that a server states, such as its ETag, and raises `ShardError` if the
file has changed."""

log = logging.getLogger(__name__)


class Sink(Protocol):
    """Protocol of objects to which bytes are written."""

    def write(self, data: bytes) -> None: ...
    def restart(self) -> None: ...


class Readable(Protocol):
    """Protocol of objects from which bytes are read."""

    def read(self, size: int, /) -> bytes: ...


def is_remote(path: str) -> bool:
    """Return True if a path is a URL or `pipe:COMMAND`."""
    return bool(re.match(r"[A-Za-z][A-Za-z0-9+.-]*://|pipe:", path))


def without_query(path: str) -> str:
    """Return an HTTP URL without its query string, which may hold signatures. Return all other paths unchanged."""
    return path.partition("?")[0] if path.startswith(("http://", "https://")) else path


def host(url: str) -> str:
    """Return the host and port of an HTTP URL. Return an empty string for all other paths."""
    return url.split("/", 3)[2] if url.startswith(("http://", "https://")) else ""


def read_small(url: str, source: SourceConfig, limit: int) -> bytes | None:
    """Return the content of a remote file. Return None if the file does not exist or access is denied.

    Raises:
        ShardError: the file is larger than `limit` bytes, or all attempts failed.
    """

    def once() -> bytes | None:
        try:
            with _stream(url, source) as file:
                content = _read_up_to(file, limit)
        except Exception as error:
            if is_missing(error):
                return None
            raise
        if len(content) > limit:
            raise ShardError(f"{url}: has more than {limit} bytes, which is too large for an index. Remove the file.")
        return content

    return retry(url, source, once)


def describe(url: str, source: SourceConfig) -> tuple[int, str]:
    """Return the size and the version of a remote file.

    The size is in bytes, or 0 if unknown. The version is a string that changes when the file changes, or an empty
    string if unknown.

    Raises:
        ShardError: the file does not exist, or all attempts failed.
    """
    if url.startswith(PIPE):
        return 0, ""

    def once() -> tuple[int, str]:
        system, path = _system(url, source)
        info = with_timeout(source.timeout, lambda: system.info(path))
        return int(info.get("size") or 0), next(iter(_versions(info)), "")

    return retry(url, source, once)


def _versions(facts: Mapping[str, Any]) -> list[str]:
    """Return the versions in fsspec's file information or in the headers of an answer. The most reliable one is first.

    A weak ETag counts as the strong ETag of the same value.
    """
    return [str(facts[key]).removeprefix("W/") for key in VERSION_KEYS if facts.get(key)]


def matches(pattern: str, source: SourceConfig) -> list[str]:
    """Return the sorted URLs that match a glob.

    Raises:
        ShardError: the URL belongs to a web server, which cannot list files, or all attempts failed.
    """
    if pattern.startswith(("http://", "https://")):
        raise ShardError(
            f"{pattern}: a glob cannot be used, because a web server has no listing. "
            "Name a brace range such as a-{000..099}.tar, or an index.json."
        )

    def once() -> list[str]:
        system, path = _system(pattern, source)
        # A listing has ten times the usual time limit, because it takes many requests.
        found = with_timeout(source.timeout * 10, lambda: system.glob(path))
        return sorted(str(system.unstrip_protocol(name)) for name in found)

    return retry(pattern, source, once)


def read_range(
    url: str, start: int, end: int, expected: int, source: SourceConfig, check: Check | None = None
) -> bytes:
    """Return the bytes of a remote file from `start` up to, but not including, `end`.

    Args:
        expected: expected size of the complete file in bytes; 0 if unknown.
        check: called with the versions of the file that the server states.

    Raises:
        NoRangesError: the server does not support byte ranges and sends complete files only.
        ShardError: the file does not have the expected size, or all attempts failed.
    """

    def once() -> bytes:
        if url.startswith("http"):
            data = _http_range(url, start, end, expected, source, check)
        else:
            system, path = _system(url, source)
            limit = source.timeout + (end - start) / SLOWEST
            data = with_timeout(limit, lambda: system.cat_file(path, start=start, end=end))
            if check:
                check(_versions(with_timeout(source.timeout, lambda: system.info(path))))
        if len(data) != end - start:
            size = describe(url, source)[0] if len(data) < end - start else 0
            if 0 < size < end:
                raise ShardError(f"{url}: has {size} bytes, but at least {end} were expected. {MAKE_SHARD_AGAIN}")
            raise OSError(f"only {len(data)} of {end - start} bytes were sent")
        return data

    return retry(url, source, once)


def supports_ranges(url: str, source: SourceConfig) -> bool:
    """Return True if byte ranges of a remote file can be read. Each process checks a web server only once.

    Raises:
        ShardError: the file does not exist, or all attempts failed.
    """
    if not url.startswith("http"):
        return True
    server = host(url)
    if server not in _servers_with_ranges:
        try:
            read_range(url, 0, 1, 0, source)
            _servers_with_ranges[server] = True
        except NoRangesError:
            _servers_with_ranges[server] = False
            log.warning(
                "%s does not support byte ranges. Complete shards are downloaded and kept below $TESSERA_CACHE.", server
            )
    return _servers_with_ranges[server]


def fetch(
    url: str,
    sink: Sink,
    source: SourceConfig,
    *,
    size: int = 0,
    sha256: str | None = None,
    check: Check | None = None,
) -> None:
    """Write a complete local or remote shard to `sink`. A `.tar.gz` is decompressed.

    Args:
        size: size of the stored file in bytes; 0 if unknown.
        sha256: SHA-256 of the stored file in hexadecimal; None if unknown.
        check: called with the versions of the file that a web server states.

    Raises:
        ShardError: the shard cannot be read or decompressed, or does not have the expected size or checksum.
    """

    def once() -> None:
        sink.restart()
        with _stream(url, source, check) as file:
            stored = _CountingReader(file, size, url)
            try:
                body = gzip.GzipFile(fileobj=stored) if without_query(url).endswith(".gz") else stored  # pyright: ignore[reportArgumentType]
                while chunk := body.read(READ_SIZE):
                    sink.write(chunk)
                while stored.read(READ_SIZE):
                    pass
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                if size and stored.count < size and isinstance(error, EOFError):
                    raise OSError(f"only {stored.count} of {size} bytes were sent") from error
                raise ShardError(f"{url}: cannot be decompressed ({error}). {MAKE_SHARD_AGAIN}") from error
        if size and stored.count != size:
            raise OSError(f"only {stored.count} of {size} bytes were sent")
        if sha256 and stored.digest.hexdigest() != sha256.lower():
            raise OSError("the SHA-256 of the shard differs from index.json, so the shard or the index has changed")

    retry(url, source, once)


class _CountingReader:
    """Stream that counts and hashes all bytes that are read. `ShardError` is raised if their number exceeds a limit."""

    def __init__(self, file: Readable, limit: int, url: str):
        self._file, self._limit, self._url = file, limit, url
        self.count, self.digest = 0, hashlib.sha256()

    def read(self, size: int = READ_SIZE, /) -> bytes:
        data = self._file.read(min(size, READ_SIZE) if size >= 0 else READ_SIZE)
        self.count += len(data)
        if self._limit and self.count > self._limit:
            raise ShardError(f"{self._url}: has more bytes than the expected {self._limit}. {MAKE_SHARD_AGAIN}")
        self.digest.update(data)
        return data


class _TimedReader:
    """File whose `read` raises `TimeoutError` if one read or all reads together exceed their time limit.

    The limit of all reads together grows with the number of bytes, so that a server that sends a few bytes at a time
    cannot occupy a process forever.
    """

    def __init__(self, file: Any, timeout: float):
        self._file, self._timeout = file, timeout
        self._count, self._spent = 0, 0.0

    def read(self, size: int, /) -> bytes:
        left = self._timeout + self._count / SLOWEST - self._spent
        if left <= 0:
            raise TimeoutError(f"only {self._count} bytes were sent in {self._spent:.0f} s")
        start = time.monotonic()
        data = with_timeout(min(self._timeout, left), lambda: self._file.read(size))
        self._spent += time.monotonic() - start
        self._count += len(data)
        return data


def _read_up_to(file: Readable, limit: int) -> bytes:
    """Read a file to its end, or until more than `limit` bytes have been read."""
    chunks, count = [], 0
    while count <= limit and (chunk := file.read(READ_SIZE)):
        chunks.append(chunk)
        count += len(chunk)
    return b"".join(chunks)


def _http_range(url: str, start: int, end: int, expected: int, source: SourceConfig, check: Check | None) -> bytes:
    """Read a byte range by HTTP. Check the HTTP status and the file size, which fsspec's `cat_file` does not check."""
    system, path = _system(url, source)
    headers = {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
    file = with_timeout(source.timeout, lambda: system.open(path, "rb", block_size=0, size=end, headers=headers))
    with file:
        if file.r.status != 206:
            raise NoRangesError(url)
        total = file.r.headers.get("Content-Range", "").rpartition("/")[2]
        if expected and total.isdigit() and int(total) != expected:
            raise ShardError(f"{url}: has {total} bytes, but {expected} were expected. {MAKE_SHARD_AGAIN}")
        if check:
            check(_versions(file.r.headers))
        return _read_up_to(_TimedReader(file, source.timeout), end - start - 1)


@contextmanager
def _stream(url: str, source: SourceConfig, check: Check | None = None) -> Iterator[Readable]:
    """Open a file, a URL or the output of a command for reading from beginning to end."""
    if url.startswith(PIPE):
        with _output(url.removeprefix(PIPE), source) as file:
            yield file
        return
    if not is_remote(url):
        with open(url, "rb") as file:
            yield file
        return
    system, path = _system(url, source)
    options: dict[str, Any] = {}
    if url.startswith("http"):
        options = {"block_size": 0, "size": 1, "headers": {"Accept-Encoding": "identity"}}
    with with_timeout(source.timeout, lambda: system.open(path, "rb", **options)) as file:
        if check and url.startswith("http"):
            check(_versions(file.r.headers))
        yield _TimedReader(file, source.timeout)


@contextmanager
def _output(command: str, source: SourceConfig) -> Iterator[Readable]:
    """Run a command in bash and yield its output.

    Raises:
        OSError: the command fails.
        ShardError: the settings do not allow commands.
    """
    if source.commands is False:
        raise ShardError(
            f"{PIPE}{printable(command)}: not run. The command comes from a settings file, or the run is a --dry_run. "
            "If you trust the file, give the flag --source.commands, without --dry_run."
        )
    with subprocess.Popen(
        ["bash", "-o", "pipefail", "-c", command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        try:
            yield _TimedReader(process.stdout, source.timeout)
            if code := process.wait(source.timeout):
                raise OSError(f"the command ended with status {code}")
        finally:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


_servers_with_ranges: dict[str, bool] = {}
"""Maps the host of each checked web server to True if the server supports byte ranges, otherwise to False."""


def _system(url: str, source: SourceConfig) -> tuple[Any, str]:
    """Return the fsspec file system of a URL, and the path of the file in this file system."""
    try:
        scheme, server = urlsplit(url)[:2]
    except ValueError as error:
        raise ShardError(f"{url}: not a URL ({error}). Correct the URL.") from error
    try:
        system = _open_system(os.getpid(), scheme, server, source.timeout)
    except ImportError as error:
        extra = EXTRAS.get(scheme)
        install = f"pip install 'tessera-ssl[{extra}]'" if extra else str(error)
        raise ShardError(f"{url}: a package for {scheme}:// is missing. Install it: {install}") from error
    except ValueError as error:
        raise ShardError(f"{url}: {error}. Use a URL that fsspec can open.") from error
    return system, system._strip_protocol(url)


@functools.cache
def _open_system(_process: int, scheme: str, server: str, timeout: float) -> Any:
    """Open an fsspec file system.

    `_process` is the process id. It is a part of the key of `functools.cache`, so that each process opens its own file
    system. A forked process cannot use the file system of its parent, because threads do not survive a fork.
    """
    system = url_to_fs(f"{scheme}://{server}/", **_options(scheme, timeout))[0]
    if scheme in ("s3", "s3a"):
        system.retries = 1  # one attempt per request, because `retry` repeats failed requests
    return system


def _options(scheme: str, timeout: float) -> dict[str, Any]:
    """Return options that set the time limits of a file system. The user's configuration of fsspec takes precedence."""
    given = fsspec.config.conf.get(scheme, {})
    if scheme in ("http", "https"):
        import aiohttp

        limit = aiohttp.ClientTimeout(total=None, sock_connect=timeout, sock_read=timeout)
        return {"client_kwargs": {"timeout": limit}} | given
    if scheme in ("s3", "s3a"):
        limits = {"connect_timeout": timeout, "read_timeout": timeout, "retries": {"max_attempts": 0}}
        return {"config_kwargs": limits} | given
    return {}
