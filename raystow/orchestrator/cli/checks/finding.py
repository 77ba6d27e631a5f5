"""The result of a check: status, finding and consequence."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from ....storage.errors import RaystowError
from ..exit_codes import exit_code


class Status(enum.Enum):
    """The severity of a finding. ``WARNING``: something will be slow or missing. ``FAILED``: something will not work."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True)
class Finding:
    """One line of the output. ``follows``: the consequence or remedy, possibly empty; ``code``: the exit code of a failure."""

    name: str
    status: Status
    found: str
    follows: str = ""
    code: int = 0


def ok(name: str, found: str, follows: str = "") -> Finding:
    """Return a finding without a problem."""
    return Finding(name, Status.OK, found, follows)


def warning(name: str, found: str, follows: str) -> Finding:
    """Return a finding of something that will be slow or missing."""
    return Finding(name, Status.WARNING, found, follows)


def failed(name: str, found: str, follows: str) -> Finding:
    """Return a finding of something that will not work."""
    return Finding(name, Status.FAILED, found, follows, 1)


def failure(name: str, error: Exception) -> Finding:
    """Return an error as a finding."""
    if isinstance(error, RaystowError):
        found = f"{error.subject}: {error.what}" if error.subject else error.what
        return Finding(name, Status.FAILED, found, error.remedy, exit_code(error))
    return Finding(name, Status.FAILED, f"{type(error).__name__}: {error}", "", 1)


def examined(checks: Iterable[Callable[[], Finding]]) -> Iterator[Finding]:
    """Run checks one after the other; an exception becomes a finding, so that the other checks run."""
    for check in checks:
        try:
            yield check()
        except Exception as error:
            yield failure(check.__name__.replace("_", " "), error)
