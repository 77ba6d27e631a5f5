"""The time by the store's clock, which all users of a repository share.

It alone decides whether a grace period or a lease is over: the ages of objects are by it, and a machine whose clock is wrong must
not delete what others read.
"""

from __future__ import annotations

from ..errors import StoreError, StoreUnavailable
from ..format import keys
from ..object_store import ObjectStore
from ..runtime.clock import Clock

_TRIES = 5


def now(store: ObjectStore, clock: Clock) -> float:
    """Seconds since 1970 by the store, from an object that is written for this, listed, and removed."""
    key = keys.trial(clock.token())
    store.put(key, [b""])  # needs no space on a full disk
    try:
        for _ in range(_TRIES):
            for info in store.list(key):
                return info.modified
            clock.sleep(1.0)  # the listing lags behind
    finally:
        try:
            store.delete([key])
        except StoreError:
            pass  # a collection removes it later
    raise StoreUnavailable("a listing does not show what was written", subject=f"{store.uri}/{key}", remedy="try again later")
