"""The time by the store's own clock: the one clock that all who share a repository share.

Whether a grace period or a lease is over is decided by it alone: the ages of objects are by the store's clock, and a machine
whose own clock has jumped must not delete what others still read.
"""

from __future__ import annotations

from .clock import Clock
from .errors import StoreError, StoreUnavailable
from .object_store import ObjectStore
from .probe import PREFIX

_TRIES = 5


def now(store: ObjectStore, clock: Clock) -> float:
    """Seconds since 1970 by the store: what it says of an object that is written for this, listed, and removed again."""
    key = f"{PREFIX}{clock.token()}"
    store.put(key, [b"what time is it?"])
    try:
        for _ in range(_TRIES):
            for info in store.list(key):
                return info.modified
            clock.sleep(1.0)  # a listing that lags behind
    finally:
        try:
            store.delete([key])
        except StoreError:
            pass  # collected later: it is some bytes
    raise StoreUnavailable("a listing does not show what was written", subject=f"{store.uri}/{key}", remedy="try again later")
