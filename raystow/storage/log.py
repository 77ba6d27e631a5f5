"""Log lines that carry fields, so that they can be searched by version, rank or node.

The fields: ``repository`` (its URI), ``version`` (the id; of an attempt, the id that it would have), ``attempt``, ``step``,
``rank`` and ``node``, as far as they are known. Ray's JSON encoding prints them: see ``docs/operating.md``.
"""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

from .format import keys

_here: dict[str, object] = {}


class Log(logging.LoggerAdapter):  # type: ignore[type-arg]  # generic from Python 3.11 on only
    """A logger that adds fields to each line: its own, those of the process, and those of the line."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """As ``LoggerAdapter``, which would drop the fields of the line."""
        return msg, {**kwargs, "extra": {**_here, **(self.extra or {}), **kwargs.get("extra", {})}}


def about(logger: logging.Logger, **fields: object) -> Log:
    """``logger``, with these fields on each line."""
    return Log(logger, fields)


def here(**fields: object) -> None:
    """Set fields of all lines of this process, such as its node."""
    _here.update(fields)


def whose(key: str) -> dict[str, object]:
    """The version and attempt of an object, by its key, as fields."""
    return dict(zip(("version", "attempt"), keys.attempt_of(key) or (), strict=False))
