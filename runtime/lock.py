"""The lock of a folder: at most one run at a time writes there, on one machine or on several that share a disk.

The lock is a file FOLDER/.lock-N. A process that finds a dead holder creates the file with the next larger N. Exclusive
creation of a file is atomic, also on network disks, so that only one process can take over from a dead holder. Only the
file with the largest N is valid. A run removes its file when it ends.

A run that was killed leaves its file. On the machine of the holder, its process id and start time show whether the
holder is alive. On other machines, a counter in the file shows this: a live holder increases the counter every
`Timing.interval` seconds. A holder counts as dead if the counter does not change for `Timing.timeout` seconds. The
clocks of two machines are never compared. File locks of the system (`fcntl`, `flock`) are not used, because some
network disks do not show them to other machines.

A machine that was suspended for longer than `Timing.timeout` may lose the lock to another machine. At its next
heartbeat, the suspended run notices the newer file and exits at once, without saving.
"""

import contextlib
import itertools
import json
import logging
import os
import re
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tessera.runtime.collectives import RankError
from tessera.runtime.machine import is_running, machine_id, start_time
from tessera.runtime.stdio import tell
from tessera.runtime.user_error import printable

log = logging.getLogger(__name__)
NAME = re.compile(r"\.lock-(\d{8,12})")
MAX_BYTES = 4096


class LockedError(RankError):
    """Another run writes into the folder."""


@dataclass(frozen=True)
class Timing:
    """Intervals of the lock, in seconds."""

    interval: float = 5.0
    """Seconds between two heartbeats of the holder."""
    timeout: float = 90.0
    """Seconds without a heartbeat after which a holder on another machine counts as dead. This is longer than the 60
    seconds for which NFS may show an old version of a file."""


def _exit(message: str) -> None:
    # Exit without clean-up, because the folder now belongs to the other run.
    tell(f"\n{os.path.basename(sys.argv[0])}: {message}. This run ends without saving.\n")
    os._exit(os.EX_UNAVAILABLE)


@contextmanager
def locked(folder: Path, timing: Timing = Timing(), on_loss: Callable[[str], None] = _exit) -> Iterator[None]:
    """Hold the lock of an existing folder within the context. A thread sends the heartbeats of the holder.

    Args:
        on_loss: function that is called with a message if another machine takes the lock over. By default, the process
            exits at once.

    Raises:
        LockedError: another run holds the lock.
        OSError: the folder cannot be written to.
    """
    path, descriptor = _create(folder, timing)
    since, closed = time.strftime("%Y-%m-%d %H:%M:%S"), threading.Event()

    def beat() -> None:
        for beats in itertools.count(1):
            if closed.wait(timing.interval):
                return
            with contextlib.suppress(OSError):  # try again if the disk is full or does not answer
                if not _is_newest(path, descriptor):
                    on_loss(f"{_newest_holder(folder)} has taken over {folder}, because this run was suspended")
                    return
                _write(descriptor, since, beats)

    thread = threading.Thread(target=beat, name="lock", daemon=True)
    try:
        _write(descriptor, since, 0)
        thread.start()
        yield
    finally:
        closed.set()
        if thread.ident is not None:  # the thread was started
            thread.join(timing.interval)
        with contextlib.suppress(OSError):
            if _is_newest(path, descriptor):
                path.unlink()
        if not thread.is_alive():  # the system may reuse a closed descriptor, and a hanging thread would write to it
            os.close(descriptor)


def holder(folder: Path) -> str | None:
    """Return a description of the process that holds the lock of a folder, or None if there is none.

    The function does not wait, so that a dead holder on another machine counts as alive.
    """
    newest = _newest(folder)
    try:
        record = {} if newest is None else _read(newest)
    except (FileNotFoundError, LockedError):  # the run has ended meanwhile, or the file is none of a run
        return None
    own = record.get("machine") == machine_id() and isinstance(record.get("pid"), int)
    if newest is None or (own and not is_running(record["pid"], record.get("started"))):
        return None
    return _holder(record)


def check_free(folder: Path, timing: Timing = Timing()) -> None:
    """Check that no run holds the lock of an existing folder, as `locked` does. Write nothing.

    Raises:
        LockedError: another run holds the lock.
    """
    _newest_dead(folder, timing)


