"""The repository and versions that a command works on, read once, and the fields that commands print of a version."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..storage.format.root import Entry, Root, Segment
from ..storage.repository import Repository, open_repository
from ..storage.versions.version import Version
from ..storage.versions.version_selector import select
from .output import age, count, size


@dataclass(frozen=True)
class Target:
    """A repository and its root when the command began: all versions and pins from a single read."""

    repository: Repository
    root: Root

    @property
    def uri(self) -> str:
        """The repository's address."""
        return self.repository.uri

    def versions(self) -> list[Version]:
        """Return all live versions, oldest first."""
        return [self.repository.at(entry, siblings=self.root.versions) for entry in self.root.versions]

    def listed(self) -> list[Version]:
        """Return all versions and the rolled-back ones, oldest first."""
        return [self.repository.at(entry, siblings=self.root.listed) for entry in self.root.listed]

    def rolled_back(self, id: int) -> float | None:
        """Return when a version was rolled back, in seconds since 1970; None if it is live."""
        return next((one.at for one in self.root.rolled_back if one.entry.id == id), None)

    def version(self, which: str) -> Version:
        """Return a version, as ``Repository.version`` does.

        Raises:
            NotFound: there is no such version.
        """
        return self.repository.at(select(self.root, which, self.uri), siblings=self.root.listed)

    def pins(self, id: int) -> list[str]:
        """Return the names under which a version is pinned."""
        return sorted(name for name, pinned in self.root.pins.items() if pinned == id)

    def segments(self, id: int) -> tuple[Segment, ...]:
        """Return the segments of the step journal that follow a version: none unless it is the newest live one."""
        return self.root.segments if id == max((entry.id for entry in self.root.versions), default=0) else ()

    def age(self, created: float) -> float:
        """Return the seconds since ``created``."""
        return self.repository.clock.now() - created

    def fields(self, entry: Entry) -> dict[str, object]:
        """Return the JSON fields of a version in each list; ``created`` in seconds since 1970, ``age`` in seconds."""
        seconds = round(self.age(entry.created), 3)
        return {"id": entry.id, "step": entry.step, "created": entry.created, "age": seconds, "stored": entry.stored}

    def cells(self, entry: Entry) -> list[str]:
        """Return the first cells of a version's row in each table: ID, STEP, CREATED, STORED."""
        return [str(entry.id), str(entry.step), f"{age(self.age(entry.created))} ago", size(entry.stored)]


def segment_fields(one: Segment) -> dict[str, object]:
    """Return the JSON form of a segment."""
    return {"number": one.number, "step": one.step, "created": one.created, "stored": one.stored}


def segments_text(segments: Sequence[Segment]) -> str:
    """Return how far segments lead; empty without any."""
    if not segments:
        return ""
    stored = size(sum(one.stored for one in segments))
    return f"durable up to step {segments[-1].step}: {count(len(segments), 'segment')}, {stored}"


def open_target(uri: str) -> Target:
    """Open the repository at ``uri``.

    Raises:
        NotARepository: there is none.
    """
    repository = open_repository(uri)
    return Target(repository, repository.root())
