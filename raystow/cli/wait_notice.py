"""Says what a command waits for: it would seem to hang where a server accepts connections and never answers."""

from __future__ import annotations

from ..storage.runtime import background
from ..storage.runtime.clock import SYSTEM
from ..storage.stores import request_limits
from ..storage.stores.awaited import oldest
from ..storage.stores.request_limits import COMMAND_LIMITS, RequestLimits
from .output import err, printable

PATIENCE = 5.0  # seconds
_PAUSE = 0.5


def say_what_is_awaited(limits: RequestLimits = COMMAND_LIMITS, *, patience: float = PATIENCE, pause: float = _PAUSE) -> None:
    """Print on stderr, once, which request had no answer for 5 s. Requests of this process end sooner than a training's."""
    request_limits.use(limits)
    background.start("raystow-waits", _watch, patience, pause)


def _watch(patience: float, pause: float) -> None:
    while (request := oldest()) is None or SYSTEM.monotonic() - request.begun < patience:
        SYSTEM.sleep(pause)
    server = f" at {request.server}" if request.server else ""
    what = f"waiting for {request.operation} of {request.subject}{server}"
    err.print(printable(f"{what}; without an answer this ends after {request.seconds:.0f} s"))
