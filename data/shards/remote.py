"""Requests for remote files and for the output of commands, with time limits and retries. fsspec opens all URLs.

A failed request is repeated unless its error is permanent. The pause between two attempts grows with each attempt.
"""

import functools
import gzip
import hashlib
import itertools
import logging
import os
import random
import re
import signal
import subprocess
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import fsspec.config
from fsspec.core import url_to_fs

from tessera.data.failures import MAKE_SHARD_AGAIN, RESTORE_SHARD, ShardError, causes, is_exhausted, unreadable
from tessera.data.shards.access import SourceConfig
from tessera.data.shards.cache import Sink
from tessera.runtime.preemption import WaitInterruptedError, check_wait
from tessera.runtime.user_error import printable

PIPE = "pipe:"
READ_SIZE = 2**20  # number of bytes that are read at once
SLOWEST = 2**16  # minimum mean transfer rate in bytes per second; slower transfers exceed their time limit
EXTRAS = {"http": "http", "https": "http", "s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs"}
VERSION_KEYS = ("ETag", "etag", "md5Hash", "Last-Modified", "LastModified", "mtime", "created")
"""Keys of fsspec's file information whose values change when the file changes. The most reliable key comes first."""
BACKOFF = 0.5  # Pause in seconds before the second attempt. The pause doubles after each further attempt.
LONGEST_PAUSE = 30.0  # maximum pause in seconds, before multiplication by a random factor between 0.5 and 1.5
POLL = 1.0  # seconds between two checks whether the process was asked to stop
CREDENTIALS = {
    "s3": "Set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, on each node, or FSSPEC_S3_ANON=true for a "
    "public bucket. S3 also denies access to a name that does not exist.",
    "gs": "Set GOOGLE_APPLICATION_CREDENTIALS to a key file, run `gcloud auth application-default login`, "
    "or set FSSPEC_GS_TOKEN=anon for a public bucket.",
    "http": "Give a URL that needs no login, such as a signed one.",
    "https": "Give a URL that needs no login, such as a signed one.",
    "hf": "Set HF_TOKEN on each node, and accept the terms of the data set.",
    "az": "Set AZURE_STORAGE_CONNECTION_STRING on each node.",
}
"""Maps the scheme of a URL to the sentence that says how a process gets access."""
CREDENTIALS["gcs"], CREDENTIALS["abfs"] = CREDENTIALS["gs"], CREDENTIALS["az"]
TRANSIENT = (408, 429)  # 4xx status codes after which a request is repeated; other 4xx codes are permanent errors
PERMANENT = (
    FileNotFoundError,
    PermissionError,
    IsADirectoryError,
    NotImplementedError,
    ImportError,
    TypeError,
    ValueError,
)
"""Exceptions that count as permanent errors. A request is not repeated after a permanent error."""

_SERVER = re.compile(r"(https?://)([^/?#]*)(.*)", re.DOTALL | re.IGNORECASE)
_NOT_IN_URLS = re.compile(r'[^!-~]|["<>\\^`{|}]|%(?![0-9A-Fa-f]{2})')

Check = Callable[[list[str]], None]
"""Function that takes the version identifiers of a response, such as its ETag, and raises `ShardError` if the
file has changed."""

log = logging.getLogger(__name__)
T = TypeVar("T")


def is_remote(path: str) -> bool:
    """Return True if a path is a URL or `pipe:COMMAND`."""
    return bool(re.match(r"[A-Za-z][A-Za-z0-9+.-]*://|pipe:", path))


def without_query(path: str) -> str:
    """Return an HTTP URL without its query string, which may hold signatures. Return all other paths unchanged."""
    return path.partition("?")[0] if path.startswith(("http://", "https://")) else path


def host(url: str) -> str:
    """Return the host and port of an HTTP URL. Return an empty string for all other paths."""
    return url.split("/", 3)[2] if url.startswith(("http://", "https://")) else ""


