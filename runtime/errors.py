"""The base class of all errors that are meant for the user."""

import re

CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""Pattern of control characters, line separators, and characters that change the direction of text."""


class UserError(Exception):
    """An error whose message tells the user what is wrong, where, and what to do.

    Commands print the message without a traceback and exit with code 2. A subclass that is raised for bad values also
    derives from `ValueError`, so that Python callers can catch it as a `ValueError`.
    """


def printable(name: str) -> str:
    """Return a name from outside with control characters escaped, so that it cannot forge lines or colours of a log."""
    if name.isprintable():
        return name
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in name)


def without_controls(message: str) -> str:
    """Return a message with its control characters escaped, except line breaks, and all lines but the first indented.

    Commands print every message through this function. A name in the message may hold a line break, and what follows it
    could otherwise look like another message.
    """
    return "\n    ".join(map(printable, message.split("\n")))
