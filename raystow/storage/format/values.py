"""Plain Python values as JSON text, bit for bit, with a tag where JSON has no such value.

``None``, bools, strings, finite floats and integers below 2**63 are themselves. The others are one-entry objects: ``{"float":
"7ff8000000000000"}`` (IEEE 754 bits of a NaN or infinity), ``{"int": "-0x8000..."}``, ``{"complex": [re, im]}``, ``{"bytes":
"<base64>"}``, and ``{"empty": "dict" | "list" | "tuple"}`` for an empty container.
"""

from __future__ import annotations

import base64
import json
import math
import re
import struct

from ..errors import Damaged, StateError
from ..limits import MAX_DIGITS
from .json_text import shown, strict_json

Value = None | bool | int | float | complex | str | bytes | dict[object, object] | list[object] | tuple[object, ...]
PLAIN = (type(None), bool, int, float, complex, str, bytes)
_JSON = json.JSONEncoder(allow_nan=False)  # ``json.dumps`` would make one for each value
_HEX = re.compile(f"-?0x[0-9a-f]{{1,{MAX_DIGITS}}}")
_BRACKETS = 4
"""What the form of a complex number has at most; no other form has more, and strings and Base64 do not count."""
_EMPTY: dict[str, Value] = {"dict": {}, "list": [], "tuple": ()}


def is_plain(value: object) -> bool:
    """Whether ``dumps`` takes the value: one of the plain types itself, no subclass."""
    return type(value) in PLAIN


def encode(value: object) -> object:
    """The JSON form of a plain value or empty container. Raises ``StateError`` for an integer above the limit."""
    if type(value) is float and not math.isfinite(value):
        return {"float": struct.pack(">d", value).hex()}
    if type(value) is int and not -(1 << 63) <= value < 1 << 63:
        if value.bit_length() > 4 * MAX_DIGITS:
            raise StateError(
                f"an integer of {value.bit_length()} bits; {4 * MAX_DIGITS} can be stored", remedy="store it as bytes"
            )
        return {"int": hex(value)}
    if type(value) is complex:
        return {"complex": [encode(value.real), encode(value.imag)]}
    if type(value) is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, dict | list | tuple):
        return {"empty": "dict" if isinstance(value, dict) else "list" if isinstance(value, list) else "tuple"}
    return value


def decode(form: object) -> Value:
    """The value of a form that ``encode`` returned. Raises ``Damaged`` for any other."""
    if form is None or isinstance(form, bool | str):
        return form
    if isinstance(form, int) and -(1 << 63) <= form < 1 << 63:
        return form
    if isinstance(form, float) and math.isfinite(form):
        return form
    try:
        if not isinstance(form, dict):
            raise TypeError("no object")
        ((tag, body),) = form.items()
        if tag == "float" and len(body) == 16:
            return float(struct.unpack(">d", bytes.fromhex(body))[0])
        if tag == "int" and _HEX.fullmatch(body):
            return int(body, 16)
        if tag == "complex":
            real, imag = map(decode, body)
            if isinstance(real, float) and isinstance(imag, float):
                return complex(real, imag)
        if tag == "bytes":
            return base64.b64decode(body, validate=True)
        if tag == "empty":
            return type(_EMPTY[body])()  # type: ignore[misc]
    except (AttributeError, ValueError, TypeError, KeyError, RecursionError, struct.error) as error:
        raise Damaged(f"not a stored value: {shown(form)}") from error
    raise Damaged(f"not a stored value: {shown(form)}")


def dumps(value: object) -> str:
    """JSON text of one value."""
    return _JSON.encode(encode(value))


def loads(text: str) -> Value:
    """The value of a JSON text. Raises ``Damaged`` for any other text."""
    if text.lstrip()[:1] != '"' and text.count("{") + text.count("[") > _BRACKETS:
        raise Damaged(f"not a stored value: {text[:40]!r}")  # parsing may take 32 times the memory of the text
    try:
        return decode(strict_json(text))
    except ValueError as error:
        raise Damaged(f"not JSON: {text[:40]!r}") from error
