"""The binary encoding of messages: frozen dataclasses, field by field, in the order and of the types that their classes declare.

A message is the number of its class (two bytes) and its fields. Integers and floats take eight bytes; strings, bytes and
collections are preceded by their length. Columns (``tuple[int, ...]`` and ``tuple[str, ...]``) are converted in one piece, which
makes messages of ten thousands of chunks cheap. Decoding is strict: every length is checked against its bound and against the
bytes that are left before memory is taken for it, and nothing may be left over. Both sides must have the same classes: the
handshakes compare ``MessageCodec.fingerprint``.
"""

from __future__ import annotations

import array
import enum
import itertools
import struct
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from operator import attrgetter
from typing import Annotated, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from ...storage.coding.digest import stored_digest
from ...storage.errors import ProtocolError, RaystowError
from ...storage.format import values

MAX_STRING = 256 << 10
"""Bytes of a string, unless its field says otherwise."""

MAX_BYTES = 64 << 20
"""Bytes of a ``bytes`` field, unless the field says otherwise."""

MAX_ITEMS = 1 << 20
"""Entries of a tuple or mapping, unless its field says otherwise."""

_Message = TypeVar("_Message")
_TAG, _LENGTH, _INT, _UINT, _FLOAT = (struct.Struct(form) for form in ("<H", "<I", "<q", "<Q", "<d"))
_INVALID = (struct.error, ValueError, TypeError, AttributeError, OverflowError, RecursionError, RaystowError)
assert sys.byteorder == "little"  # columns of integers are copied as they are in memory


@dataclass(frozen=True)
class Limit:
    """The bound of an annotated field: bytes of a string or of ``bytes``, entries of a collection."""

    most: int


@dataclass(frozen=True)
class Unsigned:
    """An annotated integer is from 0 to 2**64 - 1."""


@dataclass(frozen=True)
class Plain:
    """An annotated field is one of the plain values that ``storage.format.values`` stores."""


class _Cursor:
    """A message that is being decoded."""

    __slots__ = ("at", "data")

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, length: int) -> bytes:
        start, self.at = self.at, self.at + length
        if self.at > len(self.data):
            raise ProtocolError("the message ends early")
        return self.data[start : self.at]

    def length(self, most: int, width: int = 1) -> int:
        """A number of entries, each of which takes at least ``width`` bytes."""
        (length,) = _LENGTH.unpack(self.take(_LENGTH.size))
        _check(length, most)
        if length * width > len(self.data) - self.at:
            raise ProtocolError(f"{length} entries do not fit into the message")
        return int(length)


_Write = Callable[[typing.Any, list[bytes]], None]
_Read = Callable[[_Cursor], object]


@dataclass(frozen=True)
class _Kind:
    """How values of a type are encoded and decoded. ``schema`` describes the type, ``python`` is the class of its values, and
    ``column`` makes the kind of a sequence of at most so many of them; None encodes one entry after the other."""

    schema: str
    python: type | tuple[type, ...]
    write: _Write
    read: _Read
    column: Callable[[int], _Kind] | None = None


