"""Watchdog of a run with several processes: if one process is lost, the other processes exit with a message.

A process is lost if it was killed, is frozen, or its machine failed. Without the watchdog, the other processes would
wait for the lost process in a collective, for minutes or forever. Every process sends heartbeats to a store from a
separate thread, so that heartbeats continue while the main thread is saving, reading or waiting in a collective.
Each process watches the heartbeats of the next process, and the last process those of process 0. The work of a process
therefore does not grow with the number of processes. If the next process has signed off, the process watches the one
after it. Messages about a lost or failed process reach all processes through the same store.

The heartbeats begin before the process group is made. A process that has never sent a heartbeat does not count as lost,
because it may still be importing torch from a slow disk. Every minute, the first process of each node names the
processes that have not started.
"""

import datetime
import itertools
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from tessera.runtime.preemption import Preempted
from tessera.runtime.stdio import tell
from tessera.runtime.user_error import UserError

EXIT_CODE = 69
"""Exit code of a process that exits because another process is lost or has failed: EX_UNAVAILABLE of sysexits.h."""
THREAD = "watchdog"
"""Name of the thread that talks to the store."""
CONTINUE = "To continue from the newest checkpoint, start again with --resume and the folder of this run."
SLOWER = "If a process was only slow, start again with more minutes for --collective_timeout. "
"""Advice after the time-out of a collective."""
MOST_NAMED = 8
"""Largest number of processes that a message names."""
_BROKEN = ("by peer", "broken pipe", "remote", "timed out", "timeout", "aborted", "connection", "socket", "network")
# Each `watched` context takes the next number.
# All processes enter the contexts in the same order, so that a context has the same number on all processes.
_contexts = itertools.count()


@dataclass(frozen=True)
class Timing:
    """Intervals of the watchdog, in seconds."""

    interval: float = 2.0
    """Seconds between two heartbeats of a process."""
    timeout: float = 40.0
    """Seconds without a heartbeat after which a process counts as lost. In a healthy process, only code that holds
    Python's global interpreter lock delays heartbeats, for example the import of a large library. With the defaults,
    all processes learn of a lost process within a minute."""
    exit_delay: float = 10.0
    """Seconds from a message about a lost or failed process until the watchdog ends a process that has not exited by
    itself. Within this time, the message reaches all processes."""
    notice: float = 60.0
    """Seconds until a message names the processes that have not started, and seconds between two such messages."""


TIMING = Timing()
"""Intervals that `watched` uses."""


class LostError(UserError, RuntimeError):
    """A collective failed because another process is lost."""


