"""A retention plan, and what carries it out: one swap of the root drops, one for each thins or writes whole. Deletes no object:
that is ``collect``'s part."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .. import store_clock
from ..chains import line, needed
from ..format.root import Dropped, Entry, Root
from . import compaction, thinning
from .compaction import Compaction
from .freeing import estimate
from .policy import Decision, Policy
from .thinning import Thinning

if TYPE_CHECKING:
    from ..repository import Repository


_PARTICIPLES = {"keep": "kept", "thin": "thinned", "compact": "kept", "drop": "dropped"}


@dataclass(frozen=True)
class RetentionPlan:
    """Decisions on the versions that there were when it was made, oldest first. ``released``: the names of pins that do not
    keep a version; they go with it. ``policy``: what they follow from, if it is from one."""

    repository: Repository
    decisions: tuple[Decision, ...]
    released: frozenset[str] = frozenset()
    policy: Policy | None = None

    @property
    def dropped(self) -> tuple[Entry, ...]:
        """The versions to drop, oldest first."""
        return tuple(decision.entry for decision in self.decisions if not decision.keep)

    @property
    def thinned(self) -> tuple[Entry, ...]:
        """The versions to thin, newest first: one may be a difference to the next, until it is thinned itself."""
        return tuple(decision.entry for decision in reversed(self.decisions) if decision.thin)

    @property
    def compacted(self) -> tuple[Entry, ...]:
        """The versions to write whole, oldest first."""
        return tuple(decision.entry for decision in self.decisions if decision.verdict == "compact")

    def explain(self) -> list[str]:
        """A line for each version: kept, thinned, written whole or dropped, and why."""
        return [f"version {d.entry.id} (step {d.entry.step}): {_PARTICIPLES[d.verdict]}: {d.why}" for d in self.decisions]

    def execute(self, check: Callable[[Root], None] = lambda root: None) -> tuple[Entry, ...]:
        """``drop``, then thin, and write whole, one version after another, then drop what those needed; all that were dropped.

        Raises what ``drop``, ``Thinning`` and ``Compaction`` raise; what is done by then stays so, and the next plan finds the
        rest.
        """
        dropped = self.drop(check)
        for each in itertools.chain(map(self.thinning, self.thinned), map(self.compaction, self.compacted)):
            if each.needed:
                each.execute(check)
        return self.drop(check) if self.compacted else dropped

    def thinning(self, entry: Entry) -> Thinning:
        """How to thin one of ``thinned``, if it holds more than weights. Reads its record and manifest."""
        assert self.policy is not None
        assert self.policy.resumable is not None
        decisions = {decision.entry.id: decision for decision in self.decisions}
        decision = decisions[entry.id]
        if self.policy.delta is None and decision.mantissa_bits is None:
            return thinning.plan(self.repository, entry, self.policy.resumable, beside=self._entries)
        base = decisions.get(decision.base or 0)
        if base is not None and base.mantissa_bits is not None:  # it will be another, and then finds its users
            base = None
        users = [user.entry.id for user in self.decisions if user.base == entry.id and decision.mantissa_bits is not None]
        former = base.entry if base is not None else None
        bits, beside = decision.mantissa_bits, self._entries
        return thinning.plan_anew(self.repository, entry, self.policy.resumable, former, bits, users, beside=beside)

    def moved(self, entry: Entry) -> int:
        """About how many stored bytes are read and written to make one of ``compacted`` whole."""
        read = line({other.id: other for other in self._entries}, entry)
        return sum(one.stored for one in read) + estimate(entry, read[-1])

    @property
    def _entries(self) -> tuple[Entry, ...]:
        return tuple(decision.entry for decision in self.decisions)

    def compaction(self, entry: Entry) -> Compaction:
        """How to write one of ``compacted`` whole. Reads its record and manifest."""
        return compaction.plan(self.repository, entry, beside=self._entries)

    def drop(self, check: Callable[[Root], None] = lambda root: None) -> tuple[Entry, ...]:
        """Drop versions from the root in one swap; those that the root does not hold any more, by this call or another.

        A version that was pinned or verified since the plan was made stays, one that has become the newest meanwhile, and
        what those that stay are differences to: what is to go once those are whole goes by a call after that. Objects stay until
        a collection deletes them. ``check`` may raise to give up on the root that is to be replaced. Raises what
        ``Register.update`` raises.
        """
        doomed = set(self.dropped)
        if not doomed:
            return ()
        at = store_clock.now(self.repository.store, self.repository.clock)

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

        live = {entry.id for entry in self.repository.register.update(drop).versions}
        return tuple(entry for entry in self.dropped if entry.id not in live)
