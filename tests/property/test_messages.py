"""Messages between processes come back as they were, and arbitrary bytes never do more than raise ``ProtocolError``."""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raystow.storage.errors import ProtocolError
from raystow.storage.retention.policy import Policy
from raystow.workers.protocol import messages
from raystow.workers.protocol.codec import Limit, MessageCodec, Plain, Unsigned
from raystow.workers.protocol.messages import CODEC, PROTOCOL, Begin, BeginSave, check_greeting, check_protocol

TEXT = st.text(max_size=20)
PLAIN = st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(allow_nan=False), TEXT, st.binary(max_size=9))
POLICY = st.builds(Policy, keep_last=st.none() | st.integers(1, 9), keep_best=st.none() | st.just(("loss", "min", 3)))

st.register_type_strategy(int, st.integers(0, 2**63 - 1))
st.register_type_strategy(float, st.floats(allow_nan=False))
st.register_type_strategy(Policy, POLICY)
st.register_type_strategy(
    Begin,
    st.builds(
        Begin,
        metrics=st.dictionaries(TEXT, PLAIN, max_size=3),
        replicated=st.integers(0, 2**64 - 1),
        coding=st.dictionaries(TEXT, TEXT, max_size=3),
        lossy=st.dictionaries(TEXT, TEXT, max_size=3),
        delta=st.just("auto") | st.integers(0, 99),
    ),
)
ANY = st.one_of([st.from_type(message) for message in CODEC.messages])


@settings(max_examples=150, deadline=None)
@given(ANY)
def test_every_message_comes_back_as_it_was(message: object) -> None:
    data = CODEC.encode(message)
    assert CODEC.decode(data, type(message)) == message
    with pytest.raises(ProtocolError, match="after the end"):
        CODEC.decode(data + b"\0", type(message))
    other = next(kind for kind in CODEC.messages if kind is not type(message))
    with pytest.raises(ProtocolError, match=f"where {other.__name__} was expected"):
        CODEC.decode(data, other)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_changed_bytes_raise_nothing_but_protocol_errors(data: st.DataObject) -> None:
    encoded = bytearray(CODEC.encode(data.draw(ANY)))
    for _ in range(data.draw(st.integers(1, 3))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    check(bytes(encoded[: data.draw(st.integers(0, len(encoded)))]))


@settings(max_examples=150, deadline=None)
@given(st.integers(0, len(CODEC.messages) + 1), st.binary(max_size=400))
def test_random_bytes_raise_nothing_but_protocol_errors(tag: int, body: bytes) -> None:
    check(tag.to_bytes(2, "little") + body)


def check(data: bytes) -> None:
    """Decode; memory is taken in proportion to the bytes that are there, whatever lengths they claim."""
    tracemalloc.start()
    try:
        CODEC.decode(data, *CODEC.messages)
    except ProtocolError:
        pass
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < (1 << 20) + 500 * len(data)


@dataclass(frozen=True)
class Inner:
    number: int
    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Example:
    text: Annotated[str, Limit(4)] = ""
    rows: Annotated[tuple[Inner, ...], Limit(3)] = ()
    sum: Annotated[int, Unsigned()] = 0
    state: Literal["a", "b"] = "a"
    value: Annotated[object, Plain(), Limit(10)] = None
    data: Annotated[bytes, Limit(5)] = b""


EXAMPLE = MessageCodec(Example)


@pytest.mark.parametrize(
    "wrong",
    [
        Example(text="12345"),
        Example(text="\udfff"),
        Example(text=b"1234"),  # type: ignore[arg-type]
        Example(rows=(Inner(1, "", ()),) * 4),
        Example(rows=(Example(),)),  # type: ignore[arg-type]
        Example(rows=(Inner(1, 7, ()),)),  # type: ignore[arg-type]
        Example(rows=(Inner(2**63, "", ()),)),
        Example(sum=-1),
        Example(state="c"),  # type: ignore[arg-type]
        Example(value={"a": 1}, data=b"123456"),
        Example(value="0123456789"),
        Example(value=object()),
        Inner(1, "", ()),
    ],
)
def test_an_invalid_message_is_not_encoded(wrong: object) -> None:
    with pytest.raises(ProtocolError):
        EXAMPLE.encode(wrong)


def test_lengths_over_their_bounds_are_refused() -> None:
    """Before memory is taken."""
    data = bytearray(EXAMPLE.encode(Example()))
    data[2:6] = (5).to_bytes(4, "little")
    with pytest.raises(ProtocolError, match="a length of 5 exceeds 4"):
        EXAMPLE.decode(bytes(data), Example)
    data[2:6] = (2**32 - 1).to_bytes(4, "little")
    with pytest.raises(ProtocolError, match="exceeds 4"):
        EXAMPLE.decode(bytes(data), Example)
    with pytest.raises(ProtocolError, match="exceeds 10"):
        EXAMPLE.encode(Example(), most=10)
    with pytest.raises(ProtocolError, match="unknown message 7"):
        EXAMPLE.decode(b"\x07\0", Example)


def test_the_fingerprint_depends_on_every_field_and_bound() -> None:
    @dataclass(frozen=True)
    class One:
        a: int

    variants = [One]
    for hint in (str, Annotated[str, Limit(1)], tuple[int, ...], int | None):
        kind = dataclass(frozen=True)(type("One", (), {"__annotations__": {"a": hint}}))
        variants.append(kind)
    assert len({MessageCodec(kind).fingerprint for kind in (*variants, Inner)}) == 6


def test_another_version_of_the_protocol_is_refused() -> None:
    check_protocol(PROTOCOL, "a node")
    check_greeting(messages.GREETING, "a node")
    for other in (b"", b"GET / HTTP/1.1\r\n", messages.GREETING[:-1] + b"x", "\xff".encode("latin1") * 32):
        with pytest.raises(ProtocolError, match="a node: speaks protocol"):
            check_greeting(other, "a node")


def test_a_policy_that_makes_no_sense_is_refused() -> None:
    begin = Begin(0, 1, "i", 1, "n", 1, 1.0, 0, 0, retention=Policy(keep_last=77))
    data = CODEC.encode(BeginSave(begin, ()))
    seven = (77).to_bytes(8, "little")
    assert data.count(seven) == 1
    with pytest.raises(ProtocolError, match="keep_last"):
        CODEC.decode(data.replace(seven, bytes(8)), BeginSave)
    assert CODEC.decode(data, BeginSave).begin == replace(begin)
