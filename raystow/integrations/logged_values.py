"""What a trainer has logged, as a part of a state and as the metrics of a version."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Mapping, Sequence

from ..orchestrator import argument_checks
from ..state import value_text
from ..storage.errors import StateError
from ..storage.format.values import is_plain

logger = logging.getLogger(__name__)


def log_of(history: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """Return what a trainer has logged, to save. A warning names what is left out: the training goes on."""
    return [{name: value for name, value in logs.items() if is_plain(value) or _storable(name, value)} for logs in history]


def _storable(name: str, value: object) -> bool:
    try:
        value_text.dumps(value)
    except StateError:
        _leave_out(name, type(value).__name__, "cannot be saved")
        return False
    return True


def metrics_of(logged: Mapping[str, object]) -> dict[str, int | float]:
    """Return the numbers among what a trainer has logged, as metrics of a version. A warning names what is left out: the training
    goes on."""
    found: dict[str, int | float] = {}
    for name, value in logged.items():
        with contextlib.suppress(StateError):
            number = argument_checks.metrics_of({name: value})[name]
            if isinstance(number, int | float):
                found[name] = number
        if name not in found:
            _leave_out(name, type(value).__name__, "is not a number, and no metric of the version")
    return found


@functools.cache  # once for each, as each save finds them again
def _leave_out(name: object, kind: str, why: str) -> None:
    logger.warning("the logged value %r of type %s %s", name, kind, why)
