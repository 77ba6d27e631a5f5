"""Plans of what becomes of versions: by a policy, by the pins that keep them, or written whole. Deletes no object.

One swap of the root drops versions. One swap for each replaces a version that is thinned or written whole.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections import defaultdict
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from ..arguments import refused
from ..commit.catalog import Catalog
from ..errors import Damaged, NotFound, RaystowError, StateError, Unsupported, Untrusted
from ..format.root import Dropped, Entry, Root
from ..log import about
from ..root import history
from ..root.delta_chain import base_chain, needed
from ..root.invariants import Claims, Fence
from ..versions.version import Version
from . import policy as policies
from . import replacement
from .compaction_policy import as_it_is, estimate
from .policy import Decision, Policy
from .replacement import Goal, Replacement
from .rewrite import Progress

logger = logging.getLogger(__name__)

_PARTICIPLES = {"keep": "kept", "thin": "thinned", "compact": "kept", "drop": "dropped"}
_RECORDS_AT_ONCE = 16
_UNREAD = (
    "keep_best keeps version %s, whose record, and so metric, cannot be read: %s; put the object back from a replica, or drop "
    "the version by `raystow prune` with other rules"
)


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
        """The versions to thin, newest first: one may be a delta to the next, until it is thinned itself."""
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
        return replacement.plan(self.catalog, entry, self._goal(entry), siblings=self._entries)

    @functools.cached_property
    def _entries(self) -> tuple[Entry, ...]:
        return tuple(decision.entry for decision in self.decisions)

    @functools.cached_property
    def _entry_of(self) -> dict[int, Entry]:
        return {entry.id: entry for entry in self._entries}

    @functools.cached_property
    def _by_id(self) -> dict[int, Decision]:
        return {decision.entry.id: decision for decision in self.decisions}

    @functools.cached_property
    def _users(self) -> dict[int, list[int]]:
        """Ids of the versions that become deltas to each."""
        users = defaultdict[int, list[int]](list)
        for decision in self.decisions:
            users[decision.base or 0].append(decision.entry.id)
        return users

    def _goal(self, entry: Entry) -> Goal:
        decision = self._by_id[entry.id]
        if not decision.thin or self.policy is None or self.policy.resumable is None:
            return replacement.compact()
        bits, base = decision.mantissa_bits, self._by_id.get(decision.base or 0)
        if base is not None and base.mantissa_bits is not None:  # it is rounded later, and this one made a delta to it then
            base = None
        return replacement.thin(
            self.policy.resumable,
            recode=self.policy.delta is not None or bits is not None,
            base=base.entry if base is not None else None,
            bits=bits,
            users=self._users.get(entry.id, []) if bits is not None else [],
        )

    def moved(self, entry: Entry) -> int:
        """The stored bytes that are read and written to make one of ``compacted`` whole, estimated."""
        read = base_chain(self._entry_of, entry)
        return sum(one.stored for one in read) + estimate(entry, read[-1])

    def drop(self, fence: Fence | None = None) -> tuple[Entry, ...]:
        """Drop versions from the root in one swap. Objects stay until a collection deletes them.

        A version stays if it was pinned or verified since the plan was made, if it has become the newest, or if a version that
        stays is a delta to it. A base that is dropped once its deltas are written whole needs another call after that.

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
        at = self.catalog.now()

        def drop(root: Root) -> Root:
            kept = {root.verified, *(id for name, id in root.pins.items() if name not in self.released)}
            kept |= {entry.id for entry in root.versions[-1:]}
            going = {entry for entry in root.listed if entry in doomed and entry.id not in kept}
            users = needed(root.listed, [entry.id for entry in root.listed if entry not in going])
            going = {entry for entry in going if entry.id not in users}
            if not going:
                return root
            ids = {entry.id for entry in going}
            return replace(
                history.without(root, ids),
                dropped=(*root.dropped, *(Dropped(entry.id, entry.attempt, at) for entry in root.listed if entry in going)),
                pins={name: id for name, id in root.pins.items() if id not in ids},
            )

        listed = {entry.id for entry in self.catalog.register.update(drop, Claims(fence, self.released)).listed}
        return tuple(entry for entry in self.dropped if entry.id not in listed)


