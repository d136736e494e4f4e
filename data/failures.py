"""Exceptions for unusable shards and samples, and advice that ends their messages."""

import errno
import functools
import logging
from collections.abc import Iterator

from tessera.runtime.user_error import UserError

MOST_LISTED = 20
"""Maximum number of shards that one error message lists."""
MAKE_SHARD_AGAIN = "Make the shard again or remove it."
RESTORE_SHARD = "Restore the shard or remove it from the list."
MAKE_INDEX_AGAIN = "Make the index again with `tessera check_shards SHARDS --write_index true`."
CORRECT_INDEX = "If the index is wrong, make it again with `tessera check_shards SHARDS --write_index true`."
REPLACE_INDEX = "Remove the index, or make it again with `tessera check_shards SHARDS --write_index true`."

log = logging.getLogger(__name__)


class ShardError(UserError, ValueError):
    """Raised if a shard cannot be used. The message names the shard and says what to do."""


class SampleError(ShardError):
    """Raised if a label or a map is missing or wrong."""


class NoLabelError(SampleError):
    """Raised if an image has no label."""


class DroppedError(Exception):
    """Raised if a stage of the user drops a sample. A sample of a later batch takes its place."""


class ResourceError(ShardError):
    """Raised if memory, file descriptors or disk space run out. The shard and its images may be intact."""


EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT)
"""Values of `errno` for a lack of file descriptors, memory or disk space."""


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, its cause, the cause of that cause, and so on."""
    following: BaseException | None = error
    while following is not None:
        yield following
        following = following.__cause__


def is_exhausted(error: BaseException) -> bool:
    """Return True if an error, or one of its causes, is a lack of memory, file descriptors, threads or disk space."""
    return any(
        isinstance(one, MemoryError)
        or (isinstance(one, OSError) and one.errno in EXHAUSTED)
        or (isinstance(one, RuntimeError) and "start new thread" in str(one))
        for one in causes(error)
    )


def unreadable(path: str, error: BaseException, remedy: str = RESTORE_SHARD) -> ShardError:
    """Return the error for a file that cannot be read: a `ResourceError` if resources have run out."""
    reason = (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
    if not is_exhausted(error):
        return ShardError(f"{path} cannot be read: {reason}. {remedy}")
    return ResourceError(
        f"{path} cannot be read, because resources of this machine have run out ({reason}). The file may be good. "
        "Raise the limit (`ulimit -n` for open files), or use fewer loader workers."
    )


skipped: set[str] = set()
"""Corrupt images of the present run that were left out, with the reasons."""


@functools.cache
def warn_once(message: str, level: int = logging.WARNING) -> None:
    """Log a message once per run. Later calls with the same message log nothing."""
    log.log(level, message)


def forget_warnings() -> None:
    """Reset `warn_once` at the start of a run, so that warnings of an earlier run in this process are logged again."""
    warn_once.cache_clear()
    skipped.clear()
