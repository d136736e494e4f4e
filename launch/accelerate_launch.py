"""`accelerate launch` for schedulers: `python launch/accelerate_launch.py <arguments of accelerate launch>`.

There are four differences from `accelerate launch`:

- The exit code is the trainer's own (75: stopped and saved, 2: the user has to change something, ...). Nothing is
  printed after the trainer's last message, except that a trainer was killed. If a trainer fails, the others that are
  stopped (SIGSTOP) are killed at once.
- SIGTERM, SIGUSR1, SIGHUP (a closed terminal) and SIGINT (Ctrl-C) are forwarded to the trainers, which may take as
  long as they need to save. In contrast, SIGUSR1 kills `accelerate launch`. After SIGTERM, `accelerate launch` leaves
  a single trainer running, and kills several trainers after 30 seconds.
- `--num_processes 2` always starts two processes. Without a flag such as `--multi_gpu`, `accelerate launch` starts one.
- `--config_file` also takes the name of a file in configs/accelerate/, such as `zero2`.

Before the trainers start, the signals end the launcher as they end any program, because nothing needs saving yet.
"""

import argparse
import contextlib
import difflib
import logging
import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

import torch.distributed.run as elastic
from accelerate.commands import launch
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils.launch import prepare_simple_launcher_cmd_env
from torch.distributed.elastic.multiprocessing import PContext, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from tessera.launch.jobs import ENGINES, OneLineParser, engine_file

STOPPED_AND_SAVED = 75
"""Exit code of a trainer that has saved a checkpoint because a signal told it to stop."""
LOST_PEER = 69
"""Exit code of a trainer that ended because another trainer had ended."""
KILLED = (
    "Either a person, a program or the scheduler killed it (kill -9), or the system did, because memory ran out: then "
    "`dmesg -T | grep -i 'killed process'` names it (in a container, see oom_kill in /sys/fs/cgroup/memory.events). "
    "If memory ran out, lower --batch_size or --workers, or raise --accumulate. A run continues with --resume."
)
"""Advice if a trainer was killed by SIGKILL, which does not say who sent it."""
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)


def start_without_kind(args: argparse.Namespace) -> None:
    """Start the trainers if neither a flag nor a configuration file sets the kind of distribution, such as multi-GPU.

    A single trainer replaces this process, so that signals and the exit code need no forwarding. Several trainers are
    started as with `--multi_gpu`, which also works without a GPU.

    This function replaces accelerate's own function, which starts one process in both cases.
    """
    if (args.num_processes or 1) > 1 and args.mpirun_hostfile is None:
        os.environ["ACCELERATE_USE_CPU"] = str(args.cpu)
        launch.multi_gpu_launcher(args)
        return
    command, environment = prepare_simple_launcher_cmd_env(args)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvpe(command[0], command, environment)