@dataclass(frozen=True)
class CompactionPlan:
    """Deltas to write whole.

    ``entries``: the versions, oldest first. ``kept``: other deltas, each with the reason why it stays one. ``all``: the
    entries of the root that the plan was made for.
    """

    catalog: Catalog
    entries: tuple[Entry, ...]
    kept: Mapping[Entry, str]
    all: tuple[Entry, ...]

    def explain(self) -> list[str]:
        """Explain the plan.

        Returns:
            A line for each delta.
        """
        lines = {e: f"written whole: needs {', '.join(f'version {id}' for id in e.bases)} now" for e in self.entries}
        lines |= {entry: f"stays a delta: it {why}" for entry, why in self.kept.items()}
        return [f"version {e.id} (step {e.step}): {lines[e]}" for e in self.all if e in lines]

    def replacement(self, entry: Entry) -> Replacement:
        """The replacement of one of ``entries``. Reads its record and manifest."""
        return replacement.plan(self.catalog, entry, replacement.compact(), siblings=self.all)

    def execute(self, fence: Fence | None = None, progress: Progress = lambda nbytes: None) -> tuple[Entry, ...]:
        """Write the versions one after another; their bases stay until retention drops them.

        Args:
            fence: The epoch that must be in charge.
            progress: Called with the bytes of each chunk that is written, from several threads.

        Returns:
            The new entries of the root.

        Raises:
            RaystowError: See ``Replacement.execute``. What was written by then stays; the next plan finds the rest.
        """
        done = (self.replacement(entry).execute(fence, progress) for entry in self.entries)
        return tuple(entry for entry in done if entry is not None)


def plan_policy(
    catalog: Catalog,
    policy: Policy,
    *,
    known: dict[str, dict[str, object]] | None = None,
    bases: Collection[int] = (),
    compact: bool = False,
) -> RetentionPlan:
    """See ``Repository.plan_retention``."""
    if not isinstance(policy, Policy):
        raise refused("policy", policy, "a raystow.Policy, such as Policy(keep_last=3)")
    root, known = catalog.root(), {} if known is None else known
    unread = dict[int, RaystowError]()
    if policy.keep_best is not None:
        versions = [catalog.at(entry) for entry in root.listed if entry.attempt not in known]
        with ThreadPoolExecutor(_RECORDS_AT_ONCE) as pool:
            for version, found in zip(versions, pool.map(_metrics, versions), strict=True):
                if isinstance(found, RaystowError):
                    unread[version.id] = found
                else:
                    known[version.attempt] = found
        if unread:
            about(logger, repository=catalog.uri).warning(_UNREAD, ", ".join(map(str, unread)), next(iter(unread.values())))
        for gone in known.keys() - {entry.attempt for entry in root.listed}:
            del known[gone]
    decide = functools.partial(
        policies.plan,
        root.listed,
        policy,
        rolled_back={one.entry.id for one in root.rolled_back},
        pins=root.pins,
        metrics={entry.id: known.get(entry.attempt, {}) for entry in root.listed},
        unread=unread,
        verified=root.verified,
        bases=bases,
        compact=compact,
    )
    decisions = decide()
    if any(decision.verdict != "keep" for decision in decisions):  # else no lease is of interest
        decisions = decide(leased=catalog.leased())
    return RetentionPlan(catalog, decisions, policy=policy)


def _metrics(version: Version) -> dict[str, Any] | RaystowError:
    """The metrics of a version, or why they cannot be read."""
    try:
        return version.metrics
    except (Damaged, NotFound, Unsupported, Untrusted) as error:
        return error


def plan_release(catalog: Catalog, names: Collection[str]) -> RetentionPlan:
    """See ``Repository.plan_release``."""
    root = catalog.root()
    released = frozenset(names)
    doomed = {id for name, id in root.pins.items() if name in released}
    leased = catalog.leased() if doomed else set()
    held = {entry.id for entry in root.listed if entry.id not in doomed or (entry.id, entry.attempt) in leased}
    users = needed(root.listed, held)
    decisions = tuple(
        Decision(entry, False, ("released",))
        if entry.id not in held and entry.id not in users
        else Decision(entry, True, ("leased" if entry.id in doomed & held else "needed or not released",))
        for entry in root.listed
    )
    return RetentionPlan(catalog, decisions, released)


def plan_compaction(catalog: Catalog, ids: Collection[int] | None) -> CompactionPlan:
    """See ``Repository.plan_compaction``."""
    root = catalog.root()
    if lost := set(ids or ()) - {entry.id for entry in root.listed}:
        raise StateError(f"there is no version {min(lost)}", subject=catalog.uri, remedy="`raystow ls` lists what there is")
    reasons = as_it_is(root.versions, root.verified, catalog.leased(), {one.entry.id for one in root.rolled_back})
    deltas = [entry for entry in root.listed if entry.bases and (ids is None or entry.id in ids)]
    kept = {entry: reasons[entry.id] for entry in deltas if entry.id in reasons}
    return CompactionPlan(catalog, tuple(entry for entry in deltas if entry not in kept), kept, root.listed)
