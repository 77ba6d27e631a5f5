"""What a check found, how bad it is, and what follows from it."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from ....storage.errors import RaystowError
from ..reporting import exit_code


class Status(enum.Enum):
    """How a finding is to be taken. ``WARNING``: something will be slow or missing. ``FAILED``: something will not work."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's. ``follows``: what it means or what to do, empty if nothing follows. ``code``: of a failure."""

    name: str
    status: Status
    found: str
    follows: str = ""
    code: int = 0


def ok(name: str, found: str, follows: str = "") -> Finding:
    """As it should be."""
    return Finding(name, Status.OK, found, follows)


def warning(name: str, found: str, follows: str) -> Finding:
    """Something will be slow or missing."""
    return Finding(name, Status.WARNING, found, follows)


def failed(name: str, found: str, follows: str) -> Finding:
    """Something will not work."""
    return Finding(name, Status.FAILED, found, follows, 1)


def failure(name: str, error: Exception) -> Finding:
    """An error as a finding."""
    if isinstance(error, RaystowError):
        found = f"{error.subject}: {error.what}" if error.subject else error.what
        return Finding(name, Status.FAILED, found, error.remedy, exit_code(error))
    return Finding(name, Status.FAILED, f"{type(error).__name__}: {error}", "", 1)


def examined(checks: Iterable[Callable[[], Finding]]) -> Iterator[Finding]:
    """Run checks one after the other. Whatever one raises is its finding: what is broken must not stop the doctor."""
    for check in checks:
        try:
            yield check()
        except Exception as error:
            yield failure(check.__name__.replace("_", " "), error)
