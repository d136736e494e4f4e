"""Pretrain a vision encoder: `accelerate launch pretrain/run.py --method dino --data SHARDS`."""

import errno
import faulthandler
import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

from tessera.runtime import preemption, stdio
from tessera.runtime.machine import set_environment
from tessera.runtime.user_error import UserError, escape_controls, without_controls

set_environment()  # before torch is loaded


def train(argv: list[str]) -> None:
    """Train with the settings of a command line."""
    from tessera.pretrain.command_line import load

    config = load(argv)
    # imported here, because accelerate and torch.distributed take seconds, and --help does not need them
    from tessera.pretrain.job import pretrain

    pretrain(config)


def main(argv: list[str] | None = None, command: Callable[[list[str]], None] = train) -> int:
    """Call a command that trains with its command line, and return the exit code.

    If `argv` is None, the command line is that of this process, and the process ends with the exit code.

    0: the run is complete. 2: the user must change the settings, the data or the disk. 69: another process of the run
    was lost. 75: the run received SIGTERM, SIGUSR1, SIGHUP or Ctrl-C, saved and stopped; --resume continues the run.
    130: the run was interrupted without saving, by Ctrl-C before the first step or by a second Ctrl-C.
    """
    if argv is None:
        stdio.protect()
        faulthandler.enable()  # print the stack of a process that crashes, and of a loader worker that hangs
        preemption.end_with_launcher()
        preemption.listen()  # handle signals before the imports of the command, which take seconds
        leave(main(sys.argv[1:], command))
    from tessera.data.shards import ShardError
    from tessera.runtime import watchdog
    from tessera.runtime.isolation import own_warnings

    handler = _log_handler()
    handler.addFilter(escape_controls)
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[handler])
    rank = os.environ.get("RANK", "0")
    rank = int(rank) if rank.isdecimal() else 0  # the watchdog refuses other values
    try:
        with preemption.listening(), own_warnings():
            command(argv)
    except watchdog.LostError as error:
        _complain(f"process {rank}: {error}")
        return watchdog.EXIT_CODE
    except preemption.WaitInterruptedError as stop:
        _complain(f"process {rank}: {stop}. --resume continues from the last checkpoint.")
        return preemption.EXIT_CODE
    except UserError as error:
        if rank == 0:
            _complain(str(error))
        elif isinstance(error, ShardError):  # other ranks print it too, because a shard may be damaged on one node only
            _complain(f"process {rank}: {error}")
        return 2
    except preemption.Preempted as stop:
        if rank == 0:
            _complain(str(stop))
        return preemption.EXIT_CODE
    except KeyboardInterrupt:
        _complain(
            "The run was interrupted. To continue from the last checkpoint, start again with --resume and the folder "
            "of this run."
        )
        return 130
    except OSError as error:
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EACCES, errno.EROFS):
            _complain(f"{error.strerror}: {error.filename}. Choose another path.")
            return 2
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _complain(f"{error}. Free some space and continue with --resume.")
        return 2
    return 0


def _log_handler() -> logging.Handler:
    """Return rich's log handler for a terminal. Return a plain handler for a log file, where rich would wrap lines."""
    if not sys.stderr.isatty():
        return logging.StreamHandler()
    from rich.logging import RichHandler

    return RichHandler(show_path=False, show_time=False)


def _complain(message: str) -> None:
    print(f"\n{os.path.basename(sys.argv[0])}: {without_controls(message)}", file=sys.stderr)


def leave(code: int) -> NoReturn:
    """Exit with the code that `main` returned."""
    from tessera.runtime import watchdog

    preemption.ignore()
    saver = sys.modules.get("tessera.pretrain.checkpoints.save")  # None if the run has not started
    # A thread that still waits for the store of the processes aborts a normal exit, in place of this code.
    waits = any(thread.name == watchdog.THREAD for thread in threading.enumerate())
    if waits or code == watchdog.EXIT_CODE or (saver and saver.has_unfinished_save()):
        sys.stdout.flush()
        os._exit(code)  # a normal exit would wait for the lost process
    sys.exit(code)


if __name__ == "__main__":
    main()
