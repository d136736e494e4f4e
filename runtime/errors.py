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
    """Return a name from outside for a message: control characters and other unprintable characters are escaped.

    A name with a newline or a terminal sequence could otherwise forge lines of the log.
    """
    if name.isprintable():
        return name
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)
