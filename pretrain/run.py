"""Pretrain a vision encoder: `accelerate launch pretrain/run.py --method dino --data SHARDS`."""

import errno
import logging
import os
import sys

from runtime import preemption

if __name__ == "__main__":
    preemption.listen()  # the imports below take seconds

# Read once, when torch is loaded: threads that wait by spinning take the cores from the loader and from each other
# (two cores, a second job beside: spinning fell to 38 images/s at times, waiting never below 275).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from data.shards import ShardError
from pretrain.config import load
from runtime import watchdog
from runtime.errors import UserError


def main(argv: list[str] | None = None) -> int:
    """Train, and return the exit code.

    0: done. 2: the user has to change something. 69: another process is gone. 75: stopped and saved after SIGTERM or
    SIGUSR1, --resume continues. 130: interrupted from the keyboard.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[_log_handler()])
    rank = int(os.environ.get("RANK", "0"))
    try:
        with preemption.listening():
            config = load(sys.argv[1:] if argv is None else argv)
            # accelerate and torch.distributed take seconds to import: --help and refused settings do not wait for them
            from pretrain.job import pretrain

            pretrain(config)
    except watchdog.LostError as error:
        _complain(f"process {rank}: {error}")
        return watchdog.EXIT_CODE
    except UserError as error:
        if rank == 0:
            _complain(str(error))
        elif isinstance(error, ShardError):  # perhaps only this process sees the shard
            _complain(f"process {rank}: {error}")
        return 2
    except preemption.Preempted as stop:
        if rank == 0:
            _complain(str(stop))
        return preemption.EXIT_CODE
    except KeyboardInterrupt:
        _complain(
            "interrupted. --resume with its --output continues from the last checkpoint, if there is one. "
            "SIGTERM lets a run save before it ends"
        )
        return 130
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _complain(f"{error}. Free some space and continue with --resume")
        return 2
    return 0


def _log_handler() -> logging.Handler:
    """Return rich's handler for a terminal; in a log file its line breaks would be in the way."""
    if not sys.stderr.isatty():
        return logging.StreamHandler()
    from rich.logging import RichHandler

    return RichHandler(show_path=False, show_time=False)


def _complain(message: str) -> None:
    print(f"\nrun.py: {message}", file=sys.stderr)


if __name__ == "__main__":
    code = main()
    preemption.ignore()
    saver = sys.modules.get("pretrain.checkpoints.save")  # loaded only by a run that has started
    if code == watchdog.EXIT_CODE or (saver and saver.has_unfinished_save()):
        sys.stdout.flush()
        os._exit(code)  # the process group's own end would wait for the process that is gone
    sys.exit(code)