class MessageCodec:
    """Encodes and decodes the given classes. Their order is part of the encoding."""

    def __init__(self, *messages: type) -> None:
        self._kinds: dict[object, _Kind] = {}
        self._schemas: dict[type, str] = {}
        self.messages = messages
        self._tops = [self._kind(message) for message in messages]
        self._tags = {message: number for number, message in enumerate(messages)}
        text = repr([[message.__qualname__ for message in messages], sorted(self._schemas.values())])
        self.fingerprint = stored_digest(text.encode()).hex()[:16]
        """Differs if any class, field, type or bound differs."""

    def encode(self, message: object, *, most: int = 1 << 31) -> bytes:
        """Return the bytes of a message.

        Raises:
            ProtocolError: A field has another type than its class declares, or exceeds its bound; or the whole exceeds ``most``.
        """
        kind = type(message)
        if (tag := self._tags.get(kind)) is None:
            raise ProtocolError(f"{kind.__name__} is not a message")
        parts = [_TAG.pack(tag)]
        try:
            self._tops[tag].write(message, parts)
        except (KeyError, *_INVALID) as error:
            raise ProtocolError(f"invalid {kind.__name__}: {error}") from error
        data = b"".join(parts)
        if len(data) > most:
            raise ProtocolError(f"a {kind.__name__} of {len(data)} bytes exceeds {most}")
        return data

    def decode(self, data: bytes, *expected: type[_Message]) -> _Message:
        """Return the message that these bytes are, which must be one of the ``expected`` classes.

        Raises:
            ProtocolError: They are no such message.
        """
        cursor = _Cursor(data)
        try:
            (tag,) = _TAG.unpack(cursor.take(_TAG.size))
            if tag >= len(self._tops):
                raise ProtocolError(f"unknown message {tag}")
            kind = self._tops[tag]
            if self.messages[tag] not in expected:
                raise ProtocolError(f"{kind.schema} where {' or '.join(one.__name__ for one in expected)} was expected")
            message = kind.read(cursor)
        except ProtocolError:
            raise
        except _INVALID as error:
            raise ProtocolError(f"invalid message: {error}") from error
        if cursor.at != len(data):
            raise ProtocolError(f"{len(data) - cursor.at} bytes after the end of {kind.schema}")
        assert isinstance(message, expected)
        return message

    def _kind(self, hint: typing.Any) -> _Kind:
        if hint not in self._kinds:
            self._kinds[hint] = self._made(hint)
        return self._kinds[hint]

    def _made(self, hint: typing.Any) -> _Kind:
        marks: dict[type, typing.Any] = {}
        if get_origin(hint) is Annotated:
            hint, *found = get_args(hint)
            marks = {type(mark): mark for mark in found}
        most = marks[Limit].most if Limit in marks else None
        origin = get_origin(hint)
        if Plain in marks:
            return _plain(most or MAX_STRING)
        if hint is int and Unsigned in marks:
            return _number("unsigned", int, _UINT)
        if hint is str:
            return _string(most or MAX_STRING)
        if hint is bytes:
            return _bytes(most or MAX_BYTES)
        if hint in _KINDS:
            return _KINDS[hint]
        if origin is Literal or (isinstance(hint, type) and issubclass(hint, enum.Enum)):
            return _choice(get_args(hint) if origin is Literal else tuple(hint))
        if origin in (Union, types.UnionType):
            return _union([self._kind(one) for one in get_args(hint)])
        if origin is tuple:
            return self._tuple(get_args(hint), most or MAX_ITEMS)
        if origin in (dict, Mapping):
            keys, items = (self._tuple((one, ...), most or MAX_ITEMS) for one in get_args(hint))
            return _mapping(keys, items)
        if is_dataclass(hint) and isinstance(hint, type):
            return self._dataclass(hint)
        raise TypeError(f"{hint} has no encoding")

    def _tuple(self, parts: tuple[typing.Any, ...], most: int) -> _Kind:
        if len(parts) == 2 and parts[1] is ...:
            return _column(self._kind(parts[0]), most)
        kinds = [self._kind(part) for part in parts]
        return _fixed(kinds)

    def _dataclass(self, cls: type) -> _Kind:
        """``cls`` may contain itself."""
        names = [field.name for field in fields(cls) if field.init]
        writes, reads = list[_Write](), list[_Read]()
        get = _getter(names)

        def write(value: object, parts: list[bytes]) -> None:
            if type(value) is not cls:
                raise TypeError(f"{type(value).__name__} instead of {cls.__name__}")
            try:
                for write_part, part in zip(writes, get(value), strict=True):
                    write_part(part, parts)
            except _INVALID as error:
                raise ProtocolError(f"{cls.__name__}: {error}") from error

        def read(cursor: _Cursor) -> object:
            return cls(*[read_part(cursor) for read_part in reads])

        def column(most: int) -> _Kind:
            return _columns(cls.__name__, kinds, lambda values: map(get, values), lambda found: map(cls, *found), most)

        self._kinds[cls] = _Kind(cls.__name__, cls, write, read)
        hints = get_type_hints(cls, include_extras=True)
        kinds = [self._kind(hints[name]) for name in names]
        writes += [kind.write for kind in kinds]
        reads += [kind.read for kind in kinds]
        self._schemas[cls] = f"{cls.__name__}({', '.join(f'{n}: {k.schema}' for n, k in zip(names, kinds, strict=True))})"
        return replace(self._kinds[cls], column=column if _all_columns(kinds) else None)


def _getter(names: Sequence[str]) -> Callable[[object], tuple[object, ...]]:
    """What returns these attributes of an object."""
    if len(names) > 1:
        return attrgetter(*names)
    return lambda value: tuple(getattr(value, name) for name in names)


def _check(length: int, most: int) -> None:
    if length > most:
        raise ProtocolError(f"a length of {length} exceeds {most}")


