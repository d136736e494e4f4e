"""A warned stop: SIGTERM or SIGUSR1 asks for it, the step is finished and saved, and the run ends with `EXIT_CODE`."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

EXIT_CODE = 75
"""EX_TEMPFAIL of sysexits.h: nothing is wrong, try again later"""
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_received: list[signal.Signals] = []


class Preempted(Exception):  # noqa: N818, it is what was asked for
    """The run was asked to stop and has saved. The message is meant for the user."""


def listen() -> None:
    """From now on SIGTERM and SIGUSR1 do nothing but set `asked`, however often they come."""
    for number in SIGNALS:
        signal.signal(number, _note)


def ignore() -> None:
    """From now on they do nothing at all: what comes while the interpreter ends cannot change the exit code."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def listening() -> Iterator[None]:
    """`listen` until the context ends; then all is as before, and forgotten.

    Only the main thread may arrange signals. In another one this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    listen()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _received.clear()


def asked() -> bool:
    """Whether this process was asked to stop."""
    return bool(_received)


def message(step: int) -> str:
    """What to tell the user of a run that stopped after `step` steps."""
    why = f"stopped by {_received[0].name}" if _received else "stopped with another process, which was asked to"
    return f"{why}: step {step} is done and saved; --resume with this run's --output continues from it"


def _note(number: int, _: object) -> None:
    _received.append(signal.Signals(number))
