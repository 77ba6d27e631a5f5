"""A retention plan, and the one swap of the root that carries it out. Deletes no object: that is ``collect``'s part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from . import store_clock
from .chains import needed
from .clock import Clock
from .object_store import ObjectStore
from .retention import Decision
from .root import Dropped, Entry, Register, Root


@dataclass(frozen=True)
class RetentionPlan:
    """Decisions on the versions that there were when it was made, oldest first. ``released``: the names of pins that do not
    keep a version; they go with it."""

    register: Register
    store: ObjectStore
    clock: Clock
    decisions: tuple[Decision, ...]
    released: frozenset[str] = frozenset()

    @property
    def dropped(self) -> tuple[Entry, ...]:
        """The versions to drop, oldest first."""
        return tuple(decision.entry for decision in self.decisions if not decision.keep)

    def explain(self) -> list[str]:
        """A line for each version: kept or dropped, and why."""
        return [f"version {d.entry.id} (step {d.entry.step}): {'kept' if d.keep else 'dropped'}: {d.why}" for d in self.decisions]

    def execute(self, check: Callable[[Root], None] = lambda root: None) -> tuple[Entry, ...]:
        """Drop them from the root in one swap; those of the plan that the root does not hold any more, by this call or another.

        A version that was pinned or verified since the plan was made stays, one that has become the newest meanwhile, and
        what those that stay are differences to. Objects stay until a collection deletes them. ``check`` may raise to give up
        on the root that is to be replaced. Raises what ``Register.update`` raises.
        """
        doomed = set(self.dropped)
        if not doomed:
            return ()
        at = store_clock.now(self.store, self.clock)

        def drop(root: Root) -> Root:
            # Judged on the very root that is replaced. What was committed since the plan is not doomed, and ``next_id`` stays, so
            # that no id comes back. The newest stays: a commit whose answer was lost looks for its version in the root.
            kept = {root.verified, *(id for name, id in root.pins.items() if name not in self.released)}
            going = {entry for entry in root.versions[:-1] if entry in doomed and entry.id not in kept}
            users = needed(root.versions, [entry.id for entry in root.versions if entry not in going])
            going = {entry for entry in going if entry.id not in users}
            if not going:
                return root
            check(root)
            ids = {entry.id for entry in going}
            return replace(
                root,
                versions=tuple(entry for entry in root.versions if entry not in going),
                dropped=(*root.dropped, *(Dropped(entry.id, entry.attempt, at) for entry in root.versions if entry in going)),
                pins={name: id for name, id in root.pins.items() if id not in ids},
            )

        live = set(self.register.update(drop).versions)
        return tuple(entry for entry in self.dropped if entry not in live)