def _number(name: str, python: type | tuple[type, ...], form: struct.Struct) -> _Kind:
    code = form.format[-1]

    def write(value: int | float, parts: list[bytes]) -> None:
        parts.append(form.pack(value))

    def read(cursor: _Cursor) -> object:
        return form.unpack(cursor.take(form.size))[0]

    def column(most: int) -> _Kind:
        def write(value: Sequence[int], parts: list[bytes]) -> None:
            _check(len(value), most)
            parts += (_LENGTH.pack(len(value)), array.array(code, value).tobytes())

        def read(cursor: _Cursor) -> object:
            return tuple(array.array(code, cursor.take(form.size * cursor.length(most, form.size))))

        return _Kind(f"[{name}]{most}", tuple, write, read, lambda most: _ragged(name, code, most))

    return _Kind(name, python, write, read, column)


def _ragged(name: str, code: str, most: int) -> _Kind:
    """A column of tuples of numbers: how many each has, and all of them in one piece."""
    counts, flat = _column(_KINDS[int], most), _column(_number(name, object, struct.Struct(f"<{code}")), 8 * most)

    def write(value: Sequence[Sequence[int]], parts: list[bytes]) -> None:
        counts.write(tuple(map(len, value)), parts)
        flat.write(tuple(itertools.chain.from_iterable(value)), parts)

    def read(cursor: _Cursor) -> object:
        return _cut(counts.read(cursor), flat.read(cursor))

    return _Kind(f"[[{name}]]{most}", tuple, write, read)


def _cut(lengths: typing.Any, whole: typing.Any) -> tuple[typing.Any, ...]:
    """Slices of ``whole``, one behind the other."""
    if min(lengths, default=0) < 0 or sum(lengths) != len(whole):
        raise ProtocolError(f"parts of {sum(lengths)} entries in {len(whole)}")
    ends = list(itertools.accumulate(lengths, initial=0))
    return tuple([whole[start:end] for start, end in itertools.pairwise(ends)])


def _choice(options: Sequence[object]) -> _Kind:
    numbers = {option: bytes([number]) for number, option in enumerate(options)}

    def write(value: object, parts: list[bytes]) -> None:
        if value not in numbers:
            raise ValueError(f"{value!r} is none of {list(options)}")
        parts.append(numbers[value])

    def read(cursor: _Cursor) -> object:
        (number,) = cursor.take(1)
        if number >= len(options):
            raise ProtocolError(f"choice {number} of {len(options)}")
        return options[number]

    def column(most: int) -> _Kind:
        def write(value: Sequence[object], parts: list[bytes]) -> None:
            text.write(b"".join([numbers[one] for one in value]), parts)

        def read(cursor: _Cursor) -> object:
            found = text.read(cursor)
            assert isinstance(found, bytes)
            if found and max(found) >= len(options):
                raise ProtocolError(f"choice {max(found)} of {len(options)}")
            return tuple([options[number] for number in found])

        text = _bytes(most)
        return _Kind(f"[{schema}]{most}", tuple, write, read)

    schema = f"choice{list(options)}"
    return _Kind(schema, type(options[0]), write, read, column)


def _string(most: int) -> _Kind:
    def write(value: str, parts: list[bytes]) -> None:
        data = value.encode()
        _check(len(data), most)
        parts += (_LENGTH.pack(len(data)), data)

    def read(cursor: _Cursor) -> object:
        return cursor.take(cursor.length(most)).decode()

    def column(items: int) -> _Kind:
        """Their number, their lengths in characters, and one text."""

        def write(value: Sequence[str], parts: list[bytes]) -> None:
            _check(len(value), items)
            lengths, data = array.array("I", map(len, value)), "".join(value).encode()
            _check(max(lengths, default=0), most)
            parts += (_LENGTH.pack(len(value)), lengths.tobytes(), _LENGTH.pack(len(data)), data)

        def read(cursor: _Cursor) -> object:
            lengths = array.array("I", cursor.take(4 * cursor.length(items, 4)))
            _check(max(lengths, default=0), most)
            return _cut(lengths, cursor.take(cursor.length(len(cursor.data))).decode())

        return _Kind(f"[str{most}]{items}", tuple, write, read)

    return _Kind(f"str{most}", str, write, read, column)


def _bytes(most: int) -> _Kind:
    def write(value: bytes, parts: list[bytes]) -> None:
        _check(len(value), most)
        parts += (_LENGTH.pack(len(value)), value)

    def read(cursor: _Cursor) -> object:
        return cursor.take(cursor.length(most))

    return _Kind(f"bytes{most}", bytes, write, read)


