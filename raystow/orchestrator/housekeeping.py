"""What the coordinator does after each commit: drop what no rule keeps, and delete what was dropped long enough ago."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

from ..storage.committer import Committer
from ..storage.errors import RaystowError, StateError
from ..storage.log import about
from ..storage.retention.collect import GRACE
from ..storage.retention.policy import Policy

logger = logging.getLogger(__name__)


class Housekeeping:
    """``run`` after a commit, never two at once. What fails is logged and tried again after the next commit."""

    def __init__(self, committer: Committer, *, grace: float = GRACE) -> None:
        self._committer, self._grace = committer, grace
        self._metrics: dict[str, dict[str, Any]] = {}

    def run(self, policy: Policy, bases: Collection[int] = ()) -> None:
        """Apply ``policy``, under the committer's epoch, and collect dropped versions whose grace period is over. ``bases``: see
        ``retention.plan``."""
        repository = self._committer.repository
        log = about(logger, repository=repository.uri)
        try:
            plan = repository.plan_retention(policy, known=self._metrics, bases=bases)
            dropped = plan.drop(self._committer.check)
            why = {decision.entry: decision.why for decision in plan.decisions}
            for entry in dropped:
                dropped_one = {"version": entry.id, "attempt": entry.attempt, "step": entry.step}
                log.info("version %d, step %d, is dropped: %s", entry.id, entry.step, why[entry], extra=dropped_one)
            done = repository.plan_collection(grace=self._grace, dropped_only=True).execute()
            if done.objects:
                log.info("%d objects of %d dropped versions are deleted: %d bytes", done.objects, done.attempts, done.nbytes)
        except RaystowError as error:
            log.warning("retention is put off to the next commit: %s", error)


def kept_by_a_run(policy: Policy | None, uri: str) -> Policy | None:
    """``policy``; ``StateError`` if it has a rule that a run does not carry out."""
    if policy is not None and policy.resumable is not None:
        what = "a run drops versions and does not thin them, which is to read and to write them again"
        remedy = f"let `raystow prune {uri} --resumable {policy.resumable} --yes` run every night"
        raise StateError(what, subject="retention", remedy=remedy)
    return policy
