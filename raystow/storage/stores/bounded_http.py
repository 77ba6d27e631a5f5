"""Bounds the answers that boto3 reads: their bytes, and the seconds until their end.

botocore reads errors, listings and headers to their end, whatever their size, and its time-out starts anew with each byte. So its
connections get sockets whose files count what they read.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from botocore.awsrequest import AWSHTTPConnection, AWSHTTPConnectionPool, AWSHTTPSConnection, AWSHTTPSConnectionPool

from ..runtime.clock import SYSTEM

_SLACK = 1 << 20
"""Bytes of an answer besides its body."""

_most: ContextVar[int] = ContextVar("most", default=16 << 20)  # a page of a listing takes less than 2 MiB


@contextlib.contextmanager
def at_most(body: int) -> Iterator[None]:
    """Let the answers to this thread's requests have bodies of at most ``body`` bytes."""
    token = _most.set(body + _SLACK)
    try:
        yield
    finally:
        _most.reset(token)


def bound(client: Any, seconds: float) -> None:
    """Bound the answers that a boto3 client reads; each ends within ``seconds``."""

    class PlainConnection(_BoundedConnection, AWSHTTPConnection):  # type: ignore[misc]
        limit = seconds

    class TlsConnection(_BoundedConnection, AWSHTTPSConnection):  # type: ignore[misc]
        limit = seconds

    class PlainPool(AWSHTTPConnectionPool):  # type: ignore[misc]
        ConnectionCls = PlainConnection

    class TlsPool(AWSHTTPSConnectionPool):  # type: ignore[misc]
        ConnectionCls = TlsConnection

    # botocore has no public way to replace its connections. The names have been the same since 2018, and a hostile server in the
    # tests shows that it works.
    client._endpoint.http_session._pool_classes_by_scheme.update(http=PlainPool, https=TlsPool)


class _BoundedConnection:
    limit: float

    def connect(self) -> None:
        super().connect()  # type: ignore[misc]
        self.sock: Any = _BoundedSocket(self.sock, self.limit)


class _BoundedSocket:
    """A socket whose files are bounded. All else is the socket's."""

    def __init__(self, sock: Any, seconds: float) -> None:
        self._socket, self._seconds = sock, seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def makefile(self, mode: str = "r", buffering: int | None = None, **options: Any) -> Any:
        """A file that reads one answer."""
        if mode != "rb":
            return self._socket.makefile(mode, buffering, **options)
        file = _BoundedFile(self._socket, self._seconds, _most.get())
        if buffering == 0:  # botocore reads an early status line so, and the rest of the answer by another file
            return file
        return io.BufferedReader(file)


class _BoundedFile(io.RawIOBase):
    def __init__(self, sock: Any, seconds: float, most: int) -> None:
        self._socket, self._file, self._left = sock, sock.makefile("rb", 0), most
        self._end = SYSTEM.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        stall, left = self._socket.gettimeout(), self._end - SYSTEM.monotonic()
        if left <= 0:
            raise TimeoutError("the answer does not end")
        self._socket.settimeout(left if stall is None else min(stall, left))
        try:
            count: int = self._file.readinto(target)
        finally:
            self._socket.settimeout(stall)
        self._left -= count
        if self._left < 0:
            raise OSError("the answer is longer than it can be")
        return count

    def close(self) -> None:
        self._file.close()
        super().close()
