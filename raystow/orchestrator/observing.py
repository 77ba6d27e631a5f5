"""Asks the coordinators and node workers of a running cluster what they are at. Starts nothing, and waits for nobody for long."""

from __future__ import annotations

from typing import Any

import ray
from ray.exceptions import RayError

from ..storage.clock import SYSTEM
from ..workers.node_actor import NAMESPACE, NODE
from . import cluster
from .coordinator_actor import COORDINATOR
from .snapshot import Snapshot

_ANSWER = 2.0  # seconds within which all must answer that are to be seen


class Observer:
    """``look`` as often as you like, from one thread. One that has not answered yet is not asked again: it may be frozen, and
    would find thousands of questions."""

    def __init__(self, address: str = "auto") -> None:
        cluster.connect(address)
        self._asked: dict[str, Any] = {}

    def look(self) -> Snapshot:
        """What is to be seen now. Never raises for a part of the cluster that is down."""
        try:
            names = [
                actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True) if actor["namespace"] == NAMESPACE
            ]
            asked = {name: self._asked.get(name) or _ask(name) for name in names}
            self._asked = {name: question for name, question in asked.items() if question is not None}
            questions = list(self._asked.values())
            ready = ray.wait(questions, num_returns=len(questions), timeout=_ANSWER)[0] if questions else []
        except (RayError, ConnectionError, RuntimeError) as error:
            self._asked.clear()
            return Snapshot(SYSTEM.now(), {}, {}, trouble=f"the head node does not answer: {error}")
        answers = {name: self._answer(name) if question in ready else None for name, question in asked.items()}
        return Snapshot(
            SYSTEM.now(),
            {name: answer for name, answer in answers.items() if name.startswith(COORDINATOR)},
            {name.removeprefix(NODE): answer for name, answer in answers.items() if name.startswith(NODE)},
        )

    def _answer(self, name: str) -> Any:
        try:
            return ray.get(self._asked.pop(name))
        except RayError:
            return None  # it died a moment ago, or is of another version of raystow


def _ask(name: str) -> Any:
    """The question; None for an actor that is no more, and for those that are none of these."""
    method = "overview" if name.startswith(COORDINATOR) else "status" if name.startswith(NODE) else ""
    try:
        return getattr(ray.get_actor(name, NAMESPACE), method).options(max_task_retries=0).remote() if method else None
    except (ValueError, AttributeError):
        return None
