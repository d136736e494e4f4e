"""The lock of a folder: at most one run at a time writes there, on one machine or on several that share a disk.

The lock is a file FOLDER/.lock-N. A process that finds a dead holder creates the file with the next larger N. The
creation of a file that must not exist yet is atomic, also on network disks, so that only one process can take over from
a dead holder. The file with the largest N counts, and a run that ends removes its file.

A run may be killed by SIGKILL and leave its file, so that the file alone does not show that a run is alive. Three signs
show it, and no sign alone is enough:

1. A POSIX lock (`fcntl`) on the file. The kernel, or the server of the disk, releases the lock when the holder ends.
   The lock is not one of `flock`, because forked loader workers would inherit that lock and keep it after the end of
   the run. A POSIX lock that is held shows at once that the holder is alive. One that is free proves nothing, because
   on some network disks other machines do not see it.
2. The process id and the start time of the holder, if the holder is on the same machine.
3. A counter in the file, which the holder increases every `Timing.interval` seconds. If the counter stands still for
   `Timing.timeout` seconds, the holder is dead. The clocks of two machines are never compared.

A machine that was suspended for longer than `Timing.timeout` may lose the lock to another machine. It notices the newer
file with its next heartbeat and ends its run at once, without saving.
"""

import contextlib
import fcntl
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
from tessera.runtime.errors import printable
from tessera.runtime.machine import is_running, machine_id, start_time
from tessera.runtime.streams import tell

log = logging.getLogger(__name__)
NAME = re.compile(r"\.lock-(\d{8,12})")
MAX_BYTES = 4096
_held: set[Path] = set()  # closing a second descriptor of a file would release this process's POSIX lock on the file
EXIT_TIME = 10.0
"""Seconds within which a killed process has released its locks."""


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


TIMING = Timing()
"""Intervals that `locked` uses."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of an existing folder.

    Raises:
        LockedError: another run holds the lock.
        OSError: the folder cannot be written to.
    """
    lock = acquire(folder, TIMING)
    try:
        yield
    finally:
        lock.release()


