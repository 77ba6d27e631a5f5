"""Thrift's compact protocol, for the footer and page headers of a Parquet file.

A Parquet library trusts every number in them. So this reads what the library reads, and refuses what two readers could read
differently: a number that does not fit its type, or a field that occurs twice.
"""

from __future__ import annotations

from typing import Union

from ..errors import Damaged

_TRUE, _FALSE, _BYTE, I16, I32, I64, _DOUBLE, BINARY, LIST, _SET, _MAP, STRUCT = range(1, 13)
_SIZES = {_TRUE: 1, _FALSE: 1, _BYTE: 1, _DOUBLE: 8}
_BITS = {I16: 16, I32: 32, I64: 64}
_DEPTH = 16

Struct = dict[int, "tuple[int, Value]"]
"""Field number -> type and value."""
Value = Union[int, Struct, "list[Value]", None]
"""A number, a struct, or a list of them. Other values are None."""


def integer(struct: Struct, field: int, kind: int) -> int | None:
    """A field's number; None if there is none of this type: Thrift readers skip fields of other types."""
    found = struct.get(field)
    return found[1] if found is not None and found[0] == kind and isinstance(found[1], int) else None


def count(struct: Struct, field: int, kind: int) -> int:
    """A required field with a number that is not negative."""
    value = integer(struct, field, kind)
    if value is None or value < 0:
        raise Damaged(f"field {field} of the Parquet metadata is {value}")
    return value


def substruct(struct: Struct, field: int) -> Struct:
    """A field's struct; an empty one if there is none."""
    found = struct.get(field, (0, None))[1]
    return found if isinstance(found, dict) else {}


def structs(struct: Struct, field: int) -> list[Struct]:
    """The structs in a field's list; none if there is no list."""
    found = struct.get(field, (0, None))
    return [one if isinstance(one, dict) else {} for one in found[1]] if found[0] == LIST and isinstance(found[1], list) else []


class Scanner:
    """Reads structs from ``data`` at ``at``, which advances. Raises ``Damaged`` for anything else, or beyond ``end``."""

    def __init__(self, data: bytes, at: int, end: int) -> None:
        self._data, self.at, self._end = data, at, end

    def struct(self, depth: int = 0) -> Struct:
        """The struct that begins here."""
        fields, number = Struct(), 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self._integer(I16)
            if number in fields:
                raise Damaged(f"the Parquet metadata has a field {number} twice")
            kind = head & 15
            fields[number] = kind, (None if kind in (_TRUE, _FALSE) else self._value(kind, depth + 1))
        return fields

    def _value(self, kind: int, depth: int) -> Value:
        if depth > _DEPTH:
            raise Damaged("the Parquet metadata is nested too deeply")
        if kind in _BITS:
            return self._integer(kind)
        if kind == STRUCT:
            return self.struct(depth)
        if kind in (LIST, _SET):
            head = self._byte()
            return [self._value(head & 15, depth + 1) for _ in range(head >> 4 if head < 0xF0 else self._varint(32))]
        if kind == BINARY:
            self._skip(self._varint(32))
        elif kind in _SIZES:
            self._skip(_SIZES[kind])
        else:
            raise Damaged(f"the Parquet metadata has a field of type {kind}")  # a map: Parquet has none
        return None

    def _skip(self, size: int) -> None:
        self.at += size
        if self.at > self._end:
            raise Damaged("the Parquet metadata is cut off")

    def _byte(self) -> int:
        self._skip(1)
        return self._data[self.at - 1]

    def _varint(self, bits: int) -> int:
        value = 0
        for shift in range(0, bits, 7):
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128 and value < 1 << bits:
                return value
        raise Damaged("a number in the Parquet metadata is too large")

    def _integer(self, kind: int) -> int:
        zigzag = self._varint(_BITS[kind])
        return (zigzag >> 1) ^ -(zigzag & 1)