class Trainers:
    """Trainer processes of this machine. Torch's elastic agent, which runs in this process, starts them."""

    def __init__(self) -> None:
        self.context: PContext | None = None
        self.received: signal.Signals | None = None
        self.closed = set[int]()
        """Process ids of the trainers that still ran when the launcher began to end all trainers."""
        self._start, self._run, self._close = PContext.start, elastic.run, PContext.close

    def start(self, context: PContext) -> None:
        """Start the trainers and forward signals to them. This method replaces `PContext.start`."""
        if self.received:  # `--max_restarts` must not restart trainers that were told to stop
            sys.exit(128 + self.received if self.received == signal.SIGINT else STOPPED_AND_SAVED)
        # With this variable, newer versions of torch install no handler for SIGTERM.
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
        self._listen()
        self._start(context)
        self._listen()
        self.context = context
        if self.received:
            self.forward(self.received, None)

    def _listen(self) -> None:
        for number in SIGNALS:
            # Under nohup, SIGHUP is ignored, and in a job in the background SIGINT. They must remain ignored.
            if number not in (signal.SIGHUP, signal.SIGINT) or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self.forward)

    def forward(self, number: int, _: FrameType | None) -> None:
        """Forward a signal to the trainers, but not to their loader workers.

        A trainer and its loader workers share a process group, so the signal is sent to the trainer's process id.
        """
        self.received = signal.Signals(number)
        for process in self.context.pids().values() if self.context else ():
            with contextlib.suppress(ProcessLookupError):  # a trainer that has ended needs no signal
                os.kill(process, number)

    def close(self, context: PContext, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        """End the trainers that still run. This method replaces `PContext.close`.

        A stopped trainer is killed at once, because it does not handle a SIGTERM.
        """
        for process in context.pids().values():
            state = process_state(process)
            if state not in ("", "Z", "X"):
                self.closed.add(process)
            if state in ("T", "t"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
        self._close(context, signal.SIGTERM if death_sig is None else death_sig, timeout)

    def run(self, args: argparse.Namespace) -> None:
        """Run the elastic agent. Exit with the trainers' exit code if they fail.

        This method replaces `torch.distributed.run.run`.
        """
        try:
            self._run(args)
        except ChildFailedError as error:
            ended = {rank: one.exitcode for rank, one in error.failures.items() if not self.has_killed(one)}
            for rank in (rank for rank, code in ended.items() if code == -signal.SIGKILL):
                print(f"tessera: process {rank} was killed by SIGKILL. {KILLED}", file=sys.stderr, flush=True)
            sys.exit(exit_code(ended.values(), self.received))
        except SignalException as error:  # raised after SIGQUIT
            sys.exit(128 + error.sigval)

    def has_killed(self, failure: ProcessFailure) -> bool:
        """Return True if a trainer was killed because another one had failed, so that its end is not the cause."""
        return failure.pid in self.closed and failure.exitcode == -signal.SIGKILL


def process_state(process: int) -> str:
    """Return the letter of the state of a process in /proc, such as `T` for stopped; empty if it is unknown."""
    try:
        return Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return ""


def exit_code(codes: Iterable[int], received: signal.Signals | None) -> int:
    """Return one exit code for all trainers of this machine.

    If a trainer ended only because another trainer had ended, its code is used only if there is no other code. The
    elastic agent polls the trainers at intervals, so it may find the codes of both trainers at once.

    Args:
        codes: exit codes other than 0. A negative code -N means that signal N killed the trainer. Once one trainer has
            ended, the elastic agent sends SIGTERM to the other trainers.
        received: signal that was forwarded to the trainers, or None.
    """
    codes = list(codes)
    # If the signal killed all trainers, they had not installed their signal handlers yet, so nothing needed saving.
    if received and all(code in (-received, -signal.SIGTERM) for code in codes):
        return 128 + received if received == signal.SIGINT else STOPPED_AND_SAVED
    own = [code for code in codes if code != -signal.SIGTERM] or codes
    causes = [code for code in own if code not in (STOPPED_AND_SAVED, LOST_PEER)]
    if causes:
        return causes[0] if causes[0] > 0 else 128 - causes[0]
    # After a signal, a trainer may report that it lost another trainer, which has saved and ended earlier.
    saved = STOPPED_AND_SAVED in own and (received or LOST_PEER not in own)
    return STOPPED_AND_SAVED if saved else LOST_PEER


def main() -> None:
    parser = launch.launch_command_parser()
    parser.prog, parser.__class__ = "tessera", LauncherParser
    args = parser.parse_args()
    if args.config_file:
        args.config_file = checked_engine_file(parser, args.config_file)
    trainers = Trainers()
    launch.simple_launcher = start_without_kind
    elastic.run = trainers.run
    PContext.start = lambda self: trainers.start(self)
    PContext.close = lambda self, *given, **options: trainers.close(self, *given, **options)
    # The trainers print their errors. Without this line, torch's launcher would log the exit codes after these errors.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    launch.launch_command(args)


class LauncherParser(OneLineParser):
    """Parser of `accelerate launch`, whose usage has more than 100 lines."""

    hint = "Before the command stand the flags of `accelerate launch`. Flags of the command follow it."


def checked_engine_file(parser: argparse.ArgumentParser, name: str) -> str:
    """Return the path of the engine file that `--config_file` names. Exit with code 2 if it cannot be read."""
    path = engine_file(name)
    engines = sorted(file.stem for file in ENGINES.glob("*.yaml"))
    if not path.is_file():
        close = difflib.get_close_matches(path.stem, engines, n=1, cutoff=0.5)
        hint = f" Did you mean {close[0]}?" if close else ""
        parser.error(f"--config_file {name}: there is no such file.{hint} Engines by name: {', '.join(engines)}.")
    try:
        load_config_from_file(str(path))
    except Exception as error:  # accelerate checks little of the file, so its errors are of any kind
        reason = " ".join(str(error).split())[:300]
        parser.error(f"--config_file {name} is not a settings file of accelerate: {reason}")
    return str(path)


if __name__ == "__main__":
    main()