class Lock:
    """A lock that this process holds. A thread sends its heartbeats until `release` is called."""

    def __init__(self, path: Path, descriptor: int, timing: Timing, on_loss: Callable[[str], None]) -> None:
        self.path, self._descriptor, self._timing, self._on_loss = path, descriptor, timing, on_loss
        self._record = {
            "host": socket.gethostname(),
            "machine": machine_id(),
            "pid": os.getpid(),
            "started": start_time(os.getpid()),
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
        self._beats, self._locked, self._closed = 0, False, threading.Event()
        self._folder = path.parent.resolve()
        _held.add(self._folder)
        try:
            self._beat()
        except BaseException:  # for example, the disk is full
            os.close(descriptor)
            path.unlink(missing_ok=True)
            _held.discard(self._folder)
            raise
        self._thread = threading.Thread(target=self._run, name="lock", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Stop the heartbeats and remove the file of the lock."""
        self._closed.set()
        self._thread.join(self._timing.interval)
        with contextlib.suppress(OSError):
            if self._is_own():
                self.path.unlink(missing_ok=True)
        if not self._thread.is_alive():  # a thread that hangs could write into another file of the same number
            os.close(self._descriptor)
        _held.discard(self._folder)

    def _is_own(self) -> bool:
        """Return True if the file of the lock is still the one that this process made."""
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self._descriptor))
        except FileNotFoundError:
            return False

    def _run(self) -> None:
        while not self._closed.wait(self._timing.interval):
            try:
                newest = _newest(self.path.parent)
                lost = newest != self.path or not self._is_own()
            except OSError:  # the disk does not answer: try again
                continue
            if lost:
                other = "another run" if newest in (None, self.path) else _describe(newest)
                self._on_loss(f"{other} has taken over {self.path.parent}, because this run was suspended")
                return
            with contextlib.suppress(OSError):  # a disk that is full or does not answer: try again
                self._beat()

    def _beat(self) -> None:
        # another process that looks at the file may hold its POSIX lock for a moment
        self._locked = self._locked or _try_lock(self._descriptor) is True
        self._beats += 1
        os.pwrite(self._descriptor, json.dumps({**self._record, "beats": f"{self._beats:012d}"}).encode(), 0)
        os.fsync(self._descriptor)


def acquire(folder: Path, timing: Timing = TIMING, on_loss: Callable[[str], None] | None = None) -> Lock:
    """Return the lock of `folder`.

    Args:
        on_loss: function that is called with a message if another machine takes the lock over. By default, the process
            exits at once.

    Raises:
        LockedError: another run holds the lock.
        OSError: the folder cannot be written to.
    """
    if folder.resolve() in _held:
        raise LockedError(f"{folder} is in use by another run of this process. Choose another --output")
    while True:
        newest, probe = _newest(folder), None
        try:
            if newest is not None:
                probe = _open(newest)
                if probe is None or not _is_dead(newest, probe, timing):
                    continue
            path = folder / f".lock-{(0 if newest is None else _number(newest)) + 1:08d}"
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
            except FileExistsError:
                continue
        finally:
            if probe is not None:
                os.close(probe)
        if _newest(folder) != path:  # this process was slow, and another has created a file of a larger number
            os.close(descriptor)
            path.unlink(missing_ok=True)
            continue
        for old in _files(folder):
            if _number(old) < _number(path):
                old.unlink(missing_ok=True)
        return Lock(path, descriptor, timing, on_loss or _exit)


def _is_dead(path: Path, descriptor: int, timing: Timing) -> bool:
    """Return True if the holder of a lock is dead, and False if the file of the lock has been removed.

    Raises:
        LockedError: the holder is alive.
    """
    first = _read(descriptor)
    here = first.get("machine") == machine_id() and isinstance(first.get("pid"), int)
    ended = here and not is_running(first["pid"], first.get("started"))
    end = time.monotonic() + EXIT_TIME
    while _try_lock(descriptor) is False:
        if not ended or time.monotonic() > end:
            raise _in_use(path, first)
        time.sleep(0.01)  # the main thread of a killed process ends before its other threads, which keep the lock
    if here and not ended:
        raise _in_use(path, first)
    if ended:
        return True
    log.warning(
        "%s was in use by %s. If no heartbeat comes from there for %.0f s, this run starts",
        path.parent,
        _holder(first),
        timing.timeout,
    )
    end = time.monotonic() + timing.timeout
    while time.monotonic() < end:
        fcntl_answer = _relock(descriptor)  # NFS reads a file anew from the server when a lock is taken
        if fcntl_answer is False or _read(descriptor) != first:
            raise _in_use(path, _read(descriptor))
        if os.fstat(descriptor).st_nlink == 0 or not path.exists():
            return False
        time.sleep(min(timing.interval, timing.timeout) / 2)
    return True


def _newest(folder: Path) -> Path | None:
    return max(_files(folder), key=_number, default=None)


def _files(folder: Path) -> list[Path]:
    return [folder / name for name in os.listdir(folder) if NAME.fullmatch(name)]


def _number(path: Path) -> int:
    return int(path.name.rpartition("-")[2])


def _open(path: Path) -> int | None:
    """Return a descriptor of the file of a lock, or None if the file has been removed."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise LockedError(f"{path} is not the file of a lock. Remove it")
    return descriptor


def _try_lock(descriptor: int) -> bool | None:
    """Take the POSIX lock of a file. Return False if another process holds it, and None if the disk has no locks."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        return None
    return True


def _relock(descriptor: int) -> bool | None:
    with contextlib.suppress(OSError):
        fcntl.lockf(descriptor, fcntl.LOCK_UN)
    return _try_lock(descriptor)


def _read(descriptor: int) -> dict[str, Any]:
    """Return the content of the file of a lock, or an empty dict if the holder has not written it yet."""
    try:
        record = json.loads(os.pread(descriptor, MAX_BYTES, 0))
    except (OSError, ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def _in_use(path: Path, record: dict[str, Any]) -> LockedError:
    return LockedError(
        f"{path.parent} is in use by {_holder(record)}. Wait until that run ends, end it, or choose another --output"
    )


def _holder(record: dict[str, Any]) -> str:
    if not record:
        return "a run that is starting"
    named = (printable(str(record.get(name, "?"))[:64]) for name in ("pid", "host", "since"))
    return "process {} on {}, which started at {}".format(*named)


def _describe(path: Path) -> str:
    try:
        return _holder(json.loads(path.read_bytes()[:MAX_BYTES]))
    except (OSError, ValueError, AttributeError):
        return "another run"


def _exit(message: str) -> None:
    # without clean-up, because the other run now owns the folder
    tell(f"\n{os.path.basename(sys.argv[0])}: {message}. This run ends without saving\n")
    os._exit(os.EX_UNAVAILABLE)
