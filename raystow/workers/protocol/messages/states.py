"""A state in its node's memory, for another replica of the training, and the messages that stage it there."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from ..codec import Column, JsonText, Message, MessagePart, Shape, Text

STAGED = "staged/"
"""What the keys of staged states begin with; no object of a store has such a key."""

StateSize = Annotated[int, Meta(ge=0, le=1 << 42)]
"""Bytes of a state."""


def state_key(sender: str, step: int) -> str:
    """Return the key of the state that a sender has staged at a step."""
    return f"{STAGED}{sender}/{step}"


class StagedMesh(MessagePart, frozen=True):
    """A device mesh of DTensors: its ranks in row-major order, and the names of its dimensions, if they have names."""

    device_type: Text
    shape: Shape
    ranks: Column[int]
    names: Column[Text] | None = None


class StagedPlacement(MessagePart, frozen=True):
    """How a DTensor is placed along one dimension of its mesh. ``split``: the factor of a strided shard."""

    kind: Literal["replicate", "shard", "strided"]
    dim: int = 0
    split: int = 0


class StagedLayout(MessagePart, frozen=True):
    """What a DTensor has besides its local elements. ``mesh``: index in ``StateHeader.meshes``."""

    mesh: int
    shape: Shape
    stride: Shape
    placements: Annotated[tuple[StagedPlacement, ...], Meta(max_length=64)]


class StagedLeaf(MessagePart, frozen=True):
    """A value of a state.

    Args:
        path: See ``manifest.path_text``.
        kind: See ``manifest``.
        value: A plain value as JSON.
        shape: Of the local elements of a tensor.
        layout: Of a DTensor.
    """

    path: Text
    kind: Text
    value: JsonText = ""
    dtype: Text = ""
    shape: Shape = ()
    layout: StagedLayout | None = None


class StateHeader(Message, frozen=True):
    """The beginning of a staged state. The bytes of its tensors follow, in the order of the leaves, and then their digests.

    Args:
        size: Bytes of the tensors, each at a multiple of 64.
    """

    step: int
    size: StateSize
    leaves: Column[StagedLeaf]
    meshes: Column[StagedMesh]


class OpenStates(Message, frozen=True):
    """The first message of a training process that stages states, under its name as a sender."""

    sender: Text


class StageState(Message, frozen=True):
    """Announces a state, with a descriptor of the memory that the sender will fill. The answer is ``StateRoom``.

    Args:
        size: Bytes of that memory.
        seconds: How long the state is kept if the sender dies after it has filled the memory.
    """

    step: int
    size: StateSize
    seconds: float


class MapState(Message, frozen=True):
    """Asks for the memory of a state that a process of this node stages, once its first bytes are there. The answer is
    ``ObjectState``, with a descriptor if they are.

    Args:
        staged: How many of the first bytes; 0: none.
    """

    key: Text
    staged: StateSize


class StateRoom(Message, frozen=True):
    """``problem``: why a state cannot be kept; empty if it can."""

    problem: Text = ""


class StateStaged(Message, frozen=True):
    """The first bytes of the announced state are there, and may be read.

    Args:
        size: How many.
    """

    size: StateSize


class DropState(Message, frozen=True):
    """Nobody needs the state any more."""
