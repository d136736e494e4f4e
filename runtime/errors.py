"""The base of all errors that are meant for the user."""


class UserError(Exception):
    """An error whose message tells the user what is wrong, where, and what to do.

    Commands print the message without a traceback and exit with code 2. Subclasses that are raised for bad values also
    derive from `ValueError`, so that callers from Python can catch them as such.
    """
