"""Mutual supervision of processes: when one is lost, the others exit with a message instead of waiting for it.

A collective waits for minutes or forever for a process that was killed or whose machine failed. Every process therefore
sends heartbeats to a store, from a thread of its own: a process that is busy with saving, reading or a long collective
still sends heartbeats. Process 0 listens to all others, the others listen to process 0. The store also carries the
message about a lost or failed process to all processes.
"""

import datetime
import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from runtime.errors import UserError
from runtime.preemption import Preempted

EXIT_CODE = 69
"""Exit code after the loss of another process: EX_UNAVAILABLE of sysexits.h."""
CONTINUE = "--resume with this run's --output continues from its newest checkpoint"
_BROKEN = ("by peer", "broken pipe", "remote", "timed out", "timeout", "aborted", "connection", "socket", "network")
_contexts = itertools.count()  # numbers of the contexts, which all processes enter in the same order


@dataclass(frozen=True)
class Timing:
    """Intervals of the watchdog, in seconds."""

    interval: float = 2.0
    """Time between two heartbeats."""
    timeout: float = 40.0
    """Time without a heartbeat after which a process counts as lost. Only code that holds the interpreter's lock, such
    as the import of a large library, delays heartbeats. All processes know of a loss within a minute."""
    exit_delay: float = 20.0
    """Time that the other processes have to exit by themselves after one process failed."""


TIMING = Timing()
"""Intervals that `watched` uses."""


class LostError(UserError, RuntimeError):
    """Another process was lost during a collective."""


