"""The base class of all errors that are meant for the user."""

import logging
import re

CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""Pattern of control characters, line separators, and characters that change the direction of text."""
_PASSWORD = re.compile(r"(?<=://)([^\s/@:]*):[^\s/@]+@")


class UserError(Exception):
    """An error whose message tells the user what is wrong, where, and what to do.

    Commands print the message without a traceback and exit with code 2. A subclass that is raised for bad values also
    derives from `ValueError`, so that Python callers can catch it as a `ValueError`.
    """

    def _render_traceback_(self) -> list[str]:
        """Return the text that a notebook shows: the message, because a traceback of this project says no more."""
        return [f"{type(self).__name__}: {without_controls(str(self))}"]


def printable(name: str) -> str:
    """Escape the control characters of an untrusted name, so that the name cannot forge lines or colours of a log."""
    if name.isprintable():
        return name
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in name)


def escape_controls(record: logging.LogRecord) -> bool:
    """Escape the control characters in a log message, as a filter of a handler. File names may contain them."""
    record.msg, record.args = without_controls(record.getMessage()), None
    return True


def without_controls(message: str) -> str:
    """Escape the control characters of a message, except line breaks, and indent all lines after the first. Hide
    passwords in URLs.

    Commands print every message through this function. A name in the message may contain a line break. Without the
    indentation, the next line could look like another message.
    """
    return "\n    ".join(map(printable, _PASSWORD.sub(r"\1:***@", message).split("\n")))
