"""What a repository needs of the place that keeps its objects: ten operations, one of them a compare-and-swap.

Keys are relative to the store's root, ``/``-separated, and made by ``keys`` only. Every method raises the ``StoreError`` that
fits (``NotFound``, ``PreconditionFailed``, ``StoreUnavailable``) naming the key, and returns or fails within a deadline.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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
    """The content of a register and the tag that a later ``put_if`` must present."""

    data: bytes
    tag: str


@dataclass(frozen=True)
class Unfinished:
    """A write that was begun and never completed: what a killed writer leaves. ``started``: seconds since 1970, by the store."""

    key: str
    token: str
    started: float


@runtime_checkable
class ObjectStore(Protocol):
    """The storage operations that raystow builds on; ``docs/spec/format-v1.md`` says what each must guarantee."""

    @property
    def uri(self) -> str:
        """The address this store was opened with; holds no secret."""

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """The whole object. An object larger than ``max_bytes`` raises ``Damaged`` before it is read."""

    def get_range(self, key: str, start: int, length: int) -> Buffer:
        """Exactly ``length`` bytes from ``start``; an object that ends before raises ``Damaged``."""

    def get_range_into(self, key: str, start: int, target: memoryview) -> None:
        """``get_range``, into memory that is there already: its pages are paid for, or must be these, since they are pinned."""

    def put(self, key: str, parts: Sequence[Buffer]) -> None:
        """Store the concatenation of ``parts``, replacing what was there. All or nothing, and durable on return."""

    def get_tagged(self, key: str, *, max_bytes: int) -> Tagged:
        """Like ``get``, with the tag of exactly this content. Sees every ``put_if`` that returned before the call."""

    def put_if(self, key: str, data: bytes, tag: str | None) -> str:
        """Replace the content that carries ``tag``, or create the object if ``tag`` is None; the new tag.

        Linearizable: of several callers with one tag at most one succeeds, the others raise ``PreconditionFailed``. Any
        *other* error leaves open whether the write took effect: the caller reads back.
        """

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Every object whose key starts with ``prefix``, in the order of keys."""

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; those that do not exist are no error."""

    def unfinished(self) -> Iterator[Unfinished]:
        """Every write that was begun and is not complete: also those that are going on right now."""

    def abort(self, unfinished: Iterable[Unfinished]) -> None:
        """Remove what such writes have stored so far; those that are gone are no error."""
