"""Exceptions, output and exit status of the commands that make and check shards."""

import sys
from collections.abc import Callable

from tessera.data.shards.errors import MakeError as MakeError
from tessera.data.shards.errors import ShardError
from tessera.runtime.errors import UserError, printable
from tessera.runtime.settings import SettingsError


class WorkerError(UserError, RuntimeError):
    """Raised if a worker process was killed."""


def say(name: str, text: str) -> None:
    """Print one line of a report."""
    print(f"{name:<13} {printable(text)}", flush=True)


def run_command(program: str, command: Callable[[], int], *, resume: str = "") -> int:
    """Call a command and return its exit status. Errors are printed to stderr without a traceback.

    Args:
        program: name of the command in error messages.
        command: function that does the work and returns the exit status.
        resume: advice that is printed if the user interrupts the command or a worker process is killed.
    """
    try:
        return command()
    except (SettingsError, ShardError) as error:
        message, status = str(error), 2
    except WorkerError as error:
        message, status = f"{error} {resume}", 1
    except (MakeError, OSError) as error:
        message, status = str(error), 1
    except MemoryError:
        message, status = "out of memory. Use fewer --workers, or a lower --max_pixels.", 1
    except KeyboardInterrupt:
        message, status = f"stopped. {resume}", 130
    print(f"{program}: {message}", file=sys.stderr)
    return status
