"""Learns what has become of a save whose end was not reported, from the root and from the coordinator."""

from __future__ import annotations

from collections.abc import Callable

from ...storage.committer import outcome_in
from ...storage.errors import Fenced, NotARepository, NotFound, OutcomeUnknown, RaystowError, SaveFailed
from ...storage.format.root import Entry
from ...storage.repository import Repository
from ...storage.version import Version


def find_outcome(
    repository: Repository,
    ask: Callable[[int, str], Entry],
    attempt: tuple[int, str] | None,
    unknown: OutcomeUnknown,
) -> Version | RaystowError:
    """Return the version that an attempt (id, name) has become, or the error that says that it has become none.

    The root is asked first, since a version in it is certain, and the coordinator next, which may still commit the attempt.
    ``unknown`` is returned if neither can say. ``ask``: asks the coordinator for the entry, and raises as ``outcome_in``.
    """
    if attempt is None:
        return unknown
    id, name = attempt
    for in_root in (True, False):
        try:
            return repository.at(outcome_in(repository.root(), id, name) if in_root else ask(id, name))
        except (SaveFailed, Fenced, NotFound) as error:
            return type(error)(error.what, subject=unknown.subject, remedy=error.remedy)
        except NotARepository as error:  # with the repository, all of its versions are gone
            return SaveFailed(f"{error.subject}: {error.what}", subject=unknown.subject, remedy=error.remedy)
        except RaystowError:
            pass  # it does not answer, or does not know
    return unknown
