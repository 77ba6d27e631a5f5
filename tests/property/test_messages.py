"""Messages are decoded as they were encoded, and the decoding of arbitrary bytes raises only ``ProtocolError``."""

from __future__ import annotations

import tracemalloc
from collections.abc import Mapping
from functools import partial
from typing import Any, get_args, get_type_hints

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raystow.storage.errors import ProtocolError
from raystow.storage.retention.export_rule import Export
from raystow.storage.retention.policy import Policy
from raystow.workers.protocol.codec import MessagePart
from raystow.workers.protocol.messages import MESSAGES, Message, RestoreChoice, decode, encode

POLICY = st.builds(Policy, keep_last=st.none() | st.integers(1, 9), keep_best=st.none() | st.just(("loss", "min", 3)))

st.register_type_strategy(int, st.integers(0, 2**63 - 1))
st.register_type_strategy(float, st.floats(allow_nan=False))
st.register_type_strategy(Policy, POLICY)
EXPORT = st.builds(Export, uri=st.just("s3://bucket/x"), when=st.integers(1, 9) | st.sampled_from(["best", "pin:a"]))
st.register_type_strategy(Export, EXPORT)
st.register_type_strategy(Mapping, lambda table: st.dictionaries(*map(st.from_type, get_args(table)), max_size=3))


def fits(most: int, value: Any) -> bool:
    return len(value) <= most


def within(hint: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for the values of a field's type within the bounds of the field."""
    values = st.from_type(hint)
    for bound in getattr(hint, "__metadata__", ()):
        if bound.le is not None:
            values = st.integers(bound.ge or 0, bound.le)
        if bound.min_length is not None and hint.__origin__ is bytes:  # of a secret
            values = st.binary(min_size=bound.min_length, max_size=bound.max_length)
        elif bound.min_length is not None:
            values = values.filter(bool)
        elif bound.max_length is not None:
            values = values.filter(partial(fits, bound.max_length))
    return values


def built(kind: type[MessagePart], **given: object) -> st.SearchStrategy[Any]:
    """Return a strategy for instances with all fields set."""
    fields: dict[str, Any] = {name: within(hint) for name, hint in get_type_hints(kind, include_extras=True).items()}
    return st.builds(kind, **(fields | given))


def parts(kind: type[MessagePart] = MessagePart) -> list[type[MessagePart]]:
    return [one for child in kind.__subclasses__() if child is not Message for one in (child, *parts(child))]


for message in (*MESSAGES, *parts()):
    st.register_type_strategy(message, built)
BASE = built(RestoreChoice, bases=st.just(()))
st.register_type_strategy(RestoreChoice, built(RestoreChoice, bases=st.lists(BASE, max_size=2).map(tuple)))
ANY = st.one_of([st.from_type(message) for message in MESSAGES])


@settings(max_examples=150, deadline=None)
@given(ANY)
def test_every_message_is_decoded_as_it_was_encoded(message: Message) -> None:
    data = encode(message)
    assert decode(data, type(message)) == message
    with pytest.raises(ProtocolError, match="trailing"):
        decode(data + b"\0", type(message))
    other = next(kind for kind in MESSAGES if kind is not type(message))
    with pytest.raises(ProtocolError, match=f"where {other.__name__} was expected"):
        decode(data, other)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_changed_bytes_raise_only_protocol_errors(data: st.DataObject) -> None:
    encoded = bytearray(encode(data.draw(ANY)))
    for _ in range(data.draw(st.integers(1, 3))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    check(bytes(encoded[: data.draw(st.integers(0, len(encoded)))]))


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([*(message.__name__ for message in MESSAGES), "Unknown"]), st.integers(1, 15), st.binary(max_size=400))
def test_random_bytes_raise_only_protocol_errors(name: str, fields: int, body: bytes) -> None:
    check(bytes([0x90 | fields]) + msgspec.msgpack.encode(name) + body)
    check(body)


def check(data: bytes) -> None:
    """Decode, and check that memory is proportional to the number of bytes, not to the lengths that they declare."""
    tracemalloc.start()
    try:
        decode(data, *MESSAGES)
    except ProtocolError:
        pass
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < (1 << 20) + 500 * len(data)
