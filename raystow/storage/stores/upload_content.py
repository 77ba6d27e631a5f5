"""The content of an upload that does not fit into memory, as a file that obstore reads."""

from __future__ import annotations

from collections.abc import Iterable
from io import UnsupportedOperation

from ..object_store import Buffer


class UploadContent:
    """The bytes of ``parts`` in order. They are copied before the next part is requested, which may reuse the same memory.

    Attributes:
        failure: What ``parts`` raised, since obstore replaces it by an error of its own.
    """

    def __init__(self, parts: Iterable[Buffer]) -> None:
        self._parts, self._rest = iter(parts), memoryview(b"")
        self.failure: BaseException | None = None

    def read(self, nbytes: int) -> bytes:
        """Return at most ``nbytes``; nothing at the end."""
        try:
            while not self._rest.nbytes:
                if (part := next(self._parts, None)) is None:
                    return b""
                self._rest = memoryview(part).cast("B")
        except BaseException as error:
            self.failure = error
            raise
        found, self._rest = bytes(self._rest[:nbytes]), self._rest[nbytes:]
        return found

    def seek(self, *_: int) -> int:
        """Raise: obstore seeks only to find out the size of an upload in one request."""
        raise UnsupportedOperation("seek")
