"""Writes the versions that ``raystow prune`` and ``compact`` thin or store whole, one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ..storage.errors import Damaged, NotFound, RaystowError, Unsupported
from ..storage.format.root import Entry
from ..storage.retention.replacement import Replacement
from .output import size
from .progress import progress_bar

_OF_ONE_VERSION = (Damaged, NotFound, Unsupported)  # the versions after it may be whole


class RewriteBatch:
    """The versions that a plan rewrites.

    ``due``: the replacements that change something; ``sizes``: the estimated stored bytes of each by id; ``written``: the new
    entries after ``execute``; ``errors``: of versions that cannot be read and stay unchanged, ``failed`` of them during
    ``execute``.
    """

    def __init__(self, title: str, entries: Iterable[Entry], plan: Callable[[Entry], Replacement]) -> None:
        self._title = title
        self.due: list[Replacement] = []
        self.sizes: dict[int, int] = {}
        self.written: list[Entry] = []
        self.errors: list[RaystowError] = []
        self.failed = 0
        for entry in entries:
            try:
                replacement = plan(entry)
                if replacement.needed:
                    self.sizes[entry.id] = replacement.stored
                    self.due.append(replacement)
            except _OF_ONE_VERSION as error:
                self.errors.append(error)

    @property
    def before(self) -> dict[int, int]:
        """Stored bytes by id before the rewrite."""
        return {replacement.version.id: replacement.version.bytes for replacement in self.due}

    @property
    def unchanged(self) -> int:
        """The number of due versions that were left unchanged without an error."""
        return len(self.due) - len(self.written) - self.failed

    def execute(self, *, quiet: bool) -> None:
        """Write them."""
        done: list[Entry] = []
        with progress_bar(self._title, sum(each.rewriting.read for each in self.due), quiet=quiet) as advance:
            for replacement in self.due:
                try:
                    entry = replacement.execute(progress=advance)
                except _OF_ONE_VERSION as error:
                    self.errors.append(error)
                    self.failed += 1
                else:
                    done += [entry] if entry is not None else []
        # Sizes may have shrunk since: a later version can have become the base of a delta.
        live = {entry.id: entry for entry in self.due[0].catalog.root().versions} if done else {}
        self.written = [live.get(entry.id, entry) for entry in done]

    def change(self) -> str:
        """Format the stored bytes before and after the rewrite."""
        before, after = sum(self.before[entry.id] for entry in self.written), sum(entry.stored for entry in self.written)
        return f"{size(before)} to {size(after)}"
