"""Errors that the command line turns into exit codes. Bad input is a ValueError (exit 2)."""


class CannotRunHereError(RuntimeError):
    """Hardware or a package is missing (exit 3); the message is one line and names the remedy."""


class GateFailedError(RuntimeError):
    """A check ran and failed (exit 1)."""


class NonFiniteError(ValueError):
    """A NaN or infinite value where numbers are needed: in training it ends the arm, not the comparison."""
