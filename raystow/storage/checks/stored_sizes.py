"""The sizes of an attempt's objects as the store lists them, without a list of all of them."""

from __future__ import annotations

from collections.abc import Iterator

from ..format import keys
from ..object_store import ObjectInfo, ObjectStore


class StoredSizes:
    """Sizes by key. Asked in the order of keys, it lists the objects of each group once, and keeps none of them; a key out of
    order costs another request."""

    def __init__(self, store: ObjectStore, id: int, attempt: str) -> None:
        self._store, self._prefix = store, keys.prefix(id, attempt)
        self._groups: dict[str, _Listing] = {}

    def get(self, key: str) -> int | None:
        """The size of an object; None if there is none. ``key``: of a fragment or pack of the attempt."""
        group = key.removeprefix(self._prefix).partition("-")[0]
        listing = self._groups.get(group)
        if listing is None:
            listing = self._groups[group] = _Listing(self._store.list(f"{self._prefix}{group}-"))
        elif key < listing.asked:
            return next((info.size for info in self._store.list(key) if info.key == key), None)
        return listing.size(key)


class _Listing:
    """``asked``: the key that was asked for last."""

    def __init__(self, infos: Iterator[ObjectInfo]) -> None:
        self._infos, self.asked = infos, ""
        self._next = next(infos, None)

    def size(self, key: str) -> int | None:
        """The size of the object with this key, which is not before the last one."""
        self.asked = key
        while self._next is not None and self._next.key < key:
            self._next = next(self._infos, None)
        return self._next.size if self._next is not None and self._next.key == key else None
