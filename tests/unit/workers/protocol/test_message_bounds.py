"""Messages: the data that decoding refuses, the bounds of lengths, and the refusal of other protocol versions."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec
import pytest
from helpers.begins import begin_of
from helpers.processes import incarnation
from msgspec import Meta, inspect
from msgspec.structs import replace

from raystow.storage.errors import ProtocolError
from raystow.storage.retention.policy import Policy
from raystow.workers.protocol import messages
from raystow.workers.protocol.codec import MAX_RANKS, Column, Digest, Message, MessagePart, Shape, Table, Text, fingerprint
from raystow.workers.protocol.messages import (
    MESSAGES,
    PROTOCOL,
    Begin,
    BeginSave,
    EntryInfo,
    Generation,
    KeepEntry,
    check_greeting,
    check_protocol,
    decode,
    encode,
)


class Inner(MessagePart, frozen=True):
    number: int
    name: Text
    shape: Shape


class Example(Message, frozen=True):
    text: Annotated[str, Meta(max_length=4)] = ""
    rows: Annotated[tuple[Inner, ...], Meta(max_length=3)] = ()
    sum: Digest = 0
    state: Literal["a", "b"] = "a"
    data: Annotated[bytes, Meta(max_length=5)] = b""
    near: Table[int, Column[Text]] = {}
    rate: float = 0.0


class Other(Message, frozen=True):
    pass


def test_tuples_and_numbers_survive_encode_and_decode() -> None:
    example = Example("é12\0", (Inner(-(2**63), "n", (1, 2)),), 2**64 - 1, "b", b"12345", {7: ("x", "")}, float("-inf"))
    assert decode(encode(example), Other, Example) == example
    assert isinstance(decode(encode(example), Example).rows, tuple)


def test_an_entry_without_a_generation_is_refused() -> None:
    """Nodes order entries by it."""
    info = EntryInfo("r", 0, 1, 1, 0, (Generation("g", 0),))
    assert decode(encode(KeepEntry(info)), KeepEntry).info == info
    with pytest.raises(ProtocolError, match="length >= 1"):
        decode(encode(KeepEntry(replace(info, lineage=()))), KeepEntry)


@pytest.mark.parametrize(
    "wrong",
    [
        Example(text="12345"),
        Example(text="\udfff"),
        Example(text=b"1234"),  # type: ignore[arg-type]
        Example(rows=(Inner(1, "", ()),) * 4),
        Example(rows=(Example(),)),  # type: ignore[arg-type]
        Example(rows=(Inner(1, 7, ()),)),  # type: ignore[arg-type]
        Example(rows=(Inner(True, "", ()),)),
        Example(rows=(Inner(1.0, "", ()),)),  # type: ignore[arg-type]
        Example(rows=(Inner(2**64, "", ()),)),
        Example(rows=(Inner(1, "x" * (1 << 16) + "x", ()),)),
        Example(rows=(Inner(1, "", (1,) * 65),)),
        Example(sum=-1),
        Example(state="c"),  # type: ignore[arg-type]
        Example(data=b"123456"),
        Example(data="12345"),  # type: ignore[arg-type]
        Example(near={"7": ()}),  # type: ignore[dict-item]
        Example(near={7: (None,)}),  # type: ignore[dict-item]
        Example(near=object()),  # type: ignore[arg-type]
        Example(rate="1"),  # type: ignore[arg-type]
        Inner(1, "", ()),
        Other(),
    ],
)
def test_an_invalid_message_is_refused(wrong: Message) -> None:
    """The sender refuses a message that has no encoding; the receiver refuses other invalid messages."""
    with pytest.raises(ProtocolError):
        decode(encode(wrong), Example)


def test_missing_or_additional_fields_are_refused() -> None:
    fields = ["Begin", "n", [0, 1, ["r", 1, 1, "i", "job 1"], 1, 1, 1.0, {}, {}, None, 0], [0, 0]]
    assert decode(msgspec.msgpack.encode(fields), Begin) == begin_of(0, 1, incarnation("i", "r"), 1, "n", 1, 1.0, 0, 0)
    for wrong in (fields[:3], [*fields, 0], fields[1:], ["Unknown", *fields[1:]], [], {}, {"rank": 0}, None):
        with pytest.raises(ProtocolError, match="where Begin was expected"):
            decode(msgspec.msgpack.encode(wrong), Begin)


HEADS = {"str": b"\xdb", "bytes": b"\xc6", "array": b"\xdd", "map": b"\xdf", "extension": b"\xc9"}
"""The MessagePack type bytes before a length of four bytes."""


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("claimed", [5, 1 << 20, (1 << 32) - 1])
def test_lengths_over_their_bounds_are_refused(head: bytes, claimed: int) -> None:
    """They are refused before memory is allocated."""
    fields = [msgspec.msgpack.encode(one) for one in ("Example", "", (), 0, "a", b"", {}, 0.0)]
    for number in range(len(fields)):
        data = b"\x98" + b"".join(fields[:number]) + head + claimed.to_bytes(4, "big")
        tracemalloc.start()
        try:
            with pytest.raises(ProtocolError):
                decode(data, Example, Other)
            assert tracemalloc.get_traced_memory()[1] < 1 << 16
        finally:
            tracemalloc.stop()
    with pytest.raises(ProtocolError, match="exceeds 10"):
        encode(Example(), most=10)


def lengths(kind: inspect.Type) -> Iterator[inspect.Type]:
    """Yield the types of variable length in a message, except the types in values of ``storage``."""
    match kind:
        case inspect.StructType(fields=fields):
            for field in fields:
                yield from lengths(field.type)
        case inspect.UnionType(types=types) | inspect.TupleType(item_types=types):
            for one in types:
                yield from lengths(one)
        case inspect.VarTupleType(item_type=item):
            yield kind
            yield from lengths(item) if item is not ... and not isinstance(item, inspect.StructType) else ()
        case inspect.DictType(key_type=key, value_type=value):
            yield kind
            yield from (*lengths(key), *lengths(value))
        case inspect.StrType() | inspect.BytesType():
            yield kind
        case _:
            assert not isinstance(kind, inspect.ListType | inspect.SetType | inspect.AnyType)


def test_every_length_in_a_message_has_a_bound() -> None:
    parts = set(MESSAGES) | set(MessagePart.__subclasses__())
    unbounded = {
        f"{part.__name__}: {kind}"
        for part in parts - {Message}
        if part.__module__.startswith("raystow.")
        for kind in lengths(inspect.type_info(part))
        if kind.max_length is None  # type: ignore[attr-defined]
    }
    assert unbounded == set()


def test_every_number_of_ranks_has_a_bound() -> None:
    """Who waits for ranks lists those that are missing: a number of 10**12 took all memory of the coordinator's machine."""
    for kind in (*MESSAGES, EntryInfo):
        fields = {field.name: field.type for field in msgspec.inspect.type_info(kind).fields}  # type: ignore[attr-defined]
        found = fields.get("world_size")
        assert found is None or isinstance(found, inspect.IntType)
        assert found is None or (found.ge, found.le) == (1, MAX_RANKS)
    with pytest.raises(ProtocolError, match="<= 1048576"):
        decode(encode(begin_of(0, 10**12, incarnation("i"), 1, "n", 1, 1.0, 0, 0)), Begin)


