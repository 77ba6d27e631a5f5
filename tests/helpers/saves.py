"""Saves without a node worker: their outcomes are set by the test."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.builders import memory_repository
from helpers.processes import incarnation
from helpers.replaced_parts import replace_parts
from raystow.orchestrator.client import checkpointer as checkpointer_module
from raystow.orchestrator.client import exit_notice
from raystow.orchestrator.client.checkpointer import Checkpointer
from raystow.orchestrator.client.failure_reports import FailureReports
from raystow.orchestrator.client.failures import Failures
from raystow.orchestrator.client.outcome_subscribers import OutcomeSubscribers
from raystow.orchestrator.client.save_outcome import SaveOutcome
from raystow.orchestrator.client.saves_in_flight import SavesInFlight
from raystow.orchestrator.client.version_callbacks import VersionCallbacks
from raystow.state.planner import SavePlan
from raystow.storage.errors import ClusterError
from raystow.storage.format.root import Entry
from raystow.storage.log import about
from raystow.workers.protocol.messages import Committed, FindOutcome, JoinRun
from raystow.workers.staging.plan import SaveOrder
from raystow.workers.staging.progress import SaveProgress

_log = about(logging.getLogger("raystow"))


class Cluster:
    """The connection of a rank to a coordinator that answers ``FindOutcome`` with ``answers`` in turn, and then not at all."""

    def __init__(self, *answers: Entry | Exception) -> None:
        self.uri, self.port, self.answers = "s3://b", self, [*answers]
        self.reported, self.member = list[str](), JoinRun(0, incarnation("i"), 1)
        self._repository = memory_repository()
        self.store = self._repository.store

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

    check_process = check

    def node_address(self) -> str:
        raise ClusterError("the node worker is gone")

    def no_journal(self, _: object) -> Any:
        raise ClusterError("the coordinator is gone")

    send = no_journal

    def wait(self) -> Any:
        return SimpleNamespace(repository=self._repository.id)


class NoNode:
    """The connection of a rank to a node worker that cannot be reached. ``numbers``: of the saves that were staged."""

    def __init__(self) -> None:
        self.numbers = list[int]()

    def staging(self, plan: SavePlan) -> NoNode:
        return self

    def submit(self, order: SaveOrder) -> None:
        self.numbers.append(order.request.save)
        raise ClusterError("the node worker is gone")


def checkpointer(patch: pytest.MonkeyPatch, node: NoNode, cluster: Cluster | None = None, **options: Any) -> Checkpointer:
    """Return a Checkpointer of one rank, which is connected to ``cluster`` and ``node`` instead of Ray."""
    parts = {"Startup": Cluster() if cluster is None else cluster, "NodeConnection": node}
    replace_parts(patch, [(checkpointer_module, name, lambda *_, part=part, **__: part) for name, part in parts.items()])
    replace_parts(patch, [(exit_notice, "watch", lambda *_: None)])  # the process of the tests ends as they have passed
    return Checkpointer("memory://saves", rank=0, world_size=1, **options)


def subscribers(failures: Failures | None = None) -> OutcomeSubscribers:
    counted = Failures("warn", count=lambda: None) if failures is None else failures
    return OutcomeSubscribers(counted, FailureReports(lambda *_: False, _log), VersionCallbacks((), _log), uri="s3://b")


def saves(timeout: float = 60.0, *, limit: int = 9, cluster: Any = None, failures: Failures | None = None) -> SavesInFlight:
    cluster = Cluster() if cluster is None else cluster
    return SavesInFlight(cluster, subscribers(failures), limit=limit, timeout=timeout, log=_log)


def save(step: int = 7, *, cluster: Any = None, failures: Failures | None = None) -> SaveOutcome:
    return saves(cluster=cluster, failures=failures).begin(SaveProgress(step, log=_log))
