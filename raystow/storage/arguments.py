"""Checks of arguments. ``StateError`` names the argument, its value and a valid one. Nothing is converted; a bool is no
number."""

from __future__ import annotations

from .errors import StateError


def integer(name: str, value: object, *, least: int, instead: str = "", subject: str = "") -> int:
    """An integer that fits the format. ``instead``: another valid value, for the remedy."""
    if type(value) is not int or not least <= value < 1 << 63:
        raise refused(name, value, f"an integer of at least {least} and below 2**63", instead, subject)
    return value


def refused(name: str, value: object, valid: str, instead: str = "", subject: str = "") -> StateError:
    """The error for an invalid argument. ``valid``: what is valid; ``instead``: another valid value."""
    remedy = f"give {valid}" + (f", or {instead}" if instead else "")
    return StateError(f"{name} is {value!r:.80}", subject=subject, remedy=remedy)
