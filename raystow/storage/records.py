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
from typing import Any

from .digest import stored_digest
from .errors import Damaged, Unsupported

FORMAT = 1
_LINE = len('{"digest": "') + 64 + len('",\n')


def dump(fields: dict[str, Any], key: str) -> bytes:
    """The bytes of the record that is to lie at ``key``."""
    text = json.dumps({"format": FORMAT, "record": _name(key), **fields}, indent=1, allow_nan=False)
    body = text[text.index("{") + 1 :].lstrip("\n").encode()
    return f'{{"digest": "{stored_digest(body).hex()}",\n'.encode() + body


def load(data: bytes, key: str) -> dict[str, Any]:
    """The fields of a record; ``Damaged`` naming ``key`` unless every byte is as written, ``Unsupported`` for another format."""
    line, body = data[:_LINE], data[_LINE:]
    if line != f'{{"digest": "{stored_digest(body).hex()}",\n'.encode():
        raise Damaged("the record does not match its own digest", subject=key)
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"not JSON: {error}", subject=key) from error
    if not isinstance(fields, dict):
        raise Damaged("not a record", subject=key)
    if fields.get("format") != FORMAT:
        raise Unsupported(f"format {fields.get('format')!r}; this raystow reads {FORMAT}", subject=key, remedy="upgrade raystow")
    if fields.get("record") != _name(key):
        raise Damaged(f"the object holds another record: {fields.get('record')!r:.60}", subject=key)
    return fields


def field(fields: dict[str, Any], name: str, kind: type | tuple[type, ...], key: str) -> Any:
    """``fields[name]``, checked to be of ``kind`` (and, for numbers, not a bool and not negative)."""
    value = fields.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise Damaged(f"field {name!r} is {value!r:.60}", subject=key)
    if isinstance(value, int | float) and value < 0:
        raise Damaged(f"field {name!r} is negative", subject=key)
    return value


def _name(key: str) -> str:
    return key.rpartition("/")[2]
