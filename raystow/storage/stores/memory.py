"""A store in this process's memory, for tests and demonstrations: the reference for the other stores."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ClassVar

from ..object_store import Buffer, ObjectInfo, Tagged, Unfinished
from ..runtime.clock import SYSTEM, Clock
from . import checks


class MemoryStore:
    """Objects in a dict under one lock. Pickling carries the name only: another process has an empty store of that name."""

    _stores: ClassVar[dict[str, MemoryStore]] = {}
    _stores_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, name: str, *, clock: Clock = SYSTEM) -> None:
        self._name, self._clock = name, clock
        self._objects: dict[str, tuple[Tagged, float]] = {}  # each with the time of its last write
        self._lock = threading.Lock()
        self._writes = 0

    @classmethod
    def named(cls, name: str) -> MemoryStore:
        """The one store of this name in this process."""
        with cls._stores_lock:
            return cls._stores.setdefault(name, cls(name))

    @property
    def uri(self) -> str:
        return f"memory://{self._name}"

    def get(self, key: str, *, max_bytes: int) -> bytes:
        return self.get_tagged(key, max_bytes=max_bytes).data

    def get_range(self, key: str, start: int, length: int) -> Buffer:
        """As the protocol says; a view of the object, not a copy."""
        subject = self._subject(key)
        checks.checked_range(subject, start, length)
        data = self._find(key).data
        if start + length > len(data):
            raise checks.ends_early(subject, start, length)
        return memoryview(data)[start : start + length]

    def get_range_into(self, key: str, start: int, target: memoryview) -> None:
        target[:] = self.get_range(key, start, target.nbytes)

    def put(self, key: str, parts: Sequence[Buffer]) -> None:
        data = b"".join(parts)
        with self._lock:
            self._write(key, data)

    def put_stream(self, key: str, content: Callable[[], Iterable[Buffer]], nbytes: int) -> None:
        """See ``StreamedStore``; this store is memory."""
        self.put(key, [bytearray(part) for part in content()])

    def get_tagged(self, key: str, *, max_bytes: int) -> Tagged:
        found = self._find(key)
        if len(found.data) > max_bytes:
            raise checks.too_large(self._subject(key), len(found.data), max_bytes)
        return found

    def put_if(self, key: str, data: bytes, tag: str | None) -> str:
        subject = self._subject(key)
        with self._lock:
            held = self._objects.get(key)
            if (held[0].tag if held else None) != tag:
                raise checks.stale(subject)
            return self._write(key, bytes(data))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """As the protocol says; the state at the first step."""
        checks.checked_prefix(prefix)
        with self._lock:
            found = [ObjectInfo(key, len(one.data), at) for key, (one, at) in self._objects.items() if key.startswith(prefix)]
        yield from sorted(found, key=lambda info: info.key)

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            checks.checked_key(key)
            with self._lock:
                self._objects.pop(key, None)

    def unfinished(self) -> Iterator[Unfinished]:
        """None: every write is whole."""
        yield from ()

    def abort(self, unfinished: Iterable[Unfinished]) -> None:
        """Nothing to do."""

    def __reduce__(self) -> tuple[Callable[[str], MemoryStore], tuple[str]]:
        return MemoryStore.named, (self._name,)

    def _subject(self, key: str) -> str:
        return f"{self.uri}/{checks.checked_key(key)}"

    def _find(self, key: str) -> Tagged:
        subject = self._subject(key)
        with self._lock:
            found = self._objects.get(key)
        if found is None:
            raise checks.missing(subject)
        return found[0]

    def _write(self, key: str, data: bytes) -> str:
        # Tags count writes, so a caller that relies on equal tags for equal contents fails here.
        self._writes += 1
        tag = f"{self._writes:016x}"
        self._objects[checks.checked_key(key)] = Tagged(data, tag), self._clock.now()
        return tag