def read_small(path: str, config: SourceConfig, limit: int) -> bytes | None:
    """Return the content of a small local or remote file.

    Return None if the file does not exist, or if the server denies access to a remote file.

    Raises:
        ShardError: the file cannot be read, is larger than `limit` bytes, or all attempts failed.
    """

    def once() -> bytes | None:
        try:
            with _stream(path, config) as file:
                return _read_up_to(file, limit)
        except Exception as error:
            if is_missing(error):
                return None
            raise

    if is_remote(path):
        content = retry(path, config, once)
    else:
        try:
            with open(path, "rb") as file:
                content = file.read(limit + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise unreadable(path, error, "Correct or remove the file.") from error
    if content is not None and len(content) > limit:
        raise ShardError(f"{path} has more than {limit} bytes, the maximum for such a file. Remove the file.")
    return content


def describe(url: str, config: SourceConfig) -> tuple[int, str]:
    """Return the size and the version identifier (such as the ETag) of a remote file.

    The size is in bytes, and is 0 if unknown. The version identifier changes when the file changes, and is empty if
    unknown.

    Raises:
        ShardError: the file does not exist, or all attempts failed.
    """

    def once() -> tuple[int, str]:
        system, path = _system(url, config)
        info = with_timeout(config.timeout, lambda: system.info(path))
        return int(info.get("size") or 0), next(iter(_versions(info)), "")

    return retry(url, config, once)


def _versions(facts: Mapping[str, Any]) -> list[str]:
    """Return the version identifiers in fsspec's file information or in response headers, the most reliable first.

    The prefix of weak ETags is removed, so that a weak ETag equals the strong ETag with the same value.
    """
    return [str(facts[key]).removeprefix("W/") for key in VERSION_KEYS if facts.get(key)]


def matches(pattern: str, config: SourceConfig) -> list[str]:
    """Return the sorted URLs that match a glob.

    Raises:
        ShardError: the URL belongs to a web server, which cannot list files, or all attempts failed.
    """
    if pattern.startswith(("http://", "https://")):
        raise ShardError(
            f"{pattern}: globs do not work with web servers, which cannot list files. "
            "Give a brace range such as a-{000..099}.tar, or an index.json."
        )

    def once() -> list[str]:
        system, path = _system(pattern, config)
        # A listing has ten times the usual time limit, because it takes many requests.
        found = with_timeout(config.timeout * 10, lambda: system.glob(path))
        return sorted(str(system.unstrip_protocol(name)) for name in found)

    return retry(pattern, config, once)


def read_range(
    url: str, start: int, end: int, expected: int, config: SourceConfig, check: Check | None = None
) -> bytes:
    """Return the bytes of a remote file from `start` up to, but not including, `end`.

    Args:
        expected: expected size of the complete file in bytes; 0 if unknown.
        check: called with the version identifiers of the response, such as its ETag.

    Raises:
        NoRangesError: the server does not support byte ranges and sends complete files only.
        ShardError: the file does not have the expected size, or all attempts failed.
    """

    def once() -> bytes:
        if url.startswith("http"):
            data = _http_range(url, start, end, expected, config, check)
        elif EXTRAS.get(url.partition(":")[0]) == "s3":
            data = _s3_range(url, start, end, expected, config, check)
        else:
            system, path = _system(url, config)
            limit = config.timeout + (end - start) / SLOWEST
            data = with_timeout(limit, lambda: system.cat_file(path, start=start, end=end))
            if check:
                check(_versions(with_timeout(config.timeout, lambda: system.info(path))))
        if len(data) != end - start:
            size = describe(url, config)[0] if len(data) < end - start else 0
            if 0 < size < end:
                raise ShardError(f"{url} has {size} bytes, but at least {end} were expected. {MAKE_SHARD_AGAIN}")
            raise OSError(f"only {len(data)} of {end - start} bytes were sent")
        return data

    return retry(url, config, once)


def supports_ranges(url: str, config: SourceConfig) -> bool:
    """Return True if byte ranges of a remote file can be read. Each process checks a web server only once.

    Raises:
        ShardError: the file does not exist, or all attempts failed.
    """
    if not url.startswith("http"):
        return True
    server = host(url)
    if server not in _servers_with_ranges:
        try:
            read_range(url, 0, 1, 0, config)
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
    config: SourceConfig,
    *,
    size: int = 0,
    sha256: str | None = None,
    check: Check | None = None,
) -> None:
    """Write a complete local or remote shard to `sink`. A `.tar.gz` is decompressed.

    Args:
        size: size of the stored file in bytes; 0 if unknown.
        sha256: SHA-256 of the stored file in hexadecimal; None if unknown.
        check: called with the version identifiers of the response of a web server, such as its ETag.

    Raises:
        ShardError: the shard cannot be read or decompressed, or does not have the expected size or checksum.
    """

    def once() -> None:
        sink.restart()
        with _stream(url, config, check) as file:
            stored = _CountingReader(file, size, url)
            try:
                body = gzip.GzipFile(fileobj=stored) if without_query(url).endswith((".gz", ".tgz")) else stored  # pyright: ignore[reportArgumentType]
                while chunk := body.read(READ_SIZE):
                    sink.write(chunk)
                while stored.read(READ_SIZE):
                    pass
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                if size and stored.count < size and isinstance(error, EOFError):
                    raise OSError(f"only {stored.count} of {size} bytes were sent") from error
                raise ShardError(f"{url} cannot be decompressed ({error}). {MAKE_SHARD_AGAIN}") from error
        if size and stored.count != size:
            raise OSError(f"only {stored.count} of {size} bytes were sent")
        if sha256 and stored.digest.hexdigest() != sha256.lower():
            raise OSError("the SHA-256 of the shard differs from index.json, so the shard or the index has changed")

    retry(url, config, once)


