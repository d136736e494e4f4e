"""Retries and time limits for requests to servers. The pause between two attempts grows with each attempt."""

import itertools
import logging
import random
import threading
import time
from collections.abc import Callable
from typing import Literal, TypeVar

from pydantic import Field

from tessera.data.shards.errors import RESTORE_SHARD, ShardError, causes, is_exhausted, unreadable
from tessera.runtime.errors import printable
from tessera.runtime.preemption import WaitInterruptedError, check_wait
from tessera.runtime.settings import Section

BACKOFF = 0.5  # Pause in seconds before the second attempt. The pause doubles after each further attempt.
LONGEST_PAUSE = 30.0  # Limit of a pause in seconds, before the pause is multiplied by a random factor of 0.5 to 1.5.
POLL = 1.0  # seconds between two checks whether the process was asked to stop
TRANSIENT = (408, 429)  # HTTP statuses 4xx after which a request is repeated. All other statuses 4xx are permanent.
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

log = logging.getLogger(__name__)
T = TypeVar("T")


class SourceConfig(Section):
    """Settings for access to shards. No setting of this group changes the order of samples."""

    unreadable: Literal["stop", "skip"] = "stop"
    """behaviour if a shard cannot be read; stop: the run stops; skip: the run leaves the shard out and logs its name"""
    retries: int = Field(default=5, ge=0)
    """maximum number of repetitions of a failed request; each pause is about twice as long as the previous pause"""
    timeout: float = Field(default=60, gt=0)
    """time in seconds after which a request without an answer fails"""
    verify: bool = False
    """compare the SHA-256 of every shard with index.json at the start; remote shards are downloaded completely"""
    allow_overlap: bool = False
    """accept validation images that are also training images; their scores say nothing about new images"""
    cache_gb: float = Field(default=64, gt=0)
    """maximum size in GB, on each node, of the cache of downloaded and decompressed shards below $TESSERA_CACHE"""
    commands: bool | None = None
    """run the commands of pipe:COMMAND; only a flag can set this; default: run those of flags, but not those of a
    settings file"""


DEFAULT = SourceConfig()


class NoRangesError(Exception):
    """Raised if a server does not support byte ranges and sends complete files only."""


def with_timeout(seconds: float, do: Callable[[], T]) -> T:
    """Call `do` in a thread and return its result.

    A call that exceeds the time limit is abandoned. The thread of this call cannot be stopped, and continues in the
    background.

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
        raise TimeoutError(f"no answer for {seconds:g} s")
    return results[0]


def sleep(seconds: float) -> None:
    """Sleep, but raise `WaitInterruptedError` if this process was asked to stop."""
    start = time.monotonic()
    while seconds > 0:
        time.sleep(min(seconds, POLL))
        seconds -= POLL
        check_wait(start)


def retry(url: str, source: SourceConfig, do: Callable[[], T]) -> T:
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
            if is_exhausted(error) and attempt > source.retries:
                raise unreadable(url, error) from error
            if _is_permanent(error):
                raise ShardError(f"{message}. {RESTORE_SHARD}") from error
            if attempt > source.retries:
                raise ShardError(f"{message}. Number of failed attempts: {attempt}. {RESTORE_SHARD}") from error
        pause = min(BACKOFF * 2 ** (attempt - 1), LONGEST_PAUSE) * random.SystemRandom().uniform(0.5, 1.5)
        log.warning("%s; trying again in %.1f s (retry %d of %d)", message, pause, attempt, source.retries)
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
