"""The progress of the saves that ranks of one node take part in: draining a node waits for one of them."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator

from msgspec.structs import replace

from ..protocol.messages import Saves


class SavesHere:
    """Counts for all repositories. For several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ranks: Counter[str] = Counter()
        self._saves: dict[str, Saves] = {}

    @contextlib.contextmanager
    def rank(self, uri: str) -> Iterator[None]:
        """While a rank is connected that saves to ``uri``."""
        with self._lock:
            self._ranks[uri] += 1
        try:
            yield
        finally:
            with self._lock:
                self._ranks[uri] -= 1

    def connected(self) -> dict[str, int]:
        """The ranks connected, by the URI of the repository."""
        with self._lock:
            return dict(self._ranks)

    def begin(self, uri: str) -> int:
        """A save has begun; its number."""
        with self._lock:
            saves = self._saves.get(uri, Saves())
            self._saves[uri] = replace(saves, begun=saves.begun + 1)
            return saves.begun + 1

    def settle(self, uri: str, number: int) -> None:
        """A save has become a version."""
        with self._lock:
            saves = self._saves[uri]
            self._saves[uri] = replace(saves, durable=max(saves.durable, number))

    def now(self) -> dict[str, Saves]:
        """By the URI of the repository, for those that ranks are connected for."""
        with self._lock:
            return {uri: self._saves.get(uri, Saves()) for uri, ranks in self._ranks.items() if ranks}
