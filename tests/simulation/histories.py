"""Which version follows which, and what rollbacks may do with them. Shares no code with what it checks."""

from __future__ import annotations

from dataclasses import dataclass, field

from .journal import Violation
from .model_store import Change
from .root_json import Attempt, Json, attempts_of, entry_of, listed_in, live_in


@dataclass
class Histories:
    """``before``: id of a version -> that of the one that was the newest when it was committed; 0 for none. ``begun``: attempt ->
    the rollbacks that there were when it had begun. ``moved``: what is rolled back -> number of the change that did it."""

    before: dict[int, int] = field(default_factory=dict)
    begun: dict[Attempt, int] = field(default_factory=dict)
    moved: dict[Attempt, int] = field(default_factory=dict)

    def begins(self, attempt: Attempt, root: Json | None) -> None:
        """A node has been told of an attempt."""
        self.begun.setdefault(attempt, root["rollbacks"] if root is not None else 0)

    def chosen(self, who: str, attempt: Attempt, before: int) -> None:
        """A reader has found a version the newest, or the next one, and has looked at the root after the ``before``-th change."""
        if self.moved.get(attempt, before + 1) <= before:
            raise Violation("a rolled-back version is never restored as the newest", f"{who} chose {attempt}")

    def committed(self, change: Change, old: Json, attempt: Attempt) -> None:
        """An attempt has become a version."""
        self.before[attempt[0]] = old["versions"][-1]["id"] if old["versions"] else 0
        if self.begun.get(attempt, old["rollbacks"]) < old["rollbacks"]:
            raise Violation("what began before a rollback is no version", f"{change.who} committed {attempt}")

    def rolled(self, root: Json, change: int) -> None:
        """The root has changed."""
        self.moved = {attempt: self.moved.get(attempt, change) for attempt in attempts_of(root["rolled_back"])}

    def repaired(self, root: Json) -> None:
        """The root was made anew: all versions are one history."""
        ids = [entry["id"] for entry in root["versions"]]
        self.before, self.moved = dict(zip(ids, [0, *ids], strict=False)), {}

    def check(self, change: Change, root: Json) -> None:
        """The live versions are the newest one and all before it, of those that are left; of the others it is known what is
        before them."""
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
        """A rollback moves versions, and changes no other thing of the root but what is verified."""
        same = [entry_of(one) for one in listed_in(old)] == [entry_of(one) for one in listed_in(new)]
        if new["rollbacks"] != old["rollbacks"] + 1 or not same or not new["versions"]:
            raise Violation("a rollback moves versions and changes none", f"{change.who} left {new}")
        if new["verified"] != (old["verified"] if old["verified"] in {id for id, _ in live_in(new)} else 0):
            raise Violation("what is verified is live", f"{change.who} left verified at {new['verified']}")
