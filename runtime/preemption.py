"""Preemption: on SIGTERM or SIGUSR1 a run finishes its step, saves, and exits with `EXIT_CODE`."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

EXIT_CODE = 75
"""Exit code of a run that stopped and saved: EX_TEMPFAIL of sysexits.h (try again later)."""
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_received: list[signal.Signals] = []


class Preempted(Exception):  # noqa: N818, because a requested stop is no error
    """The run was asked to stop and has saved. The message is meant for the user."""


def listen() -> None:
    """Record SIGTERM and SIGUSR1 from now on. The signals no longer end the process."""
    for number in SIGNALS:
        signal.signal(number, _record)


def ignore() -> None:
    """Ignore SIGTERM and SIGUSR1 from now on, so that they cannot change the exit code while the interpreter ends."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def listening() -> Iterator[None]:
    """Call `listen`; at the end of the context, restore the old handlers and clear the recorded signals.

    Outside of the main thread the context does nothing, because Python sets signal handlers only in the main thread.
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


def stop_requested() -> bool:
    """Return True if this process has received a signal to stop."""
    return bool(_received)


def message(step: int) -> str:
    """Return the message for the user of a run that stopped after `step` steps."""
    why = f"stopped by {_received[0].name}" if _received else "stopped because another process received a signal"
    return f"{why}: step {step} is done and saved; --resume with this run's --output continues from it"


def _record(number: int, _: object) -> None:
    _received.append(signal.Signals(number))
