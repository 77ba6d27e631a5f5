"""What a caller has passed, looked at before anything is done with it: ``StateError`` names the argument, its value, and what
would do. Nothing is converted, and a bool is no number."""

from __future__ import annotations

from .errors import StateError


def integer(name: str, value: object, *, least: int, instead: str = "", subject: str = "") -> int:
    """An integer that fits into messages and into the format. ``instead``: what else would do, for the remedy."""
    if type(value) is not int or not least <= value < 1 << 63:
        raise refused(name, value, f"an integer of at least {least} and below 2**63", instead, subject)
    return value


def refused(name: str, value: object, wanted: str, instead: str = "", subject: str = "") -> StateError:
    """The error to raise for an argument that will not do: give ``wanted``, or ``instead``."""
    remedy = f"give {wanted}" + (f", or {instead}" if instead else "")
    return StateError(f"{name} is {value!r:.80}", subject=subject, remedy=remedy)
