"""What can fail for a while: done again after a growing pause where that can help, and given up in bounded time."""

import itertools
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Literal, TypeVar

from pydantic import Field

from data.shards.tar import ShardError
from runtime.settings import Section

BACKOFF = 0.5  # seconds before the second attempt; twice that before the third
LONGEST_PAUSE = 30.0  # seconds
PATIENT = (408, 429)  # of the statuses 400 to 499, those that may pass

log = logging.getLogger(__name__)
T = TypeVar("T")


class SourceConfig(Section):
    """How shards are reached. None of it changes which sample comes when."""

    unreadable: Literal["stop", "skip"] = "stop"
    """a shard that cannot be read stops the run, or is left out, named and counted"""
    retries: int = Field(default=5, ge=0)
    """attempts after the first one, each after about twice the pause"""
    timeout: float = Field(default=60, gt=0)
    """seconds without an answer after which a request has failed"""
    cache_gb: float = Field(default=64, gt=0)
    """GB that remote blocks and unpacked shards may take below $TESSERA_CACHE on each node"""


DEFAULT = SourceConfig()


class NoRangesError(Exception):
    """A server that sends whole files only."""


def within(seconds: float, do: Callable[[], T]) -> T:
    """What `do` gives. One that takes too long is left alone in its thread: nothing can end it from outside.

    Raises:
        TimeoutError: it took longer.
    """
    given: list[T] = []
    failed: list[BaseException] = []

    def work() -> None:
        try:
            given.append(do())
        except BaseException as error:  # raised again where it is waited for
            failed.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if failed:
        raise failed[0]
    if not given:
        raise TimeoutError(f"no answer for {seconds:g} s")
    return given[0]


def patiently(url: str, source: SourceConfig, do: Callable[[], T]) -> T:
    """What `do` gives, tried again when that can help."""
    for attempt in itertools.count(1):
        try:
            return do()
        except (ShardError, NoRangesError):
            raise
        except Exception as error:  # each file system has its own
            said = f"{url}: {_words(error)}"
            if _final(error):
                raise ShardError(f"{said}; restore the shard or remove it from the list") from error
            if attempt > source.retries:
                raise ShardError(f"{said}, {attempt} times; restore the shard or remove it from the list") from error
        pause = min(BACKOFF * 2 ** (attempt - 1), LONGEST_PAUSE) * random.SystemRandom().uniform(0.5, 1.5)
        log.warning("%s; trying again in %.1f s (%d of %d)", said, pause, attempt, source.retries)
        time.sleep(pause)
    raise AssertionError


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and what it came from."""
    following: BaseException | None = error
    while following is not None:
        yield following
        following = following.__cause__


def _status(error: BaseException) -> int | None:
    """The HTTP status that an error of aiohttp, botocore or gcsfs came from."""
    for one in _chain(error):
        response = getattr(one, "response", None)
        answer = response.get("ResponseMetadata", {}).get("HTTPStatusCode") if isinstance(response, dict) else None
        gcsfs = type(one).__module__.startswith("gcsfs")  # with aiohttp a short body has the `code` 400
        status = answer or getattr(one, "status", None) or (getattr(one, "code", None) if gcsfs else None)
        if str(status).isdigit() and int(str(status)) >= 400:
            return int(str(status))
    return None


def missing(error: BaseException) -> bool:
    """Whether there is no such file for us."""
    return _final(error) and (
        isinstance(error, (FileNotFoundError, PermissionError)) or (_status(error) or 0) in range(400, 500)
    )


def _final(error: BaseException) -> bool:
    """Whether another attempt would fail as well."""
    if status := _status(error):
        return status < 500 and status not in PATIENT
    if any("Credentials" in type(one).__name__ for one in _chain(error)):
        return True
    if isinstance(error, FileNotFoundError) and isinstance(error.__cause__, Exception):
        return _final(error.__cause__)  # fsspec says that of every trouble on the way
    return isinstance(
        error,
        (
            FileNotFoundError,
            PermissionError,
            IsADirectoryError,
            NotImplementedError,
            ImportError,
            TypeError,
            ValueError,
        ),
    )


def _words(error: BaseException) -> str:
    """One line for the user."""
    status = _status(error)
    root = list(_chain(error))[-1]
    said = next((line.strip() for line in str(root).splitlines() if line.strip()), "")
    if isinstance(root, FileNotFoundError) or status == 404:
        return "not found"
    kind = type(root).__name__
    said = said if kind in ("OSError", "TimeoutError") and said else f"{kind} {said}".strip()
    return f"status {status} ({said})" if status else said
