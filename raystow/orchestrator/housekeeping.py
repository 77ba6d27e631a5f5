"""What the coordinator does after each commit: drop what no rule keeps, delete what was dropped long enough ago, and write a few
differences whole, so that what they need can be dropped after the next one."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

from ..storage.committer import Committer
from ..storage.errors import Damaged, NotFound, RaystowError, StateError, Unsupported, Untrusted
from ..storage.log import Log, about
from ..storage.retention.collect import GRACE
from ..storage.retention.plan import RetentionPlan
from ..storage.retention.policy import Policy

logger = logging.getLogger(__name__)


_MOVED = 4 << 30
"""Bytes that are read and written for compaction after one commit, at most: it is done on the head node, beside the saves."""

_OF_ONE = (Damaged, NotFound, Unsupported, Untrusted)


class Housekeeping:
    """``run`` after a commit, never two at once. What fails is logged and tried again after the next commit. ``moved``: bytes
    that compaction may read and write each time; what takes more is left to ``raystow prune --compact``, and so is what fails."""

    def __init__(self, committer: Committer, *, grace: float = GRACE, moved: int = _MOVED) -> None:
        self._committer, self._grace, self._moved = committer, grace, moved
        self._metrics: dict[str, dict[str, Any]] = {}
        self._left = set[str]()  # attempts that are not written whole here

    def run(self, policy: Policy, bases: Collection[int] = ()) -> None:
        """Apply ``policy``, under the committer's epoch, and collect dropped versions whose grace period is over. ``bases``: see
        ``retention.plan``."""
        repository = self._committer.repository
        log = about(logger, repository=repository.uri)
        try:
            plan = repository.plan_retention(policy, known=self._metrics, bases=bases, compact=True)
            dropped = plan.drop(self._committer.check)
            why = {decision.entry: decision.why for decision in plan.decisions}
            for entry in dropped:
                dropped_one = {"version": entry.id, "attempt": entry.attempt, "step": entry.step}
                log.info("version %d, step %d, is dropped: %s", entry.id, entry.step, why[entry], extra=dropped_one)
            done = repository.plan_collection(grace=self._grace, dropped_only=True).execute()
            if done.objects:
                log.info("%d objects of %d dropped versions are deleted: %d bytes", done.objects, done.attempts, done.nbytes)
            self._compact(plan, log)
        except RaystowError as error:
            log.warning("retention is put off to the next commit: %s", error)

    def _compact(self, plan: RetentionPlan, log: Log) -> None:
        left = self._moved
        for entry in plan.compacted:
            nbytes = plan.moved(entry)
            if entry.attempt in self._left or left < nbytes <= self._moved:
                continue
            if nbytes > self._moved:
                self._left.add(entry.attempt)
                what = "version %d is left to `raystow prune %s --compact`, since to write it whole moves about %d bytes"
                log.info(what, entry.id, plan.repository.uri, nbytes)
                continue
            left -= nbytes
            try:
                plan.compaction(entry).execute(self._committer.check)
            except _OF_ONE as error:
                self._left.add(entry.attempt)
                log.warning("version %d stays a difference: %s", entry.id, error)


def kept_by_a_run(policy: Policy | None, uri: str) -> Policy | None:
    """``policy``; ``StateError`` if it is none, or has a rule that a run does not carry out."""
    if policy is not None and not isinstance(policy, Policy):
        raise StateError(f"retention is {policy!r:.80}", remedy="give a raystow.Policy, such as Policy(keep_last=3), or None")
    if policy is not None and policy.resumable is not None:
        what = "a run drops versions and does not thin them, which is to read and to write them again"
        options = {"--resumable": policy.resumable, "--delta": policy.delta, "--mantissa-bits": policy.mantissa_bits}
        rules = " ".join(f"{option} {number}" for option, number in options.items() if number is not None)
        remedy = f"let `raystow prune {uri} {rules} --yes` run every night"
        raise StateError(what, subject="retention", remedy=remedy)
    return policy
