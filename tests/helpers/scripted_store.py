"""A store in memory some of whose operations a test replaces: outages, lost answers, slow reads, races."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from raystow.storage.object_store import ObjectStore
from raystow.storage.stores.memory import MemoryStore


class ScriptedStore(MemoryStore):
    """Calls the functions that ``script`` has set instead of its own operations. ``MemoryStore.named`` then finds this store."""


def script(store: ObjectStore, **operations: Callable[..., Any]) -> None:
    """Replace operations of the store. A function gets the arguments of its operation."""
    assert isinstance(store, ScriptedStore)
    assert all(callable(getattr(MemoryStore, name)) for name in operations)
    vars(store).update(operations)


def unscript(store: ObjectStore) -> None:
    """Bring back all operations of the store."""
    for name in [name for name in vars(store) if name in vars(MemoryStore)]:
        del vars(store)[name]
