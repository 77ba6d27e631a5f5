"""Finds or starts the coordinator actor of a repository, and calls it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import ray

from ...storage.coding.digest import stored_digest
from ...storage.errors import SettingsMissing
from ...storage.stores.settings import LOCAL, StoreSettings
from ...workers import actor_environment
from ...workers.node.actor import NAMESPACE
from ...workers.protocol import messages
from ...workers.protocol.coordinator_client import ANSWER, CoordinatorClient
from ...workers.protocol.messages import PROTOCOL
from ...workers.ray_connection import RayConnection
from .actor import UNUSED, CoordinatorActor

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

COORDINATOR = "coordinator-"
"""The prefix of the actor names of coordinators."""

_STARTS = 3  # of the coordinator in a row, each of which needs the settings of the store again


_Answer = TypeVar("_Answer", bound=messages.Message)


class RayCoordinatorClient(CoordinatorClient):
    """The coordinator of one repository, as ranks and node workers call it.

    Args:
        uri: The address of the repository.
        settings: Returns those of its store, which the coordinator opens it with.
    """

    def __init__(self, uri: str, settings: Callable[[], StoreSettings] = lambda: LOCAL) -> None:
        self._uri, self._settings, self._ray = uri, settings, RayConnection.here()
        self._actor: ActorHandle | None = None

    def open_store(self, settings: StoreSettings | None = None, timeout: float = ANSWER) -> None:
        """Send settings of the store, if it needs any. None: those that the client was made with."""
        settings = self._settings() if settings is None else settings
        if settings != LOCAL:
            self.ask(messages.OpenStore(self._uri, settings), timeout=timeout)

    def call(self, request: messages.CoordinatorRequest[_Answer], timeout: float) -> messages.Message:
        data = messages.encode(request)

        def answer() -> tuple[bytes, ObjectRef | None]:
            actor = self._known()
            found: tuple[bytes, ObjectRef | None]
            found = self._ray.call(lambda: actor.handle.remote(PROTOCOL, data), timeout, self._who)
            return found

        def forget() -> None:
            self._actor = None

        for _ in range(_STARTS):
            try:
                return self._decoded(request, *self._ray.find(answer, forget))
            except SettingsMissing:  # it was started, or started again, by now
                self.open_store()
        return self._decoded(request, *self._ray.find(answer, forget))

    def send(self, request: messages.CoordinatorRequest[_Answer]) -> None:
        self._ray.send(lambda: self._known().handle.remote(PROTOCOL, messages.encode(request)), self._who)

    def _decoded(self, request: messages.CoordinatorRequest[_Answer], data: bytes, shared: ObjectRef | None) -> messages.Message:
        """Decode an answer. ``shared``: has it instead, if it is the same for many ranks."""
        if shared is not None:
            data = self._ray.call(lambda: shared, ANSWER, self._who)
        answer: messages.Message = messages.decode(data, *messages.answers_of(type(request)), messages.RanksWarning)
        return answer

    def _known(self) -> ActorHandle:
        """The coordinator, which is started if there is none."""
        if (actor := self._actor) is None:
            actor = self._actor = self._ray.ask(self._start_actor, ANSWER)
        return actor

    def _start_actor(self) -> ActorHandle:
        return coordinator_actor(self._uri, self._settings().place)

    @property
    def _who(self) -> str:
        return f"coordinator of {self._uri}"


def coordinator_name(uri: str, place: str = "") -> str:
    """The actor name of the coordinator of the repository at ``uri``, a normalized address. ``place``: see ``StoreSettings``."""
    name = f"{COORDINATOR}{stored_digest(uri.encode()).hex()[:16]}"
    return f"{name}-{place}" if place else name


def coordinator_actor(uri: str, place: str = "", *, unused: float = UNUSED) -> ActorHandle:
    """The actor handle of the coordinator of the repository at ``uri``; it is started on the head node if there is none.
    ``place``, ``unused``: see ``CoordinatorActor``."""
    return (
        ray.remote(CoordinatorActor)
        .options(
            name=coordinator_name(uri, place),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            resources={"node:__internal_head__": 0.001},
            max_restarts=-1,
            max_task_retries=-1,
            runtime_env=actor_environment.for_actor(),
            max_concurrency=1_000_000,  # a call of each rank waits until the last one votes
        )
        .remote(uri, unused, place)
    )
