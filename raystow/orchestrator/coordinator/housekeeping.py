"""Retention after each commit: drops versions, deletes versions dropped long enough ago, and compacts some deltas."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Collection
from urllib.parse import unquote, urlsplit

from ...storage.commit.catalog import Catalog
from ...storage.commit.committer import Committer
from ...storage.errors import Damaged, NotFound, RaystowError, StateError, Unsupported, Untrusted
from ...storage.log import Log, about
from ...storage.retention import collect
from ...storage.retention import plan as retention
from ...storage.retention.collect import GRACE
from ...storage.retention.plan import RetentionPlan
from ...storage.retention.policy import Policy

logger = logging.getLogger(__name__)


_MOVED = 4 << 30
"""The most bytes that compaction moves after one commit: it runs on the head node, in parallel to saves."""

_SCARCE = 2
"""Saves like the newest version for which the file system needs space; with less, dropped versions are deleted early."""
_EARLY = 60.0
"""Seconds for which they are kept then: long enough for a restore that has chosen one to take its lease."""

_OF_ONE = (Damaged, NotFound, Unsupported, Untrusted)


class Housekeeping:
    """Call ``run`` after a commit, from one thread at a time. Failures are logged, and retried after the next commit. ``moved``:
    bytes that compaction may move each time; larger or failed compactions are left to ``raystow prune --compact``."""

    def __init__(self, committer: Committer, *, grace: float = GRACE, early: float = _EARLY, moved: int = _MOVED) -> None:
        self._committer, self._grace, self._early, self._moved = committer, grace, early, moved
        self._metrics: dict[str, dict[str, object]] = {}
        self._left = set[str]()  # attempts that are not compacted here

    def run(self, policy: Policy, bases: Collection[int] = ()) -> None:
        """Apply ``policy``, under the committer's epoch, and collect dropped versions whose grace period is over. ``bases``: see
        ``retention.plan``."""
        catalog = self._committer.catalog
        log = about(logger, repository=catalog.uri)
        try:
            plan = retention.plan_policy(catalog, policy, known=self._metrics, bases=bases, compact=True)
            dropped = plan.drop(self._committer.fence)
            why = {decision.entry: decision.why for decision in plan.decisions}
            for entry in dropped:
                dropped_one = {"version": entry.id, "attempt": entry.attempt, "step": entry.step}
                log.info("version %d, step %d, is dropped: %s", entry.id, entry.step, why[entry], extra=dropped_one)
            grace = min(self._grace, self._early) if _is_scarce(catalog) else self._grace
            done = collect.plan(catalog, grace=grace, dropped_only=True).execute()
            if done.objects:
                log.info("%d objects of %d dropped versions are deleted: %d bytes", done.objects, done.attempts, done.nbytes)
            self._compact(plan, log)
        except RaystowError as error:
            log.warning("retention is postponed to the next commit: %s", error)

    def _compact(self, plan: RetentionPlan, log: Log) -> None:
        left = self._moved
        for entry in plan.compacted:
            nbytes = plan.moved(entry)
            if entry.attempt in self._left or left < nbytes <= self._moved:
                continue
            if nbytes > self._moved:
                self._left.add(entry.attempt)
                what = "version %d is left to `raystow prune %s --compact`: compacting it moves about %d bytes"
                log.info(what, entry.id, plan.catalog.uri, nbytes)
                continue
            left -= nbytes
            try:
                plan.replacement(entry).execute(self._committer.fence)
            except _OF_ONE as error:
                self._left.add(entry.attempt)
                log.warning("version %d stays a delta: %s", entry.id, error)


def _is_scarce(catalog: Catalog) -> bool:
    """Whether the file system of a local repository has too little space for the next saves."""
    address, newest = urlsplit(catalog.uri), catalog.root().versions[-1:]
    if address.scheme != "file" or not newest:
        return False
    return shutil.disk_usage(unquote(address.path)).free < _SCARCE * newest[0].stored


def kept_by_a_run(policy: Policy | None, uri: str) -> Policy | None:
    """``policy``; ``StateError`` if it is not a policy, or has a rule that a run does not apply."""
    if policy is not None and not isinstance(policy, Policy):
        raise StateError(f"retention is {policy!r:.80}", remedy="give a raystow.Policy, such as Policy(keep_last=3), or None")
    if policy is not None and policy.resumable is not None:
        what = "a run drops versions but does not thin them, since that reads and rewrites them"
        options = {"--resumable": policy.resumable, "--delta": policy.delta, "--mantissa-bits": policy.mantissa_bits}
        rules = " ".join(f"{option} {number}" for option, number in options.items() if number is not None)
        remedy = f"let `raystow prune {uri} {rules} --yes` run every night"
        raise StateError(what, subject="retention", remedy=remedy)
    return policy
