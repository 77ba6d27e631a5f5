"""Checks of the order of versions and of rollbacks. It shares no code with the package."""

from __future__ import annotations

from dataclasses import dataclass, field

from .journal import Violation
from .model_store import Change
from .root_json import Attempt, Json, attempts_of, entry_of, listed_in, live_in


@dataclass
class Histories:
    """The histories of versions. ``before``: id of a version -> id of its predecessor (the newest version at its commit), or 0.
    ``begun``: attempt -> number of rollbacks when it began. ``moved``: rolled-back version -> number of the change."""

    before: dict[int, int] = field(default_factory=dict)
    begun: dict[Attempt, int] = field(default_factory=dict)
    moved: dict[Attempt, int] = field(default_factory=dict)

    def begins(self, attempt: Attempt, root: Json | None) -> None:
        """Record that a node has begun an attempt."""
        self.begun.setdefault(attempt, root["rollbacks"] if root is not None else 0)

    def chosen(self, who: str, attempt: Attempt, before: int) -> None:
        """Check a version that a reader chose to restore; the reader read the root after change number ``before``."""
        if self.moved.get(attempt, before + 1) <= before:
            raise Violation("a rolled-back version is never restored as the newest", f"{who} chose {attempt}")

    def committed(self, change: Change, old: Json, attempt: Attempt) -> None:
        """Check an attempt that became a version."""
        self.before[attempt[0]] = old["versions"][-1]["id"] if old["versions"] else 0
        if self.begun.get(attempt, old["rollbacks"]) < old["rollbacks"]:
            raise Violation("a save begun before a rollback is not committed", f"{change.who} committed {attempt}")

    def rolled(self, root: Json, change: int) -> None:
        """Record the rolled-back versions of a changed root."""
        self.moved = {attempt: self.moved.get(attempt, change) for attempt in attempts_of(root["rolled_back"])}

    def repaired(self, root: Json) -> None:
        """Reset to a repaired root, in which all versions are one history."""
        ids = [entry["id"] for entry in root["versions"]]
        self.before, self.moved = dict(zip(ids, [0, *ids], strict=False)), {}

    def check(self, change: Change, root: Json) -> None:
        """Check that the live versions are the newest one and its listed predecessors, and that each rolled-back version names
        its listed predecessor."""
        ids = {entry["id"] for entry in listed_in(root)}

        def left_before(id: int) -> int:
            id = self.before[id]
            while id and id not in ids:
                id = self.before[id]
            return id

        history, live = list[int](), [entry["id"] for entry in root["versions"]]
        newest = live[-1] if live else 0
        while newest:
            history.insert(0, newest)
            newest = left_before(newest)
        if live != history:
            raise Violation("live versions are one history", f"{change.who} left {live}, and the newest continues {history}")
        for one in root["rolled_back"]:
            if one["after"] != left_before(one["id"]):
                raise Violation("histories stay", f"{change.who} left version {one['id']} after {one['after']}")

    def check_rollback(self, change: Change, old: Json, new: Json) -> None:
        """Check that a rollback only moves versions and updates the verified version."""
        same = [entry_of(one) for one in listed_in(old)] == [entry_of(one) for one in listed_in(new)]
        if new["rollbacks"] != old["rollbacks"] + 1 or not same or not new["versions"]:
            raise Violation("a rollback moves versions and changes none", f"{change.who} left {new}")
        if new["verified"] != (old["verified"] if old["verified"] in {id for id, _ in live_in(new)} else 0):
            raise Violation("the verified version is live", f"{change.who} left verified at {new['verified']}")
