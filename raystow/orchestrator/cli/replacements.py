"""The part of ``raystow prune`` and ``compact`` that writes versions anew: one after another, past those that cannot be read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from ...storage.errors import Damaged, NotFound, RaystowError, Unsupported
from .progress import byte_bar

if TYPE_CHECKING:
    from ...storage.format.root import Entry
    from ...storage.retention.replacing import Replacement

_OF_ONE = (Damaged, NotFound, Unsupported)
"""Errors of one version: those after it may be whole."""


class Replacements:
    """What a plan thins, or writes whole: ``entries``, each as ``plan`` has it. ``due``: those that would be others than they
    are; ``sizes``: by id, about how many stored bytes each will have. ``errors``: of versions that cannot be read, ``failed`` of
    them found so by ``execute``; they stay as they are."""

    def __init__(self, doing: str, entries: Iterable[Entry], plan: Callable[[Entry], Replacement]) -> None:
        self._doing = doing
        self.due: list[Replacement] = []
        self.sizes: dict[int, int] = {}
        self.errors: list[RaystowError] = []
        self.failed = 0
        for entry in entries:
            try:
                replacement = plan(entry)
                if replacement.needed:
                    self.sizes[entry.id] = replacement.stored
                    self.due.append(replacement)
            except _OF_ONE as error:
                self.errors.append(error)

    @property
    def before(self) -> dict[int, int]:
        """By id, how many each has now."""
        return {replacement.version.id: replacement.version.bytes for replacement in self.due}

    def execute(self, *, quiet: bool) -> list[Entry]:
        """Write them; what the root says of them in the end."""
        done: list[Entry] = []
        with byte_bar(self._doing, sum(each.rewriting.read for each in self.due), quiet=quiet) as advance:
            for replacement in self.due:
                try:
                    entry = replacement.execute(progress=advance)
                except _OF_ONE as error:
                    self.errors.append(error)
                    self.failed += 1
                else:
                    done += [entry] if entry is not None else []
        # What others were rounded for may have become a difference to these, and smaller, since it was written.
        live = {entry.id: entry for entry in self.due[0].repository.root().versions} if done else {}
        return [live.get(entry.id, entry) for entry in done]
