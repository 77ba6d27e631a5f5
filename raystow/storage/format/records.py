"""The JSON records: marker, root, version record. The first line has the digest of all that follows.

    {"digest": "<64 hexadecimal digits: BLAKE3 of every byte after this line>",
     "format": 1, "record": "root.json", ...

So any JSON parser can read one, and a flipped bit is found without a canonical form. ``record`` is the name of the record's own
file, so a record that was copied over another is found as well.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypeVar, get_type_hints

from ..coding.digest import stored_digest
from ..errors import Damaged, StateError, Unsupported
from ..limits import MAX_INTEGER, MAX_ITEMS, MAX_MARKER, MAX_RECORD, MAX_ROOT, MAX_SEGMENT, MAX_SIGNATURE, MAX_TIME
from .json_text import items_of, shown, strict_json

T = TypeVar("T")
Json = dict[str, object]
"""A JSON object."""

FORMAT = 1
LIMITS = {
    "raystow.json": MAX_MARKER,
    "root.json": MAX_ROOT,
    "version.json": MAX_RECORD,
    "version.sig": MAX_SIGNATURE,
    "segment.json": MAX_SEGMENT,
    "segment.sig": MAX_SIGNATURE,
}
"""The largest size of each record in bytes, by file name."""
DIGEST = re.compile(r"[0-9a-f]{64}")
"""32 bytes: a digest, or a public key."""
_LINE = len('{"digest": "') + 64 + len('",\n')


def dump(fields: Mapping[str, object], key: str) -> bytes:
    """The bytes of a record for ``key``. Raises ``StateError`` if they exceed the limit or are no JSON."""
    try:
        body = (",\n".join(_lines({"format": FORMAT, "record": _name(key), **fields})) + "\n}").encode()
    except (ValueError, TypeError) as error:
        raise StateError(f"the record cannot be written: {error}", subject=key) from error
    data = f'{{"digest": "{stored_digest(body).hex()}",\n'.encode() + body
    if (items := items_of(data.decode())) > MAX_ITEMS:
        what = f"the record would have {items} elements, and readers take {MAX_ITEMS}"
        raise StateError(what, subject=key, remedy="prune versions, or save less in one")
    if len(data) > LIMITS[_name(key)]:
        what = f"the record would take {len(data)} bytes, and readers take {LIMITS[_name(key)]}"
        raise StateError(what, subject=key, remedy="prune versions, or save less in one")
    return data


def _lines(fields: Mapping[str, object]) -> Iterator[str]:
    """A line for each field, and for each object of an array."""
    encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode
    for name, value in fields.items():
        if isinstance(value, list | tuple) and value and isinstance(value[0], dict):
            yield f"{encode(name)}:[\n" + ",\n".join(map(encode, value)) + "]"
        else:
            yield f"{encode(name)}:{encode(value)}"


def load(data: bytes, key: str) -> Json:
    """The fields of a record. Raises ``Damaged`` naming ``key``, or ``Unsupported`` for another format."""
    line, body = data[:_LINE], data[_LINE:]
    if line != f'{{"digest": "{stored_digest(body).hex()}",\n'.encode():
        raise Damaged("the record does not match its own digest", subject=key)
    try:
        fields = strict_json(data.decode())
    except (ValueError, RecursionError) as error:
        raise Damaged(f"not JSON: {error}", subject=key) from error
    if not isinstance(fields, dict):
        raise Damaged("not a record", subject=key)
    if type(number := fields.get("format")) is not int:  # 1.0 and true are equal to 1
        raise Damaged(f"field 'format' is {shown(number)}", subject=key)
    if number != FORMAT:
        what = f"format {shown(number)}; this raystow reads {FORMAT}"
        raise Unsupported(what, subject=key, remedy="upgrade raystow")
    if fields.get("record") != _name(key):
        raise Damaged(f"the object is another record: {shown(fields.get('record'))}", subject=key)
    return fields


def field(fields: Json, name: str, kind: type[T], key: str) -> T:
    """``fields[name]``, checked to be of ``kind``. Integers are not negative and have at most 63 bits; a bool is none."""
    value = fields.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise Damaged(f"field {name!r} is {shown(value)}", subject=key)
    if isinstance(value, int) and not 0 <= value <= MAX_INTEGER:
        raise Damaged(f"field {name!r} is {shown(value)}, which is out of range", subject=key)
    return value


def parse(kind: Callable[..., T], fields: Json, key: str, *, optional: Collection[str] = (), **parsed: object) -> T:
    """The dataclass ``kind`` with the fields of these names, each checked by its type: an integer, a text, a time, ascending ids,
    or texts or integers by name. ``optional``: may be missing. ``parsed``: the fields that the caller has checked."""
    absent = {name for name in optional if name not in fields}.union(parsed)
    return kind(**{name: check(fields, name, key) for name, check in _checks(kind).items() if name not in absent}, **parsed)


def objects(fields: Json, name: str, key: str, *, optional: bool = False) -> list[Json]:
    """``fields[name]``, checked to be a list of objects. ``optional``: may be missing, then there are none."""
    found = field(fields, name, list, key) if name in fields or not optional else []
    if not all(isinstance(entry, dict) for entry in found):
        raise Damaged(f"an entry of {name!r} is not an object", subject=key)
    return found


def column(rows: list[Json], name: str, kind: type[T], key: str) -> list[T]:
    """``field`` of each row, fast for hundreds of thousands: they are checked one by one only if something is wrong."""
    values: list[Any] = [row.get(name) for row in rows]
    if {*map(type, values)} <= {kind} and (kind is not int or not values or 0 <= min(values) <= max(values) <= MAX_INTEGER):
        return values
    return [field(row, name, kind, key) for row in rows]


def integers(fields: Json, name: str, key: str, *, most: int = MAX_INTEGER) -> tuple[int, ...]:
    """``fields[name]``, checked to be integers from 0 to ``most``."""
    values = field(fields, name, list, key)
    if any(type(value) is not int or not 0 <= value <= most for value in values):
        raise Damaged(f"field {name!r} is {shown(values)}", subject=key)
    return tuple(values)


def ids(fields: Json, name: str, key: str) -> tuple[int, ...]:
    """``fields[name]``, checked to be ids of versions, ascending."""
    values = field(fields, name, list, key)
    if any(type(id) is not int or not 1 <= id <= MAX_INTEGER for id in values) or values != sorted(set(values)):
        raise Damaged(f"field {name!r} is {shown(values)}, which are not ascending ids", subject=key)
    return tuple(values)


def time(fields: Json, name: str, key: str) -> float:
    """``fields[name]``, checked to be seconds since 1970 within the calendar."""
    value = fields.get(name)
    value = field(fields, name, float if isinstance(value, float) else int, key)
    if not (math.isfinite(value) and 0 <= value <= MAX_TIME):
        raise Damaged(f"field {name!r} is {shown(value)}, which is not a time", subject=key)
    return float(value)


def texts(fields: Json, name: str, key: str) -> tuple[str, ...]:
    """``fields[name]``, checked to be a list of strings."""
    value = field(fields, name, list, key)
    if not all(isinstance(text, str) for text in value):
        raise Damaged(f"field {name!r} is {shown(value)}", subject=key)
    return tuple(value)


def _plain(kind: type) -> Callable[[Json, str, str], object]:
    return lambda fields, name, key: field(fields, name, kind, key)


def _integers_by_name(fields: Json, name: str, key: str) -> dict[str, int]:
    of = field(fields, name, dict, key)
    return {entry: field(of, entry, int, key) for entry in of}


def _texts_by_name(fields: Json, name: str, key: str) -> dict[str, str]:
    """Texts for people: other values are shown in a few words."""
    return {entry: text if isinstance(text, str) else shown(text) for entry, text in field(fields, name, dict, key).items()}


_CHECKS: dict[object, Callable[[Json, str, str], object]] = {
    int: _plain(int),
    int | None: _plain(int),
    str: _plain(str),
    float: time,
    float | None: time,
    tuple[int, ...]: ids,
    tuple[str, ...]: texts,
    dict[str, int]: _integers_by_name,
    dict[str, str]: _texts_by_name,
}


@functools.cache
def _checks(kind: Callable[..., object]) -> dict[str, Callable[[Json, str, str], object]]:
    """The check of each field of a dataclass."""
    return {name: _CHECKS[hint] for name, hint in get_type_hints(kind).items() if hint in _CHECKS}


def _name(key: str) -> str:
    return key.rpartition("/")[2]
