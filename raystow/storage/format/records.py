"""The small JSON records: marker, root, version record. Each begins with a line that holds the digest of all that follows.

    {"digest": "<64 hexadecimal digits: BLAKE3 of every byte after this line>",
     "format": 1,
     "record": "root.json",
     ...

So a person can read it, any JSON parser takes it, and a flipped bit anywhere is found without agreeing on a canonical form.
``record`` is the name of the record's own file: one record copied over another is found as well.
"""

from __future__ import annotations

import json
import math
import reprlib
from typing import Any, NoReturn

from ..coding.digest import stored_digest
from ..errors import Damaged, StateError, Unsupported
from ..limits import MAX_INTEGER, MAX_MARKER, MAX_RECORD, MAX_ROOT, MAX_SIGNATURE, MAX_TIME

FORMAT = 1
LIMITS = {"raystow.json": MAX_MARKER, "root.json": MAX_ROOT, "version.json": MAX_RECORD, "version.sig": MAX_SIGNATURE}
"""Bytes that each record has at most, by its file's name."""
_LINE = len('{"digest": "') + 64 + len('",\n')


def dump(fields: dict[str, Any], key: str) -> bytes:
    """The bytes of the record that is to lie at ``key``; ``StateError`` if they are more than readers take."""
    text = json.dumps({"format": FORMAT, "record": _name(key), **fields}, indent=1, allow_nan=False)
    body = text[text.index("{") + 1 :].lstrip("\n").encode()
    if _LINE + len(body) > LIMITS[_name(key)]:
        what = f"the record would take {_LINE + len(body)} bytes, and readers take {LIMITS[_name(key)]}"
        raise StateError(what, subject=key, remedy="prune versions, or save less in one")
    return f'{{"digest": "{stored_digest(body).hex()}",\n'.encode() + body


def load(data: bytes, key: str) -> dict[str, Any]:
    """The fields of a record; ``Damaged`` naming ``key`` unless every byte is as written, ``Unsupported`` for another format."""
    line, body = data[:_LINE], data[_LINE:]
    if line != f'{{"digest": "{stored_digest(body).hex()}",\n'.encode():
        raise Damaged("the record does not match its own digest", subject=key)
    try:
        fields = json.loads(data.decode(), parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"not JSON: {error}", subject=key) from error
    if not isinstance(fields, dict):
        raise Damaged("not a record", subject=key)
    if fields.get("format") != FORMAT:
        what = f"format {shown(fields.get('format'))}; this raystow reads {FORMAT}"
        raise Unsupported(what, subject=key, remedy="upgrade raystow")
    if fields.get("record") != _name(key):
        raise Damaged(f"the object holds another record: {shown(fields.get('record'))}", subject=key)
    return fields


def field(fields: dict[str, Any], name: str, kind: type | tuple[type, ...], key: str) -> Any:
    """``fields[name]``, checked to be of ``kind`` (and, for integers, not a bool, not negative, and of at most 63 bits)."""
    value = fields.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise Damaged(f"field {name!r} is {shown(value)}", subject=key)
    if isinstance(value, int) and not 0 <= value <= MAX_INTEGER:
        raise Damaged(f"field {name!r} is {shown(value)}, which is no number here", subject=key)
    return value


def column(rows: list[dict[str, Any]], name: str, kind: type, key: str) -> list[Any]:
    """``field`` of each row, for hundreds of thousands of them: looked at one by one only if something is wrong somewhere."""
    try:
        values = [row[name] for row in rows]
    except (TypeError, LookupError):
        values = [None]
    if {*map(type, values)} <= {kind} and (kind is not int or not values or 0 <= min(values) <= max(values) <= MAX_INTEGER):
        return values
    return [field(row, name, kind, key) for row in rows]


def ids(fields: dict[str, Any], name: str, key: str) -> tuple[int, ...]:
    """``fields[name]``, checked to be ids of versions, ascending."""
    values = field(fields, name, list, key)
    if any(type(id) is not int or not 1 <= id <= MAX_INTEGER for id in values) or values != sorted(set(values)):
        raise Damaged(f"field {name!r} is {shown(values)}, which are no ids in order", subject=key)
    return tuple(values)


def time(fields: dict[str, Any], name: str, key: str) -> float:
    """``fields[name]``, checked to be a time that a calendar has: seconds since 1970."""
    value = field(fields, name, (int, float), key)
    if not (math.isfinite(value) and 0 <= value <= MAX_TIME):
        raise Damaged(f"field {name!r} is {shown(value)}, which is no time", subject=key)
    return float(value)


def texts(fields: dict[str, Any], name: str, key: str) -> tuple[str, ...]:
    """``fields[name]``, checked to be a list of texts."""
    value = field(fields, name, list, key)
    if not all(isinstance(text, str) for text in value):
        raise Damaged(f"field {name!r} is {shown(value)}", subject=key)
    return tuple(value)


def shown(value: object) -> str:
    """A value from storage for an error's text: short, however large or deep it is."""
    return reprlib.repr(value)


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a number in JSON")


def _name(key: str) -> str:
    return key.rpartition("/")[2]
