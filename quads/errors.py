"""Errors that the command line turns into exit codes. Bad input is a ValueError (exit 2)."""


class CannotRunHere(RuntimeError):
    """Hardware or a package is missing (exit 3); the message is one line and names the remedy."""


class GateFailed(RuntimeError):
    """A check ran and failed (exit 1)."""
