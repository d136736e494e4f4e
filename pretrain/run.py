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

from rich.logging import RichHandler

from data.shards import ShardError
from pretrain.checkpoints import save
from pretrain.config import load
from pretrain.job import pretrain
from runtime import watchdog
from runtime.errors import UserError


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0 done, 2 the user has something to change, 75 stopped and saved as SIGTERM or SIGUSR1 asked (--resume
    continues), 69 another process is gone, 130 interrupted from the keyboard."""
    # rich breaks lines at the width of a terminal, which a log file does not have
    handler = RichHandler(show_path=False, show_time=False) if sys.stderr.isatty() else logging.StreamHandler()
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[handler])
    rank = int(os.environ.get("RANK", "0"))
    try:
        with preemption.listening():
            pretrain(load(sys.argv[1:] if argv is None else argv))
    except watchdog.LostError as error:
        print(f"\nrun.py: process {rank}: {error}", file=sys.stderr)
        return watchdog.EXIT_CODE
    except UserError as error:
        if rank == 0 or isinstance(error, ShardError):  # an error of a shard may be known to this process only
            print(f"\nrun.py: {f'process {rank}: ' if rank else ''}{error}", file=sys.stderr)
        return 2
    except preemption.Preempted as stop:
        if rank == 0:
            print(f"\nrun.py: {stop}", file=sys.stderr)
        return preemption.EXIT_CODE
    except KeyboardInterrupt:
        print(
            "\nrun.py: interrupted; --resume with its --output continues from the last checkpoint, if there is one "
            "(SIGTERM lets a run save before it ends)",
            file=sys.stderr,
        )
        return 130
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        print(f"\nrun.py: {error}. Free some space and continue with --resume", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    code = main()
    preemption.ignore()
    if code == watchdog.EXIT_CODE or save.has_unfinished_save():
        sys.stdout.flush()
        os._exit(code)  # the process group's own end would wait for the process that is gone
    sys.exit(code)
