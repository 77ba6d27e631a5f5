"""Plain Python values as JSON text, bit for bit, with a tag where JSON has no such value.

``None``, bools, strings, finite floats and integers below 2**63 are themselves. The others are one-entry objects:
``{"float": "7ff8000000000000"}`` (IEEE 754 bits of a NaN or infinity), ``{"int": "-0x8000..."}``, ``{"complex": [re, im]}``,
``{"bytes": "<base64>"}``, and ``{"empty": "dict" | "list" | "tuple"}`` for a container that holds nothing.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import struct
from typing import Any

from .errors import Damaged

Value = None | bool | int | float | complex | str | bytes | dict[Any, Any] | list[Any] | tuple[Any, ...]
PLAIN = (type(None), bool, int, float, complex, str, bytes)
_EMPTY: dict[str, Value] = {"dict": {}, "list": [], "tuple": ()}


def is_plain(value: object) -> bool:
    """Whether ``dumps`` takes the value: exactly one of the plain types, not a subclass that would come back as another."""
    return type(value) in PLAIN


def encode(value: Any) -> Any:
    """The JSON-able form of one plain value or empty container."""
    if type(value) is float and not math.isfinite(value):
        return {"float": struct.pack(">d", value).hex()}
    if type(value) is int and not -(1 << 63) <= value < 1 << 63:
        return {"int": hex(value)}
    if type(value) is complex:
        return {"complex": [encode(value.real), encode(value.imag)]}
    if type(value) is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, dict | list | tuple):
        return {"empty": "dict" if isinstance(value, dict) else "list" if isinstance(value, list) else "tuple"}
    return value


def decode(form: Any) -> Any:
    """The value of what ``encode`` gave; ``Damaged`` for anything else."""
    if not isinstance(form, dict):
        if isinstance(form, list):
            raise Damaged("a list is not a stored value")
        return form
    try:
        ((tag, body),) = form.items()
        if tag == "float":
            return struct.unpack(">d", bytes.fromhex(body))[0]
        if tag == "int":
            return int(body, 16)
        if tag == "complex":
            return complex(decode(body[0]), decode(body[1]))
        if tag == "bytes":
            return base64.b64decode(body, validate=True)
        if tag == "empty":
            return type(_EMPTY[body])()  # type: ignore[misc]
    except (ValueError, TypeError, KeyError, IndexError, struct.error, binascii.Error) as error:
        raise Damaged(f"not a stored value: {str(form)[:80]}") from error
    raise Damaged(f"not a stored value: {str(form)[:80]}")


def dumps(value: Any) -> str:
    """JSON text of one value."""
    return json.dumps(encode(value), allow_nan=False)


def loads(text: str) -> Any:
    """The value of a JSON text."""
    try:
        return decode(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise Damaged(f"not JSON: {text[:80]!r}") from error
