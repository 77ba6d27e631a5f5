"""Log lines that carry fields, so that whoever collects them can ask for a version, a rank or a node.

The fields: ``repository`` (its URI), ``version`` (the id; of an attempt, the one it would have), ``attempt``, ``step``, ``rank``
and ``node``, as far as they are known where the line is written. Ray's JSON encoding prints them: see ``docs/operating.md``.
"""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

from .format import keys

_here: dict[str, object] = {}


class Log(logging.LoggerAdapter):  # type: ignore[type-arg]  # generic from Python 3.11 on only
    """A logger whose lines all carry some fields: its own, those of the process, and those of the single line."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """As ``LoggerAdapter``, which would drop the fields of the single line."""
        return msg, {**kwargs, "extra": {**_here, **(self.extra or {}), **kwargs.get("extra", {})}}


def about(logger: logging.Logger, **fields: object) -> Log:
    """``logger``, with these fields on each line."""
    return Log(logger, fields)


def here(**fields: object) -> None:
    """Fields of all lines of this process: which node it runs on."""
    _here.update(fields)


def whose(key: str) -> dict[str, object]:
    """The fields that tell of which version an object is, by its key."""
    return dict(zip(("version", "attempt"), keys.attempt_of(key) or (), strict=False))
