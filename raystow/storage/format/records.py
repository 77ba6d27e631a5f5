"""The JSON records: marker, root, version record. The first line has the digest of all that follows.

    {"digest": "<64 hexadecimal digits: BLAKE3 of every byte after this line>",
     "format": 1, "record": "root.json", ...

So any JSON parser can read one, and a flipped bit is found without a canonical form. ``record`` is the name of the record's own
file, so a record that was copied over another is found as well.
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
"""The largest size of each record in bytes, by file name."""
_LINE = len('{"digest": "') + 64 + len('",\n')


def dump(fields: dict[str, Any], key: str) -> bytes:
    """The bytes of a record for ``key``. Raises ``StateError`` if they exceed the limit."""
    text = json.dumps({"format": FORMAT, "record": _name(key), **fields}, indent=1, allow_nan=False)
    body = text[text.index("{") + 1 :].lstrip("\n").encode()
    if _LINE + len(body) > LIMITS[_name(key)]:
        what = f"the record would take {_LINE + len(body)} bytes, and readers take {LIMITS[_name(key)]}"
        raise StateError(what, subject=key, remedy="prune versions, or save less in one")
    return f'{{"digest": "{stored_digest(body).hex()}",\n'.encode() + body


def load(data: bytes, key: str) -> dict[str, Any]:
    """The fields of a record. Raises ``Damaged`` naming ``key``, or ``Unsupported`` for another format."""
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
        raise Damaged(f"the object is another record: {shown(fields.get('record'))}", subject=key)
    return fields


def field(fields: dict[str, Any], name: str, kind: type | tuple[type, ...], key: str) -> Any:
    """``fields[name]``, checked to be of ``kind``. Integers are not negative and have at most 63 bits; a bool is none."""
    value = fields.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise Damaged(f"field {name!r} is {shown(value)}", subject=key)
    if isinstance(value, int) and not 0 <= value <= MAX_INTEGER:
        raise Damaged(f"field {name!r} is {shown(value)}, which is out of range", subject=key)
    return value


def column(rows: list[dict[str, Any]], name: str, kind: type, key: str) -> list[Any]:
    """``field`` of each row, fast for hundreds of thousands: they are checked one by one only if something is wrong."""
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
        raise Damaged(f"field {name!r} is {shown(values)}, which are no ascending ids", subject=key)
    return tuple(values)


def time(fields: dict[str, Any], name: str, key: str) -> float:
    """``fields[name]``, checked to be seconds since 1970 within the calendar."""
    value = field(fields, name, (int, float), key)
    if not (math.isfinite(value) and 0 <= value <= MAX_TIME):
        raise Damaged(f"field {name!r} is {shown(value)}, which is no time", subject=key)
    return float(value)


def texts(fields: dict[str, Any], name: str, key: str) -> tuple[str, ...]:
    """``fields[name]``, checked to be a list of strings."""
    value = field(fields, name, list, key)
    if not all(isinstance(text, str) for text in value):
        raise Damaged(f"field {name!r} is {shown(value)}", subject=key)
    return tuple(value)


def shown(value: object) -> str:
    """A stored value in an error message: short, whatever its size."""
    return reprlib.repr(value)


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a number in JSON")


def _name(key: str) -> str:
    return key.rpartition("/")[2]
