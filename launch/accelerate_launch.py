"""`accelerate launch` for schedulers: `python launch/accelerate_launch.py <arguments of accelerate launch>`.

What it does otherwise than `accelerate launch`:

- Its exit code is the trainer's own (75: stopped and saved, 2: something to change, ...), and nothing is printed after
  the trainer's own message.
- SIGTERM and SIGUSR1 go to the trainers, and nothing else happens: they may save for as long as they need. `accelerate
  launch` ends of SIGUSR1, and after SIGTERM leaves them alone (one process) or kills them after 30 seconds (several).

Before the trainers are started, both signals end it as they end any program: there is nothing to save.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Iterable
from types import FrameType
from typing import Any, NoReturn

import torch.distributed.run as elastic
from accelerate.commands import launch
from accelerate.utils.launch import prepare_simple_launcher_cmd_env
from torch.distributed.elastic.multiprocessing import PContext, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

TRY_AGAIN = 75
"""the trainers' exit code for: stopped and saved, as a signal asked"""
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


def become_the_trainer(args: Any) -> NoReturn:
    """In place of accelerate's launcher of one process: with nobody in between, signals and exit code are its own."""
    command, environment = prepare_simple_launcher_cmd_env(args)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvpe(command[0], command, environment)


class Trainers:
    """The processes that torch's elastic agent starts, which runs in this one."""

    def __init__(self) -> None:
        self.context: PContext | None = None
        self.asked: signal.Signals | None = None
        self._start, self._run = PContext.start, elastic.run

    def start(self, context: PContext) -> None:
        """In place of `PContext.start`, which starts them and arranges signals as torch wants them."""
        if self.asked:  # `--max_restarts`: who was asked to stop is not started again
            sys.exit(TRY_AGAIN)
        # where torch heeds this, there is no moment in which SIGTERM is its own
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGINT,SIGHUP,SIGQUIT"
        self._listen()
        self._start(context)
        self._listen()
        self.context = context
        if self.asked:
            self.pass_on(self.asked, None)

    def _listen(self) -> None:
        for number in SIGNALS:
            signal.signal(number, self.pass_on)

    def pass_on(self, number: int, _: FrameType | None) -> None:
        """Tell the trainers, and only them: each has a process group of its own, with its loader's processes."""
        self.asked = signal.Signals(number)
        for process in self.context.pids().values() if self.context else ():
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.kill(process, number)

    def run(self, args: Any) -> None:
        """In place of `torch.distributed.run.run`: ends this process with the trainers' exit code where they fail."""
        try:
            self._run(args)
        except ChildFailedError as error:
            sys.exit(exit_code([failure.exitcode for failure in error.failures.values()], self.asked))
        except SignalException as error:  # from the keyboard, or a closed terminal
            sys.exit(128 + error.sigval)


def exit_code(codes: Iterable[int], asked: signal.Signals | None) -> int:
    """One exit code for the codes of this machine's trainers that did not end with 0, in the order in which they ended.

    Negative ones are the signals of which they died. Once one has ended, the agent sends SIGTERM to the others.
    """
    codes = list(codes)
    own = [code for code in codes if code != -signal.SIGTERM] or codes
    if asked and all(code in (-asked, -signal.SIGTERM) for code in codes):  # too early for them to save, or to know
        return TRY_AGAIN
    code = next((code for code in own if code != TRY_AGAIN), TRY_AGAIN)
    return code if code > 0 else 128 - code


def main() -> None:
    trainers = Trainers()
    launch.simple_launcher = become_the_trainer
    elastic.run = trainers.run
    PContext.start = lambda self: trainers.start(self)
    launch.main()


if __name__ == "__main__":
    main()