class _CountingReader:
    """Stream that counts and hashes the bytes that are read.

    Raises `ShardError` if more than `limit` bytes are read. The limit 0 means that there is no limit.
    """

    def __init__(self, file: Any, limit: int, url: str):
        self._file, self._limit, self._url = file, limit, url
        self.count, self.digest = 0, hashlib.sha256()

    def read(self, size: int = READ_SIZE, /) -> bytes:
        data = self._file.read(min(size, READ_SIZE) if size >= 0 else READ_SIZE)
        self.count += len(data)
        if self._limit and self.count > self._limit:
            raise ShardError(f"{self._url} has more than the expected {self._limit} bytes. {MAKE_SHARD_AGAIN}")
        self.digest.update(data)
        return data


class _TimedReader:
    """File whose `read` raises `TimeoutError` if one read or all reads together exceed their time limit.

    One read may take `timeout` seconds. All reads together may take `timeout` seconds plus one second for every
    `SLOWEST` bytes. Without this limit, a server that sends a few bytes at a time could occupy a process forever.
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


def _read_up_to(file: Any, limit: int) -> bytes:
    """Read a file to its end, or until more than `limit` bytes have been read."""
    chunks, count = [], 0
    while count <= limit and (chunk := file.read(READ_SIZE)):
        chunks.append(chunk)
        count += len(chunk)
    return b"".join(chunks)


def _http_range(url: str, start: int, end: int, expected: int, config: SourceConfig, check: Check | None) -> bytes:
    """Read a byte range by HTTP. Check the HTTP status and the file size, which fsspec's `cat_file` does not check."""
    system, path = _system(url, config)
    headers = {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
    file = with_timeout(config.timeout, lambda: system.open(path, "rb", block_size=0, size=end, headers=headers))
    with file:
        if file.r.status != 206:
            raise NoRangesError(url)
        _check_total(url, file.r.headers.get("Content-Range", ""), expected)
        if check:
            check(_versions(file.r.headers))
        return _read_up_to(_TimedReader(file, config.timeout), end - start - 1)


def _s3_range(url: str, start: int, end: int, expected: int, config: SourceConfig, check: Check | None) -> bytes:
    """Read a byte range from S3 in one request. With `cat_file`, the version would need a second request."""
    system, path = _system(url, config)
    bucket, key, version = system.split_path(path)
    named = {"Bucket": bucket, "Key": key} | ({"VersionId": version} if version else {})
    asked = f"bytes={start}-{end - 1}"
    answer = with_timeout(config.timeout, lambda: system.call_s3("get_object", **named, Range=asked))

    async def read() -> bytes:
        try:
            return await answer["Body"].read()
        finally:
            answer["Body"].close()

    from fsspec.asyn import sync  # here, because its import takes 0.1 s

    data = with_timeout(config.timeout + (end - start) / SLOWEST, lambda: sync(system.loop, read))
    _check_total(url, answer.get("ContentRange", ""), expected)
    if check:
        check(_versions(answer))
    return data


def _check_total(url: str, content_range: str, expected: int) -> None:
    """Raise `ShardError` if the header `Content-Range` states another size of the file than the expected one."""
    total = content_range.rpartition("/")[2]
    if expected and total.isdigit() and int(total) != expected:
        raise ShardError(f"{url} has {total} bytes, but {expected} were expected. {MAKE_SHARD_AGAIN}")


@contextmanager
def _stream(url: str, config: SourceConfig, check: Check | None = None) -> Iterator[Any]:
    """Open a file, a URL or the output of a command for reading from beginning to end."""
    if url.startswith(PIPE):
        with _output(url.removeprefix(PIPE), config) as file:
            yield file
        return
    if not is_remote(url):
        with open(url, "rb") as file:
            yield file
        return
    system, path = _system(url, config)
    options: dict[str, Any] = {}
    if url.startswith("http"):
        options = {"block_size": 0, "size": 1, "headers": {"Accept-Encoding": "identity"}}
    with with_timeout(config.timeout, lambda: system.open(path, "rb", **options)) as file:
        if check and url.startswith("http"):
            check(_versions(file.r.headers))
        yield _TimedReader(file, config.timeout)


@contextmanager
def _output(command: str, config: SourceConfig) -> Iterator[Any]:
    """Run a command in bash and yield its output.

    Raises:
        OSError: the command fails.
        ShardError: the settings do not allow commands.
    """
    if config.commands is False:
        raise ShardError(
            f"{PIPE}{printable(command)} was not run. The command comes from a settings file, or the run is a "
            "--dry_run. If you trust the command, give the flag --source.commands, and leave --dry_run out."
        )
    with subprocess.Popen(
        ["bash", "-o", "pipefail", "-c", command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        try:
            yield _TimedReader(process.stdout, config.timeout)
            if code := process.wait(config.timeout):
                raise OSError(f"the command ended with status {code}")
        finally:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


_servers_with_ranges: dict[str, bool] = {}
"""Maps the host of each checked web server to True if the server supports byte ranges, otherwise to False."""


def _system(url: str, config: SourceConfig) -> tuple[Any, str]:
    """Return the fsspec file system of a URL, and the path of the file in this file system."""
    scheme, server = split_url(url)
    try:
        system = _open_system(os.getpid(), scheme, server, config.timeout)
    except ImportError as error:
        extra = EXTRAS.get(scheme)
        install = f"pip install 'tessera-ssl[{extra}]'" if extra else str(error)
        raise ShardError(f"{url}: a package for {scheme}:// is missing. Install it: {install}") from error
    except ValueError as error:
        raise ShardError(f"{url}: {error}. Use a URL that fsspec can open.") from error
    return system, encoded_url(url) if scheme in ("http", "https") else system._strip_protocol(url)


def split_url(url: str) -> tuple[str, str]:
    """Return the scheme and the server (or the bucket) of a URL.

    Raises:
        ShardError: the URL is not valid, or an HTTP URL has no path after the server.
    """
    try:
        scheme, server, path = urlsplit(url)[:3]
    except ValueError as error:
        raise ShardError(f"{url} is not a valid URL ({error}). Correct the URL.") from error
    if scheme in ("http", "https") and not path.strip("/"):
        raise ShardError(f"{url} names a server, but no file. Correct the URL.")
    return scheme, server


def encoded_url(url: str) -> str:
    """Return an HTTP URL as it is sent. Only characters that no URL may contain are percent-encoded.

    The signature of a presigned URL is valid for the bytes of the URL, so `%2F` and `%7E` must not be decoded.
    """
    scheme, server, path = _SERVER.fullmatch(url).groups()  # pyright: ignore[reportOptionalMemberAccess]
    server = server if server.isascii() else server.encode("idna").decode()
    return f"{scheme}{server}{_NOT_IN_URLS.sub(lambda found: quote(found[0], safe=''), path)}"


@functools.cache
def _open_system(_process: int, scheme: str, server: str, timeout: float) -> Any:
    """Open an fsspec file system.

    `_process` is the process id. Because the id is part of the cache key, each process opens its own file system. A
    forked process cannot use the file system of its parent, because threads do not survive a fork.
    """
    system = url_to_fs(f"{scheme}://{server}/", **_options(scheme, timeout))[0]
    if scheme in ("s3", "s3a"):
        system.retries = 1  # s3fs makes one attempt per request, because `retry` repeats failed requests
    return system


def _options(scheme: str, timeout: float) -> dict[str, Any]:
    """Return options that set the time limits of a file system. The user's configuration of fsspec takes precedence."""
    given = fsspec.config.conf.get(scheme, {})
    if scheme in ("http", "https"):
        import aiohttp

        limit = aiohttp.ClientTimeout(total=None, sock_connect=timeout, sock_read=timeout)
        # `trust_env` makes aiohttp use HTTP_PROXY, HTTPS_PROXY and NO_PROXY, as other programs do. `encoded` and
        # `requote_redirect_url` leave URLs unchanged, also after a redirect (`encoded_url`).
        client = {"timeout": limit, "trust_env": True, "requote_redirect_url": False}
        return {"encoded": True} | given | {"client_kwargs": client | given.get("client_kwargs", {})}
    if scheme in ("s3", "s3a"):
        limits = {"connect_timeout": timeout, "read_timeout": timeout, "retries": {"max_attempts": 0}}
        return given | {"config_kwargs": limits | given.get("config_kwargs", {})}
    return {}


class NoRangesError(Exception):
    """Raised if a server does not support byte ranges and sends complete files only."""


def with_timeout(seconds: float, do: Callable[[], T]) -> T:
    """Call `do` in a thread and return its result.

    If the call exceeds the time limit, its thread cannot be stopped, and continues in the background.

    Raises:
        TimeoutError: `do` returned no result within `seconds`.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(do())
        except BaseException as error:  # store the error, so that the calling thread can raise it
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    start = time.monotonic()
    while thread.is_alive() and (left := start + seconds - time.monotonic()) > 0:
        thread.join(min(left, POLL))
        check_wait(start)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no response for {seconds:g} s")
    return results[0]


def sleep(seconds: float) -> None:
    """Sleep, but raise `WaitInterruptedError` if this process was asked to stop."""
    start = time.monotonic()
    while seconds > 0:
        time.sleep(min(seconds, POLL))
        seconds -= POLL
        check_wait(start)


def retry(url: str, config: SourceConfig, do: Callable[[], T]) -> T:
    """Call `do` and return its result. Repeat the call after transient errors.

    Raises:
        ShardError: `do` raised a permanent error, or all attempts failed.
        NoRangesError: `do` raised this exception.
    """
    for attempt in itertools.count(1):
        try:
            return do()
        except (ShardError, NoRangesError, WaitInterruptedError):
            raise
        except Exception as error:  # each fsspec file system raises its own kinds of errors
            message = f"{url}: {_describe(error)}"
            if is_exhausted(error) and attempt > config.retries:
                raise unreadable(url, error) from error
            if _is_permanent(error):
                remedy = _credentials(url) if _is_denied(error) else RESTORE_SHARD
                raise ShardError(f"{message}. {remedy}") from error
            if attempt > config.retries:
                raise ShardError(f"{message}. Number of failed attempts: {attempt}. {RESTORE_SHARD}") from error
        pause = min(BACKOFF * 2 ** (attempt - 1), LONGEST_PAUSE) * random.SystemRandom().uniform(0.5, 1.5)
        log.warning("%s; trying again in %.1f s (retry %d of %d)", message, pause, attempt, config.retries)
        sleep(pause)
    raise AssertionError("unreachable: the loop is endless")


def _status(error: BaseException) -> int | None:
    """Return the HTTP status of an error that aiohttp, botocore or gcsfs raised; None if the error has no status."""
    for one in causes(error):
        response = getattr(one, "response", None)
        answer = response.get("ResponseMetadata", {}).get("HTTPStatusCode") if isinstance(response, dict) else None
        # Read `code` only for gcsfs, because aiohttp sets `code` to 400 if the body of a response is too short.
        gcsfs = type(one).__module__.startswith("gcsfs")
        status = answer or getattr(one, "status", None) or (getattr(one, "code", None) if gcsfs else None)
        if str(status).isdigit() and int(str(status)) >= 400:
            return int(str(status))
    return None


def is_missing(error: BaseException) -> bool:
    """Return True if the error says that the file does not exist or that access is denied."""
    return _is_permanent(error) and (
        isinstance(error, (FileNotFoundError, PermissionError)) or (_status(error) or 0) in range(400, 500)
    )


def _is_permanent(error: BaseException) -> bool:
    if status := _status(error):
        return status < 500 and status not in TRANSIENT
    if is_exhausted(error):
        return False
    if any("Credentials" in type(one).__name__ for one in causes(error)):
        return True
    # fsspec raises FileNotFoundError for every connection problem, so judge the cause of the error.
    if isinstance(error, FileNotFoundError) and isinstance(error.__cause__, Exception):
        return _is_permanent(error.__cause__)
    return isinstance(error, PERMANENT)


def _is_denied(error: BaseException) -> bool:
    """Return True if the server needs credentials, or denies access to those that it got."""
    names = [type(one).__name__ for one in causes(error)]
    return (
        _status(error) in (401, 403)
        or any("Credentials" in name or "Token" in name for name in names)
        or any(isinstance(one, PermissionError) for one in causes(error))
    )


def _credentials(url: str) -> str:
    """Return the sentence that says how a process gets access to a URL."""
    scheme = url.partition("://")[0]
    how = CREDENTIALS.get(scheme, "Check the credentials for this server, which each node needs.")
    return f"Access is denied or credentials are missing. {how}"


def _describe(error: BaseException) -> str:
    """Return a one-line description of an error."""
    status = _status(error)
    root = list(causes(error))[-1]
    text = printable(next((line.strip() for line in str(root).splitlines() if line.strip()), ""))
    if isinstance(root, FileNotFoundError) or status == 404:
        return "not found"
    kind = type(root).__name__
    text = text if kind in ("OSError", "TimeoutError") and text else f"{kind} {text}".strip()
    return f"status {status} ({text})" if status else text
