"""The coordinator as ranks and node workers call it.

In a cluster ``orchestrator.coordinator.ray_client`` implements the client; in a test it may call the state machine itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar, cast

from msgspec.structs import replace

from .messages import CoordinatorRequest, Message, RanksWarning

_Answer = TypeVar("_Answer", bound=Message)

ANSWER = 60.0
"""Seconds within which a call that does not wait for others must be answered."""


class CoordinatorClient(ABC):
    """Any request may raise ``SaveFailed``: then the attempt is over. Any may be handled twice, since an answer can be lost."""

    def ask(
        self,
        request: CoordinatorRequest[_Answer],
        warn: Callable[[str], None] = lambda text: None,
        *,
        timeout: float | None = None,
    ) -> _Answer:
        """Return the answer to a request; wait for other ranks if the coordinator does.

        Args:
            request: The request.
            warn: Receives the warnings about late ranks meanwhile.
            timeout: Seconds; None: as long as the request may take.
        """
        seconds = request.wait + ANSWER if timeout is None else timeout
        while isinstance(answer := self.call(request, seconds), RanksWarning):
            if answer.text:
                warn(answer.text)
                request = replace(request, last_warning=answer.number)
        return cast(_Answer, answer)

    @abstractmethod
    def call(self, request: CoordinatorRequest[_Answer], timeout: float) -> Message:
        """Return the answer to a request, or ``RanksWarning``."""

    def send(self, request: CoordinatorRequest[_Answer]) -> None:
        """Send a request. The client of a cluster does not wait for the answer, since that would delay the rank."""
        self.ask(request)
