"""Processes that watch each other: when one is lost, the others end with a message instead of waiting for it.

A collective waits for ever, or for many minutes, for a process that was killed or whose machine is gone. So every
process beats into a store, from a thread: what is merely busy, saving, reading, in a long collective, still beats.
Process 0 listens to all, the others to process 0; what it finds, or who fails, stands in the store for everyone.
"""

import datetime
import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from runtime.preemption import Preempted

EXIT_CODE = 69
"""EX_UNAVAILABLE of sysexits.h: another process is gone"""
BEAT = 2.0
"""seconds from beat to beat"""
SILENCE = 40.0
"""seconds without a beat after which a process is lost. Nothing here stops the beats for long but code that keeps the
interpreter's lock, such as the loading of a big library; with two more beats until all know, it stays under a minute"""
GRACE = 20.0
"""seconds a process has to end with an error of its own once another says that it failed"""
CONTINUE = "--resume with this run's --output continues from its newest checkpoint"
_BROKEN = ("by peer", "broken pipe", "remote", "timed out", "timeout", "aborted", "connection", "socket", "network")
_contexts = itertools.count()  # the same on all processes: each enters the same ones in the same order


class LostError(RuntimeError):
    """Another process is gone in the middle of a collective. The message is meant for the user."""


@contextmanager
def watched() -> Iterator[None]:
    """Watch the other processes, if there are any, until the context ends.

    A lost process ends this one with `EXIT_CODE` and a message, whatever its main thread does.

    Raises:
        LostError: in place of the error of a collective that broke because another process is gone.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    # Where the processes have just met: it is there, whoever started them, needs neither another open port nor a
    # broadcast, and under a launcher lies in the launcher's process and outlives process 0.
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    watch = Watch(dist.get_rank(), dist.get_world_size(), place, f"watchdog/{_attempt()}/{next(_contexts)}", _give_up)
    try:
        yield
    except Preempted:  # all leave together
        watch.close()
        raise
    except BaseException as error:
        known = watch.close(failure=f"{type(error).__name__}: {_last_line(error)}")
        if not _is_broken_collective(error):
            raise
        raise LostError(f"{known or 'another process is gone'} ({_last_line(error)}). {CONTINUE}") from error
    watch.close()


class Watch:
    """Beats for this process and listens to others, in two threads, until it is closed.

    One thread talks with the store, and may hang in that for ever when the store's machine is gone. The other counts
    how long nothing was heard; only time in which it runs itself counts, so that a machine without a free core, or
    one that was suspended, accuses nobody.
    """

    def __init__(
        self,
        rank: int,
        processes: int,
        place: tuple[str, int],
        prefix: str,
        give_up: Callable[[str], None],
        *,
        beat: float = BEAT,
        silence: float = SILENCE,
        grace: float = GRACE,
    ) -> None:
        """`place`: host and port of the store; `prefix`: of all keys in it; `give_up` is called with a message, once,
        when a process is lost."""
        self._rank, self._place, self._prefix, self._give_up = rank, place, prefix, give_up
        self._beat, self._silence, self._grace = beat, silence, grace
        self._over = threading.Event()
        self._awake = 0.0  # seconds in which this process was able to judge
        others = [peer for peer in range(processes) if peer != rank]
        self._answered, self._answered_at = 0.0, time.time()  # of the store, as in _Peer
        self._peers = {peer: _Peer(time.time()) for peer in (others if rank == 0 else [0])}
        self._failure: str | None = None
        self._found = ""  # what this process found, to be told to the others
        self._lost = self._failed = ""  # what the store says
        self._talker = threading.Thread(target=self._talk, name="watchdog", daemon=True)
        self._judge = threading.Thread(target=self._look, name="watchdog judge", daemon=True)
        self._talker.start()
        self._judge.start()

    def close(self, failure: str | None = None) -> str:
        """Say goodbye, so that nobody waits for this process's beats, or why it fails.

        Returns what is known of a process that failed or is lost, or nothing.
        """
        self._failure = failure
        self._over.set()
        self._talker.join(5.0)  # the store may be gone
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
                    over = self._over.wait(self._beat)
                self._leave(store)
            except (RuntimeError, OSError):  # as silent as the others: the judge counts
                store = None
                over = over or self._over.wait(self._beat)

    def _connect(self) -> Store:
        """A connection of its own: on the process group's the main thread may be waiting."""
        socket.create_connection(self._place, 10).close()  # torch prints a page for each attempt that fails
        limit = datetime.timedelta(seconds=10)
        return PrefixStore(self._prefix, TCPStore(*self._place, is_master=False, wait_for_workers=False, timeout=limit))

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
        before, failed_for = time.monotonic(), 0.0
        while not self._over.wait(self._beat):
            now = time.monotonic()
            passed = min(now - before, 2 * self._beat)
            before = now
            self._awake += passed
            failed_for += passed if self._failed else 0.0
            silent = {n: peer for n, peer in list(self._peers.items()) if self._awake - peer.heard > self._silence}
            if silent:
                self._found = self._describe(silent)
                self._over.wait(2 * self._beat)  # the others read it; with this process the store itself may end
            told = self._found or self._lost or (self._failed if failed_for > self._grace else "")
            if told and not self._over.is_set():
                self._over.set()
                self._give_up(f"process {self._rank}: {told}. {CONTINUE}")

    def _describe(self, silent: dict[int, "_Peer"]) -> str:
        now = f"now it is {_clock(time.time())}"
        if self._awake - self._answered > self._silence / 2:
            place = ":".join(map(str, self._place))
            return (
                f"the store at {place}, through which the processes hear each other, last answered at "
                f"{_clock(self._answered_at)}, {now}: the launcher there was killed, or the machine is gone"
            )
        named = [
            f"process {number}{f' on {peer.host}' * bool(peer.host)} was last heard at {_clock(peer.heard_at)}"
            for number, peer in list(silent.items())[:4]
        ]
        more = f" and {len(silent) - len(named)} more" * (len(silent) > len(named))
        return f"{', '.join(named)}{more}, {now}: killed, frozen, or its machine is gone"


class _Peer:
    """What is known of another process."""

    def __init__(self, heard_at: float) -> None:
        self.host, self.beats = "", 0
        self.heard = 0.0
        """in seconds of the listener's `_awake`"""
        self.heard_at = heard_at
        """as the clock on the wall has it"""


def _attempt() -> str:
    """Processes that the launcher started anew meet at the same store as those before them."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def _read(store: Store, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))


def _give_up(message: str) -> None:
    # the main thread may hold any lock, also those of the streams and of the process group
    os.write(2, f"\nrun.py: {message}\n".encode())
    os._exit(EXIT_CODE)


def _is_broken_collective(error: BaseException | None) -> bool:
    """Whether an error is what gloo or NCCL say when another process is gone."""
    while error is not None:
        of_torch = isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))
        if of_torch and any(word in str(error).lower() for word in _BROKEN):
            return True
        error = error.__cause__ or error.__context__
    return False


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
