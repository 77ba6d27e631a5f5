"""The result of a check: status, finding and consequence."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from ...storage.errors import RaystowError
from ..exit_codes import exit_code


class Status(enum.Enum):
    """The severity of a finding. ``WARNING``: something will be slow or missing. ``FAILED``: something will not work."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True)
class Finding:
    """The result of a check. ``follows``: the consequence or remedy, possibly empty; ``code``: the exit code of a failure."""

    status: Status
    found: str
    follows: str = ""
    code: int = 0


ok = partial(Finding, Status.OK)
warning = partial(Finding, Status.WARNING)
failed = partial(Finding, Status.FAILED, code=1)
damaged = partial(Finding, Status.FAILED, code=3)


def failure(error: Exception) -> Finding:
    """Return an error as a finding."""
    if isinstance(error, RaystowError):
        found = f"{error.subject}: {error.what}" if error.subject else error.what
        return failed(found, error.remedy, code=exit_code(error))
    return failed(f"{type(error).__name__}: {error}")


def examined(checks: Mapping[str, Callable[[], Finding]]) -> Iterator[tuple[str, Finding]]:
    """Run checks by name, one after the other; an exception becomes a finding, so that the other checks run."""
    for name, check in checks.items():
        try:
            finding = check()
        except Exception as error:
            finding = failure(error)
        yield name, finding
