"""Retention plans: one swap of the root drops versions, and one for each thins it or writes it whole. Deletes no object."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from .. import store_clock
from ..catalog import Catalog
from ..delta_chain import line, needed
from ..format.root import Dropped, Entry, Root
from ..invariants import Claims, Fence
from . import policy as policies
from . import replacement
from .compaction_policy import estimate
from .policy import Decision, Policy
from .replacement import Goal, Replacement

_PARTICIPLES = {"keep": "kept", "thin": "thinned", "compact": "kept", "drop": "dropped"}
_RECORDS_AT_ONCE = 16


@dataclass(frozen=True)
class RetentionPlan:
    """Decisions on the versions of a root.

    ``decisions``: oldest version first. ``released``: names of pins that keep no version and go with theirs. ``policy``: what the
    decisions follow from, if it is a policy.
    """

    catalog: Catalog
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
        """Explain the plan.

        Returns:
            A line for each version: kept, thinned, written whole or dropped, and why.
        """
        return [f"version {d.entry.id} (step {d.entry.step}): {_PARTICIPLES[d.verdict]}: {d.why}" for d in self.decisions]

    def execute(self, fence: Fence | None = None) -> tuple[Entry, ...]:
        """Drop versions, then thin and write whole one after another, then drop the bases that are not needed any more.

        Args:
            fence: The epoch that must be in charge.

        Returns:
            All entries that were dropped.

        Raises:
            RaystowError: See ``drop`` and ``Replacement.execute``. What was done by then stays; the next plan finds the rest.
        """
        dropped = self.drop(fence)
        for each in map(self.replacement, itertools.chain(self.thinned, self.compacted)):
            if each.needed:
                each.execute(fence)
        return self.drop(fence) if self.compacted else dropped

    def replacement(self, entry: Entry) -> Replacement:
        """The replacement of one of ``thinned`` or ``compacted``. Reads its record and manifest."""
        entries = tuple(decision.entry for decision in self.decisions)
        return replacement.plan(self.catalog, entry, self._goal(entry), siblings=entries)

    def _goal(self, entry: Entry) -> Goal:
        decisions = {decision.entry.id: decision for decision in self.decisions}
        decision = decisions[entry.id]
        if not decision.thin or self.policy is None or self.policy.resumable is None:
            return replacement.compact()
        bits = decision.mantissa_bits
        if self.policy.delta is None and bits is None:
            return replacement.thin(self.policy.resumable)
        base = decisions.get(decision.base or 0)
        if base is not None and base.mantissa_bits is not None:  # it is rounded later, and then makes this its difference
            base = None
        users = [user.entry.id for user in self.decisions if user.base == entry.id and bits is not None]
        return replacement.thin_anew(self.policy.resumable, base.entry if base is not None else None, bits, users)

    def moved(self, entry: Entry) -> int:
        """The stored bytes that are read and written to make one of ``compacted`` whole, estimated."""
        read = line({decision.entry.id: decision.entry for decision in self.decisions}, entry)
        return sum(one.stored for one in read) + estimate(entry, read[-1])

    def drop(self, fence: Fence | None = None) -> tuple[Entry, ...]:
        """Drop versions from the root in one swap. Objects stay until a collection deletes them.

        A version stays that was pinned or verified since the plan was made, that has become the newest, or that a version that
        stays is a difference to. What is to go once its users are whole is dropped by another call after that.

        Args:
            fence: The epoch that must be in charge.

        Returns:
            The entries to drop that the root does not list any more, by this call or another.

        Raises:
            RaystowError: See ``RootRegister.update``.
        """
        doomed = set(self.dropped)
        if not doomed:
            return ()
        at = store_clock.now(self.catalog.store, self.catalog.clock)

        def drop(root: Root) -> Root:
            kept = {root.verified, *(id for name, id in root.pins.items() if name not in self.released)}
            going = {entry for entry in root.versions[:-1] if entry in doomed and entry.id not in kept}
            users = needed(root.versions, [entry.id for entry in root.versions if entry not in going])
            going = {entry for entry in going if entry.id not in users}
            if not going:
                return root
            ids = {entry.id for entry in going}
            return replace(
                root,
                versions=tuple(entry for entry in root.versions if entry not in going),
                dropped=(*root.dropped, *(Dropped(entry.id, entry.attempt, at) for entry in root.versions if entry in going)),
                pins={name: id for name, id in root.pins.items() if id not in ids},
            )

        live = {entry.id for entry in self.catalog.register.update(drop, Claims(fence, self.released)).versions}
        return tuple(entry for entry in self.dropped if entry.id not in live)


def plan_policy(
    catalog: Catalog,
    policy: Policy,
    *,
    known: dict[str, dict[str, Any]] | None = None,
    bases: Collection[int] = (),
    compact: bool = False,
) -> RetentionPlan:
    """See ``Repository.plan_retention``."""
    root = catalog.root()
    metrics: dict[int, dict[str, Any]] = {}
    if policy.keep_best is not None:
        known = {} if known is None else known
        versions = [catalog.at(entry) for entry in root.versions if entry.attempt not in known]
        with ThreadPoolExecutor(_RECORDS_AT_ONCE) as pool:
            known.update(pool.map(lambda version: (version.attempt, version.metrics), versions))
        metrics = {entry.id: known[entry.attempt] for entry in root.versions}

    def decide(leased: Collection[tuple[int, str]]) -> tuple[Decision, ...]:
        return policies.plan(
            root.versions,
            policy,
            pins=root.pins,
            metrics=metrics,
            verified=root.verified,
            leased=leased,
            bases=bases,
            compact=compact,
        )

    decisions = decide(())
    if any(decision.verdict != "keep" for decision in decisions):  # else no lease is of interest
        decisions = decide(catalog.leased())
    return RetentionPlan(catalog, decisions, policy=policy)


def plan_release(catalog: Catalog, names: Collection[str]) -> RetentionPlan:
    """See ``Repository.plan_release``."""
    root = catalog.root()
    released = frozenset(names)
    doomed = {id for name, id in root.pins.items() if name in released}
    leased = catalog.leased() if doomed else set()
    held = {entry.id for entry in root.versions if entry.id not in doomed or (entry.id, entry.attempt) in leased}
    users = needed(root.versions, held)
    decisions = tuple(
        Decision(entry, False, ("released",))
        if entry.id not in held and entry.id not in users
        else Decision(entry, True, ("leased" if entry.id in doomed & held else "needed or not released",))
        for entry in root.versions
    )
    return RetentionPlan(catalog, decisions, released)
