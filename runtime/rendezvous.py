"""Messages about processes of a launch that do not start, while the others wait for them.

Before the process group exists, a process waits for all others, for many minutes if one of them never starts. Every
process therefore tells the store that it waits. After a minute, and after every further minute, the first process of
each node names the processes that are missing. A process that has started and then falls silent is lost: the others
exit.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from tessera.runtime import watchdog
from tessera.runtime.streams import tell

FIRST_NOTICE = 60.0
"""Seconds until the missing processes are named, and between two such messages. Nodes may differ by minutes in the time
that they need to import torch from a network disk. A missing process is therefore named, but not counted as lost."""
MOST_NAMED = 8


@contextmanager
def naming_missing_processes() -> Iterator[None]:
    """Name the processes that have not started while the block waits for them. With one process, do nothing."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes == 1 or not {"RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        yield
        return
    over = threading.Event()
    arguments = (int(os.environ["RANK"]), processes, over)
    threading.Thread(target=_watch, args=arguments, name="rendezvous", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _watch(rank: int, processes: int, over: threading.Event) -> None:
    store, view = None, _View(rank, processes)
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    prefix = f"rendezvous/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    began, due = time.monotonic(), FIRST_NOTICE
    while not over.wait(watchdog.TIMING.interval):
        missing = f"The store at {address[0]}:{address[1]} does not answer"
        try:
            store = store or watchdog.connect(address, prefix)
            lost = view.exchange(store)
            if lost and not over.is_set():
                _say(rank, f"ends, because {lost} was lost while the processes were starting. Start again")
                os._exit(watchdog.EXIT_CODE)
            if time.monotonic() - began > due:
                missing = view.describe(store)
        except (RuntimeError, OSError):
            store = None
        waited = time.monotonic() - began
        if waited > due and os.environ.get("LOCAL_RANK", "0") == "0" and not over.is_set():
            due += FIRST_NOTICE
            _say(rank, f"has waited for {waited:.0f} s for the other processes. {missing}")
    if store is not None:
        with contextlib.suppress(RuntimeError, OSError):
            store.set(f"left/{rank}", "")


class _View:
    """Heartbeats of all processes, as this process has seen them."""

    def __init__(self, rank: int, processes: int) -> None:
        self.rank = rank
        self.beats, self.heard = [0] * processes, [time.monotonic()] * processes

    def exchange(self, store: Store) -> str:
        """Send a heartbeat and count those of the others. Return the name of a process that fell silent, or ""."""
        store.add(f"beat/{self.rank}", 1)
        store.set(f"host/{self.rank}", socket.gethostname())
        # process 0 listens to all, and each other process to process 0, so that the store answers few requests
        for number in range(len(self.beats)) if self.rank == 0 else (0,):
            before = self.beats[number]
            self.beats[number] = store.add(f"beat/{number}", 0)
            if self.beats[number] != before:
                self.heard[number] = time.monotonic()
            silent_for = time.monotonic() - self.heard[number]
            if before and silent_for > watchdog.TIMING.timeout and not store.check([f"left/{number}"]):
                return f"process {number} on {store.get(f'host/{number}').decode()}"
        return ""

    def describe(self, store: Store) -> str:
        """Return which processes have not started."""
        missing = [number for number in range(len(self.beats)) if not store.add(f"beat/{number}", 0)]
        if not missing:
            return "All of them have started, but they do not connect. Check the network between the nodes"
        named = ", ".join(map(str, missing[:MOST_NAMED]))
        more = f" and {len(missing) - MOST_NAMED} more" if len(missing) > MOST_NAMED else ""
        return f"Of {len(self.beats)} processes, these have not started: {named}{more}. Look at the logs of their nodes"


def _say(rank: int, message: str) -> None:
    tell(f"process {rank} on {socket.gethostname()} {message}.\n")
