"""Preemption: on SIGTERM, SIGUSR1, SIGHUP or a first Ctrl-C, a run finishes the current step, saves a checkpoint and
exits with `EXIT_CODE`."""

import os
import shlex
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tessera.runtime.machine import command_line, is_launcher, signal_at_end_of_parent
from tessera.runtime.stdio import tell
from tessera.runtime.user_error import UserError

EXIT_CODE = 75
"""Exit code of a run that was preempted and has saved a checkpoint: EX_TEMPFAIL of sysexits.h (try again later)."""
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Signals that stop a run. A terminal that is closed sends SIGHUP."""
LONGEST_WAIT = 10.0
"""Longest wait for data, in seconds, of a process that was asked to stop."""
_received: list[signal.Signals] = []


class Preempted(SystemExit):
    """The run was asked to stop and has saved a checkpoint. The message is meant for the user.

    A scheduler expects that its signal ends the program. A program that does not catch this exception ends with
    `EXIT_CODE`, and `except Exception` does not catch it.
    """

    def __init__(self, step: int, folder: str | Path) -> None:
        """Describe the stop of the run in `folder` after `step` steps."""
        super().__init__(message(step, folder))
        self.code, self.step, self.folder = EXIT_CODE, step, Path(folder)
        self.signal = _received[0] if _received else None
        """Signal that this process received, or None if another process received it."""


class InterruptedRunError(KeyboardInterrupt):
    """The run was interrupted without saving: before its first step, or by a second Ctrl-C."""

    def _render_traceback_(self) -> list[str]:
        """Return the text that a notebook shows."""
        return [f"KeyboardInterrupt: {self}"]


class WaitInterruptedError(UserError, RuntimeError):
    """Raised if a process was asked to stop while it waits for data that does not arrive."""


def check_wait(since: float) -> None:
    """Raise `WaitInterruptedError` if this process was asked to stop and has waited for `LONGEST_WAIT` seconds.

    Args:
        since: value of `time.monotonic` at the beginning of the wait.
    """
    if _received and time.monotonic() - since > LONGEST_WAIT:
        raise WaitInterruptedError(f"stopped by {_received[0].name} while waiting for data")


def forget() -> None:
    """Forget all recorded signals, for example in a forked process, which receives its own signals."""
    _received.clear()


def listen() -> None:
    """From now on, record the signals that stop a run. Recorded signals do not end the process.

    SIGHUP is not recorded if the process already ignores it, as under nohup.
    """
    for number in SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _record)


def ignore() -> None:
    """From now on, ignore the signals that stop a run, so that they do not change the exit code of this process."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def end_with_launcher() -> None:
    """Make this process receive SIGTERM when `accelerate launch` ends, if it is the only process of this launch.

    `accelerate launch` does not forward signals to a single process, so SIGTERM would otherwise end the launcher and
    leave this process running. If there are several processes, torch's elastic agent forwards SIGTERM. The function
    does nothing under launch/accelerate_launch.py, which replaces itself by this process, and on systems other than
    Linux.
    """
    parent = os.getppid()
    if "TORCHELASTIC_RUN_ID" in os.environ or not is_launcher(command_line(parent)):
        return
    signal_at_end_of_parent(signal.SIGTERM)
    if os.getppid() != parent:  # the launcher ended before the call above
        os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def listening() -> Iterator[None]:
    """Record the signals that stop a run within the context. Then restore the old handlers and clear the record.

    Outside of the main thread, the context does nothing, because Python allows only the main thread to set signal
    handlers.
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
        forget()


@contextmanager
def saving_on_interrupt() -> Iterator[None]:
    """Record the first Ctrl-C (SIGINT) within the context, like SIGTERM. A second Ctrl-C raises `KeyboardInterrupt`.

    Outside of the main thread, or if the process ignores SIGINT, the context does nothing.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGINT, _record_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def stop_requested() -> bool:
    """Return True if this process has recorded a signal to stop."""
    return bool(_received)


def message(step: int, folder: str | Path) -> str:
    """Return a message for the user. It says why the run in `folder` stopped after `step` steps, and how to continue
    it."""
    why = f"stopped by {_received[0].name}" if _received else "stopped because another process received a signal"
    return f"{why}. Step {step} is done and saved. To continue, start again with --resume {shlex.quote(str(folder))}."


def _record(number: int, _: object) -> None:
    _received.append(signal.Signals(number))


def _record_interrupt(number: int, frame: object) -> None:
    _record(number, frame)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Use `tell`, because print and logging are not reentrant, and the signal may have interrupted one of them.
    if os.environ.get("RANK", "0") == "0":
        tell("\nThe run finishes this step, saves and ends. To end it at once, without saving, press Ctrl-C again.\n")
