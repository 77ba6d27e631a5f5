"""The encoding of messages: MessagePack arrays of the fields of frozen ``msgspec`` classes.

Decoding is strict: values of other types, lengths over their bounds, additional fields, and trailing bytes are errors. msgspec
compares each claimed length with the bytes that are left before it allocates memory. Both ends must have the same classes, since
field names are not sent: the handshakes compare ``fingerprint``. Encoding does not check the types of fields; mypy does.
"""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Iterable, Mapping
from typing import Annotated, Generic, TypeVar, get_args

import msgspec

from ...storage.coding.digest import SECRET, stored_digest
from ...storage.errors import ProtocolError, RaystowError
from ...storage.limits import MAX_ROWS
from ...storage.limits import Digest as Digest
from ...storage.limits import Shape as Shape
from ...storage.limits import Text as Text

_Key = TypeVar("_Key")
_Item = TypeVar("_Item")

MAX_JSON = 96 << 20
"""Characters of a plain value."""

JsonText = Annotated[str, msgspec.Meta(max_length=MAX_JSON)]
"""A plain value, as ``storage.format.values`` stores it."""

MAX_RANKS = 1 << 20
"""Ranks of a run."""

WorldSize = Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]
"""A number of ranks. Who waits for ranks lists those that are missing."""

DigestBytes = Annotated[bytes, msgspec.Meta(max_length=32)]
"""BLAKE3, or empty."""

Column = Annotated[tuple[_Item, ...], msgspec.Meta(max_length=MAX_ROWS)]
"""Values of one type, at most one for each chunk or value of a node."""

Table = Annotated[Mapping[_Key, _Item], msgspec.Meta(max_length=MAX_ROWS)]
"""Values of one type by name or number."""

Packed = Annotated[bytes, msgspec.Meta(max_length=16 * MAX_ROWS)]
"""Numbers of a column as bytes, at most 16 for each row."""

Secret = Annotated[bytes, msgspec.Meta(min_length=SECRET, max_length=SECRET)]
"""What ``storage.coding.digest.SecretKeys`` are made from."""


class MessagePart(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """A value inside messages. Copy it with ``msgspec.structs.replace``: ``dataclasses.replace`` fails, but mypy accepts it.

    The garbage collector does not track it: no value is part of a cycle, and a save makes many.
    """


class Message(MessagePart, frozen=True, tag=True):
    """A value that is sent by itself. The name of its class is its first field."""


_Message = TypeVar("_Message", bound=Message)
_Answer = TypeVar("_Answer", bound=Message)


class CoordinatorRequest(Message, Generic[_Answer], frozen=True):
    """A message to the coordinator. A class names its answers: ``class JoinRun(CoordinatorRequest[Acknowledged])``."""

    @property
    def wait(self) -> float:
        """Seconds for which the coordinator may wait for others before it answers."""
        return 0.0


@functools.cache
def answers_of(request: type[CoordinatorRequest[_Answer]]) -> tuple[type[_Answer], ...]:
    """Return the classes of the answers to a class of requests."""
    (answer,) = get_args(request.__orig_bases__[0])  # type: ignore[attr-defined]
    return get_args(answer) or (answer,)


_ENCODER = msgspec.msgpack.Encoder()
_building = threading.Lock()
"""Held while a decoder is built: msgspec 0.22 shows a class to other threads before it knows the types of its fields, and the
process of a thread that decodes such a class dies."""


def encode(message: Message, *, most: int = 1 << 31) -> bytes:
    """Return the bytes of a message.

    Raises:
        ProtocolError: A field has no encoding, or the whole exceeds ``most`` bytes.
    """
    kind = type(message).__name__
    try:
        data = _ENCODER.encode(message)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"invalid {kind}: {error}") from error
    if len(data) > most:
        raise ProtocolError(f"a {kind} of {len(data)} bytes exceeds {most}")
    return data


def decode(data: bytes, *expected: type[_Message]) -> _Message:
    """Return the message, which must be of one of the ``expected`` classes.

    Raises:
        ProtocolError: The bytes are no such message.
    """
    try:
        message: _Message = _decoder(expected).decode(data)
        return message
    except (msgspec.MsgspecError, ValueError, RecursionError, RaystowError) as error:
        names = " or ".join(one.__name__ for one in expected)
        raise ProtocolError(f"invalid message where {names} was expected: {error}") from error


@functools.cache
def _decoder(expected: tuple[type[_Message], ...]) -> msgspec.msgpack.Decoder[_Message]:
    with _building:
        return msgspec.msgpack.Decoder(functools.reduce(operator.or_, expected))


def fingerprint(messages: Iterable[type[Message]]) -> str:
    """Return a text that differs if any class, field, type or bound differs."""
    return stored_digest(repr(msgspec.inspect.multi_type_info(messages)).encode()).hex()[:16]
