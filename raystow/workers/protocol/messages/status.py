"""Snapshots of node workers and coordinators, for tools that only read them."""

from __future__ import annotations

from typing import Literal, get_args

from ....storage.format.root import Entry
from ..codec import Column, Message, MessagePart, Table, Text
from .replicas import ReplicationProgress


class KeepNode(Message, frozen=True):
    """The first message of a connection that a training process keeps as long as it may need the node worker. The answer is
    ``Acknowledged``. Sent again before the connection ends, it changes ``seconds``.

    Args:
        uri: Of the repository.
        seconds: For which the node worker stays after the end of the connection.
    """

    uri: Text
    seconds: float


class Saves(Message, frozen=True):
    """The saves to one repository, numbered from 1 as they begin on this node. ``begun``: the number of the last; ``durable``:
    that of the last which is a version. 0: none."""

    begun: int = 0
    durable: int = 0


Stage = Literal["staging", "coding", "coded"]
"""The progress of a rank's part of an attempt on its node: its chunks are still coming; all are here, but not all are coded; what
is left is for the node, which uploads packs or waits for other ranks."""

STAGES: tuple[Stage, ...] = get_args(Stage)
"""All of them in order."""


class AttemptStatus(MessagePart, frozen=True):
    """An attempt on one node. ``ranks``: those of the node, by each of ``STAGES``. ``raw``: bytes of the chunks that are
    coded, ``coded``: what they take now. ``stored``: all of the node's part is in the store, and the commit is waited for."""

    id: int
    attempt: Text
    step: int
    ranks: Table[Stage, Column[int]]
    raw: int
    coded: int
    stored: bool


class NodeStatus(Message, frozen=True):
    """A node worker.

    Args:
        at: Its clock, in monotonic seconds.
        raw: Bytes coded since it began.
        uploaded: Bytes that stores have taken, by the URI of the repository.
        uploads: Objects that are being uploaded.
        queue: Bytes being coded, or coded and not uploaded yet.
        memory: Bytes kept to restore from, and those of them that are kept decoded as well.
        spare: Bytes that were kept and can be used again.
        copies: Replicas on other nodes.
        ranks: How many are connected, by the URI of the repository.
        attempts: Those in progress, by the URI of the repository.
    """

    node: Text
    at: float
    raw: int
    uploaded: Table[Text, int]
    uploads: int
    queue: int
    queue_limit: int
    memory: int
    spare: int
    memory_limit: int
    copies: ReplicationProgress
    ranks: Table[Text, int]
    attempts: Table[Text, Column[AttemptStatus]]


class OpenAttempt(MessagePart, frozen=True):
    """An attempt in progress. ``begun`` and ``finished``: how many of its ``world_size`` ranks and parts have begun to save, and
    have all chunks coded. ``nodes``: of those ranks; ``stored``: nodes whose part is durable. ``age`` and ``left``: seconds since
    the first rank began, and until the attempt is aborted."""

    id: int
    attempt: Text
    step: int
    phase: Text
    world_size: int
    begun: int
    finished: int
    nodes: int
    stored: int
    age: float
    left: float


class FailedAttempt(MessagePart, frozen=True):
    """An attempt that was aborted ``ago`` seconds ago."""

    id: int
    attempt: Text
    step: int
    reason: Text
    ago: float


class CoordinatorStatus(Message, frozen=True):
    """The status of the coordinator of the repository at ``uri``. ``newest``: the newest version, None if there is none; ``age``:
    seconds since it was committed. ``aborted_in_a_row``: attempts aborted since then."""

    uri: Text
    repository: Text
    epoch: int
    newest: Entry | None
    age: float | None
    aborted_in_a_row: int
    attempts: Column[OpenAttempt]
    failures: Column[FailedAttempt]
