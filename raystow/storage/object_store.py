"""The store that a repository needs: ten operations, one of them a compare-and-swap.

Keys are relative to the store's root, ``/``-separated, and made by ``keys`` only. Every method raises the ``StoreError`` that
fits (``NotFound``, ``PreconditionFailed``, ``StoreUnavailable``) naming the key, and returns or fails within a deadline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

Buffer: TypeAlias = bytes | bytearray | memoryview


@dataclass(frozen=True)
class ObjectInfo:
    """One object in a listing. ``modified`` is in seconds since 1970, by the store's clock."""

    key: str
    size: int
    modified: float


@dataclass(frozen=True)
class Tagged:
    """The content of an object, and the tag for a later ``put_if``."""

    data: bytes
    tag: str


@dataclass(frozen=True)
class Unfinished:
    """A write that a killed writer did not complete. ``started``: seconds since 1970, by the store."""

    key: str
    token: str
    started: float


@runtime_checkable
class ObjectStore(Protocol):
    """The operations of a store; ``docs/spec/format-v1.md`` says what each must guarantee."""

    @property
    def uri(self) -> str:
        """The address this store was opened with; holds no secret."""

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """Return the whole object. Raises ``Damaged``, before it is read, if it is larger than ``max_bytes``."""

    def get_range(self, key: str, start: int, length: int) -> Buffer:
        """Return exactly ``length`` bytes from ``start``. Raises ``Damaged`` if the object ends before."""

    def get_range_into(self, key: str, start: int, target: memoryview) -> None:
        """As ``get_range``, into existing memory, which may be pinned."""

    def put(self, key: str, parts: Sequence[Buffer]) -> None:
        """Store the concatenation of ``parts``, replacing the object. All or nothing, and durable on return."""

    def get_tagged(self, key: str, *, max_bytes: int) -> Tagged:
        """Like ``get``, with the tag of exactly this content. Sees every ``put_if`` that returned before the call."""

    def put_if(self, key: str, data: bytes, tag: str | None) -> str:
        """Replace the content that carries ``tag``, or create the object if ``tag`` is None. Returns the new tag.

        Linearizable: of several callers with one tag at most one succeeds, the others raise ``PreconditionFailed``. After any
        *other* error the write may or may not have taken effect: the caller reads back.
        """

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Every object whose key starts with ``prefix``, in the order of keys."""

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects. Missing ones are no error."""

    def unfinished(self) -> Iterator[Unfinished]:
        """Every write that is not complete, also those under way."""

    def abort(self, unfinished: Iterable[Unfinished]) -> None:
        """Remove what such writes have stored. Missing ones are no error."""


@runtime_checkable
class StreamedStore(ObjectStore, Protocol):
    """A store that also takes objects that do not fit into memory. Repositories have none; exports do."""

    def put_stream(self, key: str, content: Callable[[], Iterable[Buffer]], nbytes: int) -> None:
        """As ``put``, of parts that are requested one after another; each may reuse the memory of the one before.

        Args:
            key: The object to create or to replace.
            content: Returns the parts; it may be called again after a failed attempt. If it raises, nothing is stored.
            nbytes: The bytes of all parts.
        """