def _plain(most: int) -> _Kind:
    text = _string(most)

    def write(value: object, parts: list[bytes]) -> None:
        text.write(values.dumps(value), parts)

    def read(cursor: _Cursor) -> object:
        return values.loads(str(text.read(cursor)))

    return _Kind(f"plain{most}", object, write, read)


def _column(entry: _Kind, most: int) -> _Kind:
    """A sequence of any length."""
    if entry.column is not None:
        return entry.column(most)

    def write(value: Sequence[object], parts: list[bytes]) -> None:
        _check(len(value), most)
        parts.append(_LENGTH.pack(len(value)))
        for one in value:
            entry.write(one, parts)

    def read(cursor: _Cursor) -> object:
        return tuple([entry.read(cursor) for _ in range(cursor.length(most))])

    return _Kind(f"[{entry.schema}]{most}", tuple, write, read)


def _columns(
    name: str,
    kinds: Sequence[_Kind],
    rows: Callable[[Sequence[object]], typing.Iterable[tuple[object, ...]]],
    made: Callable[[list[typing.Any]], typing.Iterable[object]],
    most: int,
) -> _Kind:
    """A sequence of records, column by column."""

    columns = [_column(kind, most) for kind in kinds]

    def write(value: Sequence[object], parts: list[bytes]) -> None:
        found = list(zip(*rows(value), strict=True)) or [()] * len(kinds)
        for column, of in zip(columns, found, strict=True):
            column.write(of, parts)

    def read(cursor: _Cursor) -> object:
        found: list[typing.Any] = [column.read(cursor) for column in columns]
        if len({len(column) for column in found}) != 1:
            raise ProtocolError(f"columns of {name} have different lengths")
        return tuple(made(found))

    return _Kind(f"[{name}]{most}", tuple, write, read)


def _fixed(kinds: list[_Kind]) -> _Kind:
    def write(value: Sequence[object], parts: list[bytes]) -> None:
        for kind, one in zip(kinds, value, strict=True):
            kind.write(one, parts)

    def read(cursor: _Cursor) -> object:
        return tuple([kind.read(cursor) for kind in kinds])

    def column(most: int) -> _Kind:
        return _columns(schema, kinds, lambda values: values, lambda found: zip(*found, strict=True), most)  # type: ignore[arg-type,return-value]

    schema = f"({', '.join(kind.schema for kind in kinds)})"
    return _Kind(schema, tuple, write, read, column if _all_columns(kinds) else None)


def _all_columns(kinds: Sequence[_Kind]) -> bool:
    return bool(kinds) and all(kind.column is not None for kind in kinds)


def _mapping(keys: _Kind, items: _Kind) -> _Kind:
    def write(value: Mapping[object, object], parts: list[bytes]) -> None:
        keys.write(tuple(value), parts)
        items.write(tuple(value.values()), parts)

    def read(cursor: _Cursor) -> object:
        names: typing.Any = keys.read(cursor)
        found: typing.Any = items.read(cursor)
        mapping = dict(zip(names, found, strict=True))
        if len(mapping) < len(names):
            raise ProtocolError("a key occurs twice")
        return mapping

    return _Kind(f"{{{keys.schema}: {items.schema}}}", Mapping, write, read)


def _union(kinds: list[_Kind]) -> _Kind:
    def write(value: object, parts: list[bytes]) -> None:
        for number, kind in enumerate(kinds):
            if isinstance(value, kind.python):
                parts.append(bytes([number]))
                kind.write(value, parts)
                return
        raise TypeError(f"{type(value).__name__} is none of {[kind.schema for kind in kinds]}")

    def read(cursor: _Cursor) -> object:
        (number,) = cursor.take(1)
        if number >= len(kinds):
            raise ProtocolError(f"alternative {number} of {len(kinds)}")
        return kinds[number].read(cursor)

    return _Kind(" | ".join(kind.schema for kind in kinds), object, write, read)


def _nothing(value: None, parts: list[bytes]) -> None:
    if value is not None:
        raise TypeError(f"{value!r} instead of None")


_KINDS: dict[object, _Kind] = {
    int: _number("int", int, _INT),
    float: _number("float", (float, int), _FLOAT),
    bool: _choice((False, True)),
    type(None): _Kind("None", type(None), _nothing, lambda cursor: None),
}
