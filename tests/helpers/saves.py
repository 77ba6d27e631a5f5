"""Saves in flight without a node worker: their outcomes are set by the test."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

from helpers.builders import memory_repository
from helpers.processes import incarnation
from raystow.orchestrator.client.failure_reports import FailureReports
from raystow.orchestrator.client.failures import Failures
from raystow.orchestrator.client.outcome_subscribers import OutcomeSubscribers
from raystow.orchestrator.client.save_outcome import SaveOutcome
from raystow.orchestrator.client.saves_in_flight import SavesInFlight
from raystow.orchestrator.client.version_callbacks import VersionCallbacks
from raystow.storage.errors import ClusterError
from raystow.storage.format.root import Entry
from raystow.storage.log import about
from raystow.workers.protocol.messages import Committed, FindOutcome, JoinRun
from raystow.workers.staging.progress import SaveProgress

_log = about(logging.getLogger("raystow"))


class Cluster:
    """The connection of a rank to a coordinator that answers ``FindOutcome`` with ``answers`` in turn, and then not at all."""

    def __init__(self, *answers: Entry | Exception) -> None:
        self.uri, self.port, self.answers = "s3://b", self, [*answers]
        self.reported, self.member = list[str](), JoinRun(0, incarnation("i"), 1)
        self._repository = memory_repository()

    def repository(self) -> Any:
        return self._repository

    def report_failure(self, number: int, step: int, what: str) -> bool:
        self.reported.append(what)
        return False

    def ask(self, request: FindOutcome, *, timeout: float) -> Committed:
        answer = self.answers.pop(0) if self.answers else ClusterError("did not answer")
        if isinstance(answer, Exception):
            raise answer
        return Committed(answer)

    def check(self) -> None: ...

    def wait(self) -> Any:
        return SimpleNamespace(repository=self._repository.id)


def subscribers(failures: Failures | None = None) -> OutcomeSubscribers:
    counted = Failures("warn", count=lambda: None) if failures is None else failures
    return OutcomeSubscribers(counted, FailureReports(lambda *_: False, _log), VersionCallbacks((), _log), uri="s3://b")


def saves(timeout: float = 60.0, *, limit: int = 9, cluster: Any = None, failures: Failures | None = None) -> SavesInFlight:
    cluster = Cluster() if cluster is None else cluster
    return SavesInFlight(cluster, subscribers(failures), limit=limit, timeout=timeout, log=_log)


def save(step: int = 7, *, cluster: Any = None, failures: Failures | None = None) -> SaveOutcome:
    return saves(cluster=cluster, failures=failures).begin(SaveProgress(step, log=_log))