@contextmanager
def watched() -> Iterator[None]:
    """Watch the other processes, if there are any, until the context ends.

    If a process is lost, this process exits with `EXIT_CODE` and a message, whatever its main thread is doing.

    Raises:
        LostError: a collective failed because another process is lost. `LostError` replaces the error of the
            collective.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    # The process group's store exists under every launcher and needs no further port. A launcher keeps the store in its
    # own process, where the store outlives process 0.
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    prefix = f"watchdog/{_restart_count()}/{next(_contexts)}"
    watch = Watch(dist.get_rank(), dist.get_world_size(), address, prefix, _exit, TIMING)
    try:
        yield
    except Preempted:  # a preempted run reports no failure, because all processes stop at the same step
        watch.close()
        raise
    except BaseException as error:
        reason = watch.close(failure=f"{type(error).__name__}: {_last_line(error)}")
        if not _is_broken_collective(error):
            raise
        raise LostError(f"{reason or 'another process is lost'} ({_last_line(error)}). {CONTINUE}") from error
    watch.close()


class Watch:
    """Sends this process's heartbeats and listens to those of other processes, in two threads, until `close` is called.

    One thread talks to the store, and blocks forever if the machine of the store is lost. The other thread measures how
    long no heartbeat was seen. The other thread counts only time in which it runs itself, so that a machine without a
    free core, or one that was suspended, does not report others as lost.
    """

    def __init__(
        self,
        rank: int,
        processes: int,
        address: tuple[str, int],
        prefix: str,
        on_loss: Callable[[str], None],
        timing: Timing = Timing(),
    ) -> None:
        """Start the threads.

        Args:
            address: host and port of the store.
            prefix: prefix of all keys in the store.
            on_loss: called with a message, once, when a process is lost.
        """
        self._rank, self._address, self._prefix, self._on_loss = rank, address, prefix, on_loss
        self._timing = timing
        self._closed = threading.Event()
        self._awake = 0.0  # seconds in which this process was able to notice heartbeats
        others = [peer for peer in range(processes) if peer != rank]
        # time of the store's last answer, on the clock `_awake` and in seconds since the Unix epoch
        self._answered, self._answered_at = 0.0, time.time()
        self._peers = {peer: _Peer(time.time()) for peer in (others if rank == 0 else [0])}
        self._failure: str | None = None
        self._found = ""  # message about a loss that this process found
        self._lost = self._failed = ""  # messages in the store about a lost and about a failed process
        self._talker = threading.Thread(target=self._talk, name="watchdog", daemon=True)
        self._judge = threading.Thread(target=self._look, name="watchdog judge", daemon=True)
        self._talker.start()
        self._judge.start()

    def close(self, failure: str | None = None) -> str:
        """Sign off, so that no process waits for further heartbeats of this one.

        Args:
            failure: the error with which this process exits. It is sent to the other processes.

        Returns:
            The message about a failed or lost process in the store, or an empty string.
        """
        self._failure = failure
        self._closed.set()
        self._talker.join(5.0)  # join with a timeout, because a lost store blocks the thread
        return self._lost or self._failed

    def _talk(self) -> None:
        store = None
        over = False
        while not over:
            try:
                store = store or self._connect()
                store.set(f"host/{self._rank}", socket.gethostname())
                while not over:
                    self._exchange(store)
                    over = self._closed.wait(self._timing.interval)
                self._leave(store)
            except (RuntimeError, OSError):  # no heartbeat was read; `_look` measures for how long
                store = None
                over = over or self._closed.wait(self._timing.interval)

    def _connect(self) -> Store:
        """Return a separate connection to the store, because the main thread may block the process group's
        connection."""
        # test the address first, because torch prints a page of errors for each failed attempt to reach the store
        socket.create_connection(self._address, 10).close()
        limit = datetime.timedelta(seconds=10)
        store = TCPStore(*self._address, is_master=False, wait_for_workers=False, timeout=limit)
        return PrefixStore(self._prefix, store)

    def _exchange(self, store: Store) -> None:
        store.add(f"beat/{self._rank}", 1)
        for number, peer in list(self._peers.items()):
            beats = store.add(f"beat/{number}", 0)
            if beats != peer.beats:
                peer.host = peer.host or store.get(f"host/{number}").decode()
                peer.beats, peer.heard, peer.heard_at = beats, self._awake, time.time()
            elif store.check([f"left/{number}"]):
                del self._peers[number]
        if self._found:
            store.set("lost", self._found)
        self._lost, self._failed = _read(store, "lost"), _read(store, "failed")
        self._answered, self._answered_at = self._awake, time.time()

    def _leave(self, store: Store) -> None:
        self._lost, self._failed = _read(store, "lost"), _read(store, "failed")
        if self._failure is None:
            store.set(f"left/{self._rank}", "")
        elif not self._failed:
            store.set("failed", f"process {self._rank} on {socket.gethostname()} failed: {self._failure}")

    def _look(self) -> None:
        interval = self._timing.interval
        before, failed_for = time.monotonic(), 0.0
        while not self._closed.wait(interval):
            now = time.monotonic()
            passed = min(now - before, 2 * interval)
            before = now
            self._awake += passed
            failed_for += passed if self._failed else 0.0
            silent = {
                n: peer for n, peer in list(self._peers.items()) if self._awake - peer.heard > self._timing.timeout
            }
            if silent:
                self._found = self._describe(silent)
                # give other processes time to read the message, because the store may end with this process
                self._closed.wait(2 * interval)
            told = self._found or self._lost or (self._failed if failed_for > self._timing.exit_delay else "")
            if told and not self._closed.is_set():
                self._closed.set()
                self._on_loss(f"process {self._rank}: {told}. {CONTINUE}")

    def _describe(self, silent: dict[int, "_Peer"]) -> str:
        now = f"now it is {_clock(time.time())}"
        if self._awake - self._answered > self._timing.timeout / 2:
            host, port = self._address
            return (
                f"the store at {host}:{port}, which carries the heartbeats, last answered at "
                f"{_clock(self._answered_at)}, {now}: the launcher there was killed, or its machine failed"
            )
        named = []
        for number, peer in list(silent.items())[:4]:
            host = f" on {peer.host}" if peer.host else ""
            named.append(f"process {number}{host} was last heard at {_clock(peer.heard_at)}")
        if len(silent) > len(named):
            named.append(f"and {len(silent) - len(named)} more")
        return f"{', '.join(named)}, {now}: killed, frozen, or its machine failed"


class _Peer:
    """Last heartbeat of another process."""

    def __init__(self, heard_at: float) -> None:
        self.host, self.beats = "", 0
        self.heard = 0.0
        """Time of the last new heartbeat, on the listener's `_awake` clock."""
        self.heard_at = heard_at
        """Time of the last new heartbeat, in seconds since the Unix epoch."""


def _restart_count() -> str:
    """Return the launcher's count of restarts. Processes before and after a restart share one store, so the keys in the
    store contain the count."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def _read(store: Store, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))


def _exit(message: str) -> None:
    # A clean exit could block: the main thread may hold the locks of the output streams or of the process group.
    os.write(2, f"\nrun.py: {message}\n".encode())
    os._exit(EXIT_CODE)


def _is_broken_collective(error: BaseException | None) -> bool:
    """Return True if gloo or NCCL raised the error because another process is lost."""
    while error is not None:
        of_torch = isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))
        if of_torch and any(word in str(error).lower() for word in _BROKEN):
            return True
        error = error.__cause__ or error.__context__
    return False


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
