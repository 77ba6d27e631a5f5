"""A retention plan, and the one swap of the root that carries it out. Deletes no object."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .retention import Decision
from .root import Entry, Register, Root


@dataclass(frozen=True)
class RetentionPlan:
    """Decisions on the versions that there were when it was made, oldest first."""

    register: Register
    decisions: tuple[Decision, ...]

    @property
    def dropped(self) -> tuple[Entry, ...]:
        """The versions to drop, oldest first."""
        return tuple(decision.entry for decision in self.decisions if not decision.keep)

    def explain(self) -> list[str]:
        """A line for each version: kept or dropped, and why."""
        return [f"version {d.entry.id} (step {d.entry.step}): {'kept' if d.keep else 'dropped'}: {d.why}" for d in self.decisions]

    def execute(self) -> tuple[Entry, ...]:
        """Drop them from the root in one swap; those of the plan that the root does not hold any more, by this call or another.

        A version that was pinned since the plan was made, or has become the newest because others were dropped, stays. Their
        objects stay in the store until a collection deletes them; there is none yet. Raises what ``Register.update`` raises.
        """
        doomed = set(self.dropped)

        def drop(root: Root) -> Root:
            # Judged on the very root that is replaced. What was committed since the plan is not doomed, and ``next_id`` stays, so
            # that no id comes back. The newest stays: a commit whose answer was lost looks for its version in the root.
            pinned = set(root.pins.values())
            going = {entry for entry in root.versions[:-1] if entry in doomed and entry.id not in pinned}
            if not going:
                return root
            return replace(root, versions=tuple(entry for entry in root.versions if entry not in going))

        live = set(self.register.update(drop).versions)
        return tuple(entry for entry in self.dropped if entry not in live)