@contextmanager
def watched(advice: str = CONTINUE) -> Iterator[None]:
    """Run the watchdog until the context ends. With one process, the context does nothing.

    Enter the context before the process group is made, so that messages can name a process that does not start.

    Args:
        advice: sentence that tells the user how to continue after a loss.

    If another process is lost, this process exits with `EXIT_CODE` and a message, even if its main thread is blocked.

    Raises:
        LostError: a collective failed because another process is lost. `LostError` replaces the error of the
            collective.
        UserError: an environment variable of the launcher is not a number.
    """
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        if not os.environ.get(name, "0").removeprefix("-").isdecimal():
            raise UserError(f"The environment variable {name} is {os.environ[name]!r}. It must be a number, or unset.")
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes == 1 or not {"RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        yield
        return
    # The watchdog uses the store of the process group, because this store exists under every launcher and needs no
    # additional port. A launcher runs the store in its own process, so that the store outlives process 0.
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # Processes before and after a restart by the launcher share one store.
    prefix = f"watchdog/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{next(_contexts)}"
    rank = int(os.environ["RANK"])
    watch = Watch(rank, processes, address, prefix, lambda told: _exit(f"{told}. {advice}{new_record()}"), TIMING)
    try:
        yield
    except Preempted:  # a preempted run reports no failure, because all processes stop at the same step
        watch.close()
        raise
    except BaseException as error:
        reason = watch.close(failure=f"{type(error).__name__}: {_last_line(error)}")
        if not _is_broken_collective(error):
            raise
        last = _last_line(error)
        if advice == CONTINUE and re.search("timed? ?out", last, re.IGNORECASE):
            advice = SLOWER + advice
        raise LostError(f"{reason or 'another process is lost'} ({last}). {advice}{new_record()}") from error
    watch.close()


_record, _recorded_before = Path(), 0.0


def record_collectives(output: Path) -> None:
    """Let NCCL write its record of the last collectives to the run folder, if one of them does not end in time.

    PyTorch's flight recorder is on by default. Each process writes one file. The user's own file name holds. Call this
    function after the process group is made.
    """
    global _record, _recorded_before
    names = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")  # of PyTorch, and before PyTorch 2.9
    chosen = next(filter(None, map(os.environ.get, names)), None) or str(output.absolute() / "nccl_trace_rank_")
    os.environ.setdefault(names[0], chosen)
    _record = Path(f"{chosen}{dist.get_rank() if dist.is_initialized() else 0}")
    _recorded_before = _time_of_record()


def new_record() -> str:
    """Return a sentence that names the record of this process, or an empty string if none was written in this run."""
    if _record == Path() or _time_of_record() == _recorded_before:
        return ""
    prefix = _record.name.rstrip("0123456789")
    return (
        f" The last collectives of NCCL are in {_record}. `torchfrtrace --prefix {prefix} {_record.parent}` compares "
        "those of all processes."
    )


def _time_of_record() -> float:
    try:
        return _record.stat().st_mtime
    except OSError:
        return 0.0


class Watch:
    """Sends heartbeats of this process and watches the heartbeats of other processes, until `close` is called.

    One thread talks to the store. This thread blocks forever if the machine of the store is lost. A second thread
    therefore measures the time since the last heartbeat of each watched process. The second thread counts only time in
    which it was running, so that it reports no loss if this machine was suspended or had no free core.
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
            on_loss: function that is called once, with a message, if a process is lost or has failed.
        """
        self._rank, self._processes, self._address, self._prefix = rank, processes, address, prefix
        self._on_loss, self._timing = on_loss, timing
        self._closed = threading.Event()
        self._awake = 0.0  # number of seconds in which this process was able to notice heartbeats
        # Time of the store's last answer: `_answered` on the clock `_awake`, `_answered_at` in seconds since the epoch.
        self._answered, self._answered_at = 0.0, time.time()
        self._next = (rank + 1) % processes
        self._peer = _Peer()  # process `_next`
        self._counted = False  # True if the store counts this process as started
        self._began, self._notices = time.monotonic(), 0
        self._failure: str | None = None
        self._named = False  # True after the record of the last collectives was named
        self._told = ""  # first message about a lost or failed process, which all processes share
        self._talker = threading.Thread(target=self._talk, name=THREAD, daemon=True)
        self._judge = threading.Thread(target=self._look, name="watchdog judge", daemon=True)
        self._talker.start()
        self._judge.start()

    def close(self, failure: str | None = None) -> str:
        """Stop both threads, and tell the other processes to expect no further heartbeats of this process.

        Args:
            failure: message about the error that ends this process, or None. The other processes receive the message.

        Returns:
            The message from the store about a lost or failed process, or an empty string if there is no message.
        """
        self._failure = failure
        self._closed.set()
        self._talker.join(5.0)  # join with a timeout, because the thread blocks forever if the store is lost
        return self._told

    def _talk(self) -> None:
        store = None
        while True:
            closing = self._closed.is_set()
            try:
                if store is None:
                    store = _connect(self._address, self._prefix)
                    store.set(f"host/{self._rank}", socket.gethostname())
                    if not self._counted:
                        store.add("started", 1)
                        self._counted = True
                self._exchange(store)
                if closing:
                    self._leave(store)
            except (RuntimeError, OSError):  # the store did not answer; `_look` measures for how long
                store = None
            if closing:
                return
            self._name_missing(store)
            self._closed.wait(self._timing.interval)

    def _exchange(self, store: Store) -> None:
        store.add(f"beat/{self._rank}", 1)
        if self._next != self._rank:
            number, peer = self._next, self._peer
            beats = store.add(f"beat/{number}", 0)
            if beats != peer.beats:
                peer.host = peer.host or store.get(f"host/{number}").decode()
                peer.beats, peer.heard, peer.heard_at = beats, self._awake, time.time()
            elif store.check([f"left/{number}"]):
                self._peer, self._next = _Peer(), (number + 1) % self._processes
        if store.check(["told"]):
            self._told = store.get("told").decode()
        elif self._told:
            store.set("told", self._told)
        self._answered, self._answered_at = self._awake, time.time()

    def _leave(self, store: Store) -> None:
        if self._failure is None:
            store.set(f"left/{self._rank}", "")
        elif not store.check(["told"]):
            store.set("told", f"process {self._rank} on {socket.gethostname()} failed: {self._failure}")

    def _look(self) -> None:
        interval = self._timing.interval
        before, told_for = time.monotonic(), 0.0
        while not self._closed.wait(interval):
            now = time.monotonic()
            passed = min(now - before, 2 * interval)
            before = now
            self._awake += passed
            self._name_record()
            number, peer = self._next, self._peer
            if peer.beats and self._awake - peer.heard > self._timing.timeout and not self._told:
                self._told = self._describe(number, peer)
            told_for += passed if self._told else 0.0
            if told_for > self._timing.exit_delay:
                self._closed.set()
                self._on_loss(f"process {self._rank}: {self._told}")

    def _name_record(self) -> None:
        """On the first process of a node, name the record that NCCL writes some seconds before it ends the process."""
        if not self._named and os.environ.get("LOCAL_RANK", "0") == "0" and (said := new_record()):
            self._named = True
            tell(f"process {self._rank} on {socket.gethostname()}: a collective did not end in time.{said}\n")

    def _name_missing(self, store: Store | None) -> None:
        """Until the process group is made, print every `Timing.notice` seconds which processes have not started."""
        waited = time.monotonic() - self._began
        is_first_of_node = os.environ.get("LOCAL_RANK", "0") == "0"
        if dist.is_initialized() or waited < (self._notices + 1) * self._timing.notice or not is_first_of_node:
            return
        self._notices += 1
        missing = "All of them have started. If they do not connect, check the network between the nodes"
        try:
            if store is None:
                missing = f"The store at {self._address[0]}:{self._address[1]} does not answer"
            elif absent := _absent(store, 0, self._processes, MOST_NAMED):
                more = self._processes - store.add("started", 0) - len(absent)
                missing = f"Of {self._processes} processes, these have not started: {', '.join(map(str, absent))}"
                missing += f" and {more} more" if more > 0 else ""
                missing += ". Look at the logs of their nodes"
        except (RuntimeError, OSError):
            return
        host = socket.gethostname()
        tell(f"process {self._rank} on {host} has waited for {waited:.0f} s for the other processes. {missing}.\n")

    def _describe(self, silent: int, peer: "_Peer") -> str:
        now = f"(now: {_clock(time.time())})"
        if self._awake - self._answered > self._timing.timeout / 2:
            host, port = self._address
            return (
                f"the store at {host}:{port}, which carries the heartbeats, last answered at "
                f"{_clock(self._answered_at)} {now}. Its launcher was killed, or the machine failed"
            )
        return (
            f"process {silent} on {peer.host} was last heard at {_clock(peer.heard_at)} {now}. Possible causes: a "
            "process was killed, for example because the memory ran out, is frozen, or its machine failed"
        )


def _connect(address: tuple[str, int], prefix: str) -> Store:
    """Return a new connection to the store, because the main thread may block the process group's connection."""
    # Test the address first, because torch prints many lines for each failed attempt to reach the store.
    socket.create_connection(address, 10).close()
    limit = datetime.timedelta(seconds=10)
    store = TCPStore(*address, is_master=False, wait_for_workers=False, timeout=limit)
    return PrefixStore(prefix, store)


@dataclass
class _Peer:
    """Host and last heartbeat of another process. Without a heartbeat, the process has not started."""

    host: str = ""
    beats: int = 0
    heard: float = 0.0
    """Time at which the heartbeat last changed, on the clock `Watch._awake` of this process."""
    heard_at: float = 0.0
    """Time at which the heartbeat last changed, in seconds since the Unix epoch."""


def _absent(store: Store, first: int, end: int, most: int) -> list[int]:
    """Return the lowest processes from `first` to `end` that have not started, `most` of them at most.

    One request asks for a range of processes, so that there are `most` times log2 of the processes at most.
    """
    if most <= 0 or store.check([f"host/{number}" for number in range(first, end)]):
        return []
    if end - first == 1:
        return [first]
    middle = (first + end) // 2
    found = _absent(store, first, middle, most)
    return found + _absent(store, middle, end, most - len(found))


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))


def _exit(message: str) -> None:
    # Exit without clean-up.
    # A clean exit could block, because the main thread may hold the locks of the output streams or the process group.
    tell(f"\n{Path(sys.argv[0]).name}: {message}\n")
    os._exit(EXIT_CODE)


def _is_broken_collective(error: BaseException | None) -> bool:
    """Return True if `error` or one of its causes shows that a gloo or NCCL collective lost another process."""
    while error is not None:
        of_torch = isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))
        if of_torch and any(word in str(error).lower() for word in _BROKEN):
            return True
        error = error.__cause__ or error.__context__
    return False


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
