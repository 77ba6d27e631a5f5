"""A store whose process is killed at one of its changes."""

from __future__ import annotations

from typing import Any

from raystow.storage.object_store import ObjectStore


class Killed(BaseException):
    pass


class KilledStore:
    """A store that raises ``Killed`` directly before or after its ``last``-th change."""

    def __init__(self, store: ObjectStore, last: int, *, after: bool) -> None:
        self._store, self.left, self._after = store, last, after

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)
        if name not in ("put", "put_if", "delete"):
            return method

        def change(*args: Any) -> Any:
            self.left -= 1
            if self.left < 0 or (self.left == 0 and not self._after):
                raise Killed
            found = method(*args)
            if self.left == 0:
                raise Killed
            return found

        return change
