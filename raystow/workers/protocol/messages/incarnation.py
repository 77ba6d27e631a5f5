"""The identity of a process that takes a rank."""

from __future__ import annotations

from ..codec import MessagePart, Text


class Incarnation(MessagePart, frozen=True, order=True):
    """One process of a rank. A process that started later is greater, also one that started with a later coordinator.

    Args:
        repository: The id of the repository that it began with.
        epoch: That of the coordinator when it began, above all earlier ones of the repository.
        number: How many processes have begun with that coordinator, with this one.
        process: Its process id and host, for people.
        run: Its job and when it began, for people.
    """

    repository: Text
    epoch: int
    number: int
    process: Text
    run: Text

    def __str__(self) -> str:
        return f"{self.process}, {self.run}"