def _newest_dead(folder: Path, timing: Timing) -> Path | None:
    """Return the newest file of a lock, whose holder is dead, or None if there is no file.

    Raises:
        LockedError: the holder is alive.
    """
    newest = _newest(folder)
    while newest is not None and not _wait_until_free(newest, timing):
        newest = _newest(folder)
    return newest


def _create(folder: Path, timing: Timing) -> tuple[Path, int]:
    """Create a new lock file if no other holder is alive. Return the path of the file and a descriptor.

    Raises:
        LockedError: another holder is alive.
    """
    while True:
        newest = _newest_dead(folder, timing)
        path = folder / f".lock-{(0 if newest is None else _number(newest)) + 1:08d}"
        if not NAME.fullmatch(path.name):
            raise LockedError(f"{newest} has the largest number of a lock. Remove it if no run writes into the folder.")
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            continue
        if _newest(folder) != path:  # another process has meanwhile created a file with a larger number
            os.close(descriptor)
            path.unlink(missing_ok=True)
            continue
        for old in _files(folder):
            if _number(old) < _number(path):
                old.unlink(missing_ok=True)
        return path, descriptor


def _wait_until_free(path: Path, timing: Timing) -> bool:
    """Wait until it is certain that the holder of a lock is dead. Return False if the file of the lock was removed.

    Raises:
        LockedError: the holder is alive.
    """
    try:
        first = _read(path)
        if first.get("machine") == machine_id() and isinstance(first.get("pid"), int):
            if is_running(first["pid"], first.get("started")):
                raise _in_use(path, first)
            return True
        log.warning(
            "%s was in use by %s. This run starts if no heartbeat arrives for %.0f s.",
            path.parent,
            _holder(first),
            timing.timeout,
        )
        end = time.monotonic() + timing.timeout
        while time.monotonic() < end:
            time.sleep(min(timing.interval, timing.timeout) / 2)
            if (now := _read(path)) != first:
                raise _in_use(path, now)
    except FileNotFoundError:
        return False
    return True


def _write(descriptor: int, since: str, beats: int) -> None:
    record = {
        "host": socket.gethostname(),
        "machine": machine_id(),
        "pid": os.getpid(),
        "started": start_time(os.getpid()),
        "since": since,
        "beats": f"{beats:012d}",  # fixed width, so that a new record fully overwrites the old record
    }
    os.pwrite(descriptor, json.dumps(record).encode(), 0)
    os.fsync(descriptor)


def _is_newest(path: Path, descriptor: int) -> bool:
    """Return True if `path` is the newest lock, and still the file that this process has created."""
    try:
        return _newest(path.parent) == path and os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _newest(folder: Path) -> Path | None:
    return max(_files(folder), key=_number, default=None)


def _files(folder: Path) -> list[Path]:
    return [folder / name for name in os.listdir(folder) if NAME.fullmatch(name)]


def _number(path: Path) -> int:
    return int(path.name.rpartition("-")[2])


def _read(path: Path) -> dict[str, Any]:
    """Return the content of a lock file, or an empty dict if the holder has not written the file yet.

    The file is opened anew each time, because NFS then asks the server for its newest content.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # before `open`, which refuses a folder in words of its own
        os.close(descriptor)
        raise LockedError(f"{path} is not a regular file, so it cannot be a lock. Remove it.")
    with open(descriptor, "rb") as file:
        try:
            record = json.loads(file.read(MAX_BYTES))
        except (ValueError, RecursionError):
            return {}
    return record if isinstance(record, dict) else {}


def _in_use(path: Path, record: dict[str, Any]) -> LockedError:
    return LockedError(
        f"{path.parent} is in use by {_holder(record)}. Wait until that run ends, end it, or choose another --output."
    )


def _holder(record: dict[str, Any]) -> str:
    if not record:
        return "a run that is starting"
    named = (printable(str(record.get(name, "?"))[:64]) for name in ("pid", "host", "since"))
    return "process {} on {}, which started at {}".format(*named)


def _newest_holder(folder: Path) -> str:
    newest = _newest(folder)
    return "another run" if newest is None else _holder(_read(newest))
