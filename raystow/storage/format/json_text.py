"""JSON that may be hostile. An element of few bytes takes up to 200 as an object: they are counted before a text is parsed."""

from __future__ import annotations

import json
import reprlib
from collections import Counter
from typing import Any, NoReturn

import numpy as np

from ..limits import MAX_ITEMS

_PIECE = 1 << 20


def strict_json(text: str) -> Any:
    """Parse JSON. Raises ``ValueError`` for other texts, for NaN and infinities, for an object with a name twice, as parsers
    differ in which of the two they take, and for more elements than ``MAX_ITEMS``."""
    if items_of(text) > MAX_ITEMS:
        raise ValueError(f"more than {MAX_ITEMS} elements")
    return json.loads(text, parse_constant=_no_number, object_pairs_hook=_unique)


def items_of(text: str) -> int:
    """Return how many elements and containers a JSON text has; up to ``MAX_ITEMS``, brackets and commas in strings count, too."""
    items = sum(map(text.count, ",[{"))
    if items <= MAX_ITEMS:
        return items
    text = text.replace("\\\\", "__").replace('\\"', "__")  # what remains of quotes begins or ends a string
    items = quotes = 0
    for start in range(0, len(text), _PIECE):
        piece = np.frombuffer(text[start : start + _PIECE].encode("ascii", "replace"), np.uint8)
        quote = piece == ord('"')
        outside = (np.cumsum(quote, dtype=np.uint32) + quotes) % 2 == 0
        items += int(np.count_nonzero(outside & ((piece == ord(",")) | (piece == ord("[")) | (piece == ord("{")))))
        quotes += int(np.count_nonzero(quote))
    return items


def shown(value: object) -> str:
    """A stored value in an error message: short, whatever its size."""
    return reprlib.repr(value)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"the name {shown(twice)} occurs twice in an object")
    return found


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a number in JSON")