def test_the_fingerprint_depends_on_every_field_and_bound() -> None:
    hints = (int, str, Annotated[str, Meta(max_length=1)], tuple[int, ...], int | None)
    kinds = [msgspec.defstruct("One", [("a", hint)], bases=(Message,), frozen=True) for hint in hints]
    kinds.append(msgspec.defstruct("One", [("b", int)], bases=(Message,), frozen=True))
    kinds.append(msgspec.defstruct("Two", [("a", int)], bases=(Message,), frozen=True))
    assert len({fingerprint([kind]) for kind in (*kinds, Example)}) == 8  # type: ignore[list-item]


def test_the_protocol_names_the_present_messages() -> None:
    assert f"2.{fingerprint(MESSAGES)}" == PROTOCOL, "a message has changed: put this into messages/__init__.py"


def test_another_version_of_the_protocol_is_refused() -> None:
    check_protocol(PROTOCOL, "a node")
    check_greeting(messages.GREETING, "a node")
    for other in (b"", b"GET / HTTP/1.1\r\n", messages.GREETING[:-1] + b"x", "\xff".encode("latin1") * 32):
        with pytest.raises(ProtocolError, match="a node: speaks protocol"):
            check_greeting(other, "a node")


def test_a_message_with_an_invalid_policy_is_refused() -> None:
    begin = begin_of(0, 1, incarnation("i"), 1, "n", 1, retention=Policy(keep_last=0x77777777))
    data = encode(BeginSave(begin.request, begin.contents, ()))
    assert data.count(b"wwww") == 1
    with pytest.raises(ProtocolError, match="keep_last"):
        decode(data.replace(b"wwww", bytes(4)), BeginSave)
    assert decode(data, BeginSave).request == begin.request
